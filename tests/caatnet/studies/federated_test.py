"""Properties of the study of federated rounds over links."""

import dataclasses
import json
import statistics
import warnings

import jax
import numpy as np
import pytest

from caatnet.federated import predict, vector_codec
from caatnet.schema import tree
from caatnet.studies.federated import (
  beyond,
  figures,
  report,
  rounds,
  schedules,
  study,
)
from configs.federated import links as config_file
from parallel.plans.hardware import client_links as links

CONFIG = config_file.get_config("test").to_dict()


@pytest.fixture(scope="module")
def result():
  return study.run(CONFIG)


def test_rounds_are_the_sums_of_their_parts(result):
  assert len(result["rounds"]) == 3 * 2 * 2
  for row in result["rounds"]:
    parts = row["parts"]
    assert sum(parts.values()) == pytest.approx(row["round_s"])
    assert all(part > -1e-9 for part in parts.values())
    assert row["limited_by"] in parts
    # Clients of a cell wait for each other.
    assert (parts["sharing the cell"] > 1e-6) == row["link"].startswith("5g")
    shares = row["share_down"] + row["share_compute"] + row["share_up"]
    assert 0.8 < shares <= 1
  by = {(r["link"], r["clients"], r["model_bytes"]): r
        for r in result["rounds"]}
  large = 4 * 740_554
  assert by["5g-40mhz", 4, large]["t_d"] > 1.8 * by["5g-40mhz", 2, large]["t_d"]
  assert by["wifi", 4, large]["t_d"] < 1.1 * by["wifi", 2, large]["t_d"]
  # Rates count 1,514 bytes for 1,448 of data; frames add about 0.1%.
  at_rate_s = 1514 / 1448 * large * (8 / 152e6 + 8 / 81e6)
  parts = by["5g-40mhz", 4, large]["parts"]
  assert parts["rate of the client"] == pytest.approx(at_rate_s, rel=3e-3)


def test_rounds_have_medians_and_mean_shares_of_unequal_clients():
  """Of three clients with a spread of 2, the slowest takes 2.93 times 1 s."""
  config = CONFIG | {
    "compute_spread": 2.0, "training_s": 0.5, "validation_s": 0.3,
    "test_s": 0.2, "aggregation_s": 0.125,
  }
  row = rounds.row(config, "ethernet", 3, 1000)
  slow = 1 + 2 * statistics.NormalDist().inv_cdf(5 / 6)
  compute = [row[name] for name in ("t_tr", "t_v", "t_te")]
  assert compute == pytest.approx([0.5, 0.3, 0.2])
  assert row["straggler_s"] == pytest.approx(slow - 1, abs=1e-2)
  sent = 2 * config["fixed_s"] + 0.125
  assert row["round_s"] == pytest.approx(slow + sent, abs=1e-2)
  assert row["share_compute"] * row["round_s"] == pytest.approx(
    (0.1 + 1 + slow) / 3
  )
  assert row["limited_by"] == "compute"


def test_ratios_are_of_uplinks_and_the_compute_gives_the_published_share():
  links_of = ("wifi", "5g-40mhz", "5g-public")
  found = figures.ratios(CONFIG | {"links": links_of})
  clients = CONFIG["published_clients"]
  rows = {
    name: rounds.row(CONFIG, name, clients, 4 * CONFIG["published_parameters"])
    for name in ("ethernet", *links_of)
  }
  assert [row["link"] for row in found] == ["5g-40mhz", "5g-public"]
  for one in found:
    row = rows[one["link"]]
    for name in ("ethernet", "wifi"):
      times = one[f"over_{name}"]
      assert times * rows[name]["t_u"] == pytest.approx(row["t_u"])
    assert one["straggler_s"] == row["straggler_s"]
    assert one["ethernet_straggler_s"] == rows["ethernet"]["straggler_s"]
    whole = row["t_u"] + row["t_d"] + CONFIG["aggregation_s"] + one["compute_s"]
    assert row["t_u"] / whole == pytest.approx(0.23)
    up, users = {"5g-40mhz": (81e6, clients), "5g-public": (21e6, 1)}[
      one["link"]
    ]
    assert one["rate"] == pytest.approx(up / 8 / users)


def test_links_are_shown_in_megabits(result):
  table, predicted = report._rounds(result)
  compute_s = sum(CONFIG[f"{key}_s"] for key in ("training", "validation",
                                                 "test"))
  assert f"seconds: compute {compute_s:g} s (spread" in predicted.title
  shown = [dict(zip(table.headings, x, strict=True)) for x in table.cells()]
  by = {row["link"]: row for row in shown}
  assert (by["5g-40mhz"]["down"], by["5g-40mhz"]["up"]) == ("152", "81")


def test_link_of_a_file_is_compared_by_the_name_of_its_record(tmp_path):
  path = tmp_path / "mine.json"
  record = dataclasses.asdict(links.link("5g-40mhz")) | {"name": "5g-mine"}
  path.write_text(json.dumps(record))
  known, mine = figures.ratios(
    CONFIG | {"links": ("wifi", "5g-40mhz", str(path))}
  )
  assert mine == known | {"link": str(path)}


