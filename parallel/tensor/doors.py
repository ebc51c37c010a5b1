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

import jax
from jax import lax
import jax.numpy as jnp

from parallel.axes import Axis
from parallel.collectives import varying, varying_axes
from parallel.kernels.add_norm import api as kernels
from parallel.kernels.add_norm.reference import sum_of_squares
from parallel.kernels.calls import same_axes
from parallel.kernels.selection import Implementation
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.reductions import (
  ReduceAddNorm,
  kernel_of_norm,
  sum_over_ranks,
)
from parallel.tensor.stream import Pending, Stream, Update


def column_parallel(
  x: Stream,
  gain: jax.Array,
  w: jax.Array,
  eps: float = 1e-5,
  implementation: Implementation = "reference",
) -> tuple[Stream, jax.Array]:
  """RMSNorm of each rank's own stream, times that rank's columns.

  An update that the stream carries is added first, in the pass of the norm
  where a kernel does both; a pending one is reduced there, too. Without one the
  door is silent.

  The norm's per-token factor commutes with the product, so that
  ``norm(x) @ w = rstd * ((x * gain) @ w)``, and with several lanes its shared
  part is one product for all. Statistics are local, in float32, over all H.

  Args:
    x: The residual stream.
    gain: ``[H]``, the norm's gain, one for all ranks.
    w: ``[R, H, F]``.
    eps: Added to the mean square.
    implementation: Kernels of the norm in order of preference, see
      `parallel.kernels.selection`; they are for devices that have one stream,
      others keep to the reference.

  Returns:
    The stream with nothing left to add, and ``[R, B, T, F]`` in its dtype.
  """
  if x.is_pending:
    kernel = _kernel(x.update, implementation)
    if kernel is not None:
      return _reduce_add_columns(x, gain, w, kernel(eps))
  num_shared = min(
    x.shared.shape[-1],
    x.width if x.update is None else x.update.shared.shape[-1],
  )
  if w.shape[0] > 1 and num_shared < x.width:
    x = x.resolved()
    return x, _columns_of_lanes(x, gain, w, eps)
  updates = (None, None)
  if x.update is not None:
    x, update = x.aligned(x.update.reduced())
    updates = (update.shared, update.private[0])
  shared, private, normed = kernels.add_norm(
    x.shared, x.private[0], *updates, gain, eps=eps,
    implementation=implementation,
  )
  has_private = x.private.shape[-1] > 0
  x = Stream(shared, private[None] if has_private else x.private)
  return x, _all_columns(normed, w.astype(normed.dtype))


def _kernel(
  update: Update, implementation: Implementation
) -> Callable[[float], ReduceAddNorm] | None:
  """The kernel that reduces a pending update; None: there is none for it."""
  *rows, k = update.shared.shape
  return kernel_of_norm(
    tuple(rows), k + update.private.shape[-1], update.shared.dtype,
    update.pending.axis, update.pending.sync, implementation,
  )


def _reduce_add_columns(
  x: Stream, gain: jax.Array, w: jax.Array, reduce_add_norm: ReduceAddNorm
) -> tuple[Stream, jax.Array]:
  """`column_parallel` of one lane whose update is pending, by a kernel."""
  k = x.update.shared.shape[-1]
  shared, private, normed = reduce_add_norm(
    *_split_at(x, k), x.update.shared, x.update.private[0], gain
  )
  y = _all_columns(normed, w.astype(normed.dtype))
  # A stream that shared fewer channels than the door does goes on so.
  x = Stream(shared, private[None]).narrow(min(k, x.shared.shape[-1]))
  return x, y


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
  y: jax.Array,
  w: jax.Array,
  axis: Axis,
  sync: PartialSync,
  implementation: Implementation = "reference",
) -> Update:
  """Each rank's rows of a product, summed over ranks on the shared channels.

  By the routes "one_shot" and "ring_kernel", on devices with one lane and where
  a kernel takes the operands, the sum is left to the column door that the
  stream goes into next: there one kernel sums, adds and normalises. Where none
  does, "one_shot" adds as `parallel.collectives` does and "ring_kernel" is a
  psum.

  Args:
    y: ``[R, B, T, F]``, rank-local activations.
    w: ``[R, F, H]``.
    axis: The tensor axis.
    sync: What is shared, and how it is reduced.
    implementation: Kernels of the next norm in order of preference.

  Returns:
    The update of the residual stream.

  Raises:
    ValueError: A dtype of the reduction that the route does not have.
  """
  fused = None
  if w.shape[0] == 1:
    fused = kernel_of_norm(
      y.shape[1:-1], w.shape[-1], y.dtype, axis, sync, implementation
    )
  if fused is not None:
    return Update(*_row_products(y, w, sync, 1.0), Pending(axis, sync))
  shared, private = _row_products(y, w, sync, sync.scale(axis))
  if shared.shape[-1]:
    shared = sum_over_ranks(shared, axis.name, sync)
  return Update(shared, private)


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


def _split_at(x: Stream, k: int) -> tuple[jax.Array, jax.Array]:
  """One lane's stream, its first k channels and the rest."""
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
