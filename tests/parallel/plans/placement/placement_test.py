"""Placements on memory tiers: conservation, optimality, published counts."""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest

from parallel.plans import placement
from parallel.plans.hardware import tiers
from parallel.plans.hardware.devices import DEVICES
from parallel.plans.hardware.tiers import HOSTS, Host, Quantity
from parallel.plans.placement import optimum, problem
from parallel.plans.placement.problem import (
  DEVICE,
  INSTANTS,
  PHASES,
  ExecutionMode,
  Problem,
  StatePart,
  Tensor,
  TensorAccess,
)
from parallel.plans.workload import Transformer

LLAMA = Transformer(
  vocab_size=32_000, width=4096, num_layers=32, num_heads=32, num_kv_heads=32,
  ffn_width=11_008,
)
GB = 1e9


def _quantity(value: float) -> Quantity:
  return Quantity(value=value, low=value, high=value, source="a test")


def _host(*sizes: tuple[float, float, bool]) -> Host:
  """Returns a host of tiers with capacity, rate and duplex; DRAM first."""
  host = HOSTS["two-cxl"]
  return tiers.check_host(host.model_copy(update={"tiers": tuple(
    host.tiers[min(i, 1)].model_copy(update={
      "name": f"t{i}", "node": i, "duplex": duplex,
      "capacity_bytes": _quantity(capacity),
      "read": _quantity(rate), "write": _quantity(rate),
    })
    for i, (capacity, rate, duplex) in enumerate(sizes)
  )}))


def _random(seed: int) -> Problem:
  """Returns a random step of a random model on a random host."""
  rng = np.random.default_rng(seed)
  host = _host(*(
    (rng.uniform(20, 400) * GB, rng.uniform(10, 300) * GB, bool(duplex))
    for duplex in rng.integers(2, size=rng.integers(1, 4))
  ))
  model = dataclasses.replace(
    LLAMA, num_layers=int(rng.integers(4, 49)), vocab_size=8_000
  )
  return problem.training_step(
    model, batch_size=int(rng.integers(1, 5)),
    seq_len=int(2 ** rng.integers(10, 15)),
    device=DEVICES[str(rng.choice(["a100", "h200", "v5p"]))], host=host,
  )


def _policies(step: Problem) -> dict[str, placement.Placement]:
  found = {}
  for name in placement.POLICIES:
    with contextlib.suppress(ValueError):  # the optimum, if nothing fits
      found[name] = placement.place(step, name)
  return found


@pytest.mark.parametrize("seed", range(12))
def test_fractions_sum_to_one_and_the_optimum_is_the_fastest_that_fits(seed):
  step = _random(seed)
  policies = _policies(step)
  costs = {name: placement.cost(step, x) for name, x in policies.items()}
  for found in policies.values():
    for part in step.parts:
      shares = [found.ways.get((part.name, w.name), 0.0) for w in part.ways]
      assert sum(shares) == pytest.approx(1)
    for part, way, tensor in step.tensors():
      key = part.name, way.name, tensor.name
      total = sum(found.tiers.get(key, {}).values())
      assert total == pytest.approx(found.ways.get(key[:2], 0.0), abs=1e-6)
  for found in costs.values():
    if found.fits:
      for instant, reserved in step.reserved.items():
        on_device = found.occupied[instant][DEVICE] + reserved
        assert on_device <= step.device_bytes * (1 + 1e-6)
  fitting = {name: c.step_s for name, c in costs.items() if c.fits}
  # If any policy fits, the optimum does, and it is at least as fast.
  assert ("optimum" in fitting) == bool(fitting)
  assert fitting.get("optimum", 0.0) <= min(fitting.values(), default=0.0) * (
    1 + 1e-6
  )


def test_weights_are_on_a_device_that_has_room_at_all_instants():
  step = _random(0)
  ((_, _, weights),) = [
    x for x in step.tensors()
    if x[1].name.startswith("updated by the cpu") and x[2].on == "device"
  ]
  for margin, held in ((1.01, True), (0.99, False)):
    tight = dataclasses.replace(step, reserved=dict(zip(
      problem.INSTANTS,
      (0.0, step.device_bytes - margin * weights.size_bytes), strict=True,
    )))
    found = placement.place(tight, "latency_first")
    way = "updated by the cpu, weights on the device"
    assert (("parameters", way) in found.ways) == held


