"""Averages, over an axis, deltas that are sent with few bits.

Every logical rank of an `Axis` (a worker) has a delta of its own, lane-stacked
``[R, ...]``. The mean of all of them comes out without the lane dim, in float32
and bitwise equal on all devices, in one of three ways:

  all-reduce    Without a codec, float32 (or bfloat16) deltas are summed.
  all-gather    Each worker sends its encoded delta to all, and each device
                decodes all of them and sums. Every delta is rounded once. This
                is the form of Streaming DiLoCo, and the default.
  all-to-all    Worker m receives slice m of every delta, encoded, and sends
                the mean of these slices, encoded again, to all. There are two
                roundings, of which the paper has only the first; but a worker
                sends about 2 (N - 1) / N encoded deltas in place of N - 1.

Decoded deltas are summed one at a time, in the order of the workers 0 to N - 1.
So the result does not depend on how the workers are split into lanes and
devices. Payloads are uint8 and scales float32 on the wire, with one collective
for each.

Source: Streaming DiLoCo, arXiv 2501.18512, section 2.3. Weights other than
1 / N and error feedback (SparseLoCo, arXiv 2508.15706; MuLoCo, arXiv
2505.23725) are additions.

Shape legend: R = lanes on this device; N = logical ranks of the axis; B =
dims that blocks do not cross; n = elements of the rest; s = elements of a
slice, whole blocks.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

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


class _Call(NamedTuple):
  """Arguments that all steps of a coded mean share; see `coded_mean`."""

  axis: Axis
  codec: Codec
  weights: jax.Array | None
  key: jax.Array | None
  implementation: Implementation


def coded_mean(
  x: jax.Array,
  axis: Axis,
  wire: Wire = FLOAT32,
  *,
  anchor: jax.Array | None = None,
  residual: jax.Array | None = None,
  weights: jax.Array | None = None,
  key: jax.Array | None = None,
  block_dims: int = 0,
  use: Use = MEAN_ITSELF,
) -> tuple[Any, jax.Array | None]:
  """Averages deltas over all ranks of an axis, as they are after coding.

  The delta of a rank is x, or ``anchor - x + residual``, which kernels compute
  while encoding.

  Args:
    x: One array per lane, ``[R, *B, ...]`` float32, inside ``jax.shard_map``.
      It may also vary over other mesh axes.
    axis: The axis to average over.
    wire: The codec, and how coded deltas travel.
    anchor: ``[*B, ...]``, the same for all ranks, from which x is subtracted;
      None if x are the deltas themselves.
    residual: ``[R, *B, ...]`` float32, what the last rounding took from each
      delta; None for no error feedback.
    weights: ``[N]`` float32, not negative, the same on all devices; None for
      equal weights. The mean is ``sum(w_m x_m) / sum(w_m)``. A rank of weight
      zero contributes nothing, even if its delta is NaN. If all weights are
      zero, the mean is NaN.
    key: The random key of stochastic rounding, of both roundings where there
      are two. It is the same on all devices of the axis, and ranks derive keys
      of their own from it. Fold the number of the round into it, and the rank
      along other axes if deltas there should round independently.
    block_dims: Number of dims after R that no block crosses. If these dims hold
      the lanes of other axes, the result does not depend on how the ranks of
      those axes are split into lanes and devices either.
    use: Operation on the mean where it is decoded.

  Returns:
    The mean, ``[*B, ...]`` float32, replicated over the axis by type and
    bitwise equal on its devices, or what the use makes of it; and the new
    residual, which is each delta less what `roundtrip` makes of it. It is None
    if there was none before.

  Raises:
    ValueError: Stochastic rounding without a key.
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
  if anchor is not None:  # every lane subtracts from it
    anchor = jnp.broadcast_to(anchor, x.shape)
  rows = jax.tree.map(
    lambda x: _rows(x, axis, wire, block_dims), (anchor, x, residual)
  )
  call = _Call(axis, codec, weights, key, wire.implementation)
  # Only an all-gather ends in a decoding that makes the mean; an all-to-all's
  # last pass decodes means of others.
  if wire.route == "all_to_all":
    total, left = _mean_by_all_to_all(rows, call)
    result = use.of_mean(total.reshape(x.shape[1:]))
  else:
    result, left = _mean_by_all_gather(rows, call, use)
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
  """Rounds each lane's delta to what the other ranks receive in `coded_mean`.

  Only the first rounding is a worker's own. The second one of the all-to-all
  route is of a mean, and those of a bfloat16 sum are of partial sums.

  Args:
    x: One delta per lane, ``[R, *B, ...]`` float32.
    axis: The axis to average over.
    wire: The codec, and how coded deltas travel.
    key: The random key that `coded_mean` is given.
    block_dims: Number of dims after R that no block crosses.

  Returns:
    float32 of the shape of x; without a codec, in float32, x itself.
  """
  codec = wire.block_codec
  if codec is None:
    return x.astype(wire.dtype).astype(jnp.float32)
  rows = _rows(x, axis, wire, block_dims)
  n = rows.shape[-1]
  if wire.route == "all_to_all":  # its blocks end with slices
    rows = _pad(rows, axis.size * _slice(n, axis, codec))
  call = _Call(axis, codec, None, key, wire.implementation)
  encoded, _ = _encode_lanes((None, rows, None), call)
  return reference.decode(encoded, n, codec).reshape(x.shape)


