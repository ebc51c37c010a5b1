"""Partially synchronised tensor parallelism: the residual stream's two doors.

Each tensor rank m has a residual stream of its own, of which the first
``k = int(p * width)`` channels are *shared* (equal on all ranks) and the rest
*private*. A block reads the stream through its column door, which has nothing
to communicate, and updates it through its row door. There the partial outputs
``y_m`` of the ranks become

    F(y)_m = [ sum_j y_j[..., :k] , s * y_m[..., k:] ]

The backward is the exact transpose. Each rank has cotangents of its own, and
only F^T, which sums the same k channels over ranks, communicates. At ``p = 1``
this is ordinary tensor parallelism, with Megatron's backward reductions moved
from the column door to the row door.

Shared channels are stored once for all lanes of a device, private ones per
lane. So the shared part of all lanes' column-parallel products is one matrix
product. The row-parallel product contracts its shared columns over all lanes at
once, which includes the device's part of the reduction at no cost.

Source: Lamprecht et al., "Tensor-Parallelism with Partially Synchronized
Activations" (CAAT-Net), arXiv 2506.19645, and its official code. This differs
in one thing: the dtype of the backward reduction is a parameter.

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
  """Normalises each rank's stream (RMSNorm) and multiplies by its columns.

  If the stream carries an update, it is added first. A kernel does that in the
  same pass as the norm, and reduces a pending update there, too. Unless an
  update is pending, the door sends nothing.

  Each rank normalises its own stream by its own statistics, in float32 over all
  H channels. The factor of a token commutes with the product,
  ``norm(x) @ w = rstd * ((x * gain) @ w)``, so with several lanes the shared
  part is one product for all of them.

  Args:
    x: The residual stream.
    gain: The norm's gain ``[H]``, one for all ranks.
    w: Each rank's columns ``[R, H, F]``.
    eps: What is added to the mean square.
    implementation: Implementations of the norm in order of preference, as
      `parallel.kernels.selection` has them. Kernels take one stream, so devices
      with several use the reference.

  Returns:
    The stream with nothing left to add, and the products ``[R, B, T, F]`` in
    the stream's dtype.
  """
  if x.is_pending:
    kernel = _kernel(x.update, implementation)
    if kernel is not None:
      return _reduce_add_columns(x, gain, w, kernel(eps))
  # Shared channels once the update is added.
  num_shared = min(
    x.shared.shape[-1],
    x.width if x.update is None else x.update.shared.shape[-1],
  )
  if w.shape[0] > 1 and num_shared < x.width:  # each lane has its own stream
    x = x.resolved()
    return x, _columns_of_lanes(x, gain, w, eps)
  # One stream on this device: there is one lane, or all channels are shared and
  # the private part [R, B, T, 0] is empty, so that lane 0 stands for all.
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
  """Returns the kernel that reduces a pending update; None if none takes it."""
  *rows, k = update.shared.shape
  return kernel_of_norm(
    tuple(rows), k + update.private.shape[-1], update.shared.dtype,
    update.pending.axis, update.pending.sync, implementation,
  )


def _reduce_add_columns(
  x: Stream, gain: jax.Array, w: jax.Array, reduce_add_norm: ReduceAddNorm
) -> tuple[Stream, jax.Array]:
  """Runs `column_parallel` by a kernel, for one lane with a pending update."""
  k = x.update.shared.shape[-1]
  shared, private, normed = reduce_add_norm(
    *_split_at(x, k), x.update.shared, x.update.private[0], gain
  )
  y = _all_columns(normed, w.astype(normed.dtype))
  # If the stream shared fewer channels than the update does, those beyond were
  # different on the ranks before the sum was added, and still are.
  x = Stream(shared, private[None]).narrow(min(k, x.shared.shape[-1]))
  return x, y


def _columns_of_lanes(
  x: Stream, gain: jax.Array, w: jax.Array, eps: float
) -> jax.Array:
  """Computes norm and products ``[R, B, T, F]`` of lanes with a stream each."""
  dtype, k = x.private.dtype, x.shared.shape[-1]
  # The gain multiplies the weights: a product with the stream would be another
  # array [R, B, T, H] to write and to keep for the backward.
  w = (gain[:, None] * w.astype(dtype)).astype(dtype)
  y = _each_rank(x.private, w[:, k:])
  if k:
    y = y + _all_columns(x.shared, w[:, :k])
  # [B, T] + [R, B, T]
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
  """Multiplies by each rank's rows; sums the shared channels over ranks.

  With the routes "one_shot" and "ring_kernel" the sum is left to the column
  door that the stream goes into next, if a device has one lane and a kernel
  takes the operands: there one kernel sums, adds and normalises. Else the sum
  is made here; "one_shot" is then a route of `parallel.routes` and
  "ring_kernel" a psum.

  Args:
    y: Rank-local activations ``[R, B, T, F]``.
    w: Each rank's rows ``[R, F, H]``.
    axis: The tensor axis.
    sync: What is shared, and how it is reduced.
    implementation: Implementations of the next norm in order of preference.

  Returns:
    The update of the residual stream.

  Raises:
    ValueError: The route cannot reduce in the dtype that is asked for.
  """
  fused = None
  if w.shape[0] == 1:
    fused = kernel_of_norm(
      y.shape[1:-1], w.shape[-1], y.dtype, axis, sync, implementation
    )
  if fused is not None:
    # The kernel multiplies private channels by the scale, hence 1.0 here.
    return Update(*_row_products(y, w, sync, 1.0), Pending(axis, sync))
  shared, private = _row_products(y, w, sync, sync.scale(axis))
  if shared.shape[-1]:
    shared = sum_over_ranks(shared, axis.name, sync)
  return Update(shared, private)


def _row_products(
  y: jax.Array, w: jax.Array, sync: PartialSync, scale: float
) -> tuple[jax.Array, jax.Array]:
  """Multiplies by each rank's rows, without any reduction over devices.

  Args:
    y: Rank-local activations ``[R, B, T, F]``.
    w: Each rank's rows ``[R, F, H]``.
    sync: What is shared.
    scale: The factor of private channels.

  Returns:
    Shared channels ``[B, T, K]``, summed over lanes; and private ones
    ``[R, B, T, H - K]``, scaled.
  """
  width = w.shape[-1]
  k = sync.num_shared(width)
  w = w.astype(y.dtype)
  factor = jnp.asarray(scale, y.dtype)
  if k == width:
    shared = _all_rows(y, w)
    private = jnp.zeros((*y.shape[:-1], 0), y.dtype)
    return shared, varying(private, *varying_axes(shared))
  if w.shape[0] == 1 and not sync.overlap:  # one product, then split
    both = _all_rows(y, w)  # [B, T, H]
    return both[..., :k], both[None, ..., k:] * factor
  shared = _all_rows(y, w[..., :k])
  if sync.overlap:  # without a barrier XLA joins the two products again
    shared, y = lax.optimization_barrier((shared, y))
  # The factor multiplies the weights, which are smaller than the activations.
  return shared, _each_rank(y, w[..., k:] * factor)


def _split_at(x: Stream, k: int) -> tuple[jax.Array, jax.Array]:
  """Splits one lane's stream into its first k channels and the rest."""
  more = k - x.shared.shape[-1]
  if more <= 0:
    x = x.narrow(k)
    return x.shared, x.private[0]
  # The door sums more channels than the stream shares: with one lane, private
  # channels are no other array layout than shared ones.
  shared = jnp.concatenate([x.shared, x.private[0, ..., :more]], axis=-1)
  return shared, x.private[0, ..., more:]


