"""Attention over pages for TPUs: pages stream from HBM by their table.

The table and the positions of the sequences lie in scalar memory, where the
index maps of the blocks read them: the pipeline that loads the next block while
one is worked on then follows the table. A grid step takes several pages, each a
block of its own of the same array, and goes through them with the softmax of
FlashAttention (arXiv 2205.14135, 2307.08691): a running maximum and sum.

Steps past a sequence's end name the page that was loaded last, which the
pipeline does not load again, and do nothing. Pages that lie out of a window's
sight are not visited.

Shape legend: S = sequences, T = new tokens of each, K = kv heads, G = query
heads per kv head, D = head width, P = pages in a table, R = rows of a block,
C = positions of a grid step.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.paged_attention.order import Pages

# Positions that a grid step aims at: a step then loads 2 x 128 KB for a bfloat16
# head of 128 channels, which takes longer than to begin the step.
_POSITIONS = 512
# Blocks of one array in a grid step at most.
_PAGES = 16
# Rows of a block where there are more.
_ROWS = 256
# Bytes of scalar memory for tables and positions; a v5e has 1 MB.
_SCALAR_BYTES = 768 << 10
# What a row scores where it does not see: finite, so that a row that sees
# nothing has no NaN.
UNSEEN = -1e30


class _Blocks(NamedTuple):
  """How the work is cut.

  Attributes:
    heads: Kv heads of a grid step, a divisor of K.
    tokens: New tokens of a block of rows; R is G times that.
    pages: Pages of a grid step.
    steps: Grid steps that a block of rows takes at most.
  """

  heads: int
  tokens: int
  pages: int
  steps: int


def refusal(
  q: jax.Array, pages: Pages, tables: jax.Array, window: int
) -> str | None:
  """Returns why the kernel does not take the operands, or None if it does.

  Args:
    q: Queries, ``[S, T, H, D]``; only shape and dtype are read.
    pages: Keys and values, likewise.
    tables: ``[S, P]``, likewise.
    window: Positions that a row sees; 0 for all.
  """
  if pages.order != "heads":
    return f"pages in the order {pages.order!r}: 'heads'"
  if q.dtype not in (jnp.float32, jnp.bfloat16):
    return f"dtype {q.dtype}: float32 or bfloat16"
  if pages.dtype not in (q.dtype, jnp.int8):
    return f"pages of {pages.dtype}, queries of {q.dtype}: one dtype, or int8"
  tile = 32 // pages.dtype.itemsize
  if pages.page_size % tile:
    return f"page_size {pages.page_size}: a multiple of {tile} slots"
  size = 4 * (tables.shape[0] * (tables.shape[1] + 2))
  if size > _SCALAR_BYTES:
    return (
      f"tables of {tables.shape[0]} x {tables.shape[1]} pages exceed "
      f"{_SCALAR_BYTES >> 10} KB of scalar memory: larger pages"
    )
  if not _blocks(q, pages, tables, window):
    return f"a block of rows does not fit {calls.VMEM_BYTES >> 20} MB"
  return None


def _blocks(
  q: jax.Array, pages: Pages, tables: jax.Array, window: int
) -> _Blocks | None:
  """Cuts the work such that a grid step fits VMEM; None if it cannot."""
  _, num_rows, num_heads, width = q.shape
  page, group = pages.page_size, num_heads // pages.num_kv_heads
  # Whole tiles of rows, or all of them.
  tokens = min(num_rows, max(16, _ROWS // group // 16 * 16))
  # Pages that a block of rows sees, wherever its first row lies in a page.
  reach = tables.shape[1]
  if window:
    reach = min(reach, (window + tokens - 2) // page + 2)
  count = min(reach, _PAGES, max(1, _POSITIONS // page))
  rows, positions = tokens * group, count * page
  wide = max(128, width)  # a tile has 128 lanes
  # Two buffers of keys, values and what lies beside them, two of queries and
  # results, and the accumulator, of each head; the scores of one head, thrice.
  per_head = (
    4 * positions * wide * pages.dtype.itemsize
    + (64 * positions if pages.coded else 0)
    + rows * (4 * wide * q.dtype.itemsize + 4 * wide + 1024)
  )
  room = calls.VMEM_BYTES - 12 * rows * positions - 8 * positions * wide
  heads = [
    n for n in range(1, pages.num_kv_heads + 1)
    if pages.num_kv_heads % n == 0 and n * per_head <= room
  ]
  if not heads:
    return None
  return _Blocks(max(heads), tokens, count, pl.cdiv(reach, count))


def paged_attention(
  q: jax.Array,
  pages: Pages,
  tables: jax.Array,
  first: jax.Array,
  lengths: jax.Array,
  *,
  window: int = 0,
  interpret: bool = False,
  detect_races: bool = False,
) -> jax.Array:
  """Attends from new tokens to all of their sequence that they may see.

  ``reference.paged_attention`` specifies the result. Table entries are valid
  pages here, and ``lengths`` is 0 for padding.
  """
  num_seqs, num_rows, num_heads, width = q.shape
  k, page = pages.num_kv_heads, pages.page_size
  group = num_heads // k
  blocks = _blocks(q, pages, tables, window)
  tokens, rows = blocks.tokens, blocks.tokens * group
  # [S, T, H, D] -> [S, K, T G, D]: a kv head's rows side by side.
  heads_first = q.reshape(num_seqs, num_rows, k, group, width).swapaxes(1, 2)
  heads_first = heads_first.reshape(num_seqs, k, num_rows * group, width)

  def page_of(i):
    """Returns the index map of a step's i-th page."""

    def index(s, head, block, step, tables_ref, first_ref, length_ref):
      low, count = _span(
        first_ref[s], length_ref[s], block, tokens, window, page
      )
      number = low + jnp.minimum(
        step * blocks.pages + i, jnp.maximum(count - 1, 0)
      )
      number = jnp.minimum(number, tables.shape[1] - 1)
      return head, tables_ref[s, number], 0, 0

    return index

  many = range(blocks.pages)
  of_data = [
    pl.BlockSpec((blocks.heads, None, page, width), page_of(i)) for i in many
  ]
  of_scales = [
    pl.BlockSpec((blocks.heads, None, 1, page), page_of(i)) for i in many
  ]
  of_rows = pl.BlockSpec(
    (None, blocks.heads, rows, width), lambda s, h, b, *_: (s, h, b, 0)
  )
  operands = [x for each in (*pages.data, *pages.scales) for x in [each] * len(
    many
  )]
  scalars = [tables.astype(jnp.int32), first, lengths]
  scalars = [x.astype(jnp.int32) for x in scalars]
  out = calls.tpu_call(
    functools.partial(
      _kernel, blocks=blocks, group=group, page=page, window=window,
    ),
    "parallel", "parallel", "parallel", "arbitrary",
    name="paged_attention",
    interpret=interpret,
    detect_races=detect_races,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(
        num_seqs, k // blocks.heads, pl.cdiv(num_rows, tokens), blocks.steps
      ),
      in_specs=[
        of_rows, *of_data * len(pages.data), *of_scales * len(pages.scales)
      ],
      out_specs=of_rows,
      scratch_shapes=[
        pltpu.VMEM((blocks.heads, rows, 1), jnp.float32),
        pltpu.VMEM((blocks.heads, rows, 1), jnp.float32),
        pltpu.VMEM((blocks.heads, rows, width), jnp.float32),
      ],
    ),
    out_shape=calls.shaped(heads_first.shape, q.dtype, heads_first),
  )(*scalars, heads_first, *operands)
  out = out.reshape(num_seqs, k, num_rows, group, width).swapaxes(1, 2)
  return out.reshape(q.shape)


