"""Mean of deltas over the ranks of an axis, sent with few bits per element.

A delta is an array to average, such as a worker's change of the parameters.
Every logical rank of an `Axis` (a worker) has one; the deltas of a device's
ranks (lanes) are stacked, ``[R, ...]``. The mean over all ranks is float32
``[...]``, bitwise equal on all devices. There are three algorithms
(`Wire.route`):

  all-reduce    Without a codec, float32 (or bfloat16) deltas are summed.
  all-gather    Each worker sends its encoded delta to all others, and each
                device decodes and sums all of them. Every delta is rounded
                once. Streaming DiLoCo does this; it is the default.
  all-to-all    Worker m receives slice m of every delta, encoded, and sends the
                mean of these slices, encoded again, to all others. Values are
                rounded twice (in the paper only once); a worker sends about
                2 (N - 1) / N encoded deltas instead of N - 1.

Decoded deltas are summed one at a time, in the order of the workers 0 to N - 1,
so that the result does not depend on the split of the workers into lanes and
devices. Payloads are sent as uint8 and scales as float32, with one collective
each.

Source: Streaming DiLoCo, arXiv 2501.18512, section 2.3. It has neither weights
other than 1 / N nor error feedback (SparseLoCo, arXiv 2508.15706; MuLoCo, arXiv
2505.23725).

Shape legend: R = lanes (ranks) on this device; N = logical ranks of the axis; B
= dims that codec blocks do not cross; n = product of the other dims; s =
elements of a slice, a multiple of the block.
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
from parallel.wire import FLOAT32, IDENTITY, Epilogue, Wire


class _MeanArguments(NamedTuple):
  """Arguments of `coded_mean` (``codec`` of its wire) that its steps share."""

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
  epilogue: Epilogue = IDENTITY,
) -> tuple[Any, jax.Array | None]:
  """Averages encoded deltas over all ranks of an axis.

  The delta of a rank is x if there is no anchor, else ``anchor - x``, plus the
  residual if there is one. Kernels compute the delta while encoding.

  Args:
    x: One array for each of the R ranks (lanes) on this device, ``[R, *B,
      ...]`` float32, inside ``jax.shard_map``; B are the dims of
      ``block_dims``. It may vary over other mesh axes, too.
    axis: Axis to average over.
    wire: Codec of the deltas, and the collective that averages them.
    anchor: ``[*B, ...]``, equal on all ranks, from which x is subtracted; None
      if x are the deltas.
    residual: ``[R, *B, ...]`` float32, rounding error of each rank's previous
      delta (error feedback); None for no error feedback.
    weights: ``[N]`` for N ranks, float32, not negative, equal on all devices;
      None for equal weights. The mean is ``sum(w_m x_m) / sum(w_m)``. A rank
      with weight zero contributes nothing, even if its delta is NaN. If all
      weights are zero, the mean is NaN.
    key: Random key of stochastic rounding, from which each rank's keys are
      derived; equal on all devices of the axis. Fold in the number of the
      round, and the rank along other axes if deltas on those ranks should round
      independently.
    block_dims: Number of dims after R that no codec block crosses. If these
      dims hold ranks of other axes, the result does not depend on the number of
      devices of those axes either.
    epilogue: Operation applied to the mean where it is decoded.

  Returns:
    The mean, ``[*B, ...]`` float32, replicated over the axis by type and
    bitwise equal on its devices, or the result of ``epilogue``; and the new
    residual, ``delta - roundtrip(delta)``, None if ``residual`` is None.

  Raises:
    ValueError: The codec rounds stochastically, and ``key`` is None.

  Example:
    >>> from jax.sharding import PartitionSpec as P
    >>> from parallel.axes import make_mesh
    >>> workers = Axis("worker", size=2)  # 2 lanes on one device
    >>> mean = jax.jit(jax.shard_map(
    ...   lambda x: coded_mean(x, workers, Wire("int8", block=4))[0],
    ...   mesh=make_mesh({"worker": workers}), in_specs=P("worker"),
    ...   out_specs=P(),
    ... ))
    >>> x = np.float32([[127.0, 0.0, 2.0, 4.4], [127.0, 2.0, 4.0, 6.4]])
    >>> mean(x).tolist()  # scale 1: rounded to integers, then averaged
    [127.0, 1.0, 3.0, 5.0]
  """
  codec = wire.block_codec
  if codec is None:
    left = None
    delta = x if anchor is None else anchor[None] - x
    if residual is not None:
      delta = delta + residual
      left = delta - roundtrip(delta, axis, wire)
    total = _mean_by_all_reduce(delta, axis, wire.dtype, weights)
    return epilogue.of_mean(total), left
  if anchor is not None:  # one copy per lane: [R, *B, ...]
    anchor = jnp.broadcast_to(anchor, x.shape)
  rows = jax.tree.map(
    lambda x: _to_rows(x, axis, wire, block_dims), (anchor, x, residual)
  )
  call = _MeanArguments(axis, codec, weights, key, wire.implementation)
  # With an all-gather, the last decoding pass computes the mean and may include
  # the epilogue. After an all-to-all, finished means are decoded.
  if wire.route == "all_to_all":
    total, left = _mean_by_all_to_all(rows, call)
    result = epilogue.of_mean(total.reshape(x.shape[1:]))
  else:
    result, left = _mean_by_all_gather(rows, call, epilogue)
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
) -> jax.Array:
  """Encodes and decodes each rank's delta, as the ranks of `coded_mean` do.

  Only the first rounding is included, that of a single worker's delta: the
  second rounding with an all-to-all applies to a mean, and the further
  roundings of a bfloat16 all-reduce apply to partial sums.

  Args:
    x: One delta for each of the R ranks (lanes) on this device, ``[R, ...]``
      float32, encoded as for block_dims=0.
    axis: Axis whose ranks have the deltas.
    wire: Codec of the deltas, and the collective that averages them.
    key: Random key, as passed to `coded_mean`.

  Returns:
    float32 of the shape of x; equal to x for codec "none" in float32.
  """
  codec = wire.block_codec
  if codec is None:
    return x.astype(wire.dtype).astype(jnp.float32)
  rows = _to_rows(x, axis, wire, 0)
  n = rows.shape[-1]
  if wire.route == "all_to_all":  # no block crosses a slice boundary
    rows = _pad(rows, axis.size * _slice_size(n, axis, codec))
  call = _MeanArguments(axis, codec, None, key, wire.implementation)
  encoded, _ = _encode_lanes((None, rows, None), call)
  return reference.decode(encoded, n, codec).reshape(x.shape)


def mean_of_encoded(
  encoded: Any,
  axis: Axis,
  decode: Callable[[Any], jax.Array],
  weights: jax.Array | None = None,
) -> jax.Array:
  """Averages deltas in an arbitrary encoding, by an all-gather.

  Args:
    encoded: A tuple of arrays ``[R, ...]`` of the R ranks on this device; one
      all-gather per array.
    axis: Axis to average over.
    decode: Function from one rank's arrays ``[...]`` to its float32 delta.
    weights: ``[N]`` float32, as in `coded_mean`.

  Returns:
    The mean of the decoded deltas, bitwise equal on all devices of the axis.
  """
  return reference.mean_of(_all_gather_each(encoded, axis), decode, weights)


def reduce_scatter(
  x: jax.Array,
  axis: Axis,
  codec: Codec,
  implementation: Implementation = "reference",
) -> jax.Array:
  """Reduce-scatters encoded summands along the last dim.

  There is one all-to-all of payloads and one of scales. Each rank decodes the
  received slices and adds them in float32, so that every summand is rounded
  once.

  Source: qgZ of ZeRO++, arXiv 2306.10209.

  Args:
    x: ``[R, ..., N * k]``, one summand for each of the R ranks (lanes) on this
      device; N is the number of all ranks.
    axis: Axis to reduce over.
    codec: Codec of the summands; it pads slices to whole blocks.
    implementation: Implementations of the codec in order of preference.

  Returns:
    Each rank's slice of the sum, float32 ``[R, ..., k]``.
  """
  if axis.size == 1:  # one rank sends nothing, so nothing is rounded
    return x.astype(jnp.float32)
  slices = x.reshape(*x.shape[:-1], axis.size, -1)
  encoded = api.encode(slices, codec, implementation=implementation)
  return api.total(
    _exchange_slices(encoded, axis), slices.shape[-1], codec,
    implementation=implementation,
  )


def sent_bytes(
  num_elements: int, axis: Axis, wire: Wire, rows: int = 1
) -> dict[str, int]:
  """Returns the operand bytes of the collectives of one `coded_mean`.

  `parallel.ledger` counts the same bytes: payloads and scales of all ranks of
  one device. An all-gather sends this whole operand to each other device, an
  all-to-all sends one slice of it to each.

  Args:
    num_elements: Elements per row of one rank's delta on one device. No codec
      block spans two rows.
    axis: Axis to average over.
    wire: Codec of the deltas, and the collective that averages them.
    rows: Number of rows: the product of the dims that no block crosses.

  Returns:
    Bytes by dtype on the wire; empty if one device hosts all ranks.

  Example:
    >>> workers = Axis("worker", size=4, devices=4)
    >>> sent_bytes(1024, workers, Wire())
    {'float32': 4096}
    >>> sent_bytes(1024, workers, Wire("int4", block=256))
    {'uint8': 512, 'float32': 16}
  """
  if axis.devices == 1:
    return {}
  codec = wire.block_codec
  if codec is None:
    size = np.dtype(jnp.dtype(wire.dtype)).itemsize
    return {wire.dtype: rows * num_elements * size}
  elements = num_elements
  if wire.route == "all_to_all":
    s = _slice_size(num_elements, axis, codec)
    elements = (axis.size + 1) * s  # N slices of the delta and one of the mean
  units = axis.lanes * rows
  return {
    "uint8": units * codec.payload_bytes(elements),
    "float32": units * codec.num_scales(elements) * 4,
  }


def _mean_by_all_reduce(
  x: jax.Array, axis: Axis, dtype: str, weights: jax.Array | None
) -> jax.Array:
  """Averages x over all ranks by an all-reduce in ``dtype``, to ``[...]``.

  x is ``[R, ...]`` for the R ranks on this device; ``weights`` are those of
  `coded_mean`.
  """
  x = x.astype(jnp.float32)
  divisor: jax.Array | float = float(axis.size)
  if weights is not None:
    # The lanes of this device are consecutive ranks: weights [R].
    mine = lax.dynamic_slice_in_dim(
      varying(weights, axis.name), ranks_here(axis)[0], axis.lanes
    )
    x = jax.vmap(reference.weighted)(x, mine)
    divisor = reference.sum_in_order(weights)
  total = collectives.all_reduce(x.astype(dtype), axis)
  # Multiplies by the reciprocal, for the same rounding as `reference.mean_of`.
  return total.astype(jnp.float32) * (1.0 / divisor)


# (anchor or None, x, residual or None) of `coded_mean`, each reshaped by
# `_to_rows` to ``[R, *B, ..., n]``.
_Rows = tuple[jax.Array | None, jax.Array, jax.Array | None]


def _mean_by_all_gather(
  rows: _Rows, call: _MeanArguments, epilogue: Epilogue
) -> tuple[Any, jax.Array | None]:
  """Averages deltas, reshaped to ``rows``, by an all-gather of encoded ones.

  ``call`` are arguments of `coded_mean`. In addition to the rows, memory holds
  the encoded rows of all N ranks and the decoded rows of one rank.

  Returns:
    The result of ``epilogue`` on the mean, without the dim of ranks; and the
    new residual as rows, or None.
  """
  encoded, left = _encode_lanes(rows, call)
  result = epilogue.of_encoded(
    _all_gather_each(encoded, call.axis), rows[1].shape[1:], call.codec,
    call.weights, call.implementation,
  )
  return result, left


def _mean_by_all_to_all(
  rows: _Rows, call: _MeanArguments
) -> tuple[jax.Array, jax.Array | None]:
  """Averages deltas by an all-to-all of slices and an all-gather of means.

  The deltas are reshaped to ``rows``; ``call`` are arguments of `coded_mean`.

  Returns:
    The mean as rows without the dim of ranks, and the new residual as rows, or
    None.
  """
  axis, codec = call.axis, call.codec
  *lead, n = rows[1].shape
  dims, s = len(lead) - 1, _slice_size(n, axis, codec)
  # [R, *B, n] -> [R, *B, N slices, s], each of whole blocks.
  slices = jax.tree.map(
    lambda x: _pad(x, axis.size * s).reshape(*lead, axis.size, s), rows
  )
  encoded, left = _encode_lanes(slices, call)
  mine = api.mean(
    _exchange_slices(encoded, axis), s, codec, call.weights,
    implementation=call.implementation,
  )  # [R, *B, s]
  # draw=1: the means use other random numbers than the deltas.
  again, _ = _encode_lanes((None, mine, None), call, draw=1)
  everyones = Encoded(
    *(collectives.all_gather(part, axis, dim=dims) for part in again)
  )
  if left is not None:
    left = left.reshape(*lead, axis.size * s)[..., :n]
  return reference.decode(everyones, n, codec), left


def _encode_lanes(
  rows: _Rows, call: _MeanArguments, draw: int = 0
) -> tuple[Encoded, jax.Array | None]:
  """Encodes the deltas of this device's ranks; returns codes and residual.

  The residual is None without one in ``rows``. ``call`` are arguments of
  `coded_mean`. ``draw`` is 0 for its first rounding, 1 for the second.
  """
  axis, codec, _, key, implementation = call

  def encode(rows, key=None):
    anchor, x, residual = rows
    return api.encode_delta(
      anchor, x, codec, key, residual, implementation=implementation
    )

  if not codec.stochastic or key is None:
    return encode(rows)
  # The key depends on the rank's number only, so that the random numbers do not
  # depend on the split into lanes and devices.
  key = jax.random.fold_in(key, draw)
  keys = jax.vmap(lambda rank: jax.random.fold_in(key, rank))(ranks_here(axis))
  return collectives.each_lane(encode, axis, rows, keys)


def _all_gather_each(encoded: Any, axis: Axis) -> Any:
  """All-gathers each array of a tuple, one collective per array.

  Arrays of this device's R ranks, ``[R, ...]``, become arrays of all N ranks.
  """
  return type(encoded)(
    *(collectives.all_gather(part[:, None], axis) for part in encoded)
  )


def _exchange_slices(encoded: Encoded, axis: Axis) -> Encoded:
  """Sends slice i of the arrays of each of this device's R ranks to rank i.

  Arrays ``[R, ..., N receivers, k]`` become ``[N senders, R, ..., k]``.
  """

  def send(part):
    # [R, N, ..., k]: the all-to-all replaces receivers by senders.
    received = collectives.all_to_all(
      jnp.moveaxis(part, -2, 1), axis, split_dim=0, concat_dim=0
    )
    return jnp.moveaxis(received, 1, 0)

  return Encoded(*map(send, encoded))


def _to_rows(
  x: jax.Array, axis: Axis, wire: Wire, block_dims: int
) -> jax.Array:
  """Joins the dims of x ``[R, *B, ...]`` after the ``block_dims`` dims B.

  The result is float32 ``[R, *B, n]`` for the R ranks on this device.

  For an all-gather, if the last dim n is a multiple of the block, the
  result is ``[R, *B, m, n]``, where m joins the dims between. The blocks are
  the same, and TPUs need no copy: joining m and n would change the tiling.
  """
  assert x.shape[0] == axis.lanes, (x.shape, str(axis))
  assert 0 <= block_dims < x.ndim, (x.shape, block_dims)
  lead, rest = x.shape[: 1 + block_dims], x.shape[1 + block_dims :]
  whole = wire.route == "all_gather" and rest and rest[-1] % wire.block == 0
  last = (-1, rest[-1]) if whole else (math.prod(rest),)
  return x.astype(jnp.float32).reshape(*lead, *last)


def _slice_size(n: int, axis: Axis, codec: Codec) -> int:
  """Returns the size of a rank's slice of n elements, in whole blocks."""
  return codec.padded(-(-n // axis.size))


def _pad(rows: jax.Array, n: int) -> jax.Array:
  """Pads the last dim with trailing zeros to n elements."""
  widths = [(0, 0)] * (rows.ndim - 1) + [(0, n - rows.shape[-1])]
  return jnp.pad(rows, widths)