def mean_of_encoded(
  encoded: Any,
  axis: Axis,
  decode: Callable[[Any], jax.Array],
  weights: jax.Array | None = None,
) -> jax.Array:
  """Averages deltas that are encoded in any way, by sending each to all.

  Args:
    encoded: A tuple of arrays ``[R, ...]``, each of which takes an all-gather.
    axis: The axis to average over.
    decode: Maps one rank's arrays ``[...]`` to its delta, float32.
    weights: ``[N]`` float32, as `coded_mean` takes them.

  Returns:
    The mean of the decoded deltas, bitwise equal on all devices of the axis.
  """
  return reference.mean_of(_gathered(encoded, axis), decode, weights)


def reduce_scatter(
  x: jax.Array,
  axis: Axis,
  codec: Codec,
  implementation: Implementation = "reference",
) -> jax.Array:
  """Reduce-scatters encoded summands along the last dim.

  There is one all-to-all of payloads and one of scales. Each rank decodes what
  it receives and adds in float32, so every summand is rounded once.

  Source: qgZ of ZeRO++, arXiv 2306.10209.

  Args:
    x: ``[R, ..., N * k]``, one summand per lane.
    axis: The axis to reduce over.
    codec: The codec of the summands, which pads slices to whole blocks.
    implementation: Implementations of the codec in order of preference.

  Returns:
    Each rank's slice of the sum, float32 ``[R, ..., k]``.
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
  """Returns the operand bytes of one `coded_mean`, per device, as in ledgers.

  A device sends the payloads and scales of all its lanes. An all-gather sends
  its operand to N - 1 others, an all-to-all a share of it to each.

  Args:
    num_elements: Elements of a row of one rank's delta on one device.
    axis: The axis to average over.
    wire: The codec, and how coded deltas travel.
    rows: Number of rows, the product of the dims that no block crosses.

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
    elements = (axis.size + 1) * s  # a slice for each rank, and its own mean
  units = axis.lanes * rows
  return {
    "uint8": units * codec.payload_bytes(elements),
    "float32": units * codec.num_scales(elements) * 4,
  }


def _mean_by_all_reduce(
  x: jax.Array, axis: Axis, dtype: str, weights: jax.Array | None
) -> jax.Array:
  """Averages ``[R, ...]`` to ``[...]`` by an all-reduce in ``dtype``."""
  x = x.astype(jnp.float32)
  divisor: jax.Array | float = float(axis.size)
  if weights is not None:
    # This device's lanes are neighbours among the ranks: weights [R].
    mine = lax.dynamic_slice_in_dim(
      varying(weights, axis.name), ranks_here(axis)[0], axis.lanes
    )
    x = jax.vmap(reference.weighted)(x, mine)
    divisor = reference.sum_in_order(weights)
  total = collectives.all_reduce(x.astype(dtype), axis)
  # A product and not a quotient, as in `reference.mean_of`.
  return total.astype(jnp.float32) * (1.0 / divisor)


# The anchor or None, the ranks' arrays, and the residual or None, each laid out
# by `_rows`: ``[R, *B, ..., n]``.
_Rows = tuple[jax.Array | None, jax.Array, jax.Array | None]


def _mean_by_all_gather(
  rows: _Rows, call: _Call, use: Use
) -> tuple[Any, jax.Array | None]:
  """Averages rows that each rank sends to all.

  Beside the rows themselves, memory holds all N encoded ones and one decoded.

  Returns:
    What the use makes of the mean, without R; and the new residual as rows, or
    None.
  """
  encoded, left = _encode_lanes(rows, call)
  result = use.of_encoded(
    _gathered(encoded, call.axis), rows[1].shape[1:], call.codec, call.weights,
    call.implementation,
  )
  return result, left