def _span(first, length, block, tokens, window, page):
  """Returns the first page that a block of rows sees, and how many it sees."""
  row = first + block * tokens  # position of the block's first row
  low = jnp.maximum(row - window + 1, 0) // page if window else 0
  end = jnp.minimum(row + tokens, length)
  count = (jnp.maximum(end - low * page, 0) + page - 1) // page
  return low, count


def _kernel(tables_ref, first_ref, length_ref, q_ref, *refs, blocks, group,
            page, window):
  del tables_ref  # the index maps have read it
  *in_refs, o_ref, top_ref, sum_ref, acc_ref = refs
  n = blocks.pages
  sequence, block, step = (pl.program_id(i) for i in (0, 2, 3))
  first, length = first_ref[sequence], length_ref[sequence]
  low, count = _span(first, length, block, blocks.tokens, window, page)

  @pl.when(step == 0)
  def start():
    top_ref[...] = jnp.full(top_ref.shape, UNSEEN, jnp.float32)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

  @pl.when(step * n < count)
  def pages_in_sight():
    row0 = first + block * blocks.tokens
    place0 = (low + step * n) * page
    for head in range(blocks.heads):
      keys, values, *scales = (
        [ref[head] for ref in in_refs[i : i + n]]
        for i in range(0, len(in_refs), n)
      )
      _update(
        q_ref[head], keys, values, scales, row0, place0, length, group, window,
        top_ref.at[head], sum_ref.at[head], acc_ref.at[head],
      )

  @pl.when(step == pl.num_programs(3) - 1)
  def finish():
    # Rows of padding see nothing: 0 / 1.
    total = jnp.where(sum_ref[...] == 0.0, 1.0, sum_ref[...])
    o_ref[...] = (acc_ref[...] / total).astype(o_ref.dtype)


