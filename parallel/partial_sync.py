"""Partially synchronised tensor parallelism: the residual stream's two doors.

Each tensor rank m has a residual stream of its own, of which the first
``k = int(p * width)`` channels are *shared* (equal on all ranks) and the rest
*private*. A block's partial outputs ``y_m`` update it by

    F(y)_m = [ sum_j y_j[..., :k] , s * y_m[..., k:] ]        (the row door)

and the backward is the exact transpose: cotangents stay partial per rank, and
only F^T, which sums the same k channels, communicates. ``p = 1`` is ordinary
tensor parallelism with Megatron's backward reductions moved from the column
door to the row door.

Shared channels are stored once for all lanes of a device, private ones per
lane. So the shared part of all lanes' column-parallel products is one matrix
product, and the row-parallel product contracts its shared columns over all
lanes at once: the local part of the reduction costs nothing.

Source: Lamprecht et al., "Tensor-Parallelism with Partially Synchronized
Activations" (CAAT-Net), arXiv 2506.19645, and its official code. Deviates in
one thing: the dtype of the backward reduction is a parameter.

Shape legend: R = lanes, B = batch, T = position, H = width (stream channels),
K = shared channels, F = features of one rank.
"""

from collections.abc import Callable
import dataclasses
import math

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from parallel.axes import Axis
from parallel.collectives import ROUTES, Reduction, varying, varying_axes
from parallel.kernels.add_norm import api as kernels
from parallel.kernels.add_norm.reference import sum_of_squares
from parallel.kernels.calls import same_axes
from parallel.kernels.selection import Implementation

PRIVATE_SCALES = ("none", "init", "forward")

