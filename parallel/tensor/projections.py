"""Column- and row-parallel projections with partial synchronisation.

Each tensor rank m has a separate residual stream. Its first ``k = int(p *
width)`` channels are *shared* (equal on all ranks) and the rest *private*. A
block reads the stream through a column-parallel projection, which communicates
nothing, and updates it through a row-parallel projection, which turns the
partial outputs ``y_m`` of the ranks into

    F(y)_m = [ sum_j y_j[..., :k] , s * y_m[..., k:] ]    s: `PartialSync.scale`

The backward is the exact transpose. Each rank has separate cotangents, and only
F^T, which sums the same k channels over ranks, communicates. At ``p = 1`` this
is ordinary tensor parallelism, with Megatron's backward reductions moved from
the column-parallel to the row-parallel projection.

Shared channels are stored once for all lanes (ranks) of a device, private ones
per lane. The shared part of all lanes' column-parallel products is thus one
matrix product. The row-parallel product contracts its shared columns over all
lanes at once, which includes the device's part of the reduction at no cost.

Source: Lamprecht et al., "Tensor-Parallelism with Partially Synchronized
Activations" (CAAT-Net), arXiv 2506.19645, and its official code. Deviation: the
dtype of the backward reduction is a parameter.

Shape legend: R = lanes (ranks on this device), B = batch, T = position, H =
width (stream channels), K = shared channels, F = features of one rank.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp

from parallel.axes import Axis
from parallel.collectives import varying, varying_axes
from parallel.kernels.add_norm.reference import sum_of_squares
from parallel.kernels.selection import Implementation
from parallel.tensor import products
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.reductions import (
  ReduceAddNorm,
  reduce_add_norm_kernel,
  sum_over_ranks,
)
from parallel.tensor.stream import PendingReduction, Stream, Update


def column_parallel(
  x: Stream,
  gain: jax.Array,
  w: jax.Array,
  eps: float = 1e-5,
  implementation: Implementation = "reference",
) -> tuple[Stream, jax.Array]:
  """Normalizes each rank's stream (RMSNorm) and multiplies by its columns.

  If the stream carries an update, the update is added first. A kernel adds it
  in the same pass as the norm, and also reduces a pending update. Unless an
  update is pending, this function does not communicate.

  Each rank normalises its stream by its own statistics, in float32 over all H
  channels. The factor rstd = 1 / sqrt(mean(x^2) + eps) of a token commutes with
  the product, ``norm(x) @ w = rstd * ((x * gain) @ w)``, so the shared channels
  need one product for all ranks on a device.

  Args:
    x: The residual stream.
    gain: Gain of the norm ``[H]``, one for all ranks.
    w: Columns of the R ranks on this device, ``[R, H, F]``.
    eps: Number that is added to the mean square.
    implementation: Implementations of the norm in order of preference, as in
      `parallel.kernels.selection`. Kernels process one stream, so devices with
      several different streams use the reference.

  Returns:
    The stream with its update added, and the products ``[R, B, T, F]`` in the
    stream's dtype.

  Example:
    Two lanes with equal streams of RMS 1 and different columns.

    >>> stream = Stream(jnp.ones((1, 1, 4)), jnp.ones((2, 1, 1, 0)))
    >>> w = jnp.stack([jnp.ones((4, 3)), 2 * jnp.ones((4, 3))])
    >>> _, y = column_parallel(stream, jnp.ones(4), w, eps=0.0)
    >>> y[:, 0, 0].tolist()
    [[4.0, 4.0, 4.0], [8.0, 8.0, 8.0]]
  """
  if x.is_pending:
    kernel = _kernel(x.update, implementation)
    if kernel is not None:
      return _reduce_add_columns(x, gain, w, kernel(eps))
  # Number of shared channels after the update is added.
  num_shared = min(
    x.shared.shape[-1],
    x.width if x.update is None else x.update.shared.shape[-1],
  )
  if w.shape[0] > 1 and num_shared < x.width:  # the lanes' streams differ
    x = x.resolved()
    return x, _columns_of_lanes(x, gain, w, eps)
  # This device has one stream: there is one lane, or all channels are
  # shared and the private part [R, B, T, 0] is empty, so that lane 0 represents
  # all.
  updates = (None, None)
  if x.update is not None:
    x, update = x.narrow_both(x.update.reduced())
    updates = (update.shared, update.private[0])
  shared, private, normed = products.add_norm(
    x.shared, x.private[0], *updates, gain, eps, implementation
  )
  has_private = x.private.shape[-1] > 0
  x = Stream(shared, private[None] if has_private else x.private)
  return x, _multiply_all_columns(normed, w.astype(normed.dtype))


def _kernel(
  update: Update, implementation: Implementation
) -> Callable[[float], ReduceAddNorm] | None:
  """Returns a function from eps to the kernel for a pending update.

  The kernel reduces and adds the update and normalises the stream. None if no
  kernel supports the update.
  """
  *rows, k = update.shared.shape
  return reduce_add_norm_kernel(
    tuple(rows), k + update.private.shape[-1], update.shared.dtype,
    update.pending.axis, update.pending.sync, implementation,
  )


def _reduce_add_columns(
  x: Stream, gain: jax.Array, w: jax.Array, reduce_add_norm: ReduceAddNorm
) -> tuple[Stream, jax.Array]:
  """Runs `column_parallel` by the kernel ``reduce_add_norm``.

  There is one rank on the device, and its update is pending.
  """
  k = x.update.shared.shape[-1]
  shared, private, normed = reduce_add_norm(
    *_split_at(x, k), x.update.shared, x.update.private[0], gain
  )
  y = _multiply_all_columns(normed, w.astype(normed.dtype))
  # If the stream shares fewer channels than the update, the further channels of
  # the stream differed between ranks before the addition, and still do.
  x = Stream(shared, private[None]).narrow(min(k, x.shared.shape[-1]))
  return x, y


def _columns_of_lanes(
  x: Stream, gain: jax.Array, w: jax.Array, eps: float
) -> jax.Array:
  """Returns ``norm(x) @ w`` of the R ranks on this device, ``[R, B, T, F]``.

  Arguments are those of `column_parallel`, for ranks whose streams differ and
  have no update: ``gain`` of the norm ``[H]``, columns w ``[R, H, F]``.
  """
  dtype, k = x.private.dtype, x.shared.shape[-1]
  if products.scales_streams(w.shape[-1], x.width):
    normed = jax.vmap(
      lambda private: products.add_norm(
        x.shared, private, None, None, gain, eps
      )[2]
    )(x.private)  # [R, B, T, H]
    return products.product_per_rank(normed, w.astype(dtype))
  # The weights are multiplied by the gain: multiplying the stream would write,
  # and save for the backward, another array [R, B, T, H].
  w = w.astype(dtype).astype(gain.dtype)
  w = (gain[None, :, None] * w).astype(dtype)
  y = products.product_per_rank(x.private, w[:, k:])  # [R, B, T, F]
  if k:
    y = y + _multiply_all_columns(x.shared, w[:, :k])
  # [1, B, T] + [R, B, T]
  squares = sum_of_squares(x.shared)[None] + sum_of_squares(x.private)
  rstd = lax.rsqrt(squares / x.width + eps)
  return products.multiply(y, rstd[..., None])


def row_parallel(
  y: jax.Array,
  w: jax.Array,
  axis: Axis,
  sync: PartialSync,
  implementation: Implementation = "reference",
) -> Update:
  """Multiplies by each rank's rows; sums the shared channels over ranks.

  The sum is deferred to the kernel of the stream's next column-parallel
  projection if ``sync.route`` is "one_shot" or "ring_kernel", a device has one
  lane, and the kernel supports the operands. The kernel sums, adds the sum to
  the stream and normalises the stream. Otherwise this function sums: for
  "one_shot" as in `parallel.routes`, for "ring_kernel" by a psum.

  Args:
    y: Activations of the R ranks on this device, ``[R, B, T, F]``.
    w: Rows of each rank's matrix, ``[R, F, H]``.
    axis: The tensor axis.
    sync: Shared channels and their reduction.
    implementation: Implementations of the next norm in order of preference.

  Returns:
    The update of the residual stream.

  Raises:
    ValueError: Route "ring_kernel" does not support ``sync.forward_dtype``.

  Example:
    Two ranks share the first of two channels, which is the sum 1 + 2. The
    private channels 1 and 2 are scaled by sqrt(2).

    >>> from jax.sharding import PartitionSpec as P
    >>> from parallel.axes import make_mesh
    >>> tensor = Axis("tensor", size=2)  # two lanes of one device
    >>> def project(y, w):
    ...   update = row_parallel(y, w, tensor, PartialSync(p=0.5))
    ...   return update.shared, update.private
    >>> shared, private = jax.shard_map(
    ...   project,
    ...   mesh=make_mesh({"tensor": tensor}),
    ...   in_specs=P("tensor"),
    ...   out_specs=P("tensor"),
    ... )(jnp.array([1.0, 2.0]).reshape(2, 1, 1, 1), jnp.ones((2, 1, 2)))
    >>> shared.ravel().tolist(), private.round(4).ravel().tolist()
    ([3.0], [1.414..., 2.828...])
  """
  fused = None
  if w.shape[0] == 1:
    fused = reduce_add_norm_kernel(
      y.shape[1:-1], w.shape[-1], y.dtype, axis, sync, implementation
    )
  if fused is not None:
    # The factor is 1 here, since the kernel scales private channels later.
    return Update(*_row_products(y, w, sync, 1.0), PendingReduction(axis, sync))
  return sum_update(row_products(y, w, axis, sync), axis, sync)


def row_products(
  y: jax.Array, w: jax.Array, axis: Axis, sync: PartialSync
) -> Update:
  """Returns the update of `row_parallel` before its sum over ranks.

  Args:
    y: Activations of the R ranks on this device, ``[R, B, T, F]``.
    w: Rows of each rank's matrix, ``[R, F, H]``.
    axis: The tensor axis.
    sync: Shared channels.
  """
  return Update(*_row_products(y, w, sync, sync.scale(axis)))


def sum_update(update: Update, axis: Axis, sync: PartialSync) -> Update:
  """Sums the shared channels of an update of `row_products` over ranks."""
  if not update.shared.shape[-1]:
    return update
  total = sum_over_ranks(update.shared, axis.name, sync)
  return Update(total, update.private)


def _row_products(
  y: jax.Array, w: jax.Array, sync: PartialSync, scale: float
) -> tuple[jax.Array, jax.Array]:
  """Multiplies by each rank's rows, without any reduction over devices.

  Args:
    y: Activations of the R ranks on this device, ``[R, B, T, F]``.
    w: Rows of each rank's matrix, ``[R, F, H]``.
    sync: Shared channels.
    scale: Factor of private channels.

  Returns:
    Shared channels ``[B, T, K]``, summed over these ranks; and private ones
    ``[R, B, T, H - K]``, scaled.
  """
  width = w.shape[-1]
  k = sync.num_shared(width)
  w = w.astype(y.dtype)
  factor = jnp.asarray(scale, y.dtype)
  if k == width:
    shared = _multiply_all_rows(y, w)
    private = jnp.zeros((*y.shape[:-1], 0), y.dtype)
    return shared, varying(private, *varying_axes(shared))
  if w.shape[0] == 1 and not sync.overlap:  # one product, then split
    both = _multiply_all_rows(y, w)  # [B, T, H]
    return both[..., :k], both[None, ..., k:] * factor
  shared = _multiply_all_rows(y, w[..., :k])
  if sync.overlap:  # without a barrier XLA merges the two products
    shared, y = lax.optimization_barrier((shared, y))
  # The factor multiplies the weights, which are smaller than the activations.
  return shared, products.product_per_rank(y, w[..., k:] * factor)


def _split_at(x: Stream, k: int) -> tuple[jax.Array, jax.Array]:
  """Splits the stream of a device's only rank into k channels and the rest."""
  more = k - x.shared.shape[-1]
  if more <= 0:
    x = x.narrow(k)
    return x.shared, x.private[0]
  # The update shares more channels than the stream: with one lane, private
  # channels have the same layout as shared ones.
  shared = jnp.concatenate([x.shared, x.private[0, ..., :more]], axis=-1)
  return shared, x.private[0, ..., more:]


def _multiply_all_columns(x: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies one stream ``[B, T, H]`` by all columns of this device's ranks.

  The columns of the R ranks, ``[R, H, F]``, are joined to one matrix ``[H, R
  F]``.

  Returns:
    ``[R, B, T, F]``.
  """
  lanes, width, features = w.shape
  if lanes == 1:
    return products.product(x, w)[None]
  y = products.product(
    x, jnp.moveaxis(w, 0, 1).reshape(1, width, lanes * features)
  )
  return jnp.moveaxis(y.reshape(*x.shape[:-1], lanes, features), -2, 0)


def _multiply_all_rows(y: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies y by each rank's rows and sums over the ranks on this device.

  The shapes are ``[R, B, T, F]`` and ``[R, F, H]``.

  The sum is part of one product, which contracts R F features at once.

  Returns:
    ``[B, T, H]``.
  """
  lanes, features, width = w.shape
  if lanes == 1:
    return products.product(y[0], w)
  y = jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], lanes * features)
  return products.product(y, w.reshape(1, lanes * features, width))
