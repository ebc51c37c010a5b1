"""What a partition costs: bytes on a device and bytes per level and step.

One closed form for trainer, simulator and planner; no jax here. The tests hold
it equal to the lowered programs.

Per step of m microbatches, with weights, gradients and optimizer state sharded
over w <= g <= o innermost levels:

    once       gathers of weights over levels o - 1 ... w
    m times    gathers over w - 1 ... 0, in the forward and in the backward (or,
               with a secondary copy, from its depth in the backward)
    m times    scatters of gradients over 0 ... g - 1
    once       scatters over g ... o - 1, an all-reduce over the levels beyond
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Literal

from parallel.zero.partition import Partition

Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]

# Bits of a code on the wire; a float32 scale goes with every block.
_BITS = {"int8": 8, "int4": 4}
_DTYPES = {2: "bfloat16", 4: "float32"}


@dataclasses.dataclass(frozen=True)
class Parameter:
  """Equal tensors on a device, each partitioned by itself.

  Attributes:
    size: Elements of one.
    count: How many (layers x lanes of the tensor axis).
    wire_bytes: Of an element on the wire and gathered: 2 for bfloat16.
    uses: Functions of the model that read it, each with its own gather.
    regathered: Those whose backward needs it too; looking up rows does not.
    gradient_bytes: Of an element of its gradient, accumulated and, without a
      codec, on the wire; the trainer's are 4, papers count 2.
  """

  size: int
  count: int = 1
  wire_bytes: int = 4
  uses: int = 1
  regathered: int = 1
  gradient_bytes: int = 4


@dataclasses.dataclass(frozen=True)
class Exchange:
  """Equal collectives over one level, of all parameters.

  Attributes:
    levels: Names of the axes; several for an all-reduce.
    ranks: Logical ranks that take part.
    kind: The collective.
    when: "step" (once), "forward" or "backward" (per microbatch).
    dtype: On the wire.
    operand_bytes: Per step and device, of all operations, as a ledger counts.
    received_bytes: Per step, what one rank with a device of its own receives
      in a bandwidth-optimal algorithm.
  """

  levels: tuple[str, ...]
  ranks: int
  kind: Kind
  when: str
  dtype: str
  operand_bytes: int
  received_bytes: float


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on a device; the first is arguments, the rest temporaries.

  Attributes:
    stored: float32 weights and two moments.
    weights: Of a step, at depth w; 0 where these are what is stored.
    gradients: Accumulated, one copy; float32 in the trainer.
    secondary: The second copy.
  """

  stored: int
  weights: int
  gradients: int
  secondary: int

  @property
  def total(self) -> int:
    return self.stored + self.weights + self.gradients + self.secondary


def memory(
  partition: Partition,
  parameters: Sequence[Parameter],
  lanes: Mapping[str, int] | None = None,
) -> Memory:
  """The training state on one device, activations excluded.

  Args:
    partition: The partition.
    parameters: All of the model's on a device.
    lanes: Ranks per device along levels, 1 by default.
  """
  lanes = lanes or {}

  def shards(depth: int) -> int:
    """Shards at a depth that a device hosts."""
    inner = partition.inner[:depth]
    return math.prod(lanes.get(level.name, 1) for level in inner)

  w, o = partition.weights, partition.optimizer
  all_lanes = shards(len(partition.levels))
  stored = weights = gradients = secondary = 0
  for p in parameters:
    padded = partition.padded(p.size)
    stored += 12 * p.count * shards(o) * partition.shard(p.size)
    if o:  # else gradients are reduced in place of their lanes
      elements = padded // partition.degree(partition.gradients)
      gradients += p.gradient_bytes * p.count * all_lanes * elements
    else:
      gradients += p.gradient_bytes * p.count * p.size
    if partition.weight_codec != "none":
      units = p.count * shards(w) * partition.degree(o) // partition.degree(w)
      weights += units * sum(
        _encoded(partition.shard(p.size), partition.weight_codec,
                 partition.block).values()
      )
    elif w < o or p.wire_bytes != 4:
      elements = shards(w) * padded // partition.degree(w)
      weights += p.wire_bytes * p.count * elements
    if partition.secondary is not None:
      s = partition.secondary
      k = padded // partition.degree(s)
      size = p.wire_bytes * k
      if partition.secondary_codec != "none":
        size = sum(
          _encoded(k, partition.secondary_codec, partition.block).values()
        )
      secondary += p.regathered * p.count * shards(s) * size
  return Memory(stored, weights, gradients, secondary)


def exchanges(
  partition: Partition,
  parameters: Sequence[Parameter],
  *,
  accumulation: int = 1,
  lanes: Mapping[str, int] | None = None,
) -> list[Exchange]:
  """All that one step sends over the levels.

  Args:
    partition: The partition.
    parameters: All of the model's on a device.
    accumulation: Microbatches per step.
    lanes: Ranks per device along levels, 1 by default; a level that lies on
      one device sends nothing.

  Returns:
    Exchanges with bytes; empty ones are left out.
  """
  found = []
  for p in parameters:
    found += _weights(partition, p, accumulation, lanes or {})
    found += _gradients(partition, p, accumulation, lanes or {})
  return merged(e for e in found if e.operand_bytes)


