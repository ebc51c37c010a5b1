"""Bytes that an outer loop sends and stores on a device, without jax.

Planners read this closed form for DiLoCo and Streaming DiLoCo. The
implementation counts the same bytes separately
(`parallel.outer.base.OuterLoop.sent_bytes`), and tests compare both.

A parameter is stored on a device as rows. A codec divides each row into blocks
of elements that share a scale; no block spans two rows. All rows of a fragment
are exchanged together; DiLoCo has one fragment with all parameters. With w
workers, each on a separate device, n elements are sent

    float32                 by one all-reduce
    a codec, "all_gather"   as codes and scales, from each worker to all others
    a codec, "all_to_all"   as slices to the workers that average them; then the
                            means, encoded again, to all workers

and the norm of each worker's deltas is sent to all others
(`parallel.outer.health`).

Sources: DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Literal, NamedTuple

from parallel.base import checks
from parallel.plans.outer.fragment_plan import FragmentSchedule

_NAMES = {"diloco": "DiLoCo", "streaming": "Streaming DiLoCo"}
ALGORITHMS = tuple(_NAMES)
ROUTES = ("all_gather", "all_to_all")
# Bits per code. Every block of BLOCK elements also has a float32 scale
# (`parallel.kernels.codec.reference`).
CODEC_BITS = {"int8": 8, "fp8": 8, "int4": 4, "e3m0": 4}
CODECS = ("float32", *CODEC_BITS)
BLOCK_SIZE = 256

CollectiveKind = Literal["all_reduce", "all_gather", "all_to_all"]


class ParameterRows(NamedTuple):
  """Rows of equal length that hold parameters on a device.

  A codec encodes each row separately: no block of elements spans two rows.

  Attributes:
    count: Number of rows.
    elements: Parameter elements per row.
  """

  count: int
  elements: int


class Collective(NamedTuple):
  """One collective over the worker axis.

  Attributes:
    kind: Name of the collective operation.
    dtype: Dtype on the wire.
    operand_bytes: Bytes of the operand on a device.
  """

  kind: CollectiveKind
  dtype: str
  operand_bytes: int

  def received_bytes(self, workers: int) -> float:
    """Returns the bytes that a device receives if there are ``workers``."""
    # Ring algorithms: an all-reduce is a reduce-scatter and an all-gather.
    others = workers - 1
    if self.kind == "all_gather":
      return others * self.operand_bytes
    both = 2 if self.kind == "all_reduce" else 1
    return both * others / workers * self.operand_bytes

  def steps(self, workers: int) -> int:
    """Returns the number of sequential steps of a ring of ``workers``."""
    return (2 if self.kind == "all_reduce" else 1) * (workers - 1)

  def result_bytes(self, workers: int) -> int:
    """Returns the bytes of the result on a device for ``workers``."""
    return self.operand_bytes * (workers if self.kind == "all_gather" else 1)


@dataclasses.dataclass(frozen=True)
class OuterLoopConfig:
  """Configuration of an outer loop with Nesterov momentum.

  Attributes:
    algorithm: One of ``ALGORITHMS``.
    workers: w, the number of workers; at least 2.
    sync_every: H, the steps of a round, which exchanges each parameter once.
    codec: Codec of the exchanged deltas, one of ``CODECS``.
    route: Collectives that exchange encoded deltas, one of ``ROUTES``.
    fragment_layers: Layers per fragment; 0 for one fragment of all parameters.
    overlap: Steps from a fragment's send to its receipt; 0 for none.

  Raises:
    ValueError: A value is unknown or out of range.

  Example:
    Two workers exchange 1024 elements as int4 codes: half a byte per element,
    and a float32 scale for each of the four blocks of 256.

    >>> loop = OuterLoopConfig(
    ...   "diloco", workers=2, sync_every=100, codec="int4"
    ... )
    >>> parameters = [ParameterRows(count=1, elements=1024)]
    >>> for collective in loop.collectives(parameters):
    ...   print(collective.kind, collective.dtype, collective.operand_bytes)
    all_gather float32 4
    all_gather uint8 512
    all_gather float32 16
  """

  algorithm: str
  workers: int
  sync_every: int
  codec: str = "float32"
  route: str = "all_gather"
  fragment_layers: int = 0
  overlap: int = 0

  def __post_init__(self) -> None:
    checks.known("algorithm=", self.algorithm, ALGORITHMS)
    checks.known("codec=", self.codec, CODECS)
    checks.known("route=", self.route, ROUTES)
    checks.at_least("workers", self.workers, 2)
    checks.at_least("sync_every", self.sync_every)
    checks.at_least("overlap", self.overlap, 0)
    if self.overlap >= self.sync_every:
      raise ValueError(
        f"overlap={self.overlap} must be less than "
        f"sync_every={self.sync_every}: a fragment must arrive "
        "before it is sent again"
      )

  def keys(self) -> dict[str, object]:
    """Returns the config keys that select this outer loop, with values."""
    found: dict[str, object] = {
      "parallel.worker": self.workers, "outer.algorithm": self.algorithm,
      "outer.sync_every": self.sync_every, "outer.codec": self.codec,
      "outer.route": self.route,
    }
    if self.algorithm == "streaming":
      found["outer.fragment_layers"] = self.fragment_layers
      found["outer.overlap"] = (self.overlap,)
    return found

  def __str__(self) -> str:
    text = (
      f"{_NAMES[self.algorithm]}, {self.workers} workers, "
      f"H = {self.sync_every}"
    )
    if self.algorithm == "streaming":
      layers = self.fragment_layers
      many = f"fragments of {layers} layer{'s' * (layers > 1)}"
      text += f", {many if layers else 'one fragment'}, overlap {self.overlap}"
    if self.codec != "float32":
      text += f", {self.codec} by {self.route}"
    return text

  def collectives(self, rows: Sequence[ParameterRows]) -> tuple[
    Collective, ...
  ]:
    """Returns the collectives of one exchange of a fragment.

    Args:
      rows: Rows of the fragment's parameters on a device.
    """
    norms = Collective("all_gather", "float32", 4)
    if self.codec == "float32":
      elements = sum(count * size for count, size in rows)
      return norms, Collective("all_reduce", "float32", 4 * elements)
    if self.route == "all_gather":
      return norms, *self._encoded_collectives("all_gather", rows)
    # Each worker averages one slice of every row, padded to whole blocks.
    slices = [
      ParameterRows(count, _blocks(math.ceil(size / self.workers)) * BLOCK_SIZE)
      for count, size in rows
    ]
    many = [ParameterRows(self.workers * count, size) for count, size in slices]
    return (
      norms, *self._encoded_collectives("all_to_all", many),
      *self._encoded_collectives("all_gather", slices),
    )

  def _encoded_collectives(
    self, kind: CollectiveKind, rows: Sequence[ParameterRows]
  ) -> list[Collective]:
    """Returns two collectives: of the codes of ``rows`` and of their scales.

    ``kind`` is the collective operation.
    """
    blocks = sum(count * _blocks(size) for count, size in rows)
    return [
      Collective(
        kind, "uint8", blocks * BLOCK_SIZE * CODEC_BITS[self.codec] // 8
      ),
      Collective(kind, "float32", 4 * blocks),
    ]

  def state_bytes(self, fragments: Sequence[Sequence[ParameterRows]]) -> int:
    """Returns the bytes of a device's outer state between steps.

    The state consists of the outer parameters and their momentum in float32,
    the averaged deltas that wait to be applied, each in a slot, and two
    statistics of 4 bytes about the health of the device's worker.

    Args:
      fragments: Rows of each fragment's parameters. The last fragment has the
        parameters outside of layers.
    """
    elements = [sum(count * size for count, size in x) for x in fragments]
    kept = 2 * sum(elements)  # outer parameters and momentum
    if self.overlap:
      # The last fragment has one slot for its mean. The others have equal sizes
      # and share slots in rotation (`parallel.outer.streaming`).
      many = len(fragments) - 1
      spacing = FragmentSchedule(self.sync_every, len(fragments)).spacing
      slots = min(many, -(-self.overlap // spacing))
      kept += elements[-1] + slots * elements[0]
    return 4 * kept + 8

  def exchange_temp_bytes(
    self, fragments: Sequence[Sequence[ParameterRows]]
  ) -> int:
    """Returns the temporary bytes while the largest fragment is exchanged.

    They are the operands and results of all collectives and, with a codec, the
    decoded mean in float32. This is an upper bound, since a compiler may
    exchange one parameter after the other.
    """
    decoded = 4 * (self.codec != "float32")  # bytes per element
    return max(
      decoded * sum(count * size for count, size in rows)
      + sum(
        x.operand_bytes + x.result_bytes(self.workers)
        for x in self.collectives(rows)
      )
      for rows in fragments
    )


def min_fragment_layers(num_layers: int, parts: int, sync_every: int) -> int:
  """Returns the smallest allowed number of layers per fragment.

  At most one fragment is sent per step, so a round has no more fragments than
  steps. A fragment takes the same number of layers from each pipeline part.

  Args:
    num_layers: Number of layers of the model.
    parts: Number of pipeline parts (stages x chunks); 1 without a pipeline.
    sync_every: H, the steps of a round.

  Returns:
    A divisor of the number of layers; 0, which stands for one fragment of all
    parameters, if no divisor is allowed.

  Example:
    With 4 steps per round, 8 layers form 2 fragments, and the parameters
    outside of layers a third.

    >>> min_fragment_layers(num_layers=8, parts=1, sync_every=4)
    4
  """
  return next((
    layers for layers in range(parts, num_layers + 1, parts)
    if num_layers % layers == 0 and num_layers // layers < sync_every
  ), 0)


def _blocks(elements: int) -> int:
  """Returns the number of codec blocks of a row of ``elements`` elements.

  The last block is padded.
  """
  return -(-elements // BLOCK_SIZE)
