"""Properties of the study of compositions of experts."""

import itertools
import types

import numpy as np
import pytest

from caatnet.studies.serving import (
  composition,
  composition_figures,
  server,
  study,
)
from caatnet.studies.serving import report as reports
from caatnet.studies.serving.keys import RATE
from configs.serving import composition as config_file
from parallel.plans.hardware.nodes import NODES
from tests.parallel.base.report_test import check

CONFIG = config_file.get_config("test").to_dict()


@pytest.fixture(scope="module")
def result():
  return study.run(CONFIG)


def test_bytes_are_loads_times_the_size_of_an_expert(result):
  rows = [r for part in ("streams", "slots", "load") for r in result[part]]
  size = result["expert_bytes"]
  for row in rows:
    assert row["bytes"] == row["loads"] * size
    assert row["loads"] >= row["misses"] >= row["least"]
    assert row["hits"] + row["misses"] >= row["requests"]
    assert row["above_least"] == row["misses"] / row["least"] - 1
    assert row["ttft_p50_s"] <= row["ttft_p99_s"] <= row["ttft_worst_s"]
    assert row["load_s"] == pytest.approx(
      row["loads"] * size / CONFIG["experts"]["copy_rate"]
    )
    assert 0 <= row["exposed_s"] <= row["load_s"] * (1 + 1e-9)
  assert any(row["misses"] > row["least"] for row in rows)
  assert [
    (row["patience"], row["deadline_s"], row["rate"], row["output"])
    for row in result["front"]
  ] == [(0.0, 1.0, 3.0, 8), (4.0, 1.0, 3.0, 8)]
  usual = CONFIG["experts"]
  assert {(row["patience"], row["deadline_s"]) for row in rows} == {
    (usual["patience"], usual["deadline_s"])
  }


def test_waits_are_percentiles_of_requests_and_fair_among_experts():
  """One expert answers three requests, another one."""
  served = [
    types.SimpleNamespace(
      ttft_s=ttft, arrival_s=float(i), end_s=i + 10 * ttft, expert=expert
    )
    for i, (ttft, expert) in enumerate(
      [(1.0, "a"), (2.0, "b"), (3.0, "a"), (8.0, "a")]
    )
  ]
  found = composition._latency_statistics(served)
  assert found == pytest.approx({
    "ttft_p50_s": 2.5, "ttft_p99_s": 3 + 0.97 * 5, "ttft_worst_s": 8.0,
    "latency_p50_s": 25.0, "latency_p99_s": 30 + 0.97 * 50,
    "jain": (4 + 2) ** 2 / (2 * (4**2 + 2**2)),  # of the means 4 and 2
  })


def test_cache_of_one_slot_has_the_memory_that_a_model_leaves():
  """Each further slot takes the bytes of an expert."""
  hardware, model = CONFIG["hardware"], CONFIG["model"]
  one, three = (composition.machine(CONFIG, n) for n in (1, 3))
  assert one.pages == server.machine(model, hardware).pages
  token = 2 * 32 * 4096 * 2  # keys and values of 32 layers in bfloat16
  assert (one.pages - three.pages) * one.page_size * token == pytest.approx(
    2 * composition.expert_bytes(model), rel=1e-3
  )


def test_sizes_of_an_expert_are_those_of_llama_2_7b(result):
  assert result["expert_bytes"] == pytest.approx(2 * 6738415616, rel=1e-4)


def test_experts_that_all_have_a_slot_are_loaded_once():
  row = composition.simulate(
    CONFIG | {"experts": CONFIG["experts"] | {"number": 3}}, num_slots=3
  )
  assert row["misses"] == row["loads"] == row["least"] == 3


