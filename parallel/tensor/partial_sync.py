"""Partial synchronisation: which channels of an update all tensor ranks share.

Source: Lamprecht et al., "Tensor-Parallelism with Partially Synchronized
Activations" (CAAT-Net), arXiv 2506.19645.
"""

import dataclasses
import math

from jax import lax

from parallel.axes import Axis
from parallel.collectives import Reduction
from parallel.routes import ROUTES

PRIVATE_SCALES = ("none", "init", "forward")


# "ring_kernel" adds and normalises in one kernel with the reduction, so it runs
# only where a norm follows. Elsewhere it is a psum.
DOOR_ROUTES: dict[str, Reduction] = ROUTES | {"ring_kernel": lax.psum}

# Routes with a kernel that reduces, adds and normalises.
FUSED_ROUTES = ("one_shot", "ring_kernel")


@dataclasses.dataclass(frozen=True)
class PartialSync:
  """How a row door synchronises its update.

  Attributes:
    p: Fraction of the channels that is summed over all ranks, in [0, 1].
    private_scale: "forward" multiplies private channels by sqrt(ranks), since
      one rank's partial output stands in for the sum of ``ranks``; "init"
      leaves that to the initialisation of the weights; "none" does neither.
    forward_dtype: dtype of the forward reduction; None: the activations'.
    backward_dtype: dtype of the backward reduction; None: the cotangents'.
    overlap: Compute the shared columns of the product first and the private
      ones under their reduction, where the compiler reduces asynchronously.
      Otherwise a device with one lane makes one product of both.
    route: How both reductions go: a key of ``DOOR_ROUTES``, or a function in
      place of ``lax.psum``. The two routes that have kernels use them
      where `kernel_of_norm` says.
  """

  p: float = 1.0
  private_scale: str = "forward"
  forward_dtype: str | None = None
  backward_dtype: str | None = "float32"
  overlap: bool = False
  route: str | Reduction = "psum"

  def __post_init__(self) -> None:
    if not 0.0 <= self.p <= 1.0:
      raise ValueError(f"p={self.p} must lie in [0, 1]")
    if isinstance(self.route, str) and self.route not in DOOR_ROUTES:
      raise ValueError(
        f"route={self.route!r} must be one of {', '.join(DOOR_ROUTES)}"
      )
    if self.private_scale not in PRIVATE_SCALES:
      raise ValueError(
        f"private_scale={self.private_scale!r} must be one of "
        f"{', '.join(PRIVATE_SCALES)}"
      )

  def num_shared(self, width: int) -> int:
    """k, rounded the same way everywhere; ``int(0.29 * 100)`` is 28."""
    return int(self.p * width)

  def scale(self, axis: Axis) -> float:
    """What the row door multiplies private channels by."""
    return math.sqrt(axis.size) if self.private_scale == "forward" else 1.0
