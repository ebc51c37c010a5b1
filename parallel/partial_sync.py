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

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from parallel.axes import Axis
from parallel.collectives import varying, varying_axes
from parallel.door_reductions import (
  PartialSync,
  cast_to_ranks,
  kernel_of_norm,
  sum_over_ranks,
)
from parallel.kernels.add_norm import api as kernels
from parallel.kernels.add_norm.reference import sum_of_squares
from parallel.kernels.calls import same_axes
from parallel.kernels.selection import Implementation


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
    x = cast_to_ranks(x, axis.name, sync.backward_dtype)
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
  shared, private = _row_products(y, w, sync, sync.scale(axis))
  if shared.shape[-1]:
    shared = sum_over_ranks(shared, axis.name, sync)
  return Stream(shared, private)


def _row_products(
  y: jax.Array, w: jax.Array, sync: PartialSync, scale: float
) -> tuple[jax.Array, jax.Array]:
  """``[B, T, K]``, summed over lanes, and ``[R, B, T, H - K]``, scaled."""
  width = w.shape[-1]
  k = sync.num_shared(width)
  w = w.astype(y.dtype)
  factor = jnp.asarray(scale, y.dtype)
  if k == width:
    shared = _all_rows(y, w)
    private = jnp.zeros((*y.shape[:-1], 0), y.dtype)
    return shared, varying(private, *varying_axes(shared))
  if w.shape[0] == 1 and not sync.overlap:  # one product, then split
    both = _all_rows(y, w)
    return both[..., :k], both[None, ..., k:] * factor
  shared = _all_rows(y, w[..., :k])
  if sync.overlap:  # or XLA makes one product of the two again
    shared, y = lax.optimization_barrier((shared, y))
  return shared, _each_rank(y, w[..., k:] * factor)


def row_column_parallel(
  x: Stream,
  y: jax.Array,
  w_row: jax.Array,
  gain: jax.Array,
  w_column: jax.Array,
  axis: Axis,
  sync: PartialSync,
  eps: float = 1e-5,
  implementation: Implementation = "reference",
) -> tuple[Stream, jax.Array]:
  """`row_parallel`, then `add_column_parallel`: out of a door, into the next.

  On devices with one lane the routes "one_shot" and "ring_kernel" sum, scale
  and add the private channels, and normalise in one kernel, where one takes
  the operands (`door_reductions.kernel_of_norm`). Where none does, and in a
  `row_parallel` that no norm follows, such as the MLP's before the next layer,
  "one_shot" adds as `parallel.collectives` does and "ring_kernel" is a psum.

  Args:
    x: The residual stream.
    y: ``[R, B, T, F]``, rank-local activations.
    w_row: ``[R, F, H]``.
    gain: ``[H]``, of the norm.
    w_column: ``[R, H, G]``.
    axis: The tensor axis.
    sync: What is shared, and how it is reduced.
    eps: Added to the mean square.
    implementation: Of kernels, see `parallel.kernels.selection`.

  Returns:
    The new stream, and ``[R, B, T, G]``.

  Raises:
    ValueError: A dtype of the reduction that the route does not have.
  """
  reduce_add_norm = None
  if w_row.shape[0] == 1:
    reduce_add_norm = kernel_of_norm(
      x.shared.shape[:-1], x.width, y.dtype, axis, sync, eps, implementation
    )
  if reduce_add_norm is None:
    update = row_parallel(y, w_row, axis, sync)
    return add_column_parallel(x, update, gain, w_column, eps, implementation)
  partial, d_private = _row_products(y, w_row, sync, 1.0)
  k = partial.shape[-1]
  shared, private, normed = reduce_add_norm(
    *_split_at(x, k), partial, d_private[0], gain
  )
  x = Stream(shared, private[None]).narrow(min(k, x.shared.shape[-1]))
  return x, _all_columns(normed, w_column.astype(normed.dtype))


def _split_at(x: Stream, k: int) -> tuple[jax.Array, jax.Array]:
  """A rank's stream, its first k channels and the rest."""
  more = k - x.shared.shape[-1]
  if more <= 0:
    x = x.narrow(k)
    return x.shared, x.private[0]
  shared = jnp.concatenate([x.shared, x.private[0, ..., :more]], axis=-1)
  return shared, x.private[0, ..., more:]


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
