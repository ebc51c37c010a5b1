"""Predicted rounds over links: closed forms, bytes, and the server's policy."""

import dataclasses
import math

import pytest

from caatnet.federated import predict, report
from parallel.plans.hardware import client_links as links
from parallel.plans.network.fluid import SEGMENT
from tests.caatnet.federated import numeric

MODEL = 2_962_216
CELL = dataclasses.replace(
  links.LINKS["5g-40mhz"], up=1e6, down=2e6, rtt_s=0.0
)
RULES = numeric.rules(rounds=2, stragglers="wait")


def rows(given=CELL, sizes=None, compute=None, rules=RULES, **options):
  given = given if isinstance(given, list) else [given] * rules.clients
  return predict.predict(
    rules, given, sizes or predict.MessageSizes(MODEL, MODEL),
    compute or {"t_v": 1.0, "t_tr": 2.0, "t_te": 0.5, "t_a": 0.25}, **options,
  )


def framed(size):
  """Returns bytes with the frames of parts of 64 KiB, of 50 bytes each."""
  return size + 160 + 50 * math.ceil(size / 65536)


def test_message_takes_half_of_the_largest_round_trip():
  given = links.assign_links(("5g-40mhz", "wifi"), 2)
  assert predict.LinkNetwork(given).message_s == 15e-3 / 2


def test_clients_of_a_cell_share_it_and_others_do_not():
  size = framed(MODEL) / predict.DATA_SHARE
  for row in rows(fixed_s=0.1):
    assert row["t_u"] == pytest.approx(0.1 + 4 * size / 1e6)
    assert row["t_d"] == pytest.approx(0.1 + 4 * size / 2e6)
  for row in rows(dataclasses.replace(CELL, shared=False), data_share=1.0):
    assert row["t_u"] == pytest.approx(framed(MODEL) / 1e6)
    assert row["t_d"] == pytest.approx(framed(MODEL) / 2e6)
    assert row["bytes_up"] == row["bytes_down"] == framed(MODEL)


def test_the_last_one_has_the_cell_alone():
  compute = [{"t_tr": 100.0 * k} for k in range(4)]
  size = framed(MODEL) / predict.DATA_SHARE
  found = rows(compute=compute)
  assert [(r["round"], r["client"]) for r in found] == [
    (k, client) for k in range(2) for client in range(4)
  ]
  assert [r["t_u"] for r in found] == pytest.approx([size / 1e6] * 8)


def test_times_of_rounds_are_repeated():
  """A client alone in its cell while the others still train."""
  others = [{"t_tr": 100.0}] * 2
  rules = dataclasses.replace(RULES, rounds=4)
  found = rows(compute=[others, others, others, [
    {"t_tr": 1.0, "t_a": 0.5}, {"t_tr": 100.0}
  ]], rules=rules)
  size = framed(MODEL) / predict.DATA_SHARE
  last = [row for row in found if row["client"] == 3]
  assert [row["t_tr"] for row in last] == [1.0, 100.0] * 2
  assert [row["t_u"] for row in last] == pytest.approx(
    [size / 1e6, 4 * size / 1e6] * 2
  )
  assert {row["t_a"] for row in found} == {0.0}  # that of the first client


def test_rows_have_the_columns_of_a_run():
  table = report.table(rows())
  assert table.headings == [
    "round", "client", "t_a", "t_d", "t_v", "t_tr", "t_te", "t_u", "kB down",
    "kB up",
  ]
  assert table.cells()[0][2] == "250.0"
  assert table.cells()[0][4:7] == ["1,000.0", "2,000.0", "500.0"]


def test_rounds_last_as_long_as_their_slowest_client():
  run = predict.simulate_run(
    RULES, [CELL] * 4, predict.MessageSizes(MODEL, MODEL),
    [{"t_tr": 1.0 + k, "t_a": 0.25} for k in range(4)], rounds=3,
  )
  spent = [
    max(
      row["t_d"] + row["t_tr"] + row["t_u"] for row in run.rows
      if row["round"] == k
    ) for k in range(3)
  ]
  ends = numeric.ended(run)
  # The end of a round is the start of the next one, whose models follow t_a.
  assert [e.duration_s for e in ends] == pytest.approx(
    [spent[0], *(0.25 + s for s in spent[1:])]
  )


def test_coded_downlinks_follow_the_revisions_of_clients():
  """One of four per round: differences since its last round, or the model."""
  rules = numeric.rules(rounds=12, stragglers="wait", per_round=1)
  sizes = predict.MessageSizes(MODEL // 4, MODEL // 2, MODEL)
  held, found = {}, []
  for row in rows(sizes=sizes, rules=rules):
    behind = row["round"] - held.get(row["client"], -9)
    found.append(behind)
    expected = MODEL if behind > 4 else behind * (MODEL // 4)
    assert row["bytes_down"] == framed(expected), row
    assert row["bytes_up"] == framed(MODEL // 2)
    held[row["client"]] = row["round"]
  assert {1, 2, 3} < set(found)
  assert max(found) > 4


def test_late_clients_are_missing():
  rules = numeric.rules(rounds=2, stragglers="drop", deadline_s=20.0)
  compute = [{"t_tr": 1.0}] * 3 + [{"t_tr": 50.0}]
  found = rows(compute=compute, rules=rules)
  assert [row["client"] for row in found] == [0, 1, 2] * 2


def test_loss_bounds_the_rate():
  link = dataclasses.replace(
    CELL, shared=False, rtt_s=0.02, loss=1e-3, up=1e9, down=1e9
  )
  bound = 1.22 * SEGMENT / (0.02 * math.sqrt(1e-3))
  assert bound * 8e-6 == pytest.approx(22.3, abs=0.05)  # Mbit/s
  size = 1e8
  (row, *_) = rows(link, sizes=predict.MessageSizes(size, size))
  assert row["t_u"] == pytest.approx(size / bound, rel=0.01)


def test_fixed_time_is_fitted_on_one_size_and_holds_for_another():
  small, large = predict.MessageSizes(
    40_000, 40_000
  ), predict.MessageSizes(MODEL, MODEL)
  cell = dataclasses.replace(CELL, rtt_s=0.015)
  fitted = predict.fit_fixed_time_s(
    rows(cell, small, fixed_s=0.07), rows(cell, small)
  )
  assert fitted == pytest.approx(0.07)
  both = [{"t_d + t_u": r["t_d"] + r["t_u"]} for r in rows(cell, large,
                                                           fixed_s=0.07)]
  assert predict.fit_fixed_time_s(
    both, rows(cell, large)
  ) == pytest.approx(0.07)
  assert predict.fit_fixed_time_s(rows(cell, small), rows(cell, large)) == 0
  slow = [{"t_d + t_u": 1e6}, {"t_tr": 1.0}]  # one of many, and none
  assert predict.fit_fixed_time_s(
    both + slow, rows(cell, large)
  ) == pytest.approx(
    0.07
  )
  with pytest.raises(ValueError, match="no row"):
    predict.fit_fixed_time_s([{"t_tr": 1.0}], both)


def test_links_and_times_are_one_per_client():
  with pytest.raises(ValueError, match=r"links \(3\) and compute times \(4\)"):
    rows([CELL] * 3)
