"""Block codecs in one pass over memory, for GPUs, in Triton.

A program has a tile of whole blocks in registers. For a 4-bit codec these are
two arrays, the lower and the upper halves of the blocks, since element i shares
a byte with element i + block / 2 and Triton cannot slice arrays in registers.
The arithmetic is that of ``reference.py`` and the draws are those of
``threefry.py``, called here on tiles. Decoded values exist in registers only.

The kernels are in Triton and not in Mosaic GPU for the reason that
``add_norm/gpu.py`` gives. Triton's division is not correctly rounded, so on a
GPU a scale may differ from the reference's in its last place. This is safe: the
scale is sent, and all who decode a block use the same one.

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
  OuterStep,
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

# Elements of a program: 16 for each thread of 8 warps. Their int8 codes are one
# word of 16 bytes, the widest that a thread can read.
_TILE = 4096
# The largest block: 16 elements for each thread of 32 warps, which is the
# largest program.
_MAX_BLOCK = 16384
# Senders that are read in one turn of the loop over them.
_UNROLLED = 4


def refusal(codec: Codec, num_blocks: int, senders: int = 1) -> str | None:
  """Returns why the kernels do not take operands: `api.Kernels.refusal`."""
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
  """Which blocks a program has, and where their parts are in memory.

  Attributes:
    parts: Arrays that a block is held in: 2 for a 4-bit codec, which packs two
      elements into a byte, else 1.
    width: Elements of a part, which are also the bytes of a block's payload.
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
    warps = min(32, max(1, elements // 512))
    return {
      "grid": self.grid,
      "compiler_params": pltriton.CompilerParams(num_warps=warps),
      "interpret": interpret,
    }

  def here(self) -> tuple[jax.Array, jax.Array]:
    """Returns this program's blocks ``[rows, 1]``, and which of them exist."""
    block = pl.program_id(0) * self.rows + jnp.arange(self.rows)[:, None]
    return block, block < self.num_blocks

  def index(self, part: int = 0) -> tuple[tuple[Any, Any], jax.Array]:
    """Returns where a part's elements are, and which of them exist.

    Part 0 also says where the payload's bytes are.

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
  """Reads elements; zero where the mask is not set."""
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
  shape = functools.partial(calls.shaped, like=operands[0])
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
  # Both halves are read before anything is written: the scale is that of the
  # whole block.
  parts = []
  for part in range(tile.parts):
    where = tile.index(part)
    loaded = [_load(ref, *where) for ref in operands]
    parts.append(difference(loaded, feedback))
  scale = scale_of(largest_of(*parts), codec)  # [rows, 1]
  pltriton.store(scale_ref.at[block], scale, mask=exists)
  packed = None
  for part, x in enumerate(parts):
    where, mask = tile.index(part)
    uniform = None
    if draws:
      # The element's position in the flattened array, as the reference draws.
      number = (where[0] * codec.block + where[1]).astype(jnp.uint32)
      uniform = threefry.uniform(key_ref[0], key_ref[1], number)
    codes = codes_of(x, scale, codec, uniform)
    # The second part, the upper half of a block, goes to the bytes' high half.
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
  outer: OuterStep | None,
  weights: jax.Array | None,
  divide: bool,
  interpret: bool,
) -> list[jax.Array]:
  """Averages, or takes an outer step: `api.Kernels.over_senders`."""
  payload, scales = encoded
  senders, results = scales.shape[0], max(1, len(others))
  scales = scales.reshape(senders, -1)
  num_blocks = scales.shape[1]
  tile = _Tile(codec, num_blocks)
  numbers = factors(senders, weights, divide)
  operands = calls.same_axes(
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
      calls.shaped((num_blocks, codec.block), jnp.float32, operands[0])
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
  """Returns one ``((index, mask), mean)`` for each part of a tile.

  Args:
    number_ref: The factors of each sender and of the sum, ``[M + 1]``.
    payload_ref: uint8 ``[M, blocks, bytes of a block]``.
    scale_ref: float32 ``[M, blocks]``.
    codec: The codec.
    tile: Which blocks this program has.
    use_weights: Whether senders have factors other than 1.
  """
  block, exists = tile.here()
  (rows, columns), mask = tile.index()

  def add(sender, totals):
    codes = _load(payload_ref, (sender, rows, columns), mask)
    codes = codes.astype(jnp.int32)
    parts = (codes,) if tile.parts == 1 else (codes & 15, codes >> 4)
    # Read once per block, and spread over its elements in registers.
    scale = _load(scale_ref, (sender, block[:, 0]), exists[:, 0])[:, None]
    new = []
    for total, part in zip(totals, parts, strict=True):
      values = numbers_of(part, codec) * scale
      if use_weights:
        # Rounded to 23 bits, so that product and sum cannot be fused: see
        # ``reference.sum_of``.
        values = to_23_bits(weighted(values, number_ref[sender]))
      new.append(total + values)
    return tuple(new)

  def several(first, count, totals):
    for i in range(count):
      totals = add(first + i, totals)
    return totals

  senders = payload_ref.shape[0]
  zeros = jnp.zeros(mask.shape, jnp.float32)
  # Several senders in a turn, so that their reads are under way together. They
  # are still added in order, 0 to M - 1: the remainder comes first.
  rest = senders % _UNROLLED
  totals = several(0, rest, (zeros,) * tile.parts)
  totals = lax.fori_loop(
    0, senders // _UNROLLED,
    lambda turn, totals: several(rest + turn * _UNROLLED, _UNROLLED, totals),
    totals,
  )
  # The last number is the factor of the sum.
  return [
    (tile.index(part), total * number_ref[senders])
    for part, total in enumerate(totals)
  ]
