"""Speeds over the ranges of rates, and rates that give a speed."""

import importlib

import pytest

from caatnet.studies.placement import ranges, report, study
from caatnet.studies.planner.study import training_step
from parallel.plans.hardware.devices import DEVICES
from parallel.plans.hardware.tiers import HOSTS
from parallel.plans.placement import problem
from parallel.plans.placement.costs import Placement
from parallel.plans.placement.problem import INSTANTS

CONFIG = importlib.import_module("configs.memory.12b_32k")
STEP = training_step(CONFIG.get_config().to_dict())
CARDS, DRAM = HOSTS["two-cxl"], HOSTS["large-dram"]


def made(seq_len=4096, on=CARDS):
  return problem.training_step(
    STEP.model, batch_size=1, seq_len=seq_len, device=DEVICES["h200"], host=on
  )


def test_needed_rate_gives_the_speed():
  rows = ranges.find_needed_rates(made, CARDS, DRAM, (0.9, 1.0), (4096, 8192))
  assert [(r["seq_len"], r["target"]) for r in rows] == [
    (4096, 0.9), (4096, 1.0), (8192, 0.9), (8192, 1.0)
  ]
  for row in rows:
    speeds = [
      ranges.relative_speed(
        made(
          row["seq_len"],
          on=ranges._with_tier_rates(CARDS, "cxl", x * row["rate"])
        ),
        made(row["seq_len"], on=DRAM), "latency_first",
      ) for x in (1, 0.99)
    ]
    assert speeds[0] >= row["target"] > speeds[1]
    assert speeds[0] == pytest.approx(row["target"], rel=1e-6)


@pytest.mark.parametrize(("host", "target"), [
  (CARDS, 9.0),  # not reached at any rate
  (DRAM, 0.5),  # no cards
])
def test_no_rate_gives_an_impossible_speed(host, target):
  (row,) = ranges.find_needed_rates(made, host, DRAM, (target,), (4096,))
  assert row["rate"] is None


def test_speeds_of_a_context_have_both_ends_of_each_range():
  rows = ranges.scan_rates(
    made, CARDS, DRAM, ("interleave", "latency_first"), (4096, 8192)
  )
  assert [row["changed"] for row in rows] == 2 * [
    "nothing", "dram low", "cxl low"
  ]
  for row in rows:
    first, even = row["speeds"]["latency_first"], row["speeds"]["interleave"]
    assert row["gain"] == first / even - 1
  # Slower DRAM slows the baseline, too.
  assert rows[1]["speeds"]["interleave"] > rows[0]["speeds"]["interleave"]
  assert rows[2]["speeds"]["interleave"] < rows[0]["speeds"]["interleave"]
  (alone,) = ranges.scan_rates(made, DRAM, DRAM, ("dram_only",), (4096,))[:1]
  assert alone["speeds"] == {"dram_only": 1}
  assert alone["gain"] is None


def test_update_and_copies_on_one_tier_are_bytes_over_its_rate():
  rows = {
    (
      row["changed"], row["tier"]
    ): row for row in ranges.evaluate_single_tiers(made, CARDS)
  }
  count = STEP.model.num_params
  # The CPU reads 14 and writes 14 bytes, and the device reads 2 staged ones.
  dram, card = rows["nothing", "dram"], rows["nothing", "cxl0"]
  assert dram["update_s"] == pytest.approx(30 * count / 307.2e9)
  rate = CARDS.tiers[1].read.value
  assert card["update_s"] == pytest.approx(16 * count / rate)  # duplex
  assert card["slower"] == card["update_s"] / dram["update_s"]
  both = rows["cxl low", "cxl0, cxl1"]
  assert both["update_s"] == pytest.approx(16 * count / 56e9)
  # Copies cross the link to the device, too.
  link = CARDS.device_link.read.value
  assert dram["to_device"] == pytest.approx(link)
  assert both["to_device"] == pytest.approx(56e9)
  assert rows["cxl low", "cxl1"]["from_device"] == pytest.approx(28e9)
  # Copies to the device read the tier, those from it write the tier.
  card = CARDS.tiers[1]
  slow = card.model_copy(update={
    "write": card.write.model_copy(update=dict.fromkeys(
      ("value", "low", "high"), card.read.value / 7
    ))
  })
  host = CARDS.model_copy(update={"tiers": (CARDS.tiers[0], slow)})
  row = next(
    x
    for x in ranges.evaluate_single_tiers(made, host)
    if x["tier"] == slow.name
  )
  assert row["to_device"] == pytest.approx(7 * row["from_device"])