@pytest.mark.parametrize("seed", range(4))
def test_whole_layers_are_multiples_and_no_faster_than_fractions(seed):
  step = _random(100 + seed)
  found = optimum.place(step, whole=True)
  units = step.parts[0].units
  for shares in found.tiers.values():
    for share in shares.values():
      assert share * units == pytest.approx(round(share * units), abs=1e-4)
  whole = placement.cost(step, found)
  assert whole.fits
  bound = placement.cost(step, optimum.place(step)).step_s
  assert bound * (1 - 1e-6) <= whole.step_s


@pytest.mark.parametrize("seed", range(3))
def test_a_slower_tier_never_makes_the_optimum_faster(seed):
  step = _random(200 + seed)
  best = placement.cost(step, optimum.place(step)).step_s
  for i, tier in enumerate(step.host.tiers):
    slow = tier.model_copy(update={"read": _quantity(tier.read.value / 3)})
    changed = list(step.host.tiers)
    changed[i] = slow
    other = dataclasses.replace(
      step, host=step.host.model_copy(update={"tiers": tuple(changed)})
    )
    slower = placement.cost(other, optimum.place(other)).step_s
    assert slower >= best * (1 - 1e-6)


def _streams(host: Host, *tensors: tuple[float, float, float]) -> Problem:
  """Returns a step whose CPU reads and writes tensors of GB in the update."""
  made = tuple(
    Tensor(
      f"x{i}", size * GB, INSTANTS,
      (TensorAccess("update", "cpu", read=read, written=written),), "host",
    )
    for i, (size, read, written) in enumerate(tensors)
  )
  return Problem(
    host=host, device=DEVICES["h100"], device_bytes=80 * GB,
    reserved=dict.fromkeys(INSTANTS, 0.0), seconds=dict.fromkeys(PHASES, 0.0),
    parts=(
      StatePart(
        "parameters",
        (ExecutionMode("updated by the cpu, weights on the device", made),), 4,
      ),
      StatePart("activations", (ExecutionMode("recomputed", ()),), 4),
    ),
  )


@pytest.mark.parametrize("seed", range(6))
def test_greedy_is_the_optimum_with_one_scarce_tier(seed):
  """A fractional knapsack: DRAM costs nothing, the card has room for all."""
  rng = np.random.default_rng(seed)
  tensors = [tuple(rng.uniform(0.1, 4, 3)) for _ in range(5)]
  size = sum(t[0] for t in tensors)
  host = _host((0.5 * size * GB, 1e18, False), (size * GB, 20 * GB, False))
  step = _streams(host, *tensors)
  greedy, best = (
    placement.cost(step, placement.place(step, policy))
    for policy in ("latency_first", "optimum")
  )
  assert greedy.fits
  assert best.fits
  assert greedy.step_s == pytest.approx(best.step_s, rel=1e-6)
  # The order matters: the largest tensors first cost more.
  other = placement.cost(step, placement.place(step, "largest_first"))
  assert other.step_s > best.step_s * (1 + 1e-6)


def test_optimum_of_whole_units_equals_enumeration():
  host = _host((6 * GB, 40 * GB, False), (9 * GB, 25 * GB, True))
  sizes = ((4.0, 1.0, 1.0), (4.0, 1.0, 0.0), (2.0, 0.0, 2.0))
  step = _streams(host, *sizes)
  best = np.inf
  # Quarters of each tensor on the first tier.
  for quarters in itertools.product(range(5), repeat=3):
    first = np.array(quarters) / 4
    size, read, written = np.array(sizes).T
    if (size @ first > 6 + 1e-9) or (size @ (1 - first) > 9 + 1e-9):
      continue
    # The first tier reads or writes, the second does both at once.
    seconds = max(
      (size * (read + written)) @ first / 40,
      (size * read) @ (1 - first) / 25, (size * written) @ (1 - first) / 25,
    )
    best = min(best, seconds)
  found = placement.cost(step, optimum.place(step, whole=True))
  assert found.step_s == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_step_computes_the_flops_and_holds_the_bytes_of_its_model(batch_size):
  """Against the model's training FLOPs, and bytes written out."""
  h100, tokens = DEVICES["h100"], 4096 * batch_size
  step = problem.training_step(
    LLAMA, batch_size=batch_size, seq_len=4096, device=h100,
    host=HOSTS["two-cxl"], utilisation=0.4, fill=0.8,
  )
  assert step.device_bytes == 0.8 * 80e9
  flops = tokens * LLAMA.flops_per_token(4096)
  seconds = sum(step.seconds.values())
  assert seconds == pytest.approx(flops / (0.4 * 989.4e12), rel=1e-3)
  assert step.seconds["backward"] == 2 * step.seconds["forward"]
  # Of a layer: 4 streams, queries, keys, values, attention, and 3 of the MLP.
  saved = 2 * tokens * (4 * 4096 + 4 * 4096 + 3 * 11_008)
  layer = 2 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096)
  assert step.reserved == {
    "end of forward": max(8 * tokens * 32_000, 2 * saved + 2 * layer),
    "end of backward": 2 * saved + 3 * layer,
  }
  kept, again = step.parts[1].ways
  assert kept.tensors[0].size_bytes == 32 * saved
  assert again.tensors[0].size_bytes == 32 * 2 * tokens * 4096
  # Recomputed: all layers, not the head.
  head = 2 * tokens * 4096 * 32_000 / (0.4 * 989.4e12)
  assert again.seconds["backward"] + head == pytest.approx(
    step.seconds["forward"]
  )