def test_points_of_the_region_give_the_published_ratios(result):
  size, found = 4 * 740_554, result["region"]
  ethernet = 941e6 / 8
  for point in found["points"]:
    uplink = point["fixed_s"] + size / point["rate"]
    for other, ratio in ((ethernet, 33.3), (point["wifi"], 17.8)):
      assert uplink == pytest.approx(ratio * (point["fixed_s"] + size / other))
    assert point["uplink_s"] == pytest.approx(uplink)
    assert point["round_s"] * 0.23 == pytest.approx(uplink)
    # Each point is inside of the region.
    i = int(np.argmin(np.abs(np.log(np.divide(found["rates"], point["rate"])))))
    at = figures.fixed_s(size, found["rates"][i], ethernet, 33.3)
    assert found["low"][i] <= at <= found["high"][i]
  inside = [low is not None for low in found["low"]]
  assert True in inside
  assert False in inside
  # The derivation for WiFi at 100 Mbit/s: 0.22 s, 3 Mbit/s and 8.1 s.
  (middle,) = (p for p in found["points"] if p["wifi"] == 100e6 / 8)
  assert middle["fixed_s"] == pytest.approx(0.22, abs=0.005)
  assert middle["rate"] * 8e-6 == pytest.approx(3.0, abs=0.05)
  assert middle["uplink_s"] == pytest.approx(8.1, abs=0.05)


def test_stragglers_are_consistent_if_clients_differ_more_than_rounds(result):
  for clients in (2, 4):
    shares = [
      row["consistent"] for row in result["stragglers"]
      if row["clients"] == clients
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.2 < 0.85 < shares[-1]
  for row in result["fitted_ratios"]:
    assert 1 < row["ratio"] < 6
  (none,) = figures.fitted_ratios(result["stragglers"][:3])
  assert none["ratio"] is None


def test_no_schedule_is_worse_than_sharing(result):
  for row in result["schedules"]:
    assert row["earliest_s"] <= row["order_s"] + 1e-6
    assert row["order_s"] <= row["shared_s"] + 1e-6
    if row["limit"] == 1:  # the proof of `uplinks`
      assert row["earliest_s"] == pytest.approx(row["shared_s"])
    counts = row["by_deadline"]
    assert max(counts["shared"], counts["serial"]) <= counts["most"]
  assert any(
    row["earliest_s"] < 0.99 * row["shared_s"] for row in result["schedules"]
  )


def test_models_in_order_are_measured_when_compute_times_are_known():
  """In the first round, the order of models does not follow compute times."""
  config = CONFIG | {"compute_spread": 0.5, "at_once": ((1, 0),)}
  row, _ = schedules.simulated(config)
  size = 4 * config["published_parameters"]
  ends = rounds.ended(predict.simulated(
    rounds.rules(4, downlinks_at_once=1),
    links.of_clients((config["cell"],), 4), predict.Bytes(size, size),
    rounds.compute(config, 4), config["fixed_s"],
  ))
  first_s, second_s = (end.duration_s for end in ends)
  assert row["round_s"] == pytest.approx(second_s)
  assert second_s < first_s - 0.1


@pytest.mark.parametrize("n", [1, 256, 5000, 740_554])
def test_coded_bytes_are_those_of_the_codecs(n):
  x = np.linspace(-1, 1, n, dtype=np.float32)
  for name in vector_codec.NAMES:
    data = vector_codec.make(name).encode(x, jax.random.key(0))
    assert len(data) == beyond.coded_bytes(name, n), name


def test_one_fragment_is_a_round_without_streaming(result):
  by = {(r["variant"], r["stragglers"]): r for r in result["variants"]}
  plain = by["float32", "wait"]["round_s"]
  one = by["float32, 1 streamed fragments", "wait"]["round_s"]
  # The first model is not coded, but its round does not count.
  assert by["4-bit, 1 streamed fragments", "wait"]["round_s"] == pytest.approx(
    by["4-bit uplink and downlink", "wait"]["round_s"], rel=1e-3
  )
  four = by["float32, 4 streamed fragments", "wait"]["round_s"]
  assert one == pytest.approx(plain, rel=1e-3)
  slow = 1.5 * sum(
    rounds.compute(CONFIG, 4)[0][name] for name in ("t_v", "t_tr", "t_te")
  )
  # Compute hides all transfers.
  assert slow == pytest.approx(four)
  assert four < one
  assert by["float32", "late"]["round_s"] < plain
  assert all(r["merged"] <= 4 + 1e-9 for r in result["variants"])


@pytest.mark.parametrize(("key", "value"), [
  ("links", ("ethernet", "wify")), ("cell", "wify"),
])
def test_unknown_links_are_refused_by_their_key(key, value):
  words = rf"config\.{key}='wify' must be one of .*did you mean wifi"
  with pytest.raises(ValueError, match=words):
    study.run(CONFIG | {key: value})


def test_schedules_are_found_at_the_ends_of_the_ranges():
  """Rates and times so small that HiGHS would take them for 0 are refused."""
  declared = tree.declared(CONFIG)
  (apart, _), (limits, _) = declared["apart"], declared["limits"]
  ends = {
    "apart": (0.0, 1e-30, apart.allowed.high),
    "limits": (limits.allowed.low, 1.0),
  }
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    rows = study.run(CONFIG | ends)["schedules"]
  assert len(rows) >= 3 * 2
  for row in rows:
    assert row["earliest_s"] <= row["order_s"] * (1 + 1e-6)
  for key, value in (("apart", 1e9), ("limits", 1e-37)):
    with pytest.raises(ValueError, match=rf"config\.{key}=.* must lie in"):
      tree.check(CONFIG | {key: (value,)})