def _mean_by_all_to_all(
  rows: _Rows, call: _Call
) -> tuple[jax.Array, jax.Array | None]:
  """Averages rows of which each rank collects and averages a slice.

  Returns:
    The mean as rows without R, and the new residual as rows, or None.
  """
  axis, codec = call.axis, call.codec
  *lead, n = rows[1].shape
  dims, s = len(lead) - 1, _slice(n, axis, codec)
  # [R, *B, n] -> [R, *B, N slices, s], each of whole blocks.
  slices = jax.tree.map(
    lambda x: _pad(x, axis.size * s).reshape(*lead, axis.size, s), rows
  )
  encoded, left = _encode_lanes(slices, call)
  mine = api.mean(
    _deliver(encoded, axis), s, codec, call.weights,
    implementation=call.implementation,
  )  # [R, *B, s]
  # The means are rounded by other random numbers (draw=1) than the deltas.
  again, _ = _encode_lanes((None, mine, None), call, draw=1)
  everyones = Encoded(
    *(collectives.all_gather(part, axis, dim=dims) for part in again)
  )
  if left is not None:
    left = left.reshape(*lead, axis.size * s)[..., :n]
  return reference.decode(everyones, n, codec), left


def _encode_lanes(
  rows: _Rows, call: _Call, draw: int = 0
) -> tuple[Encoded, jax.Array | None]:
  """Encodes the lanes' differences; returns them and the new residual, if any.

  Args:
    rows: What `_Rows` says.
    call: Arguments of the exchange; its key is None if nothing is drawn.
    draw: Which of the exchange's roundings this is, 0 or 1.
  """
  axis, codec, _, key, implementation = call

  def encode(rows, key=None):
    anchor, x, residual = rows
    return api.encode_delta(
      anchor, x, codec, key, residual, implementation=implementation
    )

  if not codec.stochastic or key is None:
    return encode(rows)
  # The number of the rank decides its key, wherever the rank lives: so what is
  # drawn does not depend on lanes and devices.
  key = jax.random.fold_in(key, draw)
  keys = jax.vmap(lambda rank: jax.random.fold_in(key, rank))(ranks_here(axis))
  return collectives.each_lane(encode, axis, rows, keys)


def _gathered(encoded: Any, axis: Axis) -> Any:
  """Gathers a tuple of ``[R, ...]`` to ``[N, ...]``, one all-gather each."""
  return type(encoded)(
    *(collectives.all_gather(part[:, None], axis) for part in encoded)
  )


def _deliver(encoded: Encoded, axis: Axis) -> Encoded:
  """Sends ``[R, ..., N receivers, k]``; returns ``[N senders, R, ..., k]``."""

  def send(part):
    # [R, N, ..., k]: the all-to-all turns the receivers' dim into the senders'.
    received = collectives.all_to_all(
      jnp.moveaxis(part, -2, 1), axis, split_dim=0, concat_dim=0
    )
    return jnp.moveaxis(received, 1, 0)

  return Encoded(*map(send, encoded))


def _rows(x: jax.Array, axis: Axis, wire: Wire, block_dims: int) -> jax.Array:
  """Lays ``[R, *B, ...]`` out as float32 rows ``[R, *B, n]`` of whole blocks.

  If all is sent to all and the last dim consists of whole blocks, the result is
  ``[R, *B, m, n]`` with n the last dim. It has the same blocks, and on TPUs it
  is no copy: joining the two minor dims would change the layout in tiles.
  """
  assert x.shape[0] == axis.lanes, (x.shape, str(axis))
  assert 0 <= block_dims < x.ndim, (x.shape, block_dims)
  lead, rest = x.shape[: 1 + block_dims], x.shape[1 + block_dims :]
  whole = wire.route == "all_gather" and rest and rest[-1] % wire.block == 0
  last = (-1, rest[-1]) if whole else (math.prod(rest),)
  return x.astype(jnp.float32).reshape(*lead, *last)


def _slice(n: int, axis: Axis, codec: Codec) -> int:
  """Returns the size of each rank's slice of n elements, in whole blocks."""
  return codec.padded(-(-n // axis.size))


def _pad(rows: jax.Array, n: int) -> jax.Array:
  """Pads the last dim with zeros at its end to n elements."""
  widths = [(0, 0)] * (rows.ndim - 1) + [(0, n - rows.shape[-1])]
  return jnp.pad(rows, widths)