def test_each_tier_has_one_row():
  # DRAM and one card.
  one = CARDS.model_copy(update={"tiers": CARDS.tiers[:2]})
  for host, count in ((one, 2), (CARDS, 4)):  # two cards: also both
    rows = ranges.evaluate_single_tiers(made, host)
    tiers = [row["tier"] for row in rows if row["changed"] == "nothing"]
    assert len(set(tiers)) == len(tiers) == count


def test_optimum_lists_where_each_tensor_is():
  rows = study._optimum(made())["tensors"]
  assert {row["tensor"] for row in rows} >= {
    "weights", "gradients", "master weights", "first moments", "second moments",
  }
  for row in rows:
    assert 0 < sum(row["tiers"].values()) < 1 + 1e-6
    assert row["bytes"] > 0


def test_ends_of_ranges_name_the_least_and_largest_rate_of_a_kind():
  dram, first, second = CARDS.tiers
  slow = second.model_copy(update={
    "write": second.write.model_copy(update={"low": 1e10, "high": 9e10}),
  })
  host = CARDS.model_copy(update={"tiers": (dram, slow, first)})
  found = {
    name: (rates, one.tiers, other.tiers[0])
    for name, rates, one, other in ranges._hosts_at_range_ends(host, DRAM)
  }
  assert {name: x[0] for name, x in found.items()} == {
    "nothing": "", "dram low": "153.6 GB/s", "cxl low": "10.0 to 28.0 GB/s",
    "cxl high": "63.0 to 90.0 GB/s",
  }
  changed = found["cxl low"][1]
  assert [t.write.value for t in changed] == [dram.write.value, 1e10, 28e9]
  assert found["dram low"][2].read.value == dram.read.low  # the baseline's


