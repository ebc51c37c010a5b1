"""Pairs of a nano-batch plan's options, against times written out.

The reference reads the profile's rows, and enumerates plans one at a time.
"""

import csv
import dataclasses
import itertools
import math
import pathlib

import numpy as np
import pytest

from parallel.plans.hardware.devices import DEVICES
from parallel.plans.nanobatches import nanobatch, nanobatch_costs
from parallel.plans.nanobatches.nanobatch import Reduction
from parallel.plans.nanobatches.nanobatch_costs import LLAMA_2_70B, TokenMix
from parallel.plans.network import inference
from parallel.plans.workload import Transformer
from tests import pairwise

MODELS = {
  "70b": LLAMA_2_70B,
  # Heads of 96 channels; four ranks have one of four key-value heads each.
  "small": Transformer(
    20_000, 1152, 6, 12, 4, 4096, dtype="float32"
  ),
}
# Device and number of ranks.
MACHINES = {
  "gpu:h100:1x8": ("h100", 8), "gpu:a100-pcie:1x8": ("a100-pcie", 8),
  "tpu:v5p:2x2x1": ("v5p", 4),
}
MIXES = {
  "decodes": TokenMix(9, 700), "prompts": TokenMix(0, 0, 480, 300),
  "both": TokenMix(200, 900, 317, 64),
}
WAYS = {
  "one": [Reduction()], "algorithms": nanobatch_costs.reduction_choices(),
  "p and bits": [
    Reduction(p=0.3, bits=8), Reduction("one_shot", 0.5, 32), Reduction(p=0.0),
  ],
}
TABLE = pairwise.rows({
  "machine": tuple(MACHINES), "model": tuple(MODELS), "mix": tuple(MIXES),
  "ways": tuple(WAYS), "end": nanobatch_costs.TIME_RANGE_ENDS,
  "utilisation": (1.0, 0.6),
  "interference": (0.3, 0.0, 1.0), "max_pieces": (4, 3, 1),
})


def profile_of(gpu, num_ranks, part, counts):
  """Returns measured seconds of numbers of tokens; 0 for none."""
  path = pathlib.Path(nanobatch_costs.__file__).with_name(
    "nanobatch_profiles.csv"
  )
  lines = [x for x in path.read_text().splitlines() if x[0] != "#"]
  rows = [
    row for row in csv.DictReader(lines)
    if (row["gpu"], row["num_ranks"]) == (gpu, str(num_ranks))
  ]
  times = np.interp(
    counts, [int(row["tokens"]) for row in rows],
    [float(row[part]) for row in rows],
  )
  return np.where(counts, times * 1e-6, 0)