# The products below have no batch dim: XLA:CPU runs a product with a batch dim,
# or with a dim of size one beside the contracted one, at a fraction of the rate
# of a plain matrix product (LOG.md).


def _all_columns(x: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies one stream ``[B, T, H]`` by all lanes' columns ``[R, H, F]``.

  The lanes' columns stand side by side in one matrix ``[H, R F]``.

  Returns:
    ``[R, B, T, F]``.
  """
  lanes, width, features = w.shape
  if lanes == 1:
    return (x @ w[0])[None]
  y = x @ jnp.moveaxis(w, 0, 1).reshape(width, lanes * features)
  return jnp.moveaxis(y.reshape(*x.shape[:-1], lanes, features), -2, 0)


def _all_rows(y: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies ``[R, B, T, F]`` by rows ``[R, F, H]`` and sums over lanes.

  The sum is part of one product, which contracts R F features at once.

  Returns:
    ``[B, T, H]``.
  """
  lanes, features, width = w.shape
  if lanes == 1:
    return y[0] @ w[0]
  y = jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], lanes * features)
  return y @ w.reshape(lanes * features, width)


def _each_rank(x: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies each lane's ``[B, T, H]`` by its ``[H, F]``.

  The backward is written by hand, since autodiff would keep each lane's slice
  of x for it, beside x itself.

  Args:
    x: ``[R, B, T, H]``.
    w: ``[R, H, F]``.

  Returns:
    ``[R, B, T, F]``.
  """

  @jax.custom_vjp
  def products(x, w):
    return by_lane(jnp.matmul, x, w)

  def forward(x, w):
    return products(x, w), (x, w)

  def backward(residuals, cotangent):
    x, w = residuals
    dx = by_lane(lambda a, b: a @ b.T, cotangent, w)
    # Contracts B and T, which are dims 0 and 1 of one lane's arrays.
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
  """Returns ``y * factor``, with a factor ``[..., 1]``, in y's dtype.

  Autodiff would keep y for the factor's cotangent. The backward here takes the
  product divided by the factor instead: what uses the product keeps it anyway.
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