@pytest.mark.parametrize("most", [1, 7, 64, 1000, 10**6])
@pytest.mark.parametrize("limit", [1, 2, 3, 50, 127, 1000, 12_345])
def test_largest_number_that_fits_is_found_within_a_64th(limit, most):
  asked = []
  found = study._search_largest(lambda n: asked.append(n) or n <= limit, most)
  best = min(limit, most)
  assert best - max(1, found // 64) < found <= best
  assert max(asked) <= most
  assert study._search_largest(lambda n: False, most) is None


def test_executed_placement_adds_the_shares_of_all_ways():
  (dram, *cards), by_cpu = CARDS.tiers, "updated by the cpu, weights on the "
  file = dram.model_copy(update={
    "name": "file", "kind": "file", "node": None, "path": "/disk/tier"
  })
  host = CARDS.model_copy(update={"tiers": (dram, *cards, file)})
  arrays = ("master weights", "gradients", "first moments", "second moments")
  tiers = {
    ("activations", "saved", "activations"): {
      "device": 0.25, "dram": 0.125, "cxl1": 0.125
    },
    ("activations", "recomputed", "layer inputs"): {"dram": 0.5, "cxl0": 1e-9},
  }
  for place, shares in (
    ("host", {"dram": 0.5, "cxl1": 0.25}), ("device", {"cxl1": 0.125,
                                                       "file": 0.125}),
  ):
    tiers |= {("parameters", by_cpu + place, x): shares for x in arrays}
  ways = {
    ("parameters", by_cpu + "host"): 0.75,
    ("parameters", by_cpu + "device"): 0.25,
    ("activations", "saved"): 0.5, ("activations", "recomputed"): 0.5,
  }
  found = study._execution_fields(Placement(ways, tiers), host)
  assert found["activations"] == {
    "saved": {"device": 0.25, "host": 0.25}, "recomputed": {"host": 0.5}
  }
  assert found["placed"]["gradients"] == {
    "dram": 0.5, "cxl1": 0.375, "file": 0.125
  }
  assert found["placed"]["layer inputs"] == {"dram": 0.5}
  nodes = {"0": 0.5, "2": 0.375, "/disk": 0.125}
  assert found["host_optimizer"] == dict.fromkeys(
    ("weights", "gradients", "first", "second"), nodes
  )
  ways["parameters", "updated by the device, weights on the device"] = 0.5
  assert study._execution_fields(Placement(ways, tiers), host)[
    "host_optimizer"
  ] is None


def test_report_has_the_shares_times_and_memory_of_the_optimum():
  config = CONFIG.get_config("7b").to_dict()
  config["data"]["seq_len"] = 4096
  config["placement"] |= {
    "tiers": "two-cxl", "policies": ("dram_only", "optimum"), "longest": 64,
    "targets": (),
  }
  result = study.run(config)
  base, _, dram, best = result["policies"]
  assert [base["relative"], base["above"]] == [1, None]
  assert best["relative"] == base["step_s"] / best["step_s"] > 1
  assert dram["above"] == pytest.approx(
    dram["step_s"] / result["policies"][3]["step_s"] - 1
  )
  assert result["whole"]["gap"] == pytest.approx(
    result["whole"]["step_s"] / best["step_s"] - 1
  )
  made = report.report(result)
  tensors = next(t for t in made.tables if "by tensor" in t.title)
  for row, cells in zip(result["tensors"], tensors.cells(), strict=True):
    assert cells[2] == f"{row['bytes'] / 1e9:.2f}"
    shown = [float(x.split()[-1][:-1]) for x in cells[3].split(", ")]
    assert sum(shown) == pytest.approx(100, abs=0.2)
    for tier, more_s in row["elsewhere"].items():
      assert f"{tier} {1e3 * more_s:+.1f}" in cells[4].split(", ")
  # Tensors of the optimum's fractions cost nothing on some other tier.
  more = [x for row in result["tensors"] for x in row["elsewhere"].values()]
  assert min(more) == pytest.approx(0, abs=1e-9)
  assert 0.01 < max(more) < best["step_s"]
  # Ways of a tensor have their parts of it.
  moments = [x for x in result["tensors"] if x["tensor"] == "first moments"]
  assert len(moments) > 1
  assert sum(x["bytes"] for x in moments) == pytest.approx(
    4 * result["parameters"], rel=1e-4
  )
  names = [cells[0] for cells in made.tables[-1].cells()]
  assert "link to the device, write" in names
  assert not any("latency" in name for name in names)
  *panels, over_time = made.figure().panels
  for instant, panel in zip(INSTANTS, panels, strict=True):
    for i, (_, tier) in enumerate(panel.y.ticks):
      assert sum(
        bars.lengths[i] for bars in panel.marks[:-1]
      ) * 1e9 == pytest.approx(sum(
        x["bytes"] for x in result["occupied"]
        if (x["instant"], x["tier"]) == (instant, tier)
      ))
  ends = [rule.at for rule in over_time.marks if getattr(rule, "vertical", 0)]
  assert ends == [row["seconds"] for row in result["timeline"][1:-1]]


@pytest.mark.parametrize(("row", "text"), [
  ({}, "p: dram lacks 3.0 GB"),
  ({"longest": 4096, "largest": 8.96e9}, "p: dram lacks 3.0 GB; what would "
   "fit: 4,096 tokens of context or a model of 9.0B parameters"),
  ({"longest": "none", "largest": 2e9}, "p: dram lacks 3.0 GB; what would fit: "
   "a model of 2.0B parameters"),
  ({"longest": "none", "largest": "none"}, "p: dram lacks 3.0 GB; what would "
   "fit: nothing"),
])
def test_policy_that_does_not_fit_names_what_would(row, text):
  found = report._unfit({"policy": "p", "error": "dram lacks 3.0 GB"} | row)
  assert found == text
