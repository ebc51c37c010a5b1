"""What an outer loop costs a device: bytes that it sends and keeps; no jax.

Planners read this closed form of DiLoCo and of Streaming DiLoCo. What runs
counts the same by itself (`parallel.outer.base.OuterLoop.sent_bytes`), and the
tests hold both equal.

A parameter lies on a device as rows: no block of a codec crosses from one row
to the next. All rows of a fragment are exchanged together; DiLoCo has one
fragment, of everything. With w workers, each of which has a device of its own
here, n elements are sent

    float32                 by one all-reduce
    a codec, "all_gather"   as everyone's codes and scales to all
    a codec, "all_to_all"   as slices to who averages them, and their means,
                            coded again, to all

and each worker's norm goes to all (`parallel.outer.health`).

Sources: DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Literal, NamedTuple

from parallel import checks
from parallel.outer.fragment_plan import FragmentTimes

_NAMES = {"diloco": "DiLoCo", "streaming": "Streaming DiLoCo"}
ALGORITHMS = tuple(_NAMES)
ROUTES = ("all_gather", "all_to_all")
# Bits of a code; a float32 scale goes with every block of BLOCK elements
# (`parallel.kernels.codec.reference`).
BITS = {"int8": 8, "fp8": 8, "int4": 4, "e3m0": 4}
CODECS = ("float32", *BITS)
BLOCK = 256

Kind = Literal["all_reduce", "all_gather", "all_to_all"]


class Rows(NamedTuple):
  """Rows of equal length.

  Attributes:
    count: How many there are.
    elements: Elements of each.
  """

  count: int
  elements: int


class Collective(NamedTuple):
  """What goes over the axis of workers in one dtype.

  Attributes:
    kind: The collective.
    dtype: The dtype on the wire.
    operand_bytes: What a device hands to it.
  """

  kind: Kind
  dtype: str
  operand_bytes: int

  def received_bytes(self, workers: int) -> float:
    """Returns the bytes that a device receives from so many workers."""
    others = workers - 1
    if self.kind == "all_gather":
      return others * self.operand_bytes
    both = 2 if self.kind == "all_reduce" else 1
    return both * others / workers * self.operand_bytes

  def steps(self, workers: int) -> int:
    """Returns how many messages of a ring follow one another."""
    return (2 if self.kind == "all_reduce" else 1) * (workers - 1)

  def result_bytes(self, workers: int) -> int:
    """Returns the bytes of its result on a device."""
    return self.operand_bytes * (workers if self.kind == "all_gather" else 1)


@dataclasses.dataclass(frozen=True)
class Loop:
  """An outer loop with Nesterov momentum.

  Attributes:
    algorithm: One of ``ALGORITHMS``.
    workers: The number of workers, w.
    every: H, the steps of a round, in which each parameter is exchanged once.
    codec: One of ``CODECS``.
    route: One of ``ROUTES``, how codes travel.
    fragment_layers: Layers of a fragment; 0 for one fragment of everything.
    overlap: Steps from a fragment's send to its receipt; 0 for none.
  """

  algorithm: str
  workers: int
  every: int
  codec: str = "float32"
  route: str = "all_gather"
  fragment_layers: int = 0
  overlap: int = 0

  def __post_init__(self) -> None:
    checks.known("algorithm=", self.algorithm, ALGORITHMS)
    checks.known("codec=", self.codec, CODECS)
    checks.known("route=", self.route, ROUTES)
    checks.at_least("workers", self.workers, 2)
    checks.at_least("every", self.every)
    checks.at_least("overlap", self.overlap, 0)
    if self.overlap >= self.every:
      raise ValueError(
        f"overlap={self.overlap} must be less than every={self.every}: a "
        "fragment arrives before it is sent again"
      )

  def keys(self) -> dict[str, object]:
    """Returns the keys of a training run's config, with their values."""
    found: dict[str, object] = {
      "parallel.worker": self.workers, "outer.algorithm": self.algorithm,
      "outer.every": self.every, "outer.codec": self.codec,
      "outer.route": self.route,
    }
    if self.algorithm == "streaming":
      found["outer.fragment_layers"] = self.fragment_layers
      found["outer.overlap"] = (self.overlap,)
    return found

  def __str__(self) -> str:
    text = f"{_NAMES[self.algorithm]}, {self.workers} workers, H = {self.every}"
    if self.algorithm == "streaming":
      layers = self.fragment_layers
      many = f"fragments of {layers} layer{'s' * (layers > 1)}"
      text += f", {many if layers else 'one fragment'}, overlap {self.overlap}"
    if self.codec != "float32":
      text += f", {self.codec} by {self.route}"
    return text

  def collectives(self, rows: Sequence[Rows]) -> tuple[Collective, ...]:
    """Returns one exchange of a fragment."""
    norms = Collective("all_gather", "float32", 4)
    if self.codec == "float32":
      elements = sum(count * size for count, size in rows)
      return norms, Collective("all_reduce", "float32", 4 * elements)
    if self.route == "all_gather":
      return norms, *self._coded("all_gather", rows)
    slices = [
      Rows(count, _blocks(math.ceil(size / self.workers)) * BLOCK)
      for count, size in rows
    ]
    many = [Rows(self.workers * count, size) for count, size in slices]
    return (
      norms, *self._coded("all_to_all", many),
      *self._coded("all_gather", slices),
    )

  def _coded(self, kind: Kind, rows: Sequence[Rows]) -> list[Collective]:
    """Returns what codes and scales of some rows take, two collectives."""
    blocks = sum(count * _blocks(size) for count, size in rows)
    return [
      Collective(kind, "uint8", blocks * BLOCK * BITS[self.codec] // 8),
      Collective(kind, "float32", 4 * blocks),
    ]

  def state_bytes(self, fragments: Sequence[Sequence[Rows]]) -> int:
    """Returns what a device keeps from step to step, beside its worker's own.

    That are the outer parameters and their momentum, float32; the means that
    wait to be received, each in a slot; and two numbers about its worker.

    Args:
      fragments: The rows of each fragment, the last one of what is in no layer.
    """
    elements = [sum(count * size for count, size in x) for x in fragments]
    kept = 2 * sum(elements)
    if self.overlap:
      # The last fragment has one slot. The others, which are equally large,
      # take turns (`parallel.outer.streaming`).
      many = len(fragments) - 1
      spacing = FragmentTimes(self.every, len(fragments)).spacing
      slots = min(many, -(-self.overlap // spacing))
      kept += elements[-1] + slots * elements[0]
    return 4 * kept + 8

  def passing_bytes(self, fragments: Sequence[Sequence[Rows]]) -> int:
    """Returns what a device holds while it exchanges the largest fragment.

    Operands and results of all collectives, and of codes the mean in float32:
    an upper bound, since a compiler may exchange one parameter after the other.
    """
    decoded = 4 * (self.codec != "float32")
    return max(
      decoded * sum(count * size for count, size in rows)
      + sum(
        x.operand_bytes + x.result_bytes(self.workers)
        for x in self.collectives(rows)
      )
      for rows in fragments
    )


def fewest_layers(num_layers: int, parts: int, every: int) -> int:
  """Returns how few layers a fragment may have.

  Fragments are sent after different steps of a round, so there are no more than
  its steps. Each part of a pipeline's stages has as many layers of a fragment.

  Args:
    num_layers: The layers of the model.
    parts: The parts of all stages; 1 without stages.
    every: H, the steps of a round.

  Returns:
    A divisor of the layers; 0, one fragment of everything, if none will do.
  """
  return next((
    layers for layers in range(parts, num_layers + 1, parts)
    if num_layers % layers == 0 and num_layers // layers < every
  ), 0)


def _blocks(elements: int) -> int:
  """Returns how many blocks elements fill, the last one with padding."""
  return -(-elements // BLOCK)
