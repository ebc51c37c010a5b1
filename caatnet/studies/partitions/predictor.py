"""Predictor of step time and memory of every partition of a training state.

`parallel.plans.zero.cost` gives the stored and sent bytes of a partition; this
module predicts the seconds that they take on a machine. Partitions differ in
the levels of data-parallel ranks that shard weights, gradients and optimizer
state, in secondary copies of weights and in codecs. They are few, so an
exhaustive search finds the best one.

The time of a step is

    join(m 2 P T / F, forward) + join(m 4 P T / F, backward) + once a step

with P parameters, T tokens in a device's microbatch, m microbatches, and F the
assumed FLOP/s of a device. "forward", "backward" and "once a step" are the
times of communication: the sum, over levels, of the bytes that a rank receives
over a level, divided by its bandwidth there. join(a, b) is a + b, or max(a, b)
with overlap. Latency, encoding and decoding, the optimizer's own time, and
collectives of a tensor axis are ignored.

The bytes that cross a level depend on the algorithm:

    reuse     The exchange goes level by level, as in `parallel.zero.shards`: a
              node receives data once, and its ranks forward them to each other.
    no reuse  One flat exchange runs over all levels: every rank gets each
              shard, or slice, from its owner, so a node receives the same
              bytes once per rank. Coded gradients still go hop by hop
              (`Partition.hops`), as ZeRO++ is designed for that.

All times are proportional to P, and so is memory except for padding. So the
Pareto front of time and memory is the same for all model sizes. A partition of
the front is the fastest for each model that fits with it, but not with the next
faster partition of the front.

Sources: AMSP (arXiv 2311.00257) and PaRO (arXiv 2310.06003) for the space, Xu
et al. (arXiv 2501.04266) for the machine. The time model is not from a paper.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import math

from parallel.base.checks import positive
from parallel.plans.hardware.clusters import Cluster
from parallel.plans.zero import cost
from parallel.plans.zero.partition import (
  CODECS,
  Level,
  Partition,
  enumerate_partitions,
)


@dataclasses.dataclass(frozen=True)
class Machine:
  """Model of a cluster: levels of ranks, bandwidths, compute rate and memory.

  Attributes:
    levels: Levels of data-parallel ranks, outermost first.
    bandwidths: Name of a level -> bytes/s that a rank receives over it.
    flops: FLOP/s that a rank reaches.
    memory_bytes: Bytes that a rank has for its training state.
  """

  levels: tuple[Level, ...]
  bandwidths: Mapping[str, float]
  flops: float
  memory_bytes: float

  def __post_init__(self) -> None:
    positive("flops", self.flops)
    positive("memory_bytes", self.memory_bytes)
    for name, bandwidth in self.bandwidths.items():
      positive(f"bandwidth of {name}", bandwidth)

  @property
  def ranks_per_node(self) -> int:
    """Number of ranks within a node, one rank of the outermost level."""
    return math.prod(level.size for level in self.levels[1:])


def machine(
  cluster: Cluster,
  levels: Sequence[Level],
  *,
  flops: float,
  memory_bytes: float,
) -> Machine:
  """Returns a `Machine` for the part of a cluster that a training run uses.

  Args:
    cluster: The cluster; it has a link for each level.
    levels: Levels of data-parallel ranks, outermost first. They use all devices
      of the cluster's inner levels.
    flops: FLOP/s that a device reaches.
    memory_bytes: Bytes that a device has for the training state.

  Raises:
    ValueError: The levels do not fit the cluster, or a number is out of range.
  """
  # Innermost level first. Only the outermost used level may be partly used.
  sizes = [level.size for level in levels[::-1]]
  theirs = [level.size for level in cluster.levels]
  if (
    not 1 <= len(sizes) <= len(theirs)
    or sizes[:-1] != theirs[: len(sizes) - 1]
    or sizes[-1] > theirs[len(sizes) - 1]
  ):
    raise ValueError(
      f"{' x '.join(map(str, sizes[::-1]))} ranks do not fit the cluster "
      f"{cluster.name!r}: it has {' x '.join(map(str, theirs[::-1]))}, of "
      "which the outermost level in use may have fewer"
    )
  bandwidths = {
    level.name: place.link.bandwidth * place.links_per_device
    for level, place in zip(levels[::-1], cluster.levels, strict=False)
  }
  return Machine(tuple(levels), bandwidths, flops, memory_bytes)


@dataclasses.dataclass(frozen=True)
class Workload:
  """Model and steps of a training run.

  Attributes:
    parameters: Number of parameters P, spread evenly over the layers.
    num_layers: Number of layers; each is partitioned separately.
    tokens: Tokens T in a device's microbatch.
    accumulation: Microbatches m per step.
    weight_bytes: Bytes of a weight when gathered.
    gradient_bytes: Bytes of a gradient when accumulated and, without a codec,
      when sent.
  """

  parameters: float
  num_layers: int
  tokens: int
  accumulation: int = 1
  weight_bytes: int = 2
  gradient_bytes: int = 4

  def __post_init__(self) -> None:
    for key in ("parameters", "num_layers", "tokens", "accumulation"):
      positive(key, getattr(self, key))
    for key in ("weight_bytes", "gradient_bytes"):
      if getattr(self, key) not in (2, 4):
        raise ValueError(f"{key}={getattr(self, key)} must be 2 or 4")

  @property
  def tensors(self) -> list[cost.Parameter]:
    """Parameters in the form of the cost model: one tensor per layer."""
    return [
      cost.Parameter(
        math.ceil(self.parameters / self.num_layers), self.num_layers,
        self.weight_bytes, gradient_bytes=self.gradient_bytes,
      )
    ]


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Predicted cost of a partition on a machine.

  Attributes:
    partition: The partition.
    memory: Bytes of a rank's training state, without activations and gathered
      layers.
    received: Bytes that a rank receives per step with reuse, by (level of
      ranks, when); "when" is "step", "forward" or "backward".
    direct: Bytes that a rank receives per step without reuse, by (level, when).
    seconds: Time of a step with reuse, in seconds.
    direct_seconds: Time of a step without reuse, in seconds.
  """

  partition: Partition
  memory: cost.StateMemory
  received: Mapping[tuple[str, str], float]
  direct: Mapping[tuple[str, str], float]
  seconds: float
  direct_seconds: float