@dataclasses.dataclass(frozen=True)
class Case:
  """Times of a row.

  Attributes:
    row: The row.
  """

  row: pairwise.Row

  @property
  def model(self) -> Transformer:
    return MODELS[self.row["model"]]

  @property
  def mix(self) -> TokenMix:
    return MIXES[self.row["mix"]]

  @property
  def device(self):
    return DEVICES[MACHINES[self.row["machine"]][0]]

  @property
  def ranks(self) -> int:
    return MACHINES[self.row["machine"]][1]

  @property
  def heads(self) -> tuple[int, int]:
    """Heads of a rank: of queries, of keys and values; in 8 ranks replicas."""
    heads = self.model.num_heads // self.ranks
    if self.row["model"] == "small" and self.ranks == 8:
      return 2, 1  # 12 query heads, padded
    return heads, self.model.num_kv_heads // self.ranks

  @property
  def flops(self) -> float:
    """FLOPs per second that products reach."""
    return self.row["utilisation"] * self.device.peak(self.model.dtype)

  @property
  def matrices(self) -> dict[str, float]:
    """Elements of a rank's matrices of a layer."""
    (heads, kv), m = self.heads, self.model
    return {
      "qkv": m.width * (heads + 2 * kv) * m.head_width,
      "out": m.width * heads * m.head_width,
      "up": 2 * m.width * m.ffn_width / self.ranks,
      "down": m.width * m.ffn_width / self.ranks,
    }

  def half(self, counts, *parts):
    """Returns the seconds of half a layer, without attention."""
    gpu = MACHINES[self.row["machine"]][0]
    if self.model is LLAMA_2_70B and gpu != "v5p":
      return sum(
        profile_of(gpu.removesuffix("-pcie"), self.ranks, part, counts)
        for part in parts
      )
    size = self.model.item_bytes / self.device.memory_bandwidth
    return sum(
      np.where(counts, np.maximum(
        2 * counts * self.matrices[part] / self.flops,
        self.matrices[part] * size,
      ), 0) for part in parts[:2]
    )

  def attend(self, counts):
    """Returns the seconds in which tokens, decodes first, attend."""
    (heads, kv), mix, head = self.heads, self.mix, self.model.head_width
    decodes = np.minimum(counts, mix.decodes)
    position = max(
      4 * heads * head / self.flops,
      2 * kv * head * self.model.item_bytes / self.device.memory_bandwidth,
    )
    return decodes * mix.context * position + (counts - decodes) * (
      4 * heads * head * mix.prefill_context / self.flops
    )

  def sums(self, counts, way):
    """Returns the seconds of one reduction of numbers of tokens."""
    machine = inference.machine(self.row["machine"])
    item, channels = self.model.item_bytes, int(way.p * self.model.width)
    found = []
    for count in counts:
      if not count * channels:
        found.append(0.0)
        continue
      size = count * channels * way.bits / 8
      if way.algorithm == "one_shot":
        seconds = getattr(machine.all_reduce(1), self.row["end"])
        seconds += (self.ranks - 1) * size / machine.rate
      else:
        seconds = getattr(machine.all_reduce(size), self.row["end"])
      if way.bits < 8 * item:  # each number is read and written twice
        seconds += 2 * count * channels * (
          item + way.bits / 8
        ) / self.device.memory_bandwidth
      found.append(seconds)
    return np.array(found)

  @property
  def head(self) -> float:
    """Seconds of the head's product, for one token of a prompt's step."""
    elements = self.model.width * self.model.vocab_size / self.ranks
    return max(
      2 * max(self.mix.decodes, 1) * elements / self.flops,
      elements * self.model.item_bytes / self.device.memory_bandwidth,
    )


def layer_seconds(attention, mlp, sums, pending, interference):
  """Returns the time of a layer: two queues, of which both may be busy."""
  num = len(sums)
  device = [
    *(("A", i, attention[i]) for i in range(num)),
    *(("M", i, mlp[i]) for i in range(num)),
  ]
  network = [
    ("S", -1, pending), *(("R", i, sums[i]) for i in range(num)),
    *(("S", i, sums[i]) for i in range(num - 1)),
  ]
  done, time = set(), 0.0

  def ready(name, i, _):
    needed = {
      "A": ("S", -1) if i == num - 1 else None, "M": ("R", i),
      "R": ("A", i), "S": ("M", i) if i >= 0 else None,
    }[name]
    return needed is None or needed in done

  while device or network:
    running = [
      queue for queue in (device, network) if queue and ready(*queue[0])
    ]
    shortest = min(queue[0][2] for queue in running)
    time += shortest * (1 + interference * (len(running) - 1))
    for queue in running:
      name, i, left = queue.pop(0)
      if left - shortest > 1e-15:
        queue.insert(0, (name, i, left - shortest))
      else:
        done.add((name, i))
  return time


