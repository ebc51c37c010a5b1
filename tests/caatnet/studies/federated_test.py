"""Properties of the study of federated rounds over links."""

import dataclasses
import json
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


UNEVEN = CONFIG | {
  "training_s": 2.0, "validation_s": 0.3, "test_s": 0.8, "aggregation_s": 0.25,
  "compute_spread": 0.3,
}


def test_row_has_medians_and_means_of_the_clients_of_a_round():
  config, size = UNEVEN | {"fixed_s": 0.04}, 400_000
  times = rounds.client_compute_times(config, 3)
  factors = [each["t_v"] / 0.3 for each in times]
  assert sorted(factors) == links.normal_rate_factors(3, 0.3) != factors
  for factor, each in zip(factors, times, strict=True):
    assert each == pytest.approx({
      "t_a": 0.25, "t_v": 0.3 * factor, "t_tr": 2 * factor, "t_te": 0.8 * factor
    })
  row = rounds.predict_round(config, "5g-public", 3, size)
  last = [each for each in predict.predict(
    rounds.make_server_rules(3), links.assign_links(("5g-public",), 3),
    predict.MessageSizes(size, size), times, 0.04,
  ) if each["round"] == 1]
  total = [sum(each[name] for name in rounds.PHASES) for each in last]
  for name in rounds.PHASES:
    assert row[name] == sorted(each[name] for each in last)[1], name
  assert row["round_s"] == pytest.approx(0.25 + max(total))
  assert row["straggler_s"] == pytest.approx(max(total) - sorted(total)[1])
  for share, name in (("share_down", "t_d"), ("share_up", "t_u")):
    assert row[share] == pytest.approx(
      sum(each[name] for each in last) / 3 / row["round_s"]
    )
  slowest = last[total.index(max(total))]
  parts = row["parts"]
  assert parts["compute"] == pytest.approx(
    slowest["t_v"] + slowest["t_tr"] + slowest["t_te"]
  )
  assert (parts["fixed times"], parts["aggregation"]) == (0.08, 0.25)


def test_fitted_compute_gives_the_published_share_of_an_uplink():
  config = UNEVEN | {
    "compute_spread": 0.0, "published_clients": 3,
    "links": ("5g-40mhz", "5g-public", "5g-fr2"),
  }
  for found in figures.predict_uplink_ratios(config):
    of = {
      name: rounds.predict_round(
        config | {
          "training_s": found["compute_s"], "validation_s": 0, "test_s": 0
        }, name, 3, 4 * config["published_parameters"],
      ) for name in ("ethernet", "wifi", found["link"])
    }
    mine = of[found["link"]]
    link = links.link(found["link"])
    if not link.spread:
      assert mine["share_up"] == pytest.approx(figures.UPLINK_SHARE)
    assert found["rate"] == link.up / (3 if link.shared else 1)
    assert found["over_ethernet"] == pytest.approx(
      mine["t_u"] / of["ethernet"]["t_u"]
    )
    assert found["over_wifi"] == pytest.approx(mine["t_u"] / of["wifi"]["t_u"])
  (row,) = figures.predict_uplink_ratios(UNEVEN)  # of one 5G link
  assert row["ethernet_straggler_s"] == rounds.predict_round(
    UNEVEN, "ethernet", 4, 4 * UNEVEN["published_parameters"]
  )["straggler_s"]


def test_region_ends_where_no_rate_of_wifi_gives_both_ratios():
  config = CONFIG | {"wifi": (60.0, 90.0, 150.0), "tolerance": 0.07}
  found, size = figures.find_feasible_region(config), 4 * config[
    "published_parameters"
  ]
  wifi = np.linspace(60.0, 150.0, 2000) * 1e6 / 8

  def near(fixed_s, rate):
    uplink = fixed_s + size / rate
    return all(
      np.any(np.abs(np.log(uplink / (fixed_s + size / other) / ratio))
             <= np.log(1.07))
      for other, ratio in ((941e6 / 8, 33.3), (wifi, 17.8))
    )

  inside = 0
  for rate, low, high in zip(
    found["rates"], found["low"], found["high"], strict=True
  ):
    if low is None:
      assert not any(near(x, rate) for x in np.geomspace(1e-3, 10, 99))
      continue
    inside += 1
    width = high - low
    assert near(low + 0.01 * width, rate)
    assert near(high - 0.01 * width, rate)
    assert not near(high + 0.01 * width, rate)
    assert low == 0 or not near(low - 0.01 * width, rate)
  assert inside > 3


