"""Cost of a ZeRO partition: bytes on a device, and bytes per level and step.

Trainer, simulator and planner share this closed form, so it does not import
jax. Tests compare it with the lowered programs.

A step has m microbatches. Weights, gradients and optimizer state are sharded
over the w, g and o innermost levels of data-parallel ranks, w <= g <= o; level
0 is the innermost. A device may host several logical ranks of a level, its
*lanes*. A step sends

    once       gathers of weights over levels o - 1 ... w
    m times    gathers over levels w - 1 ... 0, in the forward and again in the
               backward; with a secondary copy of depth s, those of the
               backward are over levels s - 1 ... 0
    m times    reduce-scatters of gradients over levels 0 ... g - 1
    once       reduce-scatters over levels g ... o - 1, then one all-reduce over
               the levels beyond o

Encoded gradients can be reduced over several levels in one hop
(`Partition.hops`). Parameters with shards smaller than `Partition.coded_blocks`
blocks are not encoded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Literal, NamedTuple

from parallel.plans.zero.partition import Partition

CollectiveKind = Literal[
  "all_gather", "reduce_scatter", "all_to_all", "all_reduce"
]

# Bits per code on the wire; every block also has a float32 scale.
_BITS = {"int8": 8, "int4": 4}
# Bytes of an element -> dtype on the wire.
_DTYPES = {2: "bfloat16", 4: "float32"}


@dataclasses.dataclass(frozen=True)
class Parameter:
  """Parameters of equal size on a device, each partitioned separately.

  Attributes:
    size: Elements of one parameter tensor.
    count: Number of tensors (layers x tensor ranks on the device).
    wire_bytes: Bytes per element when gathered and when sent without a codec,
      such as 2 for bfloat16.
    uses: Number of functions of the model that read it; each has a separate
      gather and reduce-scatter.
    regathered: Number of these functions whose backward reads it too; the
      backward of an embedding lookup does not.
    gradient_bytes: Bytes per element of the accumulated gradient and, without a
      codec, of the sent one; 4 in the trainer, while papers count 2.
    moments: Number of the optimizer's float32 arrays of the parameter's size.
    form, apart: Partition of the tensor (`Partition.of_tensor`).
    unit: Number of consecutive elements that no shard divides.
  """

  size: int
  count: int = 1
  wire_bytes: int = 4
  uses: int = 1
  regathered: int = 1
  gradient_bytes: int = 4
  moments: int = 2
  form: str = "flat"
  apart: tuple[str, ...] = ()
  unit: int = 1


@dataclasses.dataclass(frozen=True)
class LevelCollective:
  """All collectives of one kind, phase and dtype over a data-parallel level.

  Attributes:
    levels: Name of the axis of the level of data-parallel ranks; several names,
      outermost first, for an all-reduce and for a hop over several levels.
    ranks: Number of participating logical ranks.
    kind: The collective.
    when: "step" (once), "forward" or "backward" (per microbatch).
    dtype: Dtype on the wire.
    operand_bytes: Operand bytes of all operations, per step and device, as
      `parallel.ledger.ledger` counts them.
    received_bytes: Bytes per step that one rank on a separate device receives
      in a bandwidth-optimal algorithm.
  """

  levels: tuple[str, ...]
  ranks: int
  kind: CollectiveKind
  when: str
  dtype: str
  operand_bytes: int
  received_bytes: float


@dataclasses.dataclass(frozen=True)
class StateMemory:
  """Bytes of the training state on a device.

  ``stored``, of which ``moments`` is a part, is an argument of the step; the
  other fields are its temporaries.

  Attributes:
    stored: Shards of float32 weights and moments (`Partition.optimizer`).
    weights: Weights that a step gathers or casts; 0 if it uses the stored ones.
    gradients: One copy of the accumulated gradients (`Partition.gradients`).
    secondary: Second copy of the weights (`Partition.secondary`).
    moments: Bytes of ``stored`` that are moments of the optimizer.
  """

  stored: int
  weights: int
  gradients: int
  secondary: int
  moments: int

  @property
  def total(self) -> int:
    return self.stored + self.weights + self.gradients + self.secondary


def memory(
  partition: Partition,
  parameters: Sequence[Parameter],
  lanes: Mapping[str, int] | None = None,
) -> StateMemory:
  """Returns the bytes of the training state on one device.

  Args:
    partition: Partition of the state.
    parameters: All parameters of the model on a device.
    lanes: Name of a level of data-parallel ranks -> logical ranks per device
      along it; 1 by default.

  Returns:
    The bytes, without activations and gathered layers.

  Example:
    ZeRO-3 on 4 ranks: a quarter of the 12 bytes per stored weight and of the 4
    bytes per gradient.

    >>> from parallel.plans.zero.partition import Level, named
    >>> memory(named("zero3", [Level("gpu", 4)]), [Parameter(size=1000)])
    StateMemory(stored=3000, weights=0, gradients=1000, secondary=0,
    moments=2000)
  """
  found = [_state_memory(partition, p, lanes or {}) for p in parameters]
  return StateMemory(**{
    field.name: sum(getattr(each, field.name) for each in found)
    for field in dataclasses.fields(StateMemory)
  })


def _state_memory(
  partition: Partition, p: Parameter, lanes: Mapping[str, int]
) -> StateMemory:
  """Returns the bytes of the state of p; arguments are those of `memory`."""
  partition = partition.of_tensor(p.form, p.apart)

  def shards(depth: int) -> int:
    """Returns the number of shards at a depth that a device hosts."""
    inner = partition.inner[:depth]
    return math.prod(lanes.get(level.name, 1) for level in inner)

  w, o = partition.weights, partition.optimizer
  shard = partition.shard_size(p.size, p.unit)
  padded = partition.padded(p.size, p.unit)
  coded = partition.is_coded(shard)
  array = 4 * p.count * shards(o) * shard  # float32 weight, or a moment of it
  weights = secondary = 0
  # Each lane of the device has a separate gradient until lanes are summed, even
  # if nothing is sharded.
  elements = padded // partition.degree(partition.gradients)
  all_lanes = shards(len(partition.levels))
  gradients = p.gradient_bytes * p.count * all_lanes * elements
  if partition.weight_codec != "none" and coded:
    # Weights are encoded once, as stored shards padded to whole blocks. A
    # gathered shard consists of several such units.
    units = p.count * shards(w) * partition.degree(o) // partition.degree(w)
    weights = units * sum(
      _encoded_bytes(shard, partition.weight_codec, partition.block).values()
    )
  elif w < o or p.wire_bytes != 4:  # else the stored weights are used
    elements = shards(w) * padded // partition.degree(w)
    weights = p.wire_bytes * p.count * elements
  if partition.secondary is not None:
    s = partition.secondary
    k = padded // partition.degree(s)
    size = p.wire_bytes * k
    if partition.secondary_codec != "none" and coded:
      size = sum(
        _encoded_bytes(k, partition.secondary_codec, partition.block).values()
      )
    secondary = p.regathered * p.count * shards(s) * size
  return StateMemory(
    (1 + p.moments) * array, weights, gradients, secondary, p.moments * array
  )


def level_collectives(
  partition: Partition,
  parameters: Sequence[Parameter],
  *,
  accumulation: int = 1,
  lanes: Mapping[str, int] | None = None,
) -> list[LevelCollective]:
  """Returns the collectives of one step over the levels of data-parallel ranks.

  Args:
    partition: Partition of the state.
    parameters: All parameters of the model on a device.
    accumulation: Microbatches per step.
    lanes: Name of a level of data-parallel ranks -> logical ranks per device
      along it; 1 by default. A level within one device sends nothing.

  Returns:
    The collectives that send bytes.

  Example:
    ZeRO-1 scatters the gradients and gathers the weights once per step.

    >>> from parallel.plans.zero.partition import Level, named
    >>> zero1 = named("zero1", [Level("gpu", 4)])
    >>> for c in level_collectives(zero1, [Parameter(size=1000)]):
    ...   print(c.kind, c.operand_bytes, c.received_bytes)
    all_gather 1000 3000
    reduce_scatter 4000 3000.0
  """
  found = []
  for p in parameters:
    own = partition.of_tensor(p.form, p.apart)
    found += _weight_gathers(own, p, accumulation, lanes or {})
    found += _gradient_reductions(own, p, accumulation, lanes or {})
  return merged(e for e in found if e.operand_bytes)


def merged(found: Iterable[LevelCollective]) -> list[LevelCollective]:
  """Merges collectives of equal levels, kind, phase and dtype.

  The bytes are added up.
  """
  total: dict[tuple, LevelCollective] = {}
  for e in found:
    key = (e.levels, e.kind, e.when, e.dtype)
    old = total.get(key)
    total[key] = e if old is None else dataclasses.replace(
      e,
      operand_bytes=e.operand_bytes + old.operand_bytes,
      received_bytes=e.received_bytes + old.received_bytes,
    )
  return list(total.values())


def _weight_gathers(
  partition: Partition,
  p: Parameter,
  accumulation: int,
  lanes: Mapping[str, int],
) -> Iterator[LevelCollective]:
  """Yields a step's gathers of the weights p and of their secondary copy.

  ``accumulation`` is the number of microbatches; ``lanes`` has the ranks per
  device along each level of data-parallel ranks.
  """
  w, o, s = partition.weights, partition.optimizer, partition.secondary
  size = partition.shard_size(p.size, p.unit)
  coded = partition.is_coded(size)
  stored = _Shard(size, partition.weight_codec if coded else "none", o)
  yield from _gathers(partition, p, lanes, stored, range(w, o), 1, "step")
  yield from _gathers(
    partition, p, lanes, stored, range(w), accumulation * p.uses, "forward"
  )
  source, depth = stored, w
  if s is not None:
    copy = partition.padded(p.size, p.unit) // partition.degree(s)
    codec = partition.secondary_codec if coded else "none"
    source, depth = _Shard(copy, codec, s), s
  again = accumulation * p.regathered
  yield from _gathers(
    partition, p, lanes, source, range(depth), again, "backward"
  )


class _Shard(NamedTuple):
  """Shard of a parameter from which whole layers are gathered.

  Attributes:
    elements: Elements of the shard.
    codec: Codec in which the shard is encoded, or "none".
    depth: Number of innermost levels of data-parallel ranks over which the
      parameter is sharded. Encoded shards are padded to whole blocks, so every
      level's bytes count whole shards.
  """

  elements: int
  codec: str
  depth: int


def _gathers(
  partition: Partition,
  p: Parameter,
  lanes: Mapping[str, int],
  shard: _Shard,
  levels: range,
  times: int,
  when: str,
) -> Iterator[LevelCollective]:
  """Yields the gathers of p from a shard over ``levels``, ``times`` per step.

  ``levels`` are indices, 0 for the innermost level of data-parallel ranks;
  ``lanes`` has the ranks per device along each, and ``when`` is that of
  `LevelCollective`.
  """
  elements, codec, depth = shard
  sizes = (
    {_DTYPES[p.wire_bytes]: elements * p.wire_bytes}
    if codec == "none"
    else _encoded_bytes(elements, codec, partition.block)
  )
  for j in levels:
    level = partition.inner[j]
    here = lanes.get(level.name, 1)
    # A rank's operand at level j is its shard of depth j + 1: as many original
    # shards as the gathers over the outer levels have joined. Inner levels are
    # not gathered yet, so each of their lanes has a separate operand.
    units = partition.degree(depth) // partition.degree(j + 1)
    inside = math.prod(
      lanes.get(level.name, 1) for level in partition.inner[:j]
    )
    for dtype, size in sizes.items():
      rank = times * p.count * units * size
      sent = rank * here * inside if here < level.size else 0
      yield LevelCollective(
        (level.name,), level.size, "all_gather", when, dtype, sent,
        rank * (level.size - 1),
      )


def _gradient_reductions(
  partition: Partition,
  p: Parameter,
  accumulation: int,
  lanes: Mapping[str, int],
) -> Iterator[LevelCollective]:
  """Yields the reductions of the gradients of p in one step.

  ``accumulation`` is the number of microbatches; ``lanes`` has the ranks per
  device along each level of data-parallel ranks.
  """
  g, o = partition.gradients, partition.optimizer
  all_lanes = math.prod(
    lanes.get(level.name, 1) for level in partition.levels
  )
  coded = (
    partition.gradient_codec != "none"
    and partition.is_coded(partition.shard_size(p.size, p.unit))
  )
  for hop in partition.hops(0, g, coded) + partition.hops(g, o, coded):
    levels = [partition.inner[j] for j in hop]
    ranks = math.prod(level.size for level in levels)
    here = math.prod(lanes.get(level.name, 1) for level in levels)
    times, when = 1, "step"
    if hop[0] < g:
      times, when = accumulation * p.uses, "backward"
    # Elements that a rank scatters in this hop: the tensor divided by the inner
    # levels, which have been scattered before.
    whole = partition.padded(p.size, p.unit) // partition.degree(hop[0])
    apart = here < ranks
    names = tuple(level.name for level in levels[::-1])
    if not coded:
      size = times * p.count * p.gradient_bytes * whole
      yield LevelCollective(
        names, ranks, "reduce_scatter", when, _DTYPES[p.gradient_bytes],
        # A device sums its lanes of this level locally.
        size * all_lanes // here if apart else 0,
        size * (ranks - 1) / ranks,
      )
      continue
    # With a codec, an all-to-all sends an encoded slice to each receiver, which
    # sums in float32. A device sends the slices of each lane, not their sum.
    slices = _encoded_bytes(
      whole // ranks, partition.gradient_codec, partition.block
    )
    for dtype, size in slices.items():
      size *= times * p.count * ranks
      yield LevelCollective(
        names, ranks, "all_to_all", when, dtype,
        size * all_lanes if apart else 0,
        size * (ranks - 1) / ranks,
      )
  if partition.inner[o:]:
    yield _all_reduce(partition, p, lanes)


def _all_reduce(
  partition: Partition, p: Parameter, lanes: Mapping[str, int]
) -> LevelCollective:
  """Returns the all-reduce of the gradients of p over the outermost levels.

  These are the levels of data-parallel ranks over which the optimizer state is
  not sharded. ``lanes`` has the ranks per device along each level.
  """
  o = partition.optimizer
  beyond = partition.inner[o:]
  inside = math.prod(
    lanes.get(level.name, 1) for level in partition.inner[:o]
  )
  ranks = math.prod(level.size for level in beyond)
  devices = ranks // math.prod(lanes.get(e.name, 1) for e in beyond)
  size = p.count * p.gradient_bytes * partition.shard_size(p.size, p.unit)
  return LevelCollective(
    tuple(level.name for level in beyond[::-1]), ranks, "all_reduce", "step",
    _DTYPES[p.gradient_bytes], size * inside if devices > 1 else 0,
    2 * size * (ranks - 1) / ranks,
  )


def _encoded_bytes(elements: int, codec: str, block: int) -> dict[str, int]:
  """Returns the bytes by dtype of encoded elements, padded to whole blocks.

  ``block`` is the number of elements that share a scale.
  """
  blocks = -(-elements // block)
  return {"uint8": blocks * block * _BITS[codec] // 8, "float32": 4 * blocks}