def _update(
  q: jax.Array,
  keys: Sequence[jax.Array],
  values: Sequence[jax.Array],
  scales: Sequence[Sequence[jax.Array]],
  row0: jax.Array,
  place0: jax.Array,
  length: jax.Array,
  group: int,
  window: int,
  top_ref: Any,
  sum_ref: Any,
  acc_ref: Any,
) -> None:
  """Adds what one head's rows see in some pages.

  Args:
    q: The rows, ``[R, D]``.
    keys: Pages ``[page, D]``, C positions together.
    values: Likewise.
    scales: Those of keys and of values, ``[1, page]``; empty for floats.
    row0: Position of the first row.
    place0: Position of the first key.
    length: Positions of the sequence.
    group: Rows of one position, G.
    window: Positions that a row sees; 0 for all.
    top_ref: Largest score so far, ``[R, 1]``.
    sum_ref: Sum of weights so far, ``[R, 1]``.
    acc_ref: Weighted sum of values so far, ``[R, D]``.
  """
  keys, values = (_joined(x, 0, q.dtype) for x in (keys, values))  # [C, D]
  shape = q.shape[0], keys.shape[0]
  row = row0 + lax.broadcasted_iota(jnp.int32, shape, 0) // group
  place = place0 + lax.broadcasted_iota(jnp.int32, shape, 1)
  seen = (place <= row) & (place < length)
  if window:
    seen &= place > row - window
  # float32 operands are multiplied in float32, not in bfloat16.
  exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
  scores = lax.dot_general(
    q, keys, (((1,), (1,)), ((), ())), precision=exact,
    preferred_element_type=jnp.float32,
  ) * q.shape[1] ** -0.5  # [R, C]
  if scales:
    scores *= _joined(scales[0], 1, jnp.float32)
  scores = jnp.where(seen, scores, UNSEEN)
  top = jnp.maximum(top_ref[...], jnp.max(scores, axis=1, keepdims=True))
  weights = jnp.exp(scores - top)
  past = jnp.exp(top_ref[...] - top)  # [R, 1]
  sum_ref[...] = past * sum_ref[...] + jnp.sum(weights, axis=1, keepdims=True)
  # A slot that no row sees may hold NaN, and weight 0 times NaN would be NaN.
  if scales:
    valid = _alive(place0, (1, shape[1]), 1, row0, length, window)
    scale = _joined(scales[1], 1, jnp.float32)
    weights *= jnp.where(valid, scale, 0.0)
  else:
    valid = _alive(place0, values.shape, 0, row0, length, window)
    values = jnp.where(valid, values, jnp.zeros_like(values))
  acc_ref[...] = past * acc_ref[...] + jnp.dot(
    weights.astype(values.dtype), values, precision=exact,
    preferred_element_type=jnp.float32,
  )
  top_ref[...] = top


def _alive(place0, shape, dim, row0, length, window):
  """Returns which positions some row of the block may see."""
  place = place0 + lax.broadcasted_iota(jnp.int32, shape, dim)
  return (place < length) & (place > row0 - window if window else place >= 0)


def _joined(
  parts: Sequence[jax.Array], dim: int, dtype: Any
) -> jax.Array:
  """Puts pages side by side."""
  x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dim)
  if x.dtype == jnp.int8 and dtype == jnp.bfloat16:
    x = x.astype(jnp.float32)  # Mosaic has no cast between the two
  return x.astype(dtype)
