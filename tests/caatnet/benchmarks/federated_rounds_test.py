"""Benchmark of federated rounds: medians, errors and predictions."""

import json
import types

import pytest

from caatnet import commands
from caatnet.benchmarks.federated import federated_rounds
from caatnet.benchmarks.harness import kept
from caatnet.config import federated as builder
from caatnet.federated import links
from configs.benchmark import federated
from configs.federated import tiny


def _row(round, client, t_tr, t_u):
  return {"round": round, "client": client, "t_a": 1.0, "t_d": 2.0, "t_v": 0.0,
          "t_tr": t_tr, "t_te": 0.0, "t_u": t_u, "payload_up": 100}


def test_round_takes_aggregation_and_the_slowest_client():
  rows = [
    _row(0, 0, 50.0, 3.0), _row(0, 1, 40.0, 17.0),
    _row(1, 0, 50.0, 5.0), _row(1, 1, 10.0, 5.0),
    _row(2, 0, 51.0, 7.0), _row(2, 1, 40.0, 7.0),
  ]
  faster = [row | {"t_tr": 0.9 * row["t_tr"], "t_d": 0.1} for row in rows]
  found = federated_rounds.compared(rows, faster, 0.05)
  assert found["measured"] == {
    "t_a": 1.0, "t_d": 2.0, "t_v": 0.0, "t_tr": 45.0, "t_te": 0.0, "t_u": 6.0,
    "total": 60.0,  # of 60, 58 and 61
  }
  assert found["predicted"]["t_tr"] == pytest.approx(40.5)
  # The downlink is below 5% of a round.
  assert list(found["errors"]) == ["t_tr", "t_u", "total"]
  assert found["errors"]["t_tr"] == pytest.approx(-0.1)
  assert found["errors"]["t_u"] == 0
  case = {"model": "small", "clients": 2, "interface": "wifi", **found}
  times, errors = federated_rounds.tables([case], 0.05)
  assert times.cells()[0] == ["small", "2", "wifi", *(
    f"{found['measured'][key]:.3f}: {found['predicted'][key]:.3f}"
    for key in (*federated_rounds.PHASES, "total")
  )]
  assert times.cells()[0][-1].startswith("60.000: ")
  assert errors.cells()[0][3:] == [
    "-", "-", "-", "-10.0%", "-", "+0.0%",
    f"{found['errors']['total']:+.1%}", "10.0%",
  ]


def test_fixed_time_is_a_line_through_those_of_other_sizes():
  assert federated_rounds.interpolated(5, {}) == 0
  assert federated_rounds.interpolated(5, {7: 0.25}) == 0.25
  others = {10: 0.5, 30: 0.9}
  assert federated_rounds.interpolated(50, others) == pytest.approx(1.3)
  assert federated_rounds.interpolated(1, {10: 0.1, 20: 0.9}) == 0


def test_prediction_has_compute_times_of_one_run_and_sizes_of_another():
  config = tiny.get_config("convolutional,test")
  found = {"config": json.loads(config.to_json())}
  alone = {"rows": [
    _row(k, client, 5.0 + k, 1.0) | {"client": client}
    for client in (0, 1) for k in range(3)
  ]}
  slow = links.Link("slow", 1e4, 1e3, 0.0, 0.0, 0.0, 0.0, False, "the tests")
  rows = federated_rounds._predicted(found, [slow] * 2, alone, 0.25)
  assert len(rows) == 6  # three rounds of two clients
  num_bytes = 4 * builder.build(config).vectors.num
  for row in rows:
    assert (row["t_tr"], row["t_a"]) == (5.0 + row["round"], 1.0)
    assert row["t_u"] - 0.25 == pytest.approx(num_bytes / 1e3, rel=0.1)
    assert row["t_u"] - 0.25 == pytest.approx(10 * (row["t_d"] - 0.25), rel=0.1)


def test_interrupted_benchmark_continues_with_the_missing_run(tmp_path):
  """The models' configs do not exist, so any run would be an error."""
  config = federated.get_config("test")
  options, path = config.benchmark, tmp_path / "rounds.json"
  options.models, options.fitted = ("no.py:large",), ("no.py:small",)
  options.results, options.interfaces = str(path), ("wifi", "ethernet")
  shape = json.loads(tiny.get_config("convolutional,test").to_json())

  def measured(seconds, size):
    return {"links": None, "config": shape, "load": 0.5, "rows": [
      _row(0, client, t_tr, seconds) | {"payload_up": size, "t_d": seconds}
      for client, t_tr in enumerate((5.0, 7.0))
    ]}

  runs = {
    "no.py:small, 2 clients, no links": measured(0.25, 50),
    "no.py:large, 2 clients, no links": measured(0.5, 100),
    "no.py:large, 2 clients, wifi": measured(2.0, 100),
    "no.py:large, 2 clients, ethernet": measured(1.0, 100),
  }
  begun = {
    "config": kept.described(config), "commit": commands.commit(),
    "measured": runs,
  }
  path.write_text(json.dumps(begun))
  found = federated_rounds.run(config)
  assert [row["measured"]["t_u"] for row in found["rows"]] == [2.0, 1.0]
  for row in found["rows"]:  # predicted by the other model's fixed time
    assert row["fixed_s"] == pytest.approx(0.25, rel=0.05)
    assert row["predicted"]["t_tr"] == row["measured"]["t_tr"] == 6.0
  assert list(found["alone"]) == list(runs)[:2]
  for missing in runs:
    less = {name: run for name, run in runs.items() if name != missing}
    path.write_text(json.dumps(begun | {"measured": less}))
    with pytest.raises(
      ValueError, match=rf"federate --config={missing.partition(',')[0]}: "
    ):
      federated_rounds.run(config)
  # A file of another config is not continued.
  options.rounds += 1
  with pytest.raises(ValueError, match="has rows of another config"):
    federated_rounds.run(config)


def test_failed_run_is_one_line():
  options = types.SimpleNamespace(**federated.get_config("test").benchmark)
  with pytest.raises(ValueError, match=r"federate --config=no\.py: ") as error:
    federated_rounds._measured(options, {}, "no.py", 2, ())
  assert "\n" not in str(error.value)


def test_links_of_a_run_are_shown_if_they_are_emulated():
  assert federated_rounds._emulated({"links": None}) == []
  record = {"means": "by hand", "clients": [{"client": 0, "down": 2.5e5}]}
  means, table = federated_rounds._emulated({"links": record})
  assert means == "by hand"
  assert table.rows[0]["down, Mbit/s"] == "2"


def test_line_of_a_run_has_its_round_and_phases():
  rows = [_row(0, 0, 1.25, 0.5), _row(0, 1, 1.25, 1.5)]
  assert federated_rounds._line("a case", rows) == (
    "a case: round 5.750 s (t_a 1.000, t_d 2.000, t_v 0.000, t_tr 1.250, "
    "t_te 0.000, t_u 1.000)"
  )