# The name under which remat policies find the reduced activations.
REDUCED = "reduced"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
  """A residual stream, or an update of one.

  Attributes:
    shared: ``[B, T, K]``, equal on all ranks, stored once per device.
    private: ``[R, B, T, H - K]``, a rank's own.
  """

  shared: jax.Array
  private: jax.Array

  @property
  def width(self) -> int:
    return self.shared.shape[-1] + self.private.shape[-1]

  def narrow(self, num_shared: int) -> "Stream":
    """Makes all but the first ``num_shared`` channels private."""
    if num_shared == self.shared.shape[-1]:
      return self
    moved = self.shared[..., num_shared:]
    moved = jnp.broadcast_to(moved, (self.private.shape[0], *moved.shape))
    return Stream(
      self.shared[..., :num_shared],
      jnp.concatenate([moved, self.private], axis=-1),
    )

  def aligned(self, other: "Stream") -> tuple["Stream", "Stream"]:
    """Both, with as many shared channels as the one that has fewer."""
    num_shared = min(self.shared.shape[-1], other.shared.shape[-1])
    return self.narrow(num_shared), other.narrow(num_shared)

  def __add__(self, update: "Stream") -> "Stream":
    x, y = self.aligned(update)
    return Stream(x.shared + y.shared, x.private + y.private)

  def per_rank(self) -> jax.Array:
    """``[R, B, T, H]``: each lane's whole stream, for looking at."""
    return self.narrow(0).private


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
    route: How both reductions go: a key of `parallel.collectives.ROUTES`, or
      a function in place of ``lax.psum``.
  """

  p: float = 1.0
  private_scale: str = "forward"
  forward_dtype: str | None = None
  backward_dtype: str | None = "float32"
  overlap: bool = False
  route: str | Reduction = "psum"

  def __post_init__(self) -> None:
    if not 0.0 <= self.p <= 1.0:
      raise ValueError(
        f"p={self.p} must lie in [0, 1] (config.model.p, p_attention, p_mlp)"
      )
    if isinstance(self.route, str) and self.route not in ROUTES:
      raise ValueError(
        f"config.model.route={self.route!r} must be one of {', '.join(ROUTES)}"
      )
    if self.private_scale not in PRIVATE_SCALES:
      raise ValueError(
        f"config.model.private_scale={self.private_scale!r} must be one of "
        f"{', '.join(PRIVATE_SCALES)}"
      )

  def num_shared(self, width: int) -> int:
    """k, rounded the same way everywhere; ``int(0.29 * 100)`` is 28."""
    return int(self.p * width)

  def scale(self, axis: Axis) -> float:
    """What the row door multiplies private channels by."""
    return math.sqrt(axis.size) if self.private_scale == "forward" else 1.0


def enter(x: jax.Array, axis: Axis, sync: PartialSync) -> Stream:
  """Starts a residual stream from activations equal on all ranks.

  The one full-width backward all-reduce of a block stack happens here: the
  ranks' partial cotangents are summed.

  Args:
    x: ``[B, T, H]``, equal on all ranks.
    axis: The tensor axis.
    sync: Decides the number of shared channels and the backward's dtype.

  Returns:
    The stream that every rank starts with.
  """
  with jax.named_scope("stack_entry"):
    x = _cast_to_ranks(x, axis.name, sync.backward_dtype)
  whole = Stream(x, jnp.zeros((axis.lanes, *x.shape[:-1], 0), x.dtype))
  whole = Stream(x, varying(whole.private, *varying_axes(x)))
  return whole.narrow(sync.num_shared(x.shape[-1]))


def column_parallel(
  x: Stream,
  gain: jax.Array,
  w: jax.Array,
  eps: float = 1e-5,
  implementation: Implementation = "reference",
) -> jax.Array:
  """RMSNorm of each rank's own stream, times that rank's columns. Silent.

  The norm's per-token factor commutes with the product, so that
  ``norm(x) @ w = rstd * ((x * gain) @ w)``, and with several lanes its shared
  part is one product for all. Statistics are local, in float32, over all H.

  Args:
    x: The residual stream.
    gain: ``[H]``, the norm's gain, one for all ranks.
    w: ``[R, H, F]``.
    eps: Added to the mean square.
    implementation: Of the norm, see `parallel.kernels.selection`; kernels are
      for devices that have one stream, and others keep to the reference.

  Returns:
    ``[R, B, T, F]`` in the stream's dtype.
  """
  return add_column_parallel(x, None, gain, w, eps, implementation)[1]


def add_column_parallel(
  x: Stream,
  update: Stream | None,
  gain: jax.Array,
  w: jax.Array,
  eps: float = 1e-5,
  implementation: Implementation = "reference",
) -> tuple[Stream, jax.Array]:
  """``x + update`` and `column_parallel` of it; kernels do both in one pass.

  Args:
    x: The residual stream.
    update: Of the stream; None: none.
    gain: As for `column_parallel`; so are the others.
    w: As for `column_parallel`.
    eps: As for `column_parallel`.
    implementation: As for `column_parallel`.

  Returns:
    The new stream, and ``[R, B, T, F]``.
  """
  if update is not None:
    x, update = x.aligned(update)
  num_private = x.private.shape[-1]
  if w.shape[0] > 1 and num_private:
    x = x if update is None else x + update
    return x, _columns_of_lanes(x, gain, w, eps)
  updates = (None, None)
  if update is not None:
    updates = (update.shared, update.private[0])
  shared, private, normed = kernels.add_norm(
    x.shared, x.private[0], *updates, gain, eps=eps,
    implementation=implementation,
  )
  x = Stream(shared, private[None] if num_private else x.private)
  return x, _all_columns(normed, w.astype(normed.dtype))


def _columns_of_lanes(
  x: Stream, gain: jax.Array, w: jax.Array, eps: float
) -> jax.Array:
  """Of lanes that have a stream each."""
  dtype, k = x.private.dtype, x.shared.shape[-1]
  w = (gain[:, None] * w.astype(dtype)).astype(dtype)
  y = _each_rank(x.private, w[:, k:])
  if k:
    y = y + _all_columns(x.shared, w[:, :k])
  squares = sum_of_squares(x.shared) + sum_of_squares(x.private)
  rstd = lax.rsqrt(squares / x.width + eps)
  return _times(y, rstd[..., None])


def row_parallel(
  y: jax.Array, w: jax.Array, axis: Axis, sync: PartialSync
) -> Stream:
  """Each rank's rows of a product, summed over ranks on the shared channels.

  Args:
    y: ``[R, B, T, F]``, rank-local activations.
    w: ``[R, F, H]``.
    axis: The tensor axis.
    sync: What is shared, and how it is reduced.

  Returns:
    The update of the residual stream.
  """
  width = w.shape[-1]
  k = sync.num_shared(width)
  w = w.astype(y.dtype)
  scale = jnp.asarray(sync.scale(axis), y.dtype)
  if k == width:
    shared = _all_rows(y, w)
    private = jnp.zeros((*y.shape[:-1], 0), y.dtype)
    private = varying(private, *varying_axes(shared))
  elif w.shape[0] == 1 and not sync.overlap:  # one product, then split
    both = _all_rows(y, w)
    shared, private = both[..., :k], both[None, ..., k:] * scale
  else:
    shared = _all_rows(y, w[..., :k])
    if sync.overlap:  # or XLA makes one product of the two again
      shared, y = lax.optimization_barrier((shared, y))
    private = _each_rank(y, w[..., k:] * scale)
  if k:
    shared = _sum_over_ranks(shared, axis.name, sync)
    shared = checkpoint_name(shared, REDUCED)
  return Stream(shared, private)


# The products below are plain two-dim ones: XLA:CPU runs a product with a
# batch dim, or with a dim of size one beside the contracted one, at a fraction
# of the rate (LOG.md).


def _all_columns(x: jax.Array, w: jax.Array) -> jax.Array:
  """``[B, T, H] x [R, H, F] -> [R, B, T, F]``: one input, all lanes."""
  lanes, width, features = w.shape
  if lanes == 1:
    return (x @ w[0])[None]
  y = x @ jnp.moveaxis(w, 0, 1).reshape(width, lanes * features)
  return jnp.moveaxis(y.reshape(*x.shape[:-1], lanes, features), -2, 0)


def _all_rows(y: jax.Array, w: jax.Array) -> jax.Array:
  """``[R, B, T, F] x [R, F, H] -> [B, T, H]``, summed over lanes."""
  lanes, features, width = w.shape
  if lanes == 1:
    return y[0] @ w[0]
  y = jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], lanes * features)
  return y @ w.reshape(lanes * features, width)


def _each_rank(x: jax.Array, w: jax.Array) -> jax.Array:
  """``[R, B, T, H] x [R, H, F] -> [R, B, T, F]``, lane by lane.

  With its own transpose: autodiff would keep each lane's slice of ``x`` beside
  ``x`` for the backward.
  """

  @jax.custom_vjp
  def products(x, w):
    return by_lane(jnp.matmul, x, w)

  def forward(x, w):
    return products(x, w), (x, w)

  def backward(residuals, cotangent):
    x, w = residuals
    dx = by_lane(lambda a, b: a @ b.T, cotangent, w)
    over_tokens = (((0, 1), (0, 1)), ((), ()))
    dw = by_lane(
      lambda a, b: lax.dot_general(a, b, over_tokens), x, cotangent
    )
    return dx, dw

  def by_lane(product, *operands):
    return jnp.stack([product(*lane) for lane in zip(*operands, strict=True)])

  products.defvjp(forward, backward)
  return products(*same_axes(x, w))


def _times(y: jax.Array, factor: jax.Array) -> jax.Array:
  """``y * factor``, ``factor: [..., 1]``, in y's dtype.

  The backward keeps the product, which its user keeps anyway, and not ``y``.
  """

  @jax.custom_vjp
  def times(y, factor):
    return (y * factor).astype(y.dtype)

  def forward(y, factor):
    product = times(y, factor)
    return product, (product, factor)

  def backward(residuals, cotangent):
    product, factor = residuals
    wide = cotangent.astype(factor.dtype)
    d_factor = jnp.sum(wide * product, axis=-1, keepdims=True) / factor
    return (wide * factor).astype(product.dtype), d_factor

  times.defvjp(forward, backward)
  return times(*same_axes(y, factor))


def _sum_over_ranks(
  y: jax.Array, name: str, sync: PartialSync
) -> jax.Array:
  """All-reduces each way: F on shared channels, and its transpose F^T.

  The result is device-varying by type (the ranks' cotangents of it differ)
  though equal in value.
  """
  if lax.axis_size(name) == 1:
    return varying(y, name)
  return _with_transpose(
    lambda y: varying(_sum_in(y, name, sync.forward_dtype, sync.route), name),
    lambda g: varying(_sum_in(g, name, sync.backward_dtype, sync.route), name),
    y,
  )


def _cast_to_ranks(
  x: jax.Array, name: str, backward_dtype: str | None
) -> jax.Array:
  """Identity; its transpose sums the ranks' cotangents, in one dtype."""
  return _with_transpose(
    lambda x: varying(x, name), lambda g: _sum_in(g, name, backward_dtype), x
  )


def _with_transpose(
  f: Callable[[jax.Array], jax.Array],
  transpose: Callable[[jax.Array], jax.Array],
  x: jax.Array,
) -> jax.Array:
  """``f(x)`` of a linear ``f`` whose transpose is given."""
  linear = jax.custom_vjp(f)
  linear.defvjp(lambda x: (f(x), None), lambda _, g: (transpose(g),))
  return linear(x)


def _sum_in(
  y: jax.Array, name: str, dtype: str | None, route: str | Reduction = "psum"
) -> jax.Array:
  """All-reduces in ``dtype``, in y's own if None; returns y's."""
  reduce = ROUTES[route] if isinstance(route, str) else route
  if dtype in (None, y.dtype.name):
    return reduce(y, name)
  # XLA:TPU takes casts beside a reduction for free to move, and would reduce in
  # the narrower of the two dtypes. A barrier keeps the cast before; after it,
  # where a barrier would make the reduction synchronous, rounding to the
  # narrower dtype first leaves no cast to move (LOG.md).
  narrow = min(y.dtype, jnp.dtype(dtype), key=lambda d: d.itemsize)
  bits = jnp.finfo(narrow)
  total = reduce(lax.optimization_barrier(y.astype(dtype)), name)
  return lax.reduce_precision(total, bits.nexp, bits.nmant).astype(y.dtype)
