"""Block codecs in one pass over memory, for GPUs, in Triton.

A program has a tile of whole blocks in registers, a 4-bit codec's in the two
halves that share bytes. Arithmetic and draws are ``reference.py``'s and
``threefry.py``'s, called here on tiles; decoded values exist in registers only.
Triton and not Mosaic GPU for the reason given in ``add_norm/gpu.py``. Triton's
division is not correctly rounded: on a GPU a scale may be another than the
reference's, which all who decode it share.
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

# Elements of a program: sixteen for each thread of eight warps.
_TILE = 4096
_MAX_BLOCK = 16384
# Senders that are read in one turn.
_UNROLLED = 4


def refusal(codec: Codec, num_blocks: int, senders: int = 1) -> str | None:
  """Why the kernels do not take operands; None: they do."""
  if codec.name == "fp8":
    return "codec fp8: int8, int4 and e3m0 only"
  if codec.block > _MAX_BLOCK:
    return f"block={codec.block} > {_MAX_BLOCK}: it must fit the registers"
  if num_blocks < 1:
    return "no elements"
  if max(senders, 4) * num_blocks * codec.block >= 2**31:
    return f"{senders} x {num_blocks} blocks: offsets of 31 bits"
  return None


class _Tile:
  """Which blocks a program has, and where their halves are in memory."""

  def __init__(self, codec: Codec, num_blocks: int) -> None:
    self.parts = 8 // codec.bits
    self.width = codec.block // self.parts
    rows = max(1, _TILE // pl.next_power_of_2(codec.block))
    self.rows = min(rows, pl.next_power_of_2(num_blocks))
    self.grid = (pl.cdiv(num_blocks, self.rows),)
    self.num_blocks = num_blocks

  def params(self, interpret: bool) -> dict[str, Any]:
    elements = self.rows * self.parts * pl.next_power_of_2(self.width)
    warps = min(32, max(1, elements // 512))
    return {
      "grid": self.grid,
      "compiler_params": pltriton.CompilerParams(num_warps=warps),
      "interpret": interpret,
    }

  def here(self) -> tuple[jax.Array, jax.Array]:
    """Numbers of this program's blocks ``[rows, 1]``, and which there are."""
    block = pl.program_id(0) * self.rows + jnp.arange(self.rows)[:, None]
    return block, block < self.num_blocks

  def index(self, part: int = 0) -> tuple[tuple[Any, Any], jax.Array]:
    """Of a part's elements in ``[blocks, block]``, and which there are."""
    block, mask = self.here()
    element = jnp.arange(pl.next_power_of_2(self.width))[None]
    mask = mask & (element < self.width)
    return (block, element + part * self.width), mask


def _load(ref, index, mask):
  return pltriton.load(ref.at[index], mask=mask, other=0)


def encode(
  operands: Sequence[jax.Array],
  feedback: bool,
  codec: Codec,
  key_data: jax.Array | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """See ``tpu.encode``."""
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
  parts = []
  for part in range(tile.parts):
    where = tile.index(part)
    loaded = [_load(ref, *where) for ref in operands]
    parts.append(difference(loaded, feedback))
  scale = scale_of(largest_of(*parts), codec)
  pltriton.store(scale_ref.at[block], scale, mask=exists)
  packed = None
  for part, x in enumerate(parts):
    where, mask = tile.index(part)
    uniform = None
    if draws:
      number = (where[0] * codec.block + where[1]).astype(jnp.uint32)
      uniform = threefry.uniform(key_ref[0], key_ref[1], number)
    codes = codes_of(x, scale, codec, uniform)
    packed = codes if packed is None else packed | (codes << 4)
    for ref in residual_ref:
      left = x - numbers_of(codes, codec) * scale
      pltriton.store(ref.at[where], left, mask=mask)
  where, mask = tile.index()
  pltriton.store(payload_ref.at[where], packed.astype(jnp.uint8), mask=mask)


def mean(
  payload: jax.Array,
  scales: jax.Array,
  codec: Codec,
  weights: jax.Array | None = None,
  divide: bool = True,
  interpret: bool = False,
) -> jax.Array:
  """See ``tpu.mean``."""
  (out,) = _over_senders(
    _mean, payload, scales, (), codec, weights, 1, "codec_mean", interpret,
    divide,
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
  """See ``tpu.nesterov``."""
  kernel = functools.partial(
    _nesterov, learning_rate=learning_rate, decay=decay
  )
  new, momentum = _over_senders(
    kernel, payload, scales, (params, momentum), codec, weights, 2,
    "codec_nesterov", interpret,
  )
  return new, momentum


def _over_senders(
  kernel: Any,
  payload: jax.Array,
  scales: jax.Array,
  others: tuple[jax.Array, ...],
  codec: Codec,
  weights: jax.Array | None,
  results: int,
  name: str,
  interpret: bool,
  divide: bool = True,
) -> list[jax.Array]:
  senders = scales.shape[0]
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
  new_momentum_ref, *, means, learning_rate, decay,
):
  for (where, mask), delta in means(number_ref, payload_ref, scale_ref):
    new, momentum = nesterov_step(
      delta, _load(params_ref, where, mask), _load(momentum_ref, where, mask),
      learning_rate, decay,
    )
    pltriton.store(new_ref.at[where], new, mask=mask)
    pltriton.store(new_momentum_ref.at[where], momentum, mask=mask)


def _means(number_ref, payload_ref, scale_ref, *, codec, tile, use_weights):
  """Where the parts of this program's blocks are, and their means."""
  block, exists = tile.here()
  (rows, columns), mask = tile.index()

  def add(sender, totals):
    codes = _load(payload_ref, (sender, rows, columns), mask)
    codes = codes.astype(jnp.int32)
    parts = (codes,) if tile.parts == 1 else (codes & 15, codes >> 4)
    scale = _load(scale_ref, (sender, block[:, 0]), exists[:, 0])[:, None]
    new = []
    for total, part in zip(totals, parts, strict=True):
      values = numbers_of(part, codec) * scale
      if use_weights:
        values = to_23_bits(weighted(values, number_ref[sender]))
      new.append(total + values)
    return tuple(new)

  def several(first, count, totals):
    for i in range(count):
      totals = add(first + i, totals)
    return totals

  senders = payload_ref.shape[0]
  zeros = jnp.zeros(mask.shape, jnp.float32)
  # Several in a turn: reads do not wait for sums.
  rest = senders % _UNROLLED
  totals = several(0, rest, (zeros,) * tile.parts)
  totals = lax.fori_loop(
    0, senders // _UNROLLED,
    lambda turn, totals: several(rest + turn * _UNROLLED, _UNROLLED, totals),
    totals,
  )
  return [
    (tile.index(part), total * number_ref[senders])
    for part, total in enumerate(totals)
  ]