@pytest.mark.parametrize(("rate", "seconds"), [(2e9, 2.0), (30e9, 0.5)])
def test_bytes_between_host_and_device_cross_both_the_tier_and_the_link(
  rate, seconds
):
  """4 GB written in the forward and read in the backward; a link of 8 GB/s."""
  uses = (
    TensorAccess("forward", "device", written=1),
    TensorAccess("backward", "device", read=1)
  )
  saved = Tensor("x", 4 * GB, ("end of forward",), uses, "host")
  host = _host((9 * GB, rate, True))
  link = host.device_link.model_copy(
    update={"read": _quantity(8e9), "write": _quantity(8e9)}
  )
  step = _streams(host.model_copy(update={"device_link": link}))
  step = dataclasses.replace(step, parts=(
    dataclasses.replace(step.parts[0], ways=(
      dataclasses.replace(step.parts[0].ways[0], tensors=(saved,)),
    )), step.parts[1],
  ))
  found = placement.cost(step, placement.place(step, "optimum"))
  assert found.seconds == pytest.approx(
    {"forward": seconds, "backward": seconds, "update": 0}
  )
  assert found.binding("forward") == (
    "t0, write" if rate < 8e9 else f"{link.name}, write"
  )


def test_reads_and_writes_take_the_rates_of_all_that_they_cross():
  """A quarter is in DRAM, the rest on a card behind a switch."""
  def rates(read, write, duplex):
    return {"read": _quantity(read * GB), "write": _quantity(write * GB),
            "duplex": duplex}

  host = HOSTS["one-cxl"]
  dram, card = host.tiers
  host = host.model_copy(update={
    "device_link": host.device_link.model_copy(update=rates(10, 6, True)),
    "links": (host.device_link.model_copy(
      update={"name": "switch"} | rates(5, 3, False)
    ),),
    "tiers": (
      dram.model_copy(update=rates(8, 2, False)),
      card.model_copy(update=rates(4, 1, True) | {"link": "switch"}),
    ),
  })
  step = _streams(host)
  uses = (
    TensorAccess("forward", "device", written=1),
    TensorAccess("backward", "device", read=2),
    TensorAccess("update", "cpu", read=1, written=3),
    TensorAccess("update", "device", read=1),
  )
  tensor = Tensor("x", 2 * GB, INSTANTS[:1], uses, "host")
  way = dataclasses.replace(step.parts[0].ways[0], tensors=(tensor,))
  step = dataclasses.replace(step, parts=(
    dataclasses.replace(step.parts[0], ways=(way,)), step.parts[1],
  ))
  found = placement.cost(step, placement.Placement(
    {("parameters", way.name): 1.0},
    {("parameters", way.name, "x"): {"dram": 0.25, "cxl0": 0.75}},
  ))
  link = host.device_link.name
  expected = {
    "forward": {
      "dram": 0.5 / 2, "cxl0, write": 1.5 / 1, "switch": 1.5 / 3,
      f"{link}, write": 2 / 6,
    },
    "backward": {
      "dram": 1 / 8, "cxl0, read": 3 / 4, "switch": 3 / 5,
      f"{link}, read": 4 / 10,
    },
    "update": {
      "dram": 2 * 0.5 / 8 + 1.5 / 2, "cxl0, read": 2 * 1.5 / 4,
      "cxl0, write": 4.5 / 1, "switch": 2 * 1.5 / 5 + 4.5 / 3,
      f"{link}, read": 2 / 10,
    },
  }
  for phase, loads in found.loads.items():
    assert {k: s for k, s in loads.items() if s} == pytest.approx(
      expected[phase]
    )
  assert found.step_s == pytest.approx(1.5 + 0.75 + 4.5)
  assert found.occupied["end of forward"] == pytest.approx(
    {DEVICE: 0, "dram": 0.5 * GB, "cxl0": 1.5 * GB}
  )
  assert not any(found.occupied["end of backward"].values())


