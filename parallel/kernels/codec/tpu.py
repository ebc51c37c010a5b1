"""Block codecs in one pass over HBM, for TPUs.

A grid step has whole blocks in VMEM, 128 or a multiple at a time: their scales
then fill rows of lanes. The arithmetic is that of ``reference.py``, called here
on tiles, and so are the draws (``threefry.py``): kernels send the reference's
bits. Decoded values exist in VMEM only.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.codec import threefry
from parallel.kernels.codec.reference import (
  Codec,
  codes_of,
  difference,
  factors,
  largest_of,
  nesterov_step,
  numbers_of,
  scale_of,
  to_23_bits,
  weighted,
)

_LANES = 128

# Mosaic unrolls a grid step: more would only lengthen the program.
_MOST_GROUPS = 2


def refusal(codec: Codec, num_blocks: int, senders: int = 1) -> str | None:
  """Why the kernels do not take operands; None: they do."""
  if codec.name == "fp8":
    return "codec fp8: int8, int4 and e3m0 only"
  unit = _LANES * 8 // codec.bits
  if codec.block % unit:
    return f"block={codec.block}: a multiple of {unit} for {codec.bits} bits"
  if num_blocks < 1:
    return "no elements"
  if not _groups(codec, num_blocks, senders):
    return (
      f"{senders} x 128 blocks of {codec.block} do not fit "
      f"{calls.VMEM_BYTES >> 20} MB"
    )
  return None


def _groups(codec: Codec, num_blocks: int, senders: int = 1) -> int:
  """How many times 128 blocks a grid step takes."""
  # Six arrays of float32, twice each at worst, and every sender's codes.
  element_bytes = 48 + 2 * senders * codec.bits / 8
  group_bytes = int(_LANES * codec.block * element_bytes)
  fitting = min(
    calls.VMEM_BYTES // group_bytes, -(-num_blocks // _LANES), _MOST_GROUPS
  )
  return 1 << (fitting.bit_length() - 1) if fitting else 0


def _specs(codec: Codec, groups: int, senders: int | None = None):
  """Block specs of elements, payloads and scales."""
  rows = groups * _LANES
  num_bytes = codec.block * codec.bits // 8
  if senders is None:
    return (
      pl.BlockSpec((rows, codec.block), lambda i: (i, 0)),
      pl.BlockSpec((rows, num_bytes), lambda i: (i, 0)),
      pl.BlockSpec((None, groups, _LANES), lambda i: (i, 0, 0)),
    )
  return (
    pl.BlockSpec((rows, codec.block), lambda i: (i, 0)),
    pl.BlockSpec((senders, rows, num_bytes), lambda i: (0, i, 0)),
    pl.BlockSpec(
      (senders, None, groups, _LANES), lambda i: (0, i, 0, 0)
    ),
  )


def _steps(num_blocks: int, groups: int) -> int:
  """Grid steps; scales are ``[steps, groups, 128]``, the last ones nobody's."""
  return -(-num_blocks // (groups * _LANES))


def encode(
  operands: Sequence[jax.Array],
  feedback: bool,
  codec: Codec,
  key_data: jax.Array | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Encodes a sum of operands.

  Args:
    operands: ``[blocks, block]`` each: ``[x]``, or ``[anchor, params]`` for
      their difference; a residual after it.
    feedback: Whether there is a residual.
    codec: The codec.
    key_data: uint32 ``[2]``, of stochastic rounding.
    interpret: Run on any machine.

  Returns:
    uint8 payload ``[blocks, bytes]``, scales ``[blocks]``, and with a residual
    the new one.
  """
  num_blocks = operands[0].shape[0]
  groups = _groups(codec, num_blocks)
  elements, payload, scales = _specs(codec, groups)
  shape = functools.partial(calls.shaped, like=operands[0])
  num_bytes = codec.block * codec.bits // 8
  steps = _steps(num_blocks, groups)
  keys = () if key_data is None else (key_data,)
  out = pl.pallas_call(
    functools.partial(
      _encode, codec=codec, draws=bool(keys), num=len(operands),
      feedback=feedback,
    ),
    grid=(steps,),
    in_specs=[
      *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in keys),
      *(elements for _ in operands),
    ],
    out_specs=[payload, scales, *([elements] if feedback else [])],
    out_shape=[
      shape((num_blocks, num_bytes), jnp.uint8),
      shape((steps, groups, _LANES), jnp.float32),
      *([shape(operands[0].shape, jnp.float32)] if feedback else []),
    ],
    name="codec_encode",
    **calls.tpu_params(interpret, "parallel"),
  )(*keys, *operands)
  payload, scales, *residual = out
  scales = scales.reshape(-1)[:num_blocks]
  return payload, scales, residual[0] if residual else None


def _encode(*refs, codec, draws, num, feedback):
  if draws:
    key_ref, *refs = refs
  operands, results = refs[:num], refs[num:]
  payload_ref, scale_ref = results[:2]
  rows, block = operands[0].shape
  x = difference([ref[...] for ref in operands], feedback)
  x = x.reshape(*scale_ref.shape, block)
  scale = scale_of(largest_of(x), codec)
  scale_ref[...] = scale[..., 0]
  uniform = None
  if draws:
    first = pl.program_id(0) * rows * block
    number = first + (
      lax.broadcasted_iota(jnp.int32, (rows, block), 0) * block
      + lax.broadcasted_iota(jnp.int32, (rows, block), 1)
    )
    uniform = threefry.uniform(
      key_ref[0], key_ref[1], number.astype(jnp.uint32)
    ).reshape(x.shape)
  codes = codes_of(x, scale, codec, uniform)
  packed = codes
  if codec.bits == 4:
    packed = codes[..., : block // 2] | (codes[..., block // 2 :] << 4)
  payload_ref[...] = packed.reshape(rows, -1).astype(jnp.uint8)
  if feedback:
    left = x - numbers_of(codes, codec) * scale
    results[2][...] = left.reshape(rows, block)


def mean(
  payload: jax.Array,
  scales: jax.Array,
  codec: Codec,
  weights: jax.Array | None = None,
  divide: bool = True,
  interpret: bool = False,
) -> jax.Array:
  """The mean of M encoded vectors; see ``reference.mean``.

  Args:
    payload: uint8 ``[M, blocks, bytes]``.
    scales: ``[M, blocks]``.
    codec: The codec.
    weights: ``[M]``.
    divide: False: the sum.
    interpret: Run on any machine.

  Returns:
    float32 ``[blocks, block]``.
  """
  num_blocks = payload.shape[1]
  (out,) = _over_senders(
    functools.partial(_mean, codec=codec), payload, scales, (), codec,
    weights, [(num_blocks, codec.block)], "codec_mean", interpret, divide,
  )
  return out


def nesterov(
  payload: jax.Array,
  scales: jax.Array,
  params: jax.Array,
  momentum: jax.Array,
  codec: Codec,
  learning_rate: float,
  decay: float,
  weights: jax.Array | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """The outer update; see ``reference.nesterov``; arrays as for `mean`.

  Args:
    payload: uint8 ``[M, blocks, bytes]``.
    scales: ``[M, blocks]``.
    params: ``[blocks, block]``.
    momentum: ``[blocks, block]``.
    codec: The codec.
    learning_rate: Of the outer optimizer.
    decay: Of the momentum.
    weights: ``[M]``.
    interpret: Run on any machine.

  Returns:
    The new parameters and momentum.
  """
  kernel = functools.partial(
    _nesterov, codec=codec, learning_rate=learning_rate, decay=decay
  )
  new, momentum = _over_senders(
    kernel, payload, scales, (params, momentum), codec, weights,
    [params.shape] * 2, "codec_nesterov", interpret,
  )
  return new, momentum


def _over_senders(
  kernel: Any,
  payload: jax.Array,
  scales: jax.Array,
  others: tuple[jax.Array, ...],
  codec: Codec,
  weights: jax.Array | None,
  results: list[tuple[int, ...]],
  name: str,
  interpret: bool,
  divide: bool = True,
) -> list[jax.Array]:
  senders, num_blocks = scales.shape
  groups = _groups(codec, num_blocks, senders)
  elements, payloads, scale_spec = _specs(codec, groups, senders)
  steps = _steps(num_blocks, groups)
  padding = steps * groups * _LANES - num_blocks
  scales = jnp.pad(scales, ((0, 0), (0, padding)))
  scales = scales.reshape(senders, steps, groups, _LANES)
  numbers = factors(senders, weights, divide)
  operands = calls.same_axes(numbers, payload, scales, *others)
  return pl.pallas_call(
    functools.partial(kernel, use_weights=weights is not None),
    grid=(steps,),
    in_specs=[
      pl.BlockSpec(memory_space=pltpu.SMEM),
      payloads,
      scale_spec,
      *(elements for _ in others),
    ],
    out_specs=[elements for _ in results],
    out_shape=[
      calls.shaped(shape, jnp.float32, operands[0]) for shape in results
    ],
    name=name,
    **calls.tpu_params(interpret, "parallel"),
  )(*operands)


def _mean(number_ref, payload_ref, scale_ref, out_ref, *, codec, use_weights):
  for here, part in _means(
    number_ref, payload_ref, scale_ref, codec, use_weights
  ):
    out_ref[:, here] = part


def _nesterov(
  number_ref, payload_ref, scale_ref, params_ref, momentum_ref, new_ref,
  new_momentum_ref, *, codec, use_weights, learning_rate, decay,
):
  for here, delta in _means(
    number_ref, payload_ref, scale_ref, codec, use_weights
  ):
    new_ref[:, here], new_momentum_ref[:, here] = nesterov_step(
      delta, params_ref[:, here], momentum_ref[:, here], learning_rate, decay
    )


def _means(number_ref, payload_ref, scale_ref, codec, use_weights):
  """Channels of a block, and their means: one part, or two of 4 bits."""
  senders, rows, num_bytes = payload_ref.shape

  def add(sender, totals):
    codes = payload_ref[sender].astype(jnp.int32)
    parts = (codes,) if codec.bits == 8 else (codes & 15, codes >> 4)
    scale = scale_ref[sender][..., None]
    new = []
    for total, part in zip(totals, parts, strict=True):
      part = part.reshape(*scale.shape[:-1], num_bytes)
      values = numbers_of(part, codec) * scale
      if use_weights:
        values = to_23_bits(weighted(values, number_ref[sender]))
      new.append(total + values.reshape(rows, num_bytes))
    return tuple(new)

  zeros = jnp.zeros((rows, num_bytes), jnp.float32)
  totals = (zeros,) * (8 // codec.bits)
  totals = lax.fori_loop(0, senders, add, totals)
  return [
    (pl.ds(i * num_bytes, num_bytes), total * number_ref[senders])
    for i, total in enumerate(totals)
  ]
