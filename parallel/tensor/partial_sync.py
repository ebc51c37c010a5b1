"""Options of partial synchronisation, which sums some channels over ranks.

Source: Lamprecht et al., "Tensor-Parallelism with Partially Synchronized
Activations" (CAAT-Net), arXiv 2506.19645.
"""

import dataclasses
import math

from jax import lax

from parallel.axes import Axis
from parallel.base.checks import fraction, known
from parallel.collectives import Reduction
from parallel.routes import ROUTES

PRIVATE_SCALES = ("none", "init", "forward")


# Reductions of a row-parallel projection, by their names in configs.
# "ring_kernel" adds and normalises in the same kernel as the reduction, so it
# runs only if a norm follows; otherwise it is a psum.
PROJECTION_ROUTES: dict[str, Reduction] = ROUTES | {"ring_kernel": lax.psum}

# Reductions with a kernel that also adds the sum and normalises.
FUSED_ROUTES = ("one_shot", "ring_kernel")


@dataclasses.dataclass(frozen=True)
class PartialSync:
  """Options of the sum over ranks of a row-parallel projection's output.

  Attributes:
    p: Fraction of the channels that is summed over all ranks, in [0, 1].
    private_scale: Scaling of the private channels, which are not summed: the
      sum over ranks would have sqrt(ranks) times their standard deviation.
      "forward" multiplies them by sqrt(ranks), "init" leaves the factor to the
      initialisation of the weights, "none" omits it.
    forward_dtype: Dtype of the forward sum; None for the activations' dtype.
    backward_dtype: Dtype of the backward sum; None for the cotangents' dtype.
    overlap: Whether the summed (shared) channels are computed first, by a
      separate product, so that a compiler with asynchronous collectives reduces
      them while the private channels are computed. If not, a device with one
      lane computes all channels in one product.
    route: Implementation of both reductions: a key of ``PROJECTION_ROUTES``, or
      a function that replaces ``lax.psum``. Routes in ``FUSED_ROUTES`` use a
      kernel if `reductions.reduce_add_norm_kernel` finds one.

  Raises:
    ValueError: A value is unknown or out of range.

  Example:
    >>> sync = PartialSync(p=0.5)
    >>> sync.num_shared(width=8)
    4
    >>> sync.scale(Axis("tensor", 4))
    2.0
  """

  p: float = 1.0
  private_scale: str = "forward"
  forward_dtype: str | None = None
  backward_dtype: str | None = "float32"
  overlap: bool = False
  route: str | Reduction = "psum"

  def __post_init__(self) -> None:
    fraction("p", self.p)
    if isinstance(self.route, str):
      known("route=", self.route, PROJECTION_ROUTES)
    known("private_scale=", self.private_scale, PRIVATE_SCALES)

  def num_shared(self, width: int) -> int:
    """Returns K, the number of shared channels among ``width``.

    All code that needs K calls this method, so that floating-point rounding is
    the same everywhere: ``int(0.29 * 100)`` is 28.
    """
    return int(self.p * width)

  def scale(self, axis: Axis) -> float:
    """Returns the factor by which a projection multiplies private channels."""
    return math.sqrt(axis.size) if self.private_scale == "forward" else 1.0