def test_measured_passes_replace_the_rates_of_the_optimizer():
  """4 GB read and 2 GB written; 3 GB to the device have the tier's rate."""
  host = _host((9 * GB, 2 * GB, False))
  host = host.model_copy(update={"tiers": (host.tiers[0].model_copy(update={
    "write": _quantity(GB), "passes": (
      tiers.OptimizerPass(size_bytes=GB, read_s=1.0, write_s=3.0),
      tiers.OptimizerPass(size_bytes=3 * GB, read_s=6.0, write_s=9.0),
    ),
  }),)})
  step = _streams(host, (2.0, 2.0, 1.0))
  (way,) = step.parts[0].ways
  sent = Tensor(
    "y", 3 * GB, (), (TensorAccess("update", "device", read=1),), "host"
  )
  step = dataclasses.replace(step, parts=(
    StatePart("parameters", (
      dataclasses.replace(way, tensors=(*way.tensors, sent)),
    ), 4), step.parts[1],
  ))
  found = placement.cost(step, placement.place(step, "dram_only"))
  assert found.seconds["update"] == pytest.approx(6 * 4 / 3 + 6 + 3 / 2)


def test_units_are_those_of_the_part_of_a_tensor():
  """Quarters of one part and thirds of the other: 1 GB each."""
  host = _host((3.8 * GB, 90 * GB, False), (9 * GB, GB, False))
  step = _streams(host, (4.0, 1.0, 1.0))
  use = (TensorAccess("update", "cpu", read=1.0),)
  other = ExecutionMode(
    "recomputed", (Tensor("y", 3 * GB, INSTANTS, use, "host"),)
  )
  step = dataclasses.replace(
    step, parts=(step.parts[0], StatePart("activations", (other,), 3))
  )
  found = optimum.place(step, whole=True)
  for (part, *_), shares in found.tiers.items():
    units = {"parameters": 4, "activations": 3}[part]
    for share in shares.values():
      assert share * units == pytest.approx(round(share * units), abs=1e-4)
  assert placement.cost(step, found).seconds["update"] == pytest.approx(5.0)


def test_an_unknown_policy_suggests_the_nearest():
  with pytest.raises(ValueError, match="did you mean interleave"):
    placement.place(_random(0), "interleaved")


def test_a_host_sends_at_the_slower_one_of_link_and_memory():
  link = HOSTS["dgx-h100"].device_link.read.value
  slow = _host((1e12, link / 2, False))
  assert slow.to_device == slow.from_device == link / 2
  fast = _host((1e12, link / 4, False), (1e12, 9 * link, False))
  assert fast.to_device == fast.from_device == link


def test_bytes_per_parameter_of_a_cpu_optimizer():
  """16 bytes on the host, of which the CPU reads and writes 28 per step."""
  step = problem.training_step(
    LLAMA, batch_size=1, seq_len=4096, device=DEVICES["h100"],
    host=HOSTS["large-dram"],
  )
  way = next(
    way for _, way, t in step.tensors()
    if way.name == "updated by the cpu, weights on the host"
  )
  count = LLAMA.num_params
  assert sum(t.size_bytes for t in way.tensors) == 16 * count
  touched = sum(t.size_bytes * t.cpu_bytes_per_byte for t in way.tensors)
  assert touched == 28 * count
  sent = {
    phase: sum(
      t.size_bytes * (u.read + u.written) for t in way.tensors for u in t.uses
      if u.by == "device" and u.phase == phase
    ) for phase in PHASES
  }
  # Weights to the device twice, gradients back.
  assert sent == {"forward": 2 * count, "backward": 4 * count, "update": 0}


@pytest.mark.parametrize(("rate", "seconds"), [
  (8 * 38.4e9, 0.658), (28e9, 7.220),
])
def test_seconds_of_a_cpu_optimizer_are_bytes_over_bandwidth(rate, seconds):
  """Llama 2 7B: 28 bytes per parameter, and 2 that are sent to the device."""
  host = _host((1e12, rate, False))
  step = problem.training_step(
    LLAMA, batch_size=1, seq_len=4096, device=DEVICES["a10"], host=host
  )
  found = placement.cost(step, placement.place(step, "dram_only"))
  assert found.seconds["update"] == pytest.approx(seconds, rel=1e-3)
  assert found.binding("update") == "t0"