def predict(
  partition: Partition,
  machine: Machine,
  workload: Workload,
  *,
  overlap: bool = False,
) -> Prediction:
  """Predicts memory, bytes and seconds of one partition.

  Args:
    partition: Partition over the machine's levels of ranks.
    machine: Machine that it runs on.
    workload: Model and steps of the training run.
    overlap: Whether the gathers and scatters of microbatches overlap with their
      compute; exchanges once a step never do.
  """
  found = cost.level_collectives(
    partition, workload.tensors, accumulation=workload.accumulation
  )
  both = [received_by_level(found, partition, reuse) for reuse in (True, False)]
  return Prediction(
    partition,
    cost.memory(partition, workload.tensors),
    *both,
    *(step_seconds(sizes, machine, workload, overlap) for sizes in both),
  )


def received_by_level(
  exchanges: Sequence[cost.LevelCollective], partition: Partition, reuse: bool
) -> dict[tuple[str, str], float]:
  """Returns the bytes that a rank receives per step, by (level name, when).

  Args:
    exchanges: Collectives of the partition, from `cost.level_collectives`.
    partition: Partition, which has the levels.
    reuse: Whether exchanges go level by level, or all at once over all levels.
      The total that a rank receives is the same, but without reuse more of it
      crosses the outer levels.
  """
  sizes = {level.name: level.size for level in partition.inner}
  totals: dict[tuple[str, str], float] = {}

  def add(level: str, when: str, size: float) -> None:
    totals[level, when] = totals.get((level, when), 0.0) + size

  # Collectives of one kind and phase on several levels are one exchange, a
  # chain of levels. Its bytes are redistributed over the levels.
  chains: dict[tuple[str, str, str], dict[str, float]] = {}
  for e in exchanges:
    if e.kind == "all_to_all":
      # Each rank has a part for each other rank of the hop's levels.
      inside = 1
      for name in e.levels[::-1]:
        others = (sizes[name] - 1) * inside / (e.ranks - 1)
        add(name, e.when, e.received_bytes * others)
        inside = sizes[name] * inside
      continue
    # With reuse, gathers and scatters already have one entry per level.
    if reuse and e.kind != "all_reduce":
      add(e.levels[0], e.when, e.received_bytes)
      continue
    # Splits the bytes equally over levels; only their sum is used below.
    chain = chains.setdefault((e.kind, e.when, e.dtype), {})
    for name in e.levels:
      chain[name] = chain.get(name, 0.0) + e.received_bytes / len(e.levels)
  for (_, when, _), chain in chains.items():
    inner = [name for name in sizes if name in chain]  # innermost first
    ranks = math.prod(sizes[name] for name in inner)
    inside = 1
    for name in inner:
      # Number of other ranks' parts that cross this level. Without reuse, a
      # rank receives a part from every rank in the same unit of this level (for
      # example a node) but in another unit of the next inner level. With reuse
      # (here only all-reduces), inner levels have reduced and scattered first,
      # which divides the exchange by their number of ranks. In both cases the
      # numbers of all levels sum to ranks - 1.
      others = (sizes[name] - 1) * (
        ranks / inside / sizes[name] if reuse else inside
      )
      add(name, when, sum(chain.values()) * others / (ranks - 1))
      inside *= sizes[name]
  return totals


def step_seconds(
  sizes: Mapping[tuple[str, str], float],
  machine: Machine,
  workload: Workload,
  overlap: bool,
) -> float:
  """Returns the seconds of a step.

  Args:
    sizes: Bytes that a rank receives per step, by (level, when).
    machine: Machine, with bandwidths and FLOP/s.
    workload: Model and steps of the training run.
    overlap: Whether communication of microbatches overlaps with compute.
  """
  phases = {"forward": 0.0, "backward": 0.0, "step": 0.0}
  for (level, when), size in sizes.items():
    phases[when] += size / machine.bandwidths[level]
  # The forward takes 2 of the 6 FLOP per parameter and token, the backward 4.
  forward = compute_seconds(machine, workload) / 3
  join = max if overlap else float.__add__  # per phase
  return (
    join(forward, phases["forward"])
    + join(2 * forward, phases["backward"])
    + phases["step"]
  )


