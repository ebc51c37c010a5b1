"""Means over an axis of deltas that are sent with few bits.

Every logical rank of an `Axis` (a worker) has an unreduced delta, lane-stacked
``[R, ...]``. The mean of all of them comes out without the lane dim, in
float32 and bitwise equal on all devices, in one of three ways:

  all-reduce    no codec: the sum of float32 (or bfloat16) deltas.
  all-gather    each worker sends its encoded delta to all; each device decodes
                all of them and sums. One rounding. The form of Streaming
                DiLoCo, and the default.
  all-to-all    worker m receives slice m of every delta and sends their
                mean, encoded again, to all. Two roundings, of which the paper
                has only the first. About 2 (N - 1) / N encoded deltas are sent
                per worker in place of N - 1.

Decoded deltas are summed in the order of the workers, 0 to N - 1, one at a
time: so the result is independent of how the workers are split into lanes and
devices. Payloads are uint8 and scales float32 on the wire; there is one
collective for each.

Source: Streaming DiLoCo, arXiv 2501.18512, section 2.3. Weights other than
1 / N and error feedback (SparseLoCo, arXiv 2508.15706; MuLoCo, arXiv
2505.23725) are additions.

Shape legend: R = lanes on this device; N = logical ranks of the axis; B =
dims that blocks do not cross; n = elements of the rest; s = elements of a
slice, whole blocks.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from parallel import collectives
from parallel.axes import Axis
from parallel.collectives import ranks_here, varying
from parallel.kernels.codec import api, reference
from parallel.kernels.codec.reference import Codec, Encoded
from parallel.kernels.selection import Implementation
from parallel.wire import FLOAT32, MEAN_ITSELF, Use, Wire


def coded_mean(
  x: jax.Array,
  axis: Axis,
  wire: Wire = FLOAT32,
  *,
  weights: jax.Array | None = None,
  key: jax.Array | None = None,
  block_dims: int = 0,
) -> jax.Array:
  """The (weighted) mean over all ranks of an axis, as they told each other.

  Args:
    x: ``[R, *B, ...]`` float32, one delta per lane, inside ``jax.shard_map``.
      It may also vary over other mesh axes.
    axis: The axis to average over.
    wire: Codec and route.
    weights: ``[N]`` float32, not negative, the same on all devices; uniform
      by default. The mean is ``sum(w_m x_m) / sum(w_m)``. A rank of weight
      zero contributes nothing, NaN included; NaN where all are zero.
    key: Random key of stochastic rounding, of both where there are two; the
      same on all devices of the axis, ranks derive their own. Fold the round's
      number in, and the number along other axes where their deltas should
      round independently.
    block_dims: Number of dims after R that no block crosses: with the lanes
      of other axes there, results do not depend on *their* split either.

  Returns:
    ``[*B, ...]`` float32, replicated over the axis by type and bitwise equal
    on its devices.

  Raises:
    ValueError: Stochastic rounding without a key.
  """
  return coded_mean_difference(
    None, x, axis, wire, weights=weights, key=key, block_dims=block_dims
  )[0]


def coded_mean_difference(
  anchor: jax.Array | None,
  x: jax.Array,
  axis: Axis,
  wire: Wire,
  *,
  residual: jax.Array | None = None,
  weights: jax.Array | None = None,
  key: jax.Array | None = None,
  block_dims: int = 0,
  use: Use = MEAN_ITSELF,
) -> tuple[Any, jax.Array | None]:
  """`coded_mean` of ``anchor - x + residual``, encoded in one pass by kernels.

  Args:
    anchor: ``[*B, ...]``, the same for all ranks; None: x are differences.
    x: See `coded_mean`; so are the others.
    axis: See `coded_mean`.
    wire: See `coded_mean`.
    residual: ``[R, *B, ...]`` float32, what the last rounding took from each
      difference; None: no error feedback.
    weights: See `coded_mean`.
    key: See `coded_mean`.
    block_dims: See `coded_mean`.
    use: What becomes of the mean.

  Returns:
    What becomes of the mean, ``[*B, ...]`` each; and with a residual the new
    one: by what the differences differ from what `roundtrip` makes of them.
  """
  codec = wire.block_codec
  if codec is None:
    left = None
    delta = x if anchor is None else anchor - x
    if residual is not None:
      delta = delta + residual
      left = delta - roundtrip(delta, axis, wire)
    total = _mean_by_all_reduce(delta, axis, wire.dtype, weights)
    return use.of_mean(total), left
  if anchor is not None:
    anchor = jnp.broadcast_to(anchor, x.shape)
  rows = jax.tree.map(
    lambda x: _rows(x, axis, wire, block_dims), (anchor, x, residual)
  )
  options = (axis, codec, weights, key, wire.implementation)
  if wire.route == "all_to_all":
    total, left = _mean_by_all_to_all(rows, *options)
    result = use.of_mean(total.reshape(x.shape[1:]))
  else:
    result, left = _mean_by_all_gather(rows, *options, use)
    result = jax.tree.map(lambda y: y.reshape(x.shape[1:]), result)
  if left is not None:
    left = left.reshape(x.shape)
  return result, left


def roundtrip(
  x: jax.Array,
  axis: Axis,
  wire: Wire,
  *,
  key: jax.Array | None = None,
  block_dims: int = 0,
) -> jax.Array:
  """Each lane's delta as the other ranks see it in `coded_mean`.

  This is the first rounding. The second one of the all-to-all route is of a
  mean, not of a worker's delta; nor are the roundings of a bfloat16 sum.

  Args:
    x: As for `coded_mean`.
    axis: As for `coded_mean`.
    wire: As for `coded_mean`.
    key: The same key as for `coded_mean`.
    block_dims: As for `coded_mean`.

  Returns:
    float32, of the shape of ``x``; x itself without a codec in float32.
  """
  codec = wire.block_codec
  if codec is None:
    return x.astype(wire.dtype).astype(jnp.float32)
  rows = _rows(x, axis, wire, block_dims)
  n = rows.shape[-1]
  if wire.route == "all_to_all":
    rows = _pad(rows, axis.size * _slice(n, axis, codec))
  encoded, _ = _encode_lanes(
    (None, rows, None), axis, codec, key, wire.implementation
  )
  return reference.decode(encoded, n, codec).reshape(x.shape)


def mean_of_encoded(
  encoded: Any,
  axis: Axis,
  decode: Callable[[Any], jax.Array],
  weights: jax.Array | None = None,
) -> jax.Array:
  """The mean of deltas that are encoded in whatever way: each goes to all.

  Args:
    encoded: A tuple of arrays ``[R, ...]``; each is one all-gather.
    axis: See `coded_mean`; so are the weights.
    decode: One rank's arrays ``[...]`` -> its delta, float32.
    weights: See `coded_mean`.

  Returns:
    The mean of the decoded deltas; see `coded_mean`.
  """
  return reference.mean_of(_gathered(encoded, axis), decode, weights)


def reduce_scatter(
  x: jax.Array,
  axis: Axis,
  codec: Codec,
  implementation: Implementation = "reference",
) -> jax.Array:
  """`collectives.reduce_scatter` of encoded summands along the last dim.

  One all-to-all of payloads and one of scales; each rank decodes what it
  receives and adds in float32. Source: qgZ of ZeRO++, arXiv 2306.10209.

  Args:
    x: ``[R, ..., N * k]``, one summand per lane.
    axis: The axis to reduce over.
    codec: Of the summands; a slice is padded to whole blocks.
    implementation: Of the codec, see `Wire`.

  Returns:
    float32 ``[R, ..., k]``: each rank's slice of the sum.
  """
  if axis.size == 1:  # nobody to send to: nothing to round for
    return x.astype(jnp.float32)
  slices = x.reshape(*x.shape[:-1], axis.size, -1)
  encoded = api.encode(slices, codec, implementation=implementation)
  return api.total(
    _deliver(encoded, axis), slices.shape[-1], codec,
    implementation=implementation,
  )


def sent_bytes(
  num_elements: int, axis: Axis, wire: Wire, rows: int = 1
) -> dict[str, int]:
  """Operand bytes of one `coded_mean`, per device, as the ledger counts them.

  A device sends the payloads and scales of all its lanes. An all-gather sends
  its operand to N - 1 others, an all-to-all a share of it to each.

  Args:
    num_elements: Elements of a row of one rank's delta on one device.
    axis: The axis to average over.
    wire: Codec and route.
    rows: Number of rows, the product of the dims in ``block_dims``.

  Returns:
    Bytes by dtype on the wire; empty where one device has all ranks.
  """
  if axis.devices == 1:
    return {}
  codec = wire.block_codec
  if codec is None:
    size = np.dtype(jnp.dtype(wire.dtype)).itemsize
    return {wire.dtype: rows * num_elements * size}
  elements = num_elements
  if wire.route == "all_to_all":
    s = _slice(num_elements, axis, codec)
    elements = (axis.size + 1) * s  # a slice for each, and the mean of one
  units = axis.lanes * rows
  return {
    "uint8": units * codec.payload_bytes(elements),
    "float32": units * codec.num_scales(elements) * 4,
  }


def _mean_by_all_reduce(
  x: jax.Array, axis: Axis, dtype: str, weights: jax.Array | None
) -> jax.Array:
  x = x.astype(jnp.float32)
  divisor: jax.Array | float = float(axis.size)
  if weights is not None:
    mine = lax.dynamic_slice_in_dim(
      varying(weights, axis.name), ranks_here(axis)[0], axis.lanes
    )
    x = jax.vmap(reference.weighted)(x, mine)
    divisor = jnp.sum(weights)
  total = collectives.all_reduce(x.astype(dtype), axis)
  return total.astype(jnp.float32) / divisor


# ``[R, *B, ..., n]`` each: anchor or None, ranks' arrays, residual or None.
_Rows = tuple[jax.Array | None, jax.Array, jax.Array | None]


def _mean_by_all_gather(
  rows: _Rows,
  axis: Axis,
  codec: Codec,
  weights: jax.Array | None,
  key: jax.Array | None,
  implementation: Implementation,
  use: Use,
) -> tuple[Any, jax.Array | None]:
  """What becomes of the mean, without R, and the residual as rows.

  Memory beside the rows: all N encoded ones, and one decoded.
  """
  encoded, left = _encode_lanes(rows, axis, codec, key, implementation)
  encoded = _gathered(encoded, axis)
  shape = rows[1].shape[1:]
  return use.of_encoded(encoded, shape, codec, weights, implementation), left


def _mean_by_all_to_all(
  rows: _Rows,
  axis: Axis,
  codec: Codec,
  weights: jax.Array | None,
  key: jax.Array | None,
  implementation: Implementation,
) -> tuple[jax.Array, jax.Array | None]:
  """As by all-gather; rows are padded to N slices of whole blocks."""
  *lead, n = rows[1].shape
  dims, s = len(lead) - 1, _slice(n, axis, codec)
  slices = jax.tree.map(
    lambda x: _pad(x, axis.size * s).reshape(*lead, axis.size, s), rows
  )
  encoded, left = _encode_lanes(slices, axis, codec, key, implementation)
  mine = api.mean(
    _deliver(encoded, axis), s, codec, weights, implementation=implementation
  )  # [R, *B, s]
  again, _ = _encode_lanes(
    (None, mine, None), axis, codec, key, implementation, draw=1
  )
  everyones = Encoded(
    *(collectives.all_gather(part, axis, dim=dims) for part in again)
  )
  if left is not None:
    left = left.reshape(*lead, axis.size * s)[..., :n]
  return reference.decode(everyones, n, codec), left


def _encode_lanes(
  rows: _Rows,
  axis: Axis,
  codec: Codec,
  key: jax.Array | None,
  implementation: Implementation,
  draw: int = 0,
) -> tuple[Encoded, jax.Array | None]:
  """Encodes differences; each rank draws from a key of its own."""

  def encode(rows, key=None):
    anchor, x, residual = rows
    return api.encode_delta(
      anchor, x, codec, key, residual, implementation=implementation
    )

  if not codec.stochastic or key is None:
    return encode(rows)
  key = jax.random.fold_in(key, draw)
  keys = jax.vmap(lambda rank: jax.random.fold_in(key, rank))(ranks_here(axis))
  return collectives.each_lane(encode, axis, rows, keys)


def _gathered(encoded: Any, axis: Axis) -> Any:
  """A tuple of ``[R, ...] -> [N, ...]``, one all-gather each."""
  return type(encoded)(
    *(collectives.all_gather(part[:, None], axis) for part in encoded)
  )


def _deliver(encoded: Encoded, axis: Axis) -> Encoded:
  """``[R, ..., N receivers, k] -> [N senders, R, ..., k]``."""

  def send(part):
    received = collectives.all_to_all(
      jnp.moveaxis(part, -2, 1), axis, split_dim=0, concat_dim=0
    )
    return jnp.moveaxis(received, 1, 0)

  return Encoded(*map(send, encoded))


def _rows(x: jax.Array, axis: Axis, wire: Wire, block_dims: int) -> jax.Array:
  """``[R, *B, ...] -> [R, *B, n]``, float32.

  Where all are sent to all and the last dim is whole blocks, ``[R, *B, m, n]``
  of the same blocks, which on TPUs is no copy.
  """
  assert x.shape[0] == axis.lanes, (x.shape, str(axis))
  assert 0 <= block_dims < x.ndim, (x.shape, block_dims)
  lead, rest = x.shape[: 1 + block_dims], x.shape[1 + block_dims :]
  whole = wire.route == "all_gather" and rest and rest[-1] % wire.block == 0
  last = (-1, rest[-1]) if whole else (math.prod(rest),)
  return x.astype(jnp.float32).reshape(*lead, *last)


def _slice(n: int, axis: Axis, codec: Codec) -> int:
  """Elements of a rank's slice in the all-to-all route: whole blocks."""
  return codec.padded(-(-n // axis.size))


def _pad(rows: jax.Array, n: int) -> jax.Array:
  widths = [(0, 0)] * (rows.ndim - 1) + [(0, n - rows.shape[-1])]
  return jnp.pad(rows, widths)