def test_columns_of_requests_one_at_a_time_by_hand():
  """Two experts in turn share a slot: each request waits for its load."""
  config = CONFIG | {
    "experts": CONFIG["experts"] | {"slots": 1, "number": 2},
    "stream": CONFIG["stream"] | {"requests": 6, "prompt": 16},
  }
  rate, output = 1e-3, 4
  row = composition.simulate(
    config, stream="cyclic", way="on demand", rate=rate, output=output
  )
  size, steps = 2 * 6738415616, composition.machine(config, 1).steps
  load_s = size / config["experts"]["copy_rate"]
  ttft_s = load_s + steps.step_s(np.zeros(0), [(0, 16)])
  # Contexts of the second to the fourth token, with their own positions.
  latency_s = ttft_s + sum(
    steps.step_s(np.array([context]), []) for context in (17, 18, 19)
  )
  times = [
    request.arrival_s
    for request in composition.requests(config, "cyclic", rate, 1, output)
  ]
  assert min(np.diff(times)) > latency_s
  seconds = times[-1] + latency_s - times[0]
  for key, expected in {
    "requests": 6, "hits": 0, "misses": 6, "loads": 6, "least": 6,
    "above_least": 0, "bytes": 6 * size, "exposed_s": 6 * load_s,
    "load_s": 6 * load_s, "hidden": 0, "seconds": seconds,
    "busy": 6 * (latency_s - load_s) / seconds, "ttft_p50_s": ttft_s,
    "ttft_p99_s": ttft_s, "ttft_worst_s": ttft_s, "latency_p50_s": latency_s,
    "latency_p99_s": latency_s, "jain": 1,
  }.items():
    assert row[key] == pytest.approx(expected, rel=1e-4, abs=1e-9), key


def test_loads_ahead_expose_less_than_loads_on_demand():
  rows = [
    composition.simulate(CONFIG, way=way, rate=20.0, output=40)
    for way in composition.LOAD_MODES
  ]
  demand, ahead, layers = (row["hidden"] for row in rows)
  assert demand < ahead
  assert abs(layers - ahead) < 0.2


def test_a_step_that_begins_early_reads_no_layer_that_is_missing():
  """Simulates the arrival and the use of each layer."""
  given = CONFIG["experts"] | {"host_experts": 1}
  for step_s in (0.001, 0.01, 0.5):
    tiers = composition.LoadTimeModel(given, 6.4e9, 8, step_s, True)
    load = composition.WeightLoad(composition.expert_name(0), 0)
    seconds, begin = tiers.load_s(load)
    assert seconds == pytest.approx(0.1)
    layers = np.arange(8)
    slack = begin + layers * step_s / 8 - (layers + 1) * seconds / 8
    assert slack.min() == pytest.approx(0, abs=1e-12)


def test_experts_beyond_host_memory_are_read_from_their_files():
  given = CONFIG["experts"] | {"host_experts": 2}
  tiers = composition.LoadTimeModel(given, 7e9, 8, 0.01, False)
  load = [
    composition.WeightLoad(composition.expert_name(i), 0) for i in range(3)
  ]
  assert tiers.load_s(load[1])[0] == pytest.approx(7 / 64)
  assert tiers.load_s(load[2])[0] == pytest.approx(1.0)  # evicts expert 0
  assert tiers.load_s(load[2])[0] == pytest.approx(7 / 64)
  assert tiers.load_s(load[0])[0] == pytest.approx(1.0)
  # A file that is faster than the copy to the device does not speed it up.
  fast = composition.LoadTimeModel(
    given | {"file_rate": 9e11}, 64e9, 8, 0.01, False
  )
  assert fast.load_s(load[2])[0] == pytest.approx(1.0)


def test_host_memory_for_more_than_all_experts_has_all():
  """Slots are allocated for the experts that exist, not for the limit."""
  given = CONFIG["experts"] | {"host_experts": 2**31 - 1}
  tiers = composition.LoadTimeModel(given, 7e9, 8, 0.01, False)
  for number in range(given["number"]):
    load = composition.WeightLoad(composition.expert_name(number), 0)
    assert tiers.load_s(load)[0] == pytest.approx(7 / 64)


def test_rows_of_the_front_are_not_beaten(result):
  rows = [
    {"loads": 1, "ttft_worst_s": 9.0}, {"loads": 2, "ttft_worst_s": 9.0},
    {"loads": 3, "ttft_worst_s": 1.0}, {"loads": 3, "ttft_worst_s": 1.0},
  ]
  composition.mark_front(rows)
  assert [row["best"] for row in rows] == [True, False, True, True]
  assert any(row["best"] for row in result["front"])


