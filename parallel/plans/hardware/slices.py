"""Valid topologies of TPU slices as plain data, with the source of every rule.

A slice is a box of chips connected by ICI links. Its topology is the number of
chips along each dim.

Example:
  >>> from parallel.plans.hardware.slices import SLICE_RULES
  >>> SLICE_RULES["v4"].refusal((4, 4, 8))  # valid
  >>> SLICE_RULES["v4"].refusal((2, 3, 8))
  'dims are all at most 4 or all multiples of 4'
  >>> [SLICE_RULES["v5e"].wraps_around(n) for n in (8, 16)]
  [False, True]
"""

from collections.abc import Sequence
import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class SliceRules:
  """Rules for the slices of one TPU generation.

  Attributes:
    num_dims: Number of dims of a topology.
    max_chips: Number of chips of the largest slice.
    source: Source of the rules.
    shapes: Existing topologies, each with its dims in ascending order. None if
      all topologies exist whose dims are all at most 4 or all multiples of 4
      (chips are wired in cubes of 4 x 4 x 4, which switches connect).
  """

  num_dims: int
  max_chips: int
  source: str
  shapes: tuple[tuple[int, ...], ...] | None = None

  def wraps_around(self, size: int) -> bool:
    """Returns whether the chips along a whole dim form a ring (wrap around).

    Source: Austin et al., "How to Scale Your Model", 2025, chapter "Sharded
    matrices": a v4, v5p or 7x slice wraps around in dims that are multiples of
    4, a v5e or v6e slice in dims of size 16.

    Args:
      size: Number of chips of the slice along the dim.
    """
    # 3D slices consist of cubes of 4 x 4 x 4, which switches connect.
    return size % (4 if self.num_dims == 3 else 16) == 0

  def refusal(self, topology: Sequence[int]) -> str | None:
    """Returns the rule that a topology violates, or None if it is valid.

    Args:
      topology: Number of chips along each dim.
    """
    if len(topology) != self.num_dims:
      return f"its slices have {self.num_dims} dims"
    chips = math.prod(topology)
    if chips > self.max_chips:
      return f"its largest slice has {self.max_chips} chips, not {chips}"
    if self.shapes is not None:
      # Shapes are listed with ascending dims: 8x4 is 4x8.
      if tuple(sorted(topology)) in self.shapes:
        return None
      names = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
      return f"its slices are {names}"
    if max(topology) > 4 and any(size % 4 for size in topology):
      return "dims are all at most 4 or all multiples of 4"
    return None


_DOCS = "Google Cloud TPU documentation, https://docs.cloud.google.com/tpu/docs"
_CUBE_SOURCE = (
  f"{_DOCS}/types-topologies: A, B, C all <= 4 or all multiples of 4"
)
# Single-host and multi-host shapes of the 2D generations.
_SHAPES_2D = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

# By generation, as in `devices.DEVICES`.
SLICE_RULES = {
  "v4": SliceRules(3, 4096, f"{_DOCS}/v4: 4,096 chips; {_CUBE_SOURCE}"),
  "v5e": SliceRules(
    2, 256, f"{_DOCS}/v5e, table of slice shapes, without 1x1", _SHAPES_2D
  ),
  "v5p": SliceRules(
    3, 6144, f"{_DOCS}/v5p: the largest job has 96 cubes, 6,144 chips, of a "
    f"pod's 8,960; {_CUBE_SOURCE}"
  ),
  "v6e": SliceRules(
    2, 256, f"{_DOCS}/v6e: 256 chips in a 2D torus; shapes as v5e's", _SHAPES_2D
  ),
  "tpu7x": SliceRules(3, 9216, f"{_DOCS}/tpu7x: 9,216 chips; {_CUBE_SOURCE}"),
}
