"""Step time against memory of every partition of a training state.

`parallel.zero.cost` says what a partition stores and sends; here that becomes
seconds on a machine, for all partitions at once: the 20 triples of three
levels, times the secondary copies, times the codecs. The space is small, so
the best partition under a memory cap is found by exhaustion.

The step's time, with m microbatches, F the assumed FLOP/s of a device:

    join(m 2 P T / F, forward) + join(m 4 P T / F, backward) + once a step

P parameters, T tokens of a device's microbatch. Each communication is the sum,
over levels, of what a rank receives there / its bandwidth there. join(a, b) is
a + b, or with overlap max(a, b). Left out: latency, encoding and decoding, the
optimizer's own time, and collectives of a tensor axis.

What crosses a level depends on the algorithm:

    reuse     level by level, as `parallel.zero.shards` does it: what a node
              receives once, its ranks hand on to each other
    no reuse  one flat exchange over all levels: every rank gets each shard,
              or slice, from its owner, so a node receives the same bytes once
              per rank. Coded gradients go level by level all the same: that
              is what ZeRO++'s two hops are for.

All times are proportional to P, and so is memory but for padding. So the front
of one model size is also the answer for every other: a partition of the front
is the best one for all models that fit it and not the one before.

Sources: the space, AMSP (arXiv 2311.00257) and PaRO (arXiv 2310.06003); the
machine, Xu et al., arXiv 2501.04266. The model of time is ours.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import math

from parallel.hardware.clusters import Cluster
from parallel.network.checks import positive
from parallel.zero import cost
from parallel.zero.partition import CODECS, Level, Partition, triples


@dataclasses.dataclass(frozen=True)
class Machine:
  """What the model knows of a cluster.

  Attributes:
    levels: Outermost first.
    bandwidths: Level's name -> bytes per second that a rank receives over it.
    flops: FLOP/s that a rank reaches.
    memory_bytes: Of a rank, for its training state.
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
    """Ranks within one rank of the outermost level."""
    return math.prod(level.size for level in self.levels[1:])


def machine(
  cluster: Cluster,
  levels: Sequence[Level],
  *,
  flops: float,
  memory_bytes: float,
) -> Machine:
  """The model of a cluster whose levels a run uses, outermost first.

  Args:
    cluster: Has a link for each level, innermost first.
    levels: Of the data-parallel ranks: all devices of the inner levels.
    flops: FLOP/s that a device reaches.
    memory_bytes: What a device has for the training state.

  Raises:
    ValueError: The levels are not the cluster's, or a number is out of range.
  """
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
  """What is trained, and how.

  Attributes:
    parameters: P, spread evenly over the layers.
    num_layers: Each is partitioned by itself.
    tokens: T, of a device and microbatch.
    accumulation: m, microbatches per step.
    weight_bytes: Of a weight as it is gathered.
    gradient_bytes: Of a gradient, accumulated and, without a codec, sent.
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
    """One tensor per layer."""
    return [
      cost.Parameter(
        math.ceil(self.parameters / self.num_layers), self.num_layers,
        self.weight_bytes, gradient_bytes=self.gradient_bytes,
      )
    ]


@dataclasses.dataclass(frozen=True)
class Prediction:
  """What a partition costs on a machine.

  Attributes:
    partition: The partition.
    memory: Of a rank, activations and gathered layers excluded.
    received: Bytes that a rank receives per step, by (level, when), "when" as
      `cost.Exchange` has it; with reuse.
    direct: The same without reuse.
    seconds: Of a step, with reuse.
    direct_seconds: The same without reuse.
  """

  partition: Partition
  memory: cost.Memory
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
  """Memory, bytes and seconds of one partition.

  Args:
    partition: Of the machine's levels.
    machine: Where.
    workload: What.
    overlap: Whether the gathers and scatters of microbatches run under their
      compute; what is sent once a step never does.
  """
  found = cost.exchanges(
    partition, workload.tensors, accumulation=workload.accumulation
  )
  both = [received(found, partition, reuse) for reuse in (True, False)]
  return Prediction(
    partition,
    cost.memory(partition, workload.tensors),
    *both,
    *(step_seconds(sizes, machine, workload, overlap) for sizes in both),
  )


def received(
  exchanges: Sequence[cost.Exchange], partition: Partition, reuse: bool
) -> dict[tuple[str, str], float]:
  """Bytes that a rank receives per step, by (level, when).

  Args:
    exchanges: Of the partition.
    partition: Has the levels.
    reuse: As the module says. In total a rank receives the same either way,
      but without reuse more of it comes from afar.
  """
  sizes = {level.name: level.size for level in partition.inner}
  totals: dict[tuple[str, str], float] = {}

  def add(level: str, when: str, size: float) -> None:
    totals[level, when] = totals.get((level, when), 0.0) + size

  chains: dict[tuple[str, str, str], dict[str, float]] = {}
  for e in exchanges:
    if e.kind == "all_to_all" or (reuse and e.kind != "all_reduce"):
      add(e.levels[0], e.when, e.received_bytes)
      continue
    chain = chains.setdefault((e.kind, e.when, e.dtype), {})
    for name in e.levels:
      chain[name] = chain.get(name, 0.0) + e.received_bytes / len(e.levels)
  for (_, when, _), chain in chains.items():
    inner = [name for name in sizes if name in chain]
    ranks = math.prod(sizes[name] for name in inner)
    inside = 1
    for name in inner:
      # Of the other ranks, those first told apart at this level; or, of a
      # reduce-scatter inwards first, what is left after the levels inside.
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
  """The step's time, as the module says."""
  phases = {"forward": 0.0, "backward": 0.0, "step": 0.0}
  for (level, when), size in sizes.items():
    phases[when] += size / machine.bandwidths[level]
  forward = compute_seconds(machine, workload) / 3
  join = max if overlap else float.__add__
  return (
    join(forward, phases["forward"])
    + join(2 * forward, phases["backward"])
    + phases["step"]
  )