def test_client_that_is_always_the_slowest_is_consistent():
  (row,) = figures.simulate_stragglers(CONFIG | {
    "consistent": 1.0, "lasting": (1e6,), "clients": (3,)
  })
  assert row["consistent"] == 1


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
  known, mine = figures.predict_uplink_ratios(
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
    at = figures.solve_fixed_s(size, found["rates"][i], ethernet, 33.3)
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


def test_schedules_of_three_clients_by_hand():
  """Times in uplinks that have the cell alone; client 1 may have a rate."""
  cell = links.link(CONFIG["cell"])
  unit_s = 4 * CONFIG["published_parameters"] / (predict.DATA_SHARE * cell.up)
  config = CONFIG | {"scheduled_clients": 3, "deadline": 0.8}
  found = schedules.compare_schedules(
    config | {"apart": (0.0, 4.0), "limits": (0.5,)}
  )
  times = ("shared_s", "mean_shared_s", "mean_serial_s", "earliest_s")
  for row, expected, counts in (
    # Serial: 1, then halves of the cell until 3; the deadline is at 2.4.
    (found[0], (3, 3, 7 / 3, 3), (0, 1, 2)),
    # Ready at 0, 4 and 8: ends at 1, 6 and 9; the deadline is at 7.2.
    (found[1], (9, 16 / 3, 16 / 3, 9), (2, 2, 2)),
  ):
    assert [row[key] / unit_s for key in times] == pytest.approx(expected)
    assert tuple(row["by_deadline"].values()) == counts


def test_deadline_of_simulated_rounds_is_a_share_of_a_round():
  config = CONFIG | {"at_once": ((0, 0), (0, 1)), "deadline": 0.95}
  rows = schedules.simulate_rounds(config)
  size = 4 * config["published_parameters"]
  usual = rounds.predict_round(config, config["cell"], 4, size)["round_s"]
  for row in rows[2:]:
    assert row["round_s"] == pytest.approx(0.95 * usual)
  assert [row["merged"] for row in rows[:2]] == [4, 4]
  assert rows[2]["merged"] < rows[3]["merged"] < 4


def test_models_in_order_are_measured_when_compute_times_are_known():
  """In the first round, the order of models does not follow compute times."""
  config = CONFIG | {"compute_spread": 0.5, "at_once": ((1, 0),)}
  row, _ = schedules.simulate_rounds(config)
  size = 4 * config["published_parameters"]
  ends = rounds.round_end_events(predict.simulate_run(
    rounds.make_server_rules(4, downlinks_at_once=1),
    links.assign_links((config["cell"],), 4), predict.MessageSizes(size, size),
    rounds.client_compute_times(config, 4), config["fixed_s"],
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
    rounds.client_compute_times(CONFIG, 4)[0][name] for name in (
      "t_v", "t_tr", "t_te"
    )
  )
  # Compute hides all transfers.
  assert slow == pytest.approx(four)
  assert four < one
  assert by["float32", "late"]["round_s"] < plain
  assert all(r["merged"] <= 4 + 1e-9 for r in result["variants"])


def test_variants_send_the_bytes_of_their_codecs_up_and_down(result):
  n = CONFIG["published_parameters"]
  names = {
    "float32": ("none", "none"), "int8 uplink": ("int8", "none"),
    "4-bit uplink": ("int4", "none"), "sparse uplink": ("sparse", "none"),
    "4-bit uplink and downlink": ("int4", "int4"),
    "sparse uplink, 4-bit downlink": ("sparse", "int4"),
    **{f"{name}, {count} streamed fragments": (code, code)
       for name, code in (("float32", "none"), ("4-bit", "int4"))
       for count in (1, 4)},
  }
  base_s = result["variants"][0]["round_s"]
  assert {row["variant"] for row in result["variants"]} == set(names)
  for row in result["variants"]:
    up, down = (beyond.coded_bytes(code, n) for code in names[row["variant"]])
    framed = up if "streamed" in row["variant"] else predict.framed(up)
    assert row["bytes_up"] == framed, row
    if row["stragglers"] == "wait":
      framed = down if "streamed" in row["variant"] else predict.framed(down)
      assert row["bytes_down"] == framed, row
    assert row["relative"] == row["round_s"] / base_s
  table = report._radio_cell_tables(result)[-1]
  for row, cells in zip(result["variants"], table.cells(), strict=True):
    assert [float(x.replace(",", "")) for x in cells[2:6]] == pytest.approx(
      [row["bytes_up"] / 1e6, row["bytes_down"] / 1e6, row["round_s"],
       row["relative"]], abs=0.006,
    )


def test_merged_fragments_wait_for_their_part_of_the_aggregation():
  """If it takes longer than compute and links."""
  config = CONFIG | {
    "aggregation_s": 80.0, "fixed_s": 0.0, "streamed_rounds": 3
  }
  found = beyond.streamed_round_s(config, 2, 4000, 4)
  compute_s = max(
    sum(each[key] for key in ("t_v", "t_tr", "t_te")) * (1 if k else 1.5) / 4
    for k, each in enumerate(rounds.client_compute_times(config, 2))
  )
  assert found == pytest.approx(compute_s + 20.0, abs=0.2)


def test_figure_has_the_largest_round_of_the_published_model(result):
  shares, *others = report.report(result).figure().panels[1:]
  assert not others
  assert shares.title == "4 clients, 2.96 MB"
  rows = [
    row for row in result["rounds"]
    if (row["clients"], row["model_bytes"]) == (4, 4 * 740_554)
  ]
  for bars, key in zip(
    shares.marks, ("share_down", "share_compute", "share_up"), strict=True
  ):
    assert [*bars.lengths] == [row[key] for row in rows]
  band, ours = report.report(result).figure().panels[0].marks[-2:]
  inside = [x for x in result["region"]["low"] if x is not None]
  assert [*band.low] == [max(1e-3, x) for x in inside]
  assert [*ours.x] == [row["rate"] / 125e3 for row in result["ratios"]]
  title = report._rounds(result)[1].title
  assert "compute 11 s (spread 5%), aggregation 0.05 s" in title


@pytest.mark.parametrize(("key", "value"), [
  ("links", ("ethernet", "wify")), ("cell", "wify"),
])
def test_unknown_links_are_refused_by_their_key(key, value):
  words = rf"config\.{key}='wify' must be one of .*did you mean wifi"
  with pytest.raises(ValueError, match=words):
    study.run(CONFIG | {key: value})


def test_schedules_are_found_at_the_ends_of_the_ranges():
  """Rates and times so small that HiGHS would take them for 0 are refused."""
  declared = tree.keys_with_values(CONFIG)
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