def compute_seconds(machine: Machine, workload: Workload) -> float:
  """Returns the seconds of a step's compute: 6 FLOP per parameter and token."""
  tokens = workload.accumulation * workload.tokens
  return 6 * workload.parameters * tokens / machine.flops


def node_bytes(
  sizes: Mapping[tuple[str, str], float], machine: Machine
) -> float:
  """Returns the bytes per step that a node receives from other nodes.

  Args:
    sizes: Bytes that a rank receives per step, by (level, when).
    machine: The machine; a node is a rank of its outermost level.
  """
  outermost = machine.levels[0].name
  return machine.ranks_per_node * sum(
    size for (level, _), size in sizes.items() if level == outermost
  )


def candidates(
  levels: Sequence[Level],
  *,
  weight_codecs: Sequence[str] = CODECS,
  gradient_codecs: Sequence[str] = CODECS,
  secondary_codecs: Sequence[str] = ("none", "int8"),
  block: int = 256,
) -> Iterator[Partition]:
  """Yields all partitions, by sharding levels, secondary copies and codecs.

  Args:
    levels: Levels of data-parallel ranks, outermost first.
    weight_codecs: Codecs to try for weights on the wire.
    gradient_codecs: Codecs to try for gradients on the wire.
    secondary_codecs: Codecs to try for the secondary copy; () tries no copy.
    block: Elements that share a scale in a codec.

  Yields:
    Every valid partition once.
  """
  # A triple gives the levels that shard weights, gradients, optimizer state.
  for triple in enumerate_partitions(levels):
    depth = triple.optimizer
    # A copy requires sharded weights, and a codec requires a transfer.
    copies: list[tuple[int | None, str]] = [(None, "none")]
    if triple.weights:
      copies += itertools.product(range(1, depth + 1), secondary_codecs)
    for weights, gradients, (secondary, codec) in itertools.product(
      weight_codecs if depth else ("none",),
      gradient_codecs if depth else ("none",),
      copies,
    ):
      yield dataclasses.replace(
        triple, secondary=secondary, weight_codec=weights,
        gradient_codec=gradients, secondary_codec=codec, block=block,
      )


def best(
  predictions: Sequence[Prediction], cap: float, reuse: bool = True
) -> Prediction | None:
  """Returns the fastest partition that fits into memory, or None.

  Args:
    predictions: Predictions of one workload on one machine.
    cap: Bytes of memory that a rank has for the training state.
    reuse: Whether to compare step times with reuse or without. If times are
      equal to six digits, the partition with less memory is preferred.
  """
  fitting = [p for p in predictions if p.memory.total <= cap]
  return min(fitting, key=lambda p: _order(p, reuse), default=None)


def pareto_front(
  predictions: Sequence[Prediction], cap: float, reuse: bool = True
) -> list[Prediction]:
  """Returns the Pareto front of step time and memory.

  Step times that are equal to six digits count as equal.

  Args:
    predictions: Predictions of one workload on one machine.
    cap: Bytes of memory; partitions that do not fit are excluded.
    reuse: Whether to compare step times with reuse or without.

  Returns:
    The front, fastest first.
  """
  chosen: list[Prediction] = []
  # In the order of step time, a partition is on the front if it needs less
  # memory than all faster ones, of which the last chosen one needs the least.
  for p in sorted(predictions, key=lambda p: _order(p, reuse)):
    smaller = not chosen or p.memory.total < chosen[-1].memory.total
    if p.memory.total <= cap and smaller:
      chosen.append(p)
  return chosen


def largest_model(
  partition: Partition, workload: Workload, cap: float
) -> float:
  """Returns the number of parameters of the largest model whose state fits.

  Args:
    partition: Sharding of the state.
    workload: Training run, whose number of parameters is ignored.
    cap: Bytes of memory that a rank has for the training state.

  Raises:
    ValueError: Not even one parameter per layer fits.
  """

  def fits(size: int) -> bool:
    (tensor,) = workload.tensors
    tensor = dataclasses.replace(tensor, size=size)
    return cost.memory(partition, [tensor]).total <= cap

  if not fits(1):
    raise ValueError(f"one parameter per layer exceeds {cap:g} bytes of memory")
  # Memory is nondecreasing in size: double until it does not fit, then bisect.
  low, high = 1, 2
  while fits(high):
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return low * workload.num_layers


def _order(p: Prediction, reuse: bool) -> tuple[float, int]:
  """Returns the key that sorts predictions by step time, then by memory.

  With `reuse`, the time is `Prediction.seconds`, else `direct_seconds`.
  """
  # Rounded to six digits, so that differences due to padding or to the order of
  # sums do not decide between partitions.
  seconds = p.seconds if reuse else p.direct_seconds
  return float(f"{seconds:.5e}"), p.memory.total