@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
def test_options_together_give_the_fastest_plan_of_the_costs(row):
  case = Case(row)
  mix, model = case.mix, case.model
  machine = inference.machine(row["machine"])
  tokens = mix.tokens
  costs = nanobatch_costs.layer_costs(
    "m", model,
    nanobatch_costs.profile_of(machine, model, tokens, row["utilisation"]),
    machine, mix, WAYS[row["ways"]], row["end"], row["utilisation"],
  )
  counts = np.array([0, 1, 3, tokens // 3, tokens // 2, tokens])
  attention = case.half(counts, "qkv", "out", "attention_rest")
  mlp = case.half(counts, "up", "down", "mlp_rest")
  np.testing.assert_allclose(costs.attention[counts], attention, rtol=1e-9)
  np.testing.assert_allclose(costs.mlp[counts], mlp, rtol=1e-9)
  np.testing.assert_allclose(
    costs.attend[counts], case.attend(counts), rtol=1e-9
  )
  for way in WAYS[row["ways"]]:  # interpolated between 64 numbers of tokens
    np.testing.assert_allclose(
      costs.reductions[way][counts], case.sums(counts, way), rtol=0.02
    )
  whole = Reduction(bits=8 * model.item_bytes)
  assert costs.fixed_s == pytest.approx(
    case.head + case.sums([tokens], whole)[0]
  )
  expect_optimum(case, costs)
  expect_fastest(case, costs)


def expect_optimum(case, costs):
  """Compares with FLOPs, bytes and messages at the peak rates."""
  mix, model = case.mix, case.model
  heads, kv = case.heads
  elements = sum(case.matrices.values())
  table = model.width * model.vocab_size / case.ranks
  cached = mix.decodes * mix.context
  pairs = cached + mix.prefills * mix.prefill_context
  rows = max(mix.decodes, 1)
  flops = 2 * rows * table + model.num_layers * (
    2 * mix.tokens * elements + 4 * pairs * heads * model.head_width
  )
  size = model.item_bytes * (table + model.num_layers * (
    elements + 2 * cached * kv * model.head_width
  ))
  machine = inference.machine(case.row["machine"])
  sent = (2 * model.num_layers + 1) * mix.tokens * model.width
  sent *= model.item_bytes * 2 * (case.ranks - 1) / case.ranks
  assert costs.optimum_s == pytest.approx(max(
    flops / case.device.peak(model.dtype), size / case.device.memory_bandwidth,
    sent / machine.rate,
  ))


def expect_fastest(case, costs):
  """Compares the plan with all others on its grid."""
  row, tokens = case.row, case.mix.tokens
  # The default grid for a few tokens, and up to seven cuts otherwise.
  grid = None if tokens < 64 else -(-tokens // 8)
  found = nanobatch.plan(
    costs, tokens, max_pieces=row["max_pieces"], granularity=grid,
    interference=row["interference"],
  )
  cuts = range(grid or 1, tokens, grid or 1)
  times = {}
  for way, sums in costs.reductions.items():
    for number in range(row["max_pieces"]):
      for chosen in itertools.combinations(cuts, number):
        ends = [*chosen, tokens]
        starts = [0, *chosen]
        sizes = tuple(b - a for a, b in zip(starts, ends, strict=True))
        attention = [
          costs.attention[n] + costs.attend[end] - costs.attend[end - n]
          for n, end in zip(sizes, ends, strict=True)
        ]
        first, others = (
          layer_seconds(
            attention, costs.mlp[list(sizes)], sums[list(sizes)],
            pending * sums[sizes[-1]], row["interference"],
          ) for pending in (0, 1)
        )
        times[sizes, way] = (
          costs.fixed_s + first + (costs.num_layers - 1) * others
          + sums[sizes[-1]]
        )
  assert found.considered == len(times) == len(costs.reductions) * sum(
    math.comb(len(cuts), n) for n in range(row["max_pieces"])
  )
  best = min(times.values())
  assert found.step_s == pytest.approx(best, rel=1e-8)
  assert times[found.sizes, found.reduction] == pytest.approx(best, rel=1e-8)
  single = min(times[(tokens,), way] for way in costs.reductions)
  assert found.single_s == pytest.approx(single)
  assert found.optimum_s == costs.optimum_s