def merged(found: Iterable[Exchange]) -> list[Exchange]:
  """Adds the bytes of exchanges that are alike."""
  total: dict[tuple, Exchange] = {}
  for e in found:
    key = (e.levels, e.kind, e.when, e.dtype)
    old = total.get(key)
    total[key] = e if old is None else dataclasses.replace(
      e,
      operand_bytes=e.operand_bytes + old.operand_bytes,
      received_bytes=e.received_bytes + old.received_bytes,
    )
  return list(total.values())


def _weights(
  partition: Partition,
  p: Parameter,
  accumulation: int,
  lanes: Mapping[str, int],
) -> Iterator[Exchange]:
  w, o, s = partition.weights, partition.optimizer, partition.secondary
  stored = partition.shard(p.size), partition.weight_codec
  yield from _gathers(partition, p, lanes, o, w, stored, 1, "step", o)
  yield from _gathers(
    partition, p, lanes, w, 0, stored, accumulation * p.uses, "forward", o
  )
  again = accumulation * p.regathered
  if s is None:
    yield from _gathers(
      partition, p, lanes, w, 0, stored, again, "backward", o
    )
  else:
    copy = partition.padded(p.size) // partition.degree(s)
    yield from _gathers(
      partition, p, lanes, s, 0, (copy, partition.secondary_codec), again,
      "backward", s,
    )


def _gathers(
  partition: Partition,
  p: Parameter,
  lanes: Mapping[str, int],
  upper: int,
  lower: int,
  shard: tuple[int, str],
  times: int,
  when: str,
  depth: int,
) -> Iterator[Exchange]:
  """Gathers from depth to depth of shards that were made at ``depth``."""
  elements, codec = shard
  sizes = (
    {_DTYPES[p.wire_bytes]: elements * p.wire_bytes}
    if codec == "none"
    else _encoded(elements, codec, partition.block)
  )
  for j in range(lower, upper):
    level = partition.inner[j]
    here = lanes.get(level.name, 1)
    # Shards of the outer levels have been gathered, lanes inside have not.
    units = partition.degree(depth) // partition.degree(j + 1)
    inside = math.prod(
      lanes.get(level.name, 1) for level in partition.inner[:j]
    )
    for dtype, size in sizes.items():
      rank = times * p.count * units * size
      sent = rank * here * inside if here < level.size else 0
      yield Exchange(
        (level.name,), level.size, "all_gather", when, dtype, sent,
        rank * (level.size - 1),
      )


def _gradients(
  partition: Partition,
  p: Parameter,
  accumulation: int,
  lanes: Mapping[str, int],
) -> Iterator[Exchange]:
  g, o = partition.gradients, partition.optimizer
  all_lanes = math.prod(
    lanes.get(level.name, 1) for level in partition.levels
  )
  for j in range(o):
    level = partition.inner[j]
    here = lanes.get(level.name, 1)
    times, when = 1, "step"
    if j < g:
      times, when = accumulation * p.uses, "backward"
    whole = partition.padded(p.size) // partition.degree(j)
    apart = here < level.size
    if partition.gradient_codec == "none":
      size = times * p.count * p.gradient_bytes * whole
      yield Exchange(
        (level.name,), level.size, "reduce_scatter", when,
        _DTYPES[p.gradient_bytes],
        size * all_lanes // here if apart else 0,
        size * (level.size - 1) / level.size,
      )
      continue
    slices = _encoded(
      whole // level.size, partition.gradient_codec, partition.block
    )
    for dtype, size in slices.items():
      size *= times * p.count * level.size
      yield Exchange(
        (level.name,), level.size, "all_to_all", when, dtype,
        size * all_lanes if apart else 0,
        size * (level.size - 1) / level.size,
      )
  beyond = partition.inner[o:]
  if beyond:
    inside = math.prod(
      lanes.get(level.name, 1) for level in partition.inner[:o]
    )
    ranks = math.prod(level.size for level in beyond)
    devices = ranks // math.prod(lanes.get(e.name, 1) for e in beyond)
    size = p.count * p.gradient_bytes * partition.shard(p.size)
    yield Exchange(
      tuple(level.name for level in beyond[::-1]), ranks, "all_reduce", "step",
      _DTYPES[p.gradient_bytes], size * inside if devices > 1 else 0,
      2 * size * (ranks - 1) / ranks,
    )


def _encoded(elements: int, codec: str, block: int) -> dict[str, int]:
  """Bytes by dtype of encoded elements, padded to whole blocks."""
  blocks = -(-elements // block)
  return {"uint8": blocks * block * _BITS[codec] // 8, "float32": 4 * blocks}
