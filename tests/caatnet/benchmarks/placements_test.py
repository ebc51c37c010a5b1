"""Benchmark of placements: random problems, and the worst case of a policy."""

import sys

import numpy as np
import pytest

from caatnet.benchmarks.memory import placements
from configs.benchmark import placements as config_of
from parallel.hardware import tiers
from parallel.memory import placement
from parallel.memory.placement import greedy, optimum
from parallel.memory.problem import INSTANTS
from tests.caatnet.benchmarks.printed import rows_of

# The worst of 500 problems for each policy: its seed, the ratio of the step to
# the optimum's in the same layout, and the resource that determines the update.
WORST = {
  "dram_only": (425, 2.28879, "dram0"),
  "interleave": (579, 5.98792, "cxl1, write"),
  "largest_first": (511, 2.57162, "cxl2, write"),
  "latency_first": (163, 2.57272, "file4"),
}


def _best_s(step):
  best = optimum.place(placements.same_layout(step))
  return placement.cost(step, best).step_s


@pytest.mark.parametrize("policy", WORST)
def test_worst_case_of_a_policy(policy):
  seed, ratio, binding = WORST[policy]
  step = placements.drawn(seed)
  found = placement.cost(step, placement.place(step, policy))
  assert found.fits
  assert found.step_s / _best_s(step) == pytest.approx(ratio, rel=1e-4)
  assert found.binding("update") == binding


def test_worst_case_of_accelerate():
  """Layers as `infer_auto_device_map` of accelerate 1.15.0 assigned them."""
  step = placements.drawn(163)
  layers = [6, 2, 1, 1, 1]  # in `accelerator_order`
  found = placement.cost(step, placements.by_layers(step, layers))
  assert sum(layers) == step.parts[0].units
  assert found.fits
  assert found.step_s / _best_s(step) == pytest.approx(3.50028, rel=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_random_tiers_are_a_valid_file_with_room_for_the_state(seed):
  step = placements.drawn(seed)
  assert tiers.parse(tiers.to_json(step.host)) == step.host
  _, host, _ = greedy.layout(step)
  needed = max(
    sum(t.size_bytes for _, t in host if instant in t.held)
    for instant in INSTANTS
  )
  room = sum(t.capacity_bytes.value for t in step.host.tiers)
  assert needed < room < 3 * needed


# Python that answers as the rivals' script, which places no layers, would.
RIVALS = """#!{python}
import json, sys
asked = json.loads(input())
print(json.dumps({{
  "versions": {{"accelerate": "1"}}, "estimates": [],
  "layers": [None for problem in asked["problems"]],
}}))
"""


def test_policies_are_no_faster_than_the_optimum_in_their_layout(tmp_path):
  python = tmp_path / "python"
  python.write_text(RIVALS.format(python=sys.executable))
  python.chmod(0o755)
  config = config_of.get_config("test")
  config.benchmark.python = str(python)
  result = placements.run(config)
  assert result["problems"] == 5
  assert result["versions"] == {"accelerate": "1"}
  assert result["optimum_s"] > 0
  rows = {row["policy"]: row for row in result["policies"]}
  assert rows.pop("accelerate") == {
    "policy": "accelerate", "fits": 0, "near": 0, "near_all": 0, "median": None,
    "worst": None, "worst_seed": None,
  }
  # Those that cannot be placed are left out.
  first, last = result["seeds"]
  assert (first, last - first >= 4) == (0, True)
  assert set(rows) == {*placement.POLICIES} - {"optimum"}
  for row in rows.values():
    assert 0 <= row["near_all"] <= row["near"] <= row["fits"] <= 5
    assert row["worst"] is None or row["worst"] >= row["median"] >= 1 - 1e-6
  # All layouts include the greedy one.
  assert result["layouts"]["least"] <= result["layouts"]["median"] <= 1 + 1e-6


def test_ratios_within_a_hundredth_count_as_near():
  row = placements._row(
    "x", [3, 5, 6, 9], [1.0, 1.02, np.inf, 1.005], [1.0, 0.9, 0.9, 0.5]
  )
  assert row == {
    "policy": "x", "fits": 3, "near": 2, "near_all": 1, "median": 1.005,
    "worst": 1.02, "worst_seed": 5,
  }


def test_memory_of_each_kind_of_offload_is_a_row():
  """Ours for each way of an update on the CPU, and the estimates of a rival."""
  config = config_of.get_config("test")
  ours = placements._memory(config, None)
  params = placements._of_config(config).parts[0]
  assert [row["of"] for row in ours] == [
    f"ours, {way.name}" for way in params.ways if "cpu" in way.name
  ]
  # Gradients and two moments of each parameter, and its weights somewhere.
  for row in ours:
    assert row["host"] > 0
  estimates = [
    {"optimizer": moved > 0, "weights": moved > 1, "buffers": 1.5,
     "host": 10 + moved, "device": 20 - moved} for moved in range(3)
  ]
  rows = placements._memory(config, {"estimates": estimates})
  assert rows[: len(ours)] == ours
  assert rows[len(ours) :] == [
    {"of": f"DeepSpeed ZeRO-3, offloads {what}, buffer factor 1.5",
     "host": 10 + moved, "device": 20 - moved}
    for moved, what in enumerate((
      "nothing", "optimizer", "optimizer and weights"
    ))
  ]


def test_rivals_get_the_layers_and_tiers_of_the_same_layout():
  config = config_of.get_config("test")
  steps = [placements.drawn(seed) for seed in (3, 5)]
  asked = placements._question(config, steps)
  for step, given in zip(steps, asked["problems"], strict=True):
    order = placements.accelerator_order(step)
    assert sorted(order) == sorted(tier.name for tier in step.host.tiers)
    assert given["tiers"] == [
      int(step.host.tier(name).capacity_bytes.value) for name in order
    ]
    stored = sum(t.size_bytes for _, t in greedy.layout(step)[1] if t.held)
    assert given["layers"] == step.parts[0].units
    assert given["layers"] * sum(given["sizes"]) == pytest.approx(stored)
  model = placements._of_config(config).parts[0]
  weights = next(t for t in model.ways[0].tensors if t.name == "weights")
  params, largest = asked["parameters"]
  assert 2 * params == weights.size_bytes
  assert params / model.units < largest < params / 2


def test_tables_have_policies_and_gigabytes(capsys):
  placements._print({
    "problems": 7, "policies": [{
      "policy": "x", "fits": 6, "near": 5, "near_all": 4, "median": 1.25,
      "worst": None, "worst_seed": 3,
    }], "layouts": {"median": 0.75, "least": 0.5},
    "memory": [{"of": "ours", "host": 1.5e9, "device": 250e6}],
    "optimum_s": 0.125,
  })
  printed = capsys.readouterr().out
  assert "7 random problems" in printed
  assert rows_of(printed) == [
    ["x", "6", "5", "4", "1.250", "None", "3"], ["ours", "1.5", "0.2"]
  ]
  assert "over that of greedy's: median 0.750, least 0.500" in printed
  assert "of the config's model: 0.125 s" in printed