def compute_seconds(machine: Machine, workload: Workload) -> float:
  """Of a step that sends nothing: 6 FLOP per parameter and token."""
  tokens = workload.accumulation * workload.tokens
  return 6 * workload.parameters * tokens / machine.flops


def node_bytes(
  sizes: Mapping[tuple[str, str], float], machine: Machine
) -> float:
  """Bytes per step and direction that cross the border of a node."""
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
  """All triples x secondary copies x codecs.

  Args:
    levels: Outermost first.
    weight_codecs: Of weights on the wire.
    gradient_codecs: Of gradients on the wire.
    secondary_codecs: Of the second copy; () is no copy.
    block: Elements that share a scale.

  Yields:
    Every valid partition once.
  """
  for triple in triples(levels):
    depth = triple.optimizer
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
  """The fastest that fits; of those equal to six digits, the smallest."""
  fitting = [p for p in predictions if p.memory.total <= cap]
  return min(fitting, key=lambda p: _order(p, reuse), default=None)


def front(
  predictions: Sequence[Prediction], cap: float, reuse: bool = True
) -> list[Prediction]:
  """Those that no other beats in both step time and memory, fastest first.

  Step times equal to six digits are equal.

  Args:
    predictions: All of one workload on one machine.
    cap: Bytes of memory; what does not fit is left out.
    reuse: Which step time.
  """
  chosen: list[Prediction] = []
  for p in sorted(predictions, key=lambda p: _order(p, reuse)):
    smaller = not chosen or p.memory.total < chosen[-1].memory.total
    if p.memory.total <= cap and smaller:
      chosen.append(p)
  return chosen


def largest_model(
  partition: Partition, workload: Workload, cap: float
) -> float:
  """Parameters of the largest model whose state fits; the other sizes stay.

  Raises:
    ValueError: Not even one parameter per layer fits.
  """

  def fits(size: int) -> bool:
    (tensor,) = workload.tensors
    tensor = dataclasses.replace(tensor, size=size)
    return cost.memory(partition, [tensor]).total <= cap

  if not fits(1):
    raise ValueError(f"nothing fits into {cap:g} bytes")
  low, high = 1, 2
  while fits(high):
    low, high = high, 2 * high
  while high - low > 1:  # memory never falls with size
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return low * workload.num_layers


def _order(p: Prediction, reuse: bool) -> tuple[float, int]:
  # To six digits: padding and the order of sums are no reason to choose.
  seconds = p.seconds if reuse else p.direct_seconds
  return float(f"{seconds:.5e}"), p.memory.total