@pytest.mark.parametrize("kind", ["zipf", "uniform", "bursty", "cyclic"])
def test_streams_have_their_rate_and_order(kind):
  config = CONFIG | {
    "stream": CONFIG["stream"] | {"requests": 2000},
  }
  found = composition.requests(config, kind, 5.0, 4, 3)
  times = np.array([request.arrival_s for request in found])
  assert len(found) / times[-1] == pytest.approx(5.0, rel=0.1)
  assert len(np.unique(times)) == 500
  experts = [request.expert for request in found]
  again = np.mean([a == b for a, b in itertools.pairwise(experts)])
  names, counts = np.unique(experts, return_counts=True)
  if kind == "cyclic":
    assert len(names) == CONFIG["experts"]["slots"] + 1
    assert again == 0
  if kind == "bursty":
    # Bursts of 8 on average; the next one may be of the same expert.
    weights = 1 / np.arange(1.0, CONFIG["experts"]["number"] + 1)
    other = 1 - np.sum((weights / weights.sum()) ** 2)
    assert 1 - again == pytest.approx(other / 8, rel=0.15)
  if kind == "uniform":
    assert counts.max() < 1.5 * counts.min()
  if kind == "zipf":
    first = counts[list(names).index("expert_0")]
    second = counts[list(names).index("expert_1")]
    assert first / second == pytest.approx(2, rel=0.3)


def test_long_responses_have_one_request_at_least():
  config = CONFIG | {"stream": CONFIG["stream"] | {"requests": 3}}
  assert len(composition.requests(config, "zipf", 5.0, 1, 200)) == 1
  assert len(composition.requests(config, "zipf", 5.0, 1, 99)) == 3
  assert len(composition.requests(CONFIG, "zipf", 5.0, 1, 100)) == 40 // 5


def test_solved_execution_times_give_the_published_ratios(result):
  for row in result["solved"]:
    if row["exec_s"] is None:
      continue
    own, base = (
      NODES[name].switch_s(2 * 6738415616, row["spread"])
      for name in (row["node"], "sn40l")
    )
    ratio = (row["execution"] * row["exec_s"] + own) / (row["exec_s"] + base)
    assert ratio == pytest.approx(row["published"])


def test_figures_of_nodes_follow_from_their_rates_and_capacities(result):
  size, base = 2 * 6738415616, NODES["sn40l"]
  for row in result["nodes"]:
    node = NODES[row["node"]]
    assert row["slower"] * base.switch_s(size) == pytest.approx(row["switch_s"])
    assert row["spread_slower"] * base.switch_s(size) == pytest.approx(
      node.switch_s(size, spread=True)
    )
    assert (row["resident"], row["held"]) == (
      node.num_devices * node.device_bytes.value // size,
      node.host_bytes.value // size,
    )
  # An unfused step launches 20 operators in each of 32 layers, and reads as
  # long as a fused one.
  read_s = size / base.device_rate.value / base.num_devices
  for row in result["fusion"]:
    launches_s = 32 * 20 * row["call_s"]
    assert row["gain"] == pytest.approx((read_s + launches_s) / read_s)
  assert [row["gain"] for row in result["fusion"][-2:]] == [2.0, 13.0]
  one = result["one_node"]
  assert (one["models"], one["bytes"]) == (151, 151 * size)
  assert one["parameters"] == 151 * 6738415616
  text = reports.report(result).parts[-1]
  assert "have 1.018 trillion parameters, 2.04 of" in text


def test_ratio_of_whole_requests_lies_between_one_and_that_of_switches():
  found = [
    composition_figures.relative_request_time("dgx-h100", 13.5e9, t) for t in (
      1e-9, 0.1, 1e6
    )
  ]
  assert found == sorted(found, reverse=True)
  assert found[0] == pytest.approx(15.625)
  assert found[-1] == pytest.approx(1)


@pytest.mark.parametrize(("section", "values", "words"), [
  ("hardware", {"device": "h300"},
   r"config\.hardware\.device='h300' must be one of"),
  ("model", {"num_heads": 2**31 - 1, "head_width": 0}, "is more than width="),
])
def test_unknown_devices_and_too_many_heads_are_refused(section, values, words):
  config = CONFIG | {section: CONFIG[section] | values}
  with pytest.raises(ValueError, match=words):
    composition.simulate(config, num_slots=2)


