"""Attention over pages for GPUs, in Triton.

A program processes a block of query rows of one kv head of one sequence. It
looks up pages in the sequence's table, and iterates over blocks of the visible
positions with the online softmax of FlashAttention (arXiv 2205.14135). With few
sequences most of a GPU would be idle; the positions of a sequence are then
split over several programs, and XLA combines their softmaxes (Flash-Decoding:
Dao et al., 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html).

Slots to which no query attends are never read.

Shape legend: S = sequences, T = new tokens of each, K = kv heads, G = query
heads per kv head, D = head width, P = pages in a table, R = rows of a block,
C = positions of a block, W = programs over which a sequence's positions are
split.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.paged_attention.order import Pages

# Positions of a block, and maximum and minimum of its query rows: Triton's
# smallest matrix product has 16 rows.
_BLOCK_POSITIONS = 64
_MAX_ROWS = 64
_MIN_ROWS = 16
# Programs that occupy a GPU: two per multiprocessor of an H100 or H200.
_TARGET_PROGRAMS = 264
# Minimum number of position blocks per program if positions are split.
_MIN_BLOCKS = 4
# Score of masked positions: finite, so that the softmax of a fully masked row
# is not NaN.
_MASKED_SCORE = -1e30


def refusal(
  q: jax.Array, pages: Pages, tables: jax.Array, window: int
) -> str | None:
  """Returns why operands are not supported, or None: `api.Kernels.refusal`."""
  del tables, window  # no restrictions
  if pages.order != "heads":
    return f"pages in the order {pages.order!r}: reads 'heads' only"
  if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return f"dtype {q.dtype}: float32, bfloat16 or float16"
  if pages.dtype not in (q.dtype, jnp.int8):
    return f"pages of {pages.dtype}, queries of {q.dtype}: one dtype, or int8"
  if not 16 <= pages.head_width <= 256:
    return f"heads of {pages.head_width} channels: 16 to 256"
  if pages.dtype == jnp.int8 and 2**31 < pages.data[0].size <= 2**32:
    return (
      "pages of 2 to 4 GiB of codes: addressed with 32 bits, one of them a sign"
    )
  return None


def paged_attention(
  q: jax.Array,
  pages: Pages,
  tables: jax.Array,
  first: jax.Array,
  lengths: jax.Array,
  *,
  window: int = 0,
  interpret: bool = False,
) -> jax.Array:
  """Computes attention over pages: `api.Kernels.paged_attention`."""
  num_seqs, num_rows, num_heads, width = q.shape
  k, page = pages.num_kv_heads, pages.page_size
  group = num_heads // k
  # [S, T, H, D] -> [S, K, T G, D]: the rows of a kv head are contiguous.
  rows = q.reshape(num_seqs, num_rows, k, group, width).swapaxes(1, 2)
  rows = rows.reshape(num_seqs, k, num_rows * group, width)
  block = pl.next_power_of_2(num_rows * group)
  block = min(_MAX_ROWS, max(_MIN_ROWS, block))
  row_blocks = pl.cdiv(num_rows * group, block)
  position_blocks = pl.cdiv(tables.shape[1] * page, _BLOCK_POSITIONS)
  shares = max(1, min(
    _TARGET_PROGRAMS // (num_seqs * k * row_blocks),
    position_blocks // _MIN_BLOCKS
  ))
  # Flattened slots: [K, N * page, D], and scales [K, N * page].
  arrays = [x.reshape(k, -1, width) for x in pages.data]
  arrays += [x.reshape(k, -1) for x in pages.scales]
  operands = calls.unify_varying_axes(rows, *arrays, tables, first, lengths)
  dtype = q.dtype if shares == 1 else jnp.float32
  out, lse = pl.pallas_call(
    functools.partial(
      _kernel, group=group, page=page, window=window, block=block,
      shares=shares,
    ),
    grid=(row_blocks * shares, k, num_seqs),
    out_shape=[
      calls.output_type((shares, *rows.shape), dtype, operands[0]),
      calls.output_type((shares, *rows.shape[:-1]), jnp.float32, operands[0]),
    ],
    name="paged_attention",
    compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
  )(*operands)
  if shares > 1:
    # Each program's result is normalised; lse are the logs of its weight sums.
    weights = jax.nn.softmax(lse, axis=0)  # [W, S, K, T G]
    out = jnp.sum(out * weights[..., None], axis=0, keepdims=True)
  out = out[0].astype(q.dtype)
  out = out.reshape(num_seqs, k, num_rows, group, width).swapaxes(1, 2)
  return out.reshape(q.shape)


def _kernel(q_ref, *refs, group, page, window, block, shares):
  *in_refs, tables_ref, first_ref, length_ref, o_ref, lse_ref = refs
  program, head, sequence = (pl.program_id(i) for i in range(3))
  share, number = program % shares, program // shares
  width, num_rows = q_ref.shape[-1], q_ref.shape[-2]
  channel = jnp.arange(pl.next_power_of_2(width))
  exists = (channel < width)[None]
  row = number * block + jnp.arange(block)
  inside = row < num_rows
  here = (sequence, head, row[:, None], channel[None])
  q = pltriton.load(q_ref.at[here], mask=inside[:, None] & exists, other=0)
  first, length = first_ref[sequence], length_ref[sequence]
  own = first + row // group  # position of each row
  # Positions that are visible to any row of the block: low <= position < end.
  low = first + (number * block) // group
  low = jnp.maximum(low - window + 1, 0) if window else 0
  end = jnp.minimum(first + ((number + 1) * block - 1) // group + 1, length)
  skipped = low // _BLOCK_POSITIONS
  blocks = (
    jnp.maximum(end, 0) + _BLOCK_POSITIONS - 1
  ) // _BLOCK_POSITIONS - skipped
  each = (jnp.maximum(blocks, 0) + shares - 1) // shares

  def add(turn, carried):
    # Online softmax: running maximum [R], sum of weights [R], values [R, D].
    top, total, acc = carried
    place = turn * _BLOCK_POSITIONS + jnp.arange(_BLOCK_POSITIONS)
    alive = (place >= low) & (place < end)
    at = tables_ref.at[sequence, place // page]
    slot = pltriton.load(at, mask=alive, other=0) * page + place % page
    keys, values, *scales = (
      _load(ref, head, slot, channel, alive, exists) for ref in in_refs
    )
    scores = _dot(q, keys.astype(q.dtype), trans_b=True) * width**-0.5  # [R, C]
    if scales:
      scores *= scales[0][None]
    seen = alive[None] & (place[None] <= own[:, None])
    if window:
      seen &= place[None] > own[:, None] - window
    scores = jnp.where(seen, scores, _MASKED_SCORE)
    new = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.exp(scores - new[:, None])
    past = jnp.exp(top - new)
    total = past * total + jnp.sum(weights, axis=1)
    if scales:
      weights *= scales[1][None]
    acc = past[:, None] * acc + _dot(
      weights.astype(q.dtype), values.astype(q.dtype)
    )
    return new, total, acc

  start = skipped + share * each
  stop = jnp.minimum(start + each, skipped + blocks)
  top, total, acc = lax.fori_loop(start, stop, add, (
    jnp.full((block,), _MASKED_SCORE, jnp.float32),
    jnp.zeros((block,), jnp.float32),
    jnp.zeros((block, channel.shape[0]), jnp.float32),
  ))
  # A program without positions has the weight exp(_MASKED_SCORE) = 0.
  safe = jnp.where(total == 0.0, 1.0, total)
  o = (acc / safe[:, None]).astype(o_ref.dtype)
  pltriton.store(
    o_ref.at[(share, *here)], o, mask=inside[:, None] & exists
  )
  pltriton.store(
    lse_ref.at[share, sequence, head, row], top + jnp.log(safe), mask=inside
  )


def _load(ref, head, slot, channel, alive, exists):
  """Loads keys or values ``[C, D]``, or scales ``[C]``; zeros where masked.

  ``head``, ``slot`` and ``channel`` index ``ref``; ``alive`` masks slots, and
  ``exists`` channels.
  """
  if len(ref.shape) == 2:
    return pltriton.load(ref.at[head, slot], mask=alive, other=0)
  at = ref.at[head, slot[:, None], channel[None]]
  return pltriton.load(at, mask=alive[:, None] & exists, other=0)


def _dot(a: Any, b: Any, **options: Any) -> jax.Array:
  """Multiplies matrices; does not round float32 operands to TF32."""
  return pltriton.dot(a, b, allow_tf32=False, **options).astype(jnp.float32)
