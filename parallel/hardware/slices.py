"""Topologies of TPU slices as plain data, with a source beside every rule.

A slice is a box of chips that are joined by their own links. Its topology is
the number of chips along each dim.
"""

from collections.abc import Sequence
import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Slices:
  """The slices of one generation.

  Attributes:
    num_dims: Dims of a topology.
    most_chips: Chips of the largest slice.
    source: Where the rules come from.
    shapes: The topologies that exist, each with its dims in ascending order;
      None if all do whose dims are all at most 4 or all multiples of 4 (chips
      are wired in cubes of 4 x 4 x 4, and switches join cubes).
  """

  num_dims: int
  most_chips: int
  source: str
  shapes: tuple[tuple[int, ...], ...] | None = None

  def closes(self, size: int) -> bool:
    """Returns whether chips along a whole dim are wired to a ring.

    Source: Austin et al., "How to Scale Your Model", 2025, chapter "Sharded
    matrices": a v4, v5p or 7x slice closes in dims that are multiples of 4, a
    v5e or v6e slice in those of size 16.

    Args:
      size: Chips of the slice along the dim.
    """
    return size % (4 if self.num_dims == 3 else 16) == 0

  def refusal(self, topology: Sequence[int]) -> str | None:
    """Returns why there is no slice of a topology, or None if there is.

    Args:
      topology: Chips along each dim.
    """
    if len(topology) != self.num_dims:
      return f"its slices have {self.num_dims} dims"
    chips = math.prod(topology)
    if chips > self.most_chips:
      return f"its largest slice has {self.most_chips} chips, not {chips}"
    if self.shapes is not None:
      if tuple(sorted(topology)) in self.shapes:
        return None
      names = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
      return f"its slices are {names}"
    if max(topology) > 4 and any(size % 4 for size in topology):
      return "dims are all at most 4 or all multiples of 4"
    return None


_DOCS = "Google Cloud TPU documentation, https://docs.cloud.google.com/tpu/docs"
_CUBES = f"{_DOCS}/types-topologies: A, B, C all <= 4 or all multiples of 4"
_PLANES = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

SLICES = {
  "v4": Slices(3, 4096, f"{_DOCS}/v4: 4,096 chips; {_CUBES}"),
  "v5e": Slices(
    2, 256, f"{_DOCS}/v5e, table of slice shapes, without 1x1", _PLANES
  ),
  "v5p": Slices(
    3, 6144, f"{_DOCS}/v5p: the largest job has 96 cubes, 6,144 chips, of a "
    f"pod's 8,960; {_CUBES}"
  ),
  "v6e": Slices(
    2, 256, f"{_DOCS}/v6e: 256 chips in a 2D torus; shapes as v5e's", _PLANES
  ),
  "tpu7x": Slices(3, 9216, f"{_DOCS}/tpu7x: 9,216 chips; {_CUBES}"),
}