def test_slots_that_leave_no_room_for_a_cache_are_refused():
  words = "no memory left for a cache.*config.slots has 6 slots"
  with pytest.raises(ValueError, match=words):
    composition.simulate(CONFIG, num_slots=6)


def test_responses_that_no_cache_can_hold_are_refused():
  words = r"no request of 1000000 new tokens fits.*config\.stream\.output"
  with pytest.raises(ValueError, match=words):
    composition.simulate(CONFIG, output=1_000_000)


def test_a_group_of_more_than_all_requests_has_all_of_them():
  """Memory grows with the requests, not with the size of a group."""
  count = CONFIG["stream"]["requests"]
  for batch in (count + 1, 2**60):
    found = composition.requests(CONFIG, "zipf", 4.0, batch, 4)
    assert len(found) == count
    assert len({request.arrival_s for request in found}) == 1


def test_report_has_all_tables(result):
  made = reports.report(result)
  check(made)
  assert len(made.tables) == 9
  for words in (
    "12 experts of 13.48 GB on one h100, 4 in slots", "others 64 GB/s away",
    "40 requests (a fifth for long responses) of 16 tokens, Zipf exponent 1;",
  ):
    assert words in made.parts[0]
  *loads, front = made.figure().panels
  assert len(loads) == 2
  shown = [
    (mark.label, x, round(y, 6)) for panel in loads for mark in panel.marks
    for x, y in zip(mark.x, mark.y, strict=True)
  ]
  assert sorted(shown) == sorted(
    (row["way"], row["rate"], round(100 - 100 * row["hidden"], 6))
    for row in result["load"]
  )
  shown = [
    point for mark in front.marks for point in zip(mark.x, mark.y, strict=True)
  ]
  assert sorted(shown) == sorted(
    (row["loads"], row["ttft_worst_s"]) for row in result["front"]
  )


def test_lowest_hidden_rates_are_listed(result):
  """The others of the 95% have higher rates."""
  rows = [
    result["load"][0]
    | {"way": way, "batch": 1, "output": output, "rate": rate, "hidden": hidden}
    for way, output, rate, hidden in (
      ("ahead", 20, 1.0, 0.5), ("ahead", 20, 2.0, 0.94),
      ("ahead", 200, 1.0, 0.2), ("ahead", 200, 4.0, 0.99),
      ("ahead", 200, 2.0, 0.95), ("layer-wise", 20, 2.0, 1.0),
      ("layer-wise", 200, 0.5, 0.1),
    )
  ]
  table = next(
    table for table in reports.report(result | {"load": rows}).tables
    if "lowest of the scanned" in table.title
  )
  assert table.headings[2:] == ["ahead", "layer-wise"]
  assert table.cells() == [["1", "20", "-", "2"], ["1", "200", "2", "-"]]


def test_figures_of_the_paper_need_no_simulation():
  found = study.run(config_file.get_config("figures").to_dict())
  made = reports.report(found)
  assert (found["load"], made.figure, len(made.tables)) == ([], None, 4)


def test_machines_are_those_for_the_given_numbers_of_experts():
  """Sizes of Llama 2 7B: 47 fit on the devices of a DGX H100."""
  config = config_file.get_config("figures").to_dict()
  config["published"] |= {"experts": 300, "max_experts": 2000}
  found = study.run(config)
  table = reports.report(found).tables[0]
  (row,) = (row for row in table.cells() if row[0] == "dgx-h100")
  assert row[-2:] == ["7", "43"]
  heads = [column.heading for column in table.columns[-2:]]
  assert heads == ["machines for 301", "machines for 2,000"]


def test_times_are_resolved_at_the_lowest_rate():
  """Requests one at a time wait as long at all rates: an hour or 10^6 s."""
  lowest, row = (
    composition.simulate(CONFIG, rate=rate) for rate in (RATE.low, 1 / 3600)
  )
  for key in ("loads", "ttft_p50_s", "ttft_worst_s", "exposed_s", "jain"):
    assert lowest[key] == pytest.approx(row[key], rel=1e-3), key
  assert 0.9 * RATE.low not in RATE
