"""Block codecs in one pass over memory, for GPUs, in Triton.

A program holds a tile of whole blocks in registers. For a 4-bit codec these are
two arrays, the lower and the upper halves of the blocks, since element i shares
a byte with element i + block / 2 and Triton cannot slice arrays in registers.
Arithmetic and random numbers are the functions of ``reference.py`` and
``threefry.py``, called on tiles. Decoded values exist in registers only.

``add_norm/gpu.py`` gives the reason for Triton instead of Mosaic GPU. Triton's
division is not correctly rounded, so that a scale may differ from the
reference's in its last place. The means of all workers remain equal: the scale
is sent, and every device decodes a block with the same scale.

Shape legend: M = encoded arrays (senders).
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.codec import threefry
from parallel.kernels.codec.reference import (
  Codec,
  Encoded,
  OuterOptions,
  codes_of,
  delta_with_residual,
  max_magnitude,
  nesterov_step,
  numbers_of,
  round_to_23_bits,
  scale_of,
  sender_factors,
  weighted,
)

# Elements per program: 16 per thread of 8 warps. Their int8 codes are one word
# of 16 bytes, the widest load of a thread.
_TILE = 4096
# Largest block: 16 elements per thread of 32 warps, the largest program.
_MAX_BLOCK = 16384
# Senders per iteration of the loop over senders.
_UNROLLED = 4


def refusal(codec: Codec, num_blocks: int, senders: int = 1) -> str | None:
  """Returns why operands are not supported, or None: `api.Kernels.refusal`."""
  if codec.name == "fp8":
    return "codec fp8: int8, int4 and e3m0 only"
  if codec.block > _MAX_BLOCK:
    return f"block={codec.block} > {_MAX_BLOCK}: it must fit the registers"
  if num_blocks < 1:
    return "no elements"
  # Offsets have 31 bits. Payloads have at most one byte per sender and element,
  # arrays of float32 have 4 bytes per element.
  if max(senders, 4) * num_blocks * codec.block >= 2**31:
    return f"{senders} x {num_blocks} blocks: offsets of 31 bits"
  return None


class _Tile:
  """Sizes of the tile of blocks of one program, and memory positions in it.

  Attributes:
    parts: Arrays per block: 2 for a 4-bit codec, which packs two elements into
      a byte, else 1.
    width: Elements of a part, equal to the payload bytes of a block.
    rows: Blocks of a program, a power of two as Triton requires.
    grid: Number of programs.
    num_blocks: Blocks of one array.
  """

  def __init__(self, codec: Codec, num_blocks: int) -> None:
    self.parts = 8 // codec.bits
    self.width = codec.block // self.parts
    rows = max(1, _TILE // pl.next_power_of_2(codec.block))
    self.rows = min(rows, pl.next_power_of_2(num_blocks))
    self.grid = (pl.cdiv(num_blocks, self.rows),)
    self.num_blocks = num_blocks

  def params(self, interpret: bool) -> dict[str, Any]:
    """Returns the keywords of a ``pallas_call`` over all tiles."""
    elements = self.rows * self.parts * pl.next_power_of_2(self.width)
    warps = max(1, elements // 512)  # at most 32: see `_MAX_BLOCK`
    return {
      "grid": self.grid,
      "compiler_params": pltriton.CompilerParams(num_warps=warps),
      "interpret": interpret,
    }

  def here(self) -> tuple[jax.Array, jax.Array]:
    """Returns this program's block numbers, and a mask of those that exist.

    Both are ``[rows, 1]``; numbers past the last block are masked.
    """
    block = pl.program_id(0) * self.rows + jnp.arange(self.rows)[:, None]
    return block, block < self.num_blocks

  def index(self, part: int = 0) -> tuple[tuple[Any, Any], jax.Array]:
    """Returns the positions of a part's elements, and a mask without padding.

    The bytes of the payload have the positions of part 0.

    Args:
      part: 0, or 1 for the upper halves of the blocks.

    Returns:
      The index of ``[rows, width]`` elements, padded to powers of two, in an
      array ``[num_blocks, block]``; and a mask of the same shape.
    """
    block, mask = self.here()
    element = jnp.arange(pl.next_power_of_2(self.width))[None]
    mask = mask & (element < self.width)
    return (block, element + part * self.width), mask


def _load(ref, index, mask):
  """Loads elements; zero where the mask is False."""
  return pltriton.load(ref.at[index], mask=mask, other=0)


def encode(
  operands: Sequence[jax.Array],
  feedback: bool,
  codec: Codec,
  key_data: jax.Array | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Encodes a difference plus a residual: `api.Kernels.encode`."""
  operands = [x.reshape(-1, codec.block) for x in operands]
  num_blocks = operands[0].shape[0]
  tile = _Tile(codec, num_blocks)
  shape = functools.partial(calls.output_type, like=operands[0])
  keys = () if key_data is None else (key_data,)
  payload, scales, *residual = pl.pallas_call(
    functools.partial(
      _encode, codec=codec, tile=tile, draws=bool(keys),
      num=len(operands), feedback=feedback,
    ),
    out_shape=[
      shape((num_blocks, codec.block * codec.bits // 8), jnp.uint8),
      shape((num_blocks,), jnp.float32),
      *([shape(operands[0].shape, jnp.float32)] if feedback else []),
    ],
    name="codec_encode",
    **tile.params(interpret),
  )(*keys, *operands)
  return payload, scales, residual[0] if residual else None


def _encode(*refs, codec, tile, draws, num, feedback):
  if draws:
    key_ref, *refs = refs
  operands, results = refs[:num], refs[num:]
  payload_ref, scale_ref, *residual_ref = results
  block, exists = tile.here()
  # Reads both halves first: the scale depends on the whole block.
  parts = []
  for part in range(tile.parts):
    where = tile.index(part)
    loaded = [_load(ref, *where) for ref in operands]
    parts.append(delta_with_residual(loaded, feedback))
  scale = scale_of(max_magnitude(*parts), codec)  # [rows, 1]
  pltriton.store(scale_ref.at[block], scale, mask=exists)
  packed = None
  for part, x in enumerate(parts):
    where, mask = tile.index(part)
    uniform = None
    if draws:
      # Position in the flattened array, as in the reference.
      number = (where[0] * codec.block + where[1]).astype(jnp.uint32)
      uniform = threefry.uniform(key_ref[0], key_ref[1], number)
    codes = codes_of(x, scale, codec, uniform)
    # The second part, the upper half of a block, is in the high half of bytes.
    packed = codes if packed is None else packed | (codes << 4)
    for ref in residual_ref:
      left = x - numbers_of(codes, codec) * scale
      pltriton.store(ref.at[where], left, mask=mask)
  where, mask = tile.index()
  pltriton.store(payload_ref.at[where], packed.astype(jnp.uint8), mask=mask)


def over_senders(
  encoded: Encoded,
  others: Sequence[jax.Array],
  codec: Codec,
  outer: OuterOptions | None,
  weights: jax.Array | None,
  divide: bool,
  interpret: bool,
) -> list[jax.Array]:
  """Averages or sums, or applies an outer step: `api.Kernels.over_senders`."""
  payload, scales = encoded
  senders, results = scales.shape[0], max(1, len(others))
  scales = scales.reshape(senders, -1)
  num_blocks = scales.shape[1]
  tile = _Tile(codec, num_blocks)
  numbers = sender_factors(senders, weights, divide)
  operands = calls.unify_varying_axes(
    numbers, payload.reshape(senders, num_blocks, -1), scales,
    *(x.reshape(num_blocks, codec.block) for x in others),
  )
  means = functools.partial(
    _means, codec=codec, tile=tile, use_weights=weights is not None
  )
  name, kernel = "codec_mean", _mean
  if outer is not None:
    name, kernel = "codec_nesterov", functools.partial(_nesterov, outer=outer)
  return pl.pallas_call(
    functools.partial(kernel, means=means),
    out_shape=[
      calls.output_type((num_blocks, codec.block), jnp.float32, operands[0])
    ] * results,
    name=name,
    **tile.params(interpret),
  )(*operands)


def _mean(number_ref, payload_ref, scale_ref, out_ref, *, means):
  for (where, mask), part in means(number_ref, payload_ref, scale_ref):
    pltriton.store(out_ref.at[where], part, mask=mask)


def _nesterov(
  number_ref, payload_ref, scale_ref, params_ref, momentum_ref, new_ref,
  new_momentum_ref, *, means, outer,
):
  for (where, mask), delta in means(number_ref, payload_ref, scale_ref):
    new, momentum = nesterov_step(
      delta, _load(params_ref, where, mask), _load(momentum_ref, where, mask),
      outer,
    )
    pltriton.store(new_ref.at[where], new, mask=mask)
    pltriton.store(new_momentum_ref.at[where], momentum, mask=mask)


def _means(number_ref, payload_ref, scale_ref, *, codec, tile, use_weights):
  """Returns ``((index, mask), mean)`` for each part (`_Tile.parts`) of a tile.

  Args:
    number_ref: Factors of each sender and of the sum, ``[M + 1]``.
    payload_ref: uint8 ``[M, blocks, bytes of a block]``.
    scale_ref: float32 ``[M, blocks]``.
    codec: The codec.
    tile: Blocks of this program.
    use_weights: Whether senders have factors other than 1.
  """
  block, exists = tile.here()
  (rows, columns), mask = tile.index()

  def add(sender, totals):
    codes = _load(payload_ref, (sender, rows, columns), mask)
    codes = codes.astype(jnp.int32)
    parts = (codes,) if tile.parts == 1 else (codes & 15, codes >> 4)
    # Loaded once per block, and broadcast over its elements in registers.
    scale = _load(scale_ref, (sender, block[:, 0]), exists[:, 0])[:, None]
    new = []
    for total, part in zip(totals, parts, strict=True):
      values = numbers_of(part, codec) * scale
      if use_weights:
        # Rounding to 23 bits prevents a fused multiply-add; see
        # ``reference.sum_of``.
        values = round_to_23_bits(weighted(values, number_ref[sender]))
      new.append(total + values)
    return tuple(new)

  def several(first, count, totals):
    for i in range(count):
      totals = add(first + i, totals)
    return totals

  senders = payload_ref.shape[0]
  zeros = jnp.zeros(mask.shape, jnp.float32)
  # Several senders per iteration, so that their loads overlap. They are added
  # in order, 0 to M - 1: the remainder of the division is first.
  rest = senders % _UNROLLED
  totals = several(0, rest, (zeros,) * tile.parts)
  totals = lax.fori_loop(
    0, senders // _UNROLLED,
    lambda turn, totals: several(rest + turn * _UNROLLED, _UNROLLED, totals),
    totals,
  )
  # number_ref[senders] is the factor of the sum.
  return [
    (tile.index(part), total * number_ref[senders])
    for part, total in enumerate(totals)
  ]