def test_activations_and_gradients_use_the_same_bytes():
  """A host that holds the larger of both, but not their sum, is enough."""
  tensors = (
    Tensor("activations", 3 * GB, ("end of forward",), (), "host"),
    Tensor("gradients", 2 * GB, ("end of backward",), (), "host"),
  )
  step = _streams(_host((3.1 * GB, 1e9, False)))
  ways = (ExecutionMode("updated by the cpu, weights on the device", tensors),)
  step = dataclasses.replace(
    step, parts=(StatePart("parameters", ways, 1), step.parts[1])
  )
  found = placement.cost(step, placement.place(step, "optimum"))
  assert found.fits
  assert found.occupied["end of forward"]["t0"] == pytest.approx(3 * GB)
  assert found.occupied["end of backward"]["t0"] == pytest.approx(2 * GB)


def test_a_state_that_fits_nowhere_says_how_much_is_missing():
  step = _streams(_host((1 * GB, 1e9, False)), (3.0, 1.0, 1.0))
  with pytest.raises(ValueError, match=r"fit: t0 lacks 2\.0 GB$"):
    placement.place(step, "optimum")
  found = placement.cost(step, placement.place(step, "largest_first"))
  assert found.missing == {"t0": pytest.approx(2 * GB)}


@pytest.mark.parametrize("first", [2.0, 5.0])
def test_missing_bytes_are_those_of_the_fullest_instant(first):
  tensors = (
    Tensor("activations", first * GB, ("end of forward",), (), "host"),
    Tensor("gradients", 3 * GB, ("end of backward",), (), "host"),
  )
  step = _streams(_host((1 * GB, 1e9, False)))
  ways = (ExecutionMode("updated by the cpu, weights on the device", tensors),)
  step = dataclasses.replace(
    step, parts=(StatePart("parameters", ways, 1), step.parts[1])
  )
  found = placement.cost(step, placement.place(step, "largest_first"))
  assert found.missing == {"t0": pytest.approx((max(first, 3) - 1) * GB)}


def test_tensors_fill_the_fastest_tier_first():
  step = _streams(
    _host((2 * GB, 9e9, False), (8 * GB, 1e9, False), (8 * GB, 3e9, False)),
    (3.0, 1.0, 1.0), (1.0, 1.0, 1.0),
  )
  found = placement.cost(step, placement.place(step, "largest_first"))
  assert found.occupied["end of forward"] == pytest.approx(
    {DEVICE: 0, "t0": 2 * GB, "t1": 0, "t2": 2 * GB}
  )


@pytest.mark.parametrize("policy", ["dram_only", "largest_first"])
def test_what_fits_nowhere_exceeds_the_slowest_node(policy):
  host = _host((1 * GB, 9e9, False), (1 * GB, 3e9, False))
  host = host.model_copy(update={"tiers": tuple(
    tier.model_copy(update={"kind": "dram"}) for tier in host.tiers
  )})
  step = _streams(host, (5.0, 1.0, 1.0))
  found = placement.cost(step, placement.place(step, policy))
  assert found.missing == {"t1": pytest.approx(3 * GB)}


@pytest.mark.parametrize("policy", ["dram_only", "interleave"])
def test_a_host_with_files_only_has_no_placement_on_nodes(policy):
  host = _host((1 * GB, 9e9, False))
  host = host.model_copy(update={"tiers": (
    host.tiers[0].model_copy(update={"kind": "file", "path": "x"}),
  )})
  with pytest.raises(ValueError, match=r"host 'two-cxl' .*must have a"):
    placement.place(_streams(host, (0.5, 1.0, 1.0)), policy)


def test_a_shared_link_limits_the_tiers_behind_it():
  host = _host((1 * GB, 1e18, True), (9 * GB, 30e9, True), (9 * GB, 30e9, True))
  shared = host.device_link.model_copy(update={
    "name": "switch", "read": _quantity(30e9), "write": _quantity(30e9),
  })
  behind = host.model_copy(update={
    "links": (shared,), "tiers": (host.tiers[0], *(
      t.model_copy(update={"link": "switch"}) for t in host.tiers[1:]
    )),
  })
  apart, together = (
    placement.cost(step, placement.place(step, "optimum")).step_s
    for step in (_streams(h, (7.0, 1.0, 0.0)) for h in (host, behind))
  )
  assert apart == pytest.approx(6 / 60)
  assert together == pytest.approx(6 / 30)


def test_the_optimum_respects_where_a_tensor_can_be():
  step = _random(3)
  best = placement.place(step, "optimum")
  for part, way, tensor in step.tensors():
    used = {
      tier for tier, share in
      best.tiers[part.name, way.name, tensor.name].items() if share > 1e-9
    }
    if tensor.on == "device":
      assert used <= {DEVICE}
    if tensor.on == "host":
      assert DEVICE not in used
