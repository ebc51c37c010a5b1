"""Attention over pages for TPUs: pages are streamed from HBM by their table.

The table and the positions of the sequences are in scalar memory, where the
index maps of the blocks read them, so that Pallas' double buffering follows the
table. A grid step processes several pages, each a separate block of the same
array, with the online softmax of FlashAttention (arXiv 2205.14135, 2307.08691):
a running maximum and sum.

Steps past a sequence's end refer to the page that was loaded last, which is not
loaded again, and skip the computation. Pages outside a window are not visited.

If a row holds f tokens of narrow heads, there are f copies of the queries, each
with zeros in the lanes of the other tokens: a product then scores every f-th
position. Each of these f sets of positions has a separate softmax; the last
step combines them.

Shape legend: S = sequences, T = new tokens of each, K = kv heads, G = query
heads per kv head, D = head width, f = tokens in a row of pages, P = pages in a
table, R = query rows of a block, C = positions of a grid step.
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
from parallel.kernels.paged_attention.order import LANES, Pages

# Target number of positions of a grid step, which then loads 2 x 128 KB for a
# head of 128 bfloat16 channels. This takes longer than the overhead of a step.
_STEP_POSITIONS = 512
# Maximum number of blocks of one array in a grid step.
_MAX_STEP_PAGES = 16
# Maximum number of rows of a block.
_MAX_ROWS = 256
# Bytes of scalar memory for tables and positions; a v5e has 1 MB.
_SCALAR_BYTES = 768 << 10
# Score of masked positions: finite, so that the softmax of a fully masked row
# is not NaN.
MASKED_SCORE = -1e30


class _Blocks(NamedTuple):
  """Sizes of blocks and grid.

  Attributes:
    heads: Kv heads of a grid step, a divisor of K.
    tokens: New tokens of a block of rows; R = G * tokens.
    pages: Pages of a grid step.
    steps: Maximum number of grid steps of a block of rows.
  """

  heads: int
  tokens: int
  pages: int
  steps: int


def refusal(
  q: jax.Array, pages: Pages, tables: jax.Array, window: int
) -> str | None:
  """Returns why operands are not supported, or None: `api.Kernels.refusal`."""
  if pages.order != "packed":
    return f"pages in the order {pages.order!r}: reads 'packed' only"
  if pages.packing * pages.head_width % LANES:
    return (
      f"heads of {pages.head_width} channels: a divisor or multiple of "
      f"{LANES}, or XLA would copy all pages to pad them"
    )
  if q.dtype not in (jnp.float32, jnp.bfloat16):
    return f"dtype {q.dtype}: float32 or bfloat16"
  if pages.dtype not in (q.dtype, jnp.int8):
    return f"pages of {pages.dtype}, queries of {q.dtype}: one dtype, or int8"
  # Scales must also fill the lanes, or XLA would copy all of them.
  rows = LANES if pages.coded else 8
  if pages.page_size % (rows * pages.packing):
    return (
      f"page_size {pages.page_size}: a multiple of {rows * pages.packing}, so "
      f"that pages of {pages.dtype} are whole tiles"
    )
  size = 4 * (tables.shape[0] * (tables.shape[1] + 2))
  if size > _SCALAR_BYTES:
    return (
      f"tables of {tables.shape[0]} x {tables.shape[1]} pages exceed "
      f"{_SCALAR_BYTES >> 10} KB of scalar memory: larger pages"
    )
  if not _choose_block_sizes(q, pages, tables, window):
    return f"a block of rows does not fit {calls.MAX_BLOCK_VMEM_BYTES >> 20} MB"
  return None


def _choose_block_sizes(
  q: jax.Array, pages: Pages, tables: jax.Array, window: int, lanes: int = 1
) -> _Blocks | None:
  """Returns block sizes for which a grid step fits in VMEM, or None.

  ``pages`` has the kv heads of all ``lanes``, the ranks on this device.
  """
  _, num_rows, num_heads, width = q.shape
  k, page = pages.num_kv_heads // lanes, pages.page_size
  group = num_heads // k
  # A block has whole tiles of 16 rows, or all rows.
  tokens = min(num_rows, max(16, _MAX_ROWS // group // 16 * 16))
  # Maximum number of pages visible to a block of rows, for any offset of its
  # first row in a page.
  reach = tables.shape[1]
  if window:
    reach = min(reach, (window + tokens - 2) // page + 2)
  count = min(reach, _MAX_STEP_PAGES, max(1, _STEP_POSITIONS // page))
  rows, positions = tokens * group, count * page
  f, wide = pages.packing, pages.packing * width
  # For every head: double buffers of keys, values, scales, queries and results,
  # and the accumulator. For the head that is processed: keys and values in
  # float32, and three arrays of scores.
  per_head = (
    4 * (positions // f) * wide * pages.dtype.itemsize
    + (128 * positions if pages.coded else 0)
    + rows * f * (2 * wide * (q.dtype.itemsize + 2) + 1024)
    + 2 * rows * LANES * q.dtype.itemsize
  )
  room = calls.MAX_BLOCK_VMEM_BYTES - (12 * rows + 8 * wide) * (positions // f)
  heads = [
    n for n in range(1, k + 1) if k % n == 0 and n * per_head <= room
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
  """Computes attention over pages: `api.Kernels.paged_attention`.

  ``jax.vmap`` keeps it one kernel, which reads the pages of all lanes (ranks on
  one device) without a copy. By default, a ``pallas_call`` with mapped scalars
  would become a loop that slices the pages of each lane. ``detect_races``
  applies to the interpreter.
  """

  def attend(lanes):
    @jax.custom_batching.custom_vmap
    def of_lanes(*operands):
      return _call(
        *operands, lanes=lanes, window=window, interpret=interpret,
        detect_races=detect_races,
      )

    @of_lanes.def_vmap
    def rule(size, mapped, *operands):
      def fold(x, is_mapped):
        if not is_mapped:
          x = jnp.broadcast_to(x, (size, *x.shape))
        return x.reshape(-1, *x.shape[2:])

      out = attend(size * lanes)(*jax.tree.map(fold, operands, tuple(mapped)))
      return out.reshape(size, -1, *out.shape[1:]), True

    return of_lanes

  return attend(1)(q, pages, tables, first, lengths)


def _call(
  q: jax.Array, pages: Pages, tables: jax.Array, first: jax.Array,
  lengths: jax.Array, *, lanes: int, window: int, interpret: bool,
  detect_races: bool,
) -> jax.Array:
  """Calls the kernel once, on the sequences and the kv heads of all lanes.

  ``lanes`` is the number of ranks on this device; other arguments are those of
  `paged_attention`, with the lanes' arrays joined along dim 0.
  """
  num_seqs, num_rows, num_heads, width = q.shape
  k, page = pages.num_kv_heads // lanes, pages.page_size
  group, f = num_heads // k, pages.packing
  blocks = _choose_block_sizes(q, pages, tables, window, lanes)
  tokens, rows = blocks.tokens, blocks.tokens * group
  # [S, T, H, D] -> [S, K, T G, D]: the rows of a kv head are contiguous.
  heads_first = q.reshape(num_seqs, num_rows, k, group, width).swapaxes(1, 2)
  heads_first = heads_first.reshape(num_seqs, k, num_rows * group, width)
  # [S, K, f, T G, f D]: of f copies, the i-th is in the lanes of token i.
  spread = jnp.stack([
    jnp.pad(heads_first, ((0, 0),) * 3 + ((i * width, (f - 1 - i) * width),))
    for i in range(f)
  ], axis=2)

  def page_of(i):
    """Returns the ``BlockSpec`` index map of the i-th page of a grid step."""

    def index(s, head, block, step, tables_ref, first_ref, length_ref):
      low, count = _visible_pages(
        first_ref[s], length_ref[s], block, tokens, window, page
      )
      number = low + jnp.minimum(
        step * blocks.pages + i, jnp.maximum(count - 1, 0)
      )
      number = jnp.minimum(number, tables.shape[1] - 1)
      lane = s // (num_seqs // lanes)
      head += lane * (k // blocks.heads)
      return head, tables_ref[s, number], 0, 0

    return index

  many = range(blocks.pages)
  of_data, of_scales = (
    [pl.BlockSpec((blocks.heads, None, *x.shape[2:]), page_of(i)) for i in many]
    for x in (pages.data[0], (pages.scales or pages.data)[0])
  )
  operands = [
    x for each in (*pages.data, *pages.scales) for x in [each] * len(many)
  ]
  scalars = [x.astype(jnp.int32) for x in (tables, first, lengths)]
  out = calls.tpu_call(
    functools.partial(
      _kernel, blocks=blocks, page=page,
      sight=_StepMask(None, None, None, group, width, f, window),
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
        pl.BlockSpec(
          (None, blocks.heads, f, rows, f * width),
          lambda s, h, b, *_: (s, h, 0, b, 0),
        ),
        *of_data * len(pages.data),
        *of_scales * len(pages.scales),
      ],
      out_specs=pl.BlockSpec(
        (None, blocks.heads, rows, width), lambda s, h, b, *_: (s, h, b, 0)
      ),
      scratch_shapes=[
        pltpu.VMEM((blocks.heads, f, rows, 1), jnp.float32),
        pltpu.VMEM((blocks.heads, f, rows, 1), jnp.float32),
        pltpu.VMEM((blocks.heads, f, rows, f * width), jnp.float32),
      ],
    ),
    out_shape=calls.output_type(heads_first.shape, q.dtype, heads_first),
  )(*calls.unify_varying_axes(*scalars, spread, *operands))
  out = out.reshape(num_seqs, k, num_rows, group, width).swapaxes(1, 2)
  return out.reshape(q.shape)


def _visible_pages(first, length, block, tokens, window, page):
  """Returns first page and number of pages visible to a block of rows.

  Args:
    first: Position of the sequence's first new token.
    length: Number of positions of the sequence that hold a key.
    block: Index of the block.
    tokens: New tokens per block.
    window: Number of positions that a query attends to; 0 for all.
    page: Slots of a page.
  """
  row = first + block * tokens  # position of the block's first row
  low = jnp.maximum(row - window + 1, 0) // page if window else 0
  end = jnp.minimum(row + tokens, length)
  count = (jnp.maximum(end - low * page, 0) + page - 1) // page
  return low, count


class _StepMask(NamedTuple):
  """Attention mask of a grid step.

  Attributes:
    row: Position of the first query row.
    place: Position of the first key.
    length: Number of positions of the sequence.
    group: Query rows of one position, G.
    width: Channels of a head, D.
    packing: Number of keys in a row, f.
    window: Number of positions that a query attends to; 0 for all.
  """

  row: jax.Array
  place: jax.Array
  length: jax.Array
  group: int
  width: int
  packing: int
  window: int

  def seen(self, shape: tuple[int, int], part: int) -> jax.Array:
    """Returns the mask ``[R, C / f]`` of the part-th key of every row of keys.

    Args:
      shape: Number of query rows, and of rows of keys.
      part: Index of the key in its row, 0 to f - 1.
    """
    row = self.row + lax.broadcasted_iota(jnp.int32, shape, 0) // self.group
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    place = self.place + self.packing * column + part
    seen = (place <= row) & (place < self.length)
    return seen & (place > row - self.window) if self.window else seen

  def _visible_to_any_row(self, place: jax.Array) -> jax.Array:
    """Returns whether positions ``place`` may be visible to any query row."""
    alive = place < self.length
    return alive & (place > self.row - self.window) if self.window else alive

  def element_mask(self, shape: tuple[int, int]) -> jax.Array:
    """Returns the mask of ``[C / f, f D]`` elements visible to any query."""
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    part = lax.broadcasted_iota(jnp.int32, shape, 1) // self.width
    return self._visible_to_any_row(self.place + self.packing * row + part)

  def scale_mask(self, shape: tuple[int, int], part: int) -> jax.Array:
    """Returns the mask of scales ``[1, C / f]`` visible to any query.

    They belong to the part-th key of every row of keys.
    """
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    return self._visible_to_any_row(self.place + self.packing * column + part)


def _kernel(tables_ref, first_ref, length_ref, q_ref, *refs, blocks, sight,
            page):
  del tables_ref  # only used by the index maps
  *in_refs, o_ref, top_ref, sum_ref, acc_ref = refs
  n = blocks.pages
  sequence, block, step = (pl.program_id(i) for i in (0, 2, 3))
  first, length = first_ref[sequence], length_ref[sequence]
  low, count = _visible_pages(
    first, length, block, blocks.tokens, sight.window, page
  )

  @pl.when(step == 0)
  def start():
    top_ref[...] = jnp.full(top_ref.shape, MASKED_SCORE, jnp.float32)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

  @pl.when(step * n < count)
  def pages_in_sight():
    here = sight._replace(
      row=first + block * blocks.tokens, place=(low + step * n) * page,
      length=length,
    )
    for head in range(blocks.heads):
      keys, values, *scales = (
        [ref[head] for ref in in_refs[i : i + n]]
        for i in range(0, len(in_refs), n)
      )
      _update_softmax(
        q_ref.at[head], keys, values, scales, here, top_ref.at[head],
        sum_ref.at[head], acc_ref.at[head],
      )

  @pl.when(step == pl.num_programs(3) - 1)
  def finish():
    for head in range(blocks.heads):
      o = _combine_softmaxes(
        top_ref[head], sum_ref[head], acc_ref[head], sight.width
      )
      o_ref[head] = o.astype(o_ref.dtype)


def _update_softmax(
  q_ref: Any,
  keys: Sequence[jax.Array],
  values: Sequence[jax.Array],
  scales: Sequence[Sequence[jax.Array]],
  sight: _StepMask,
  top_ref: Any,
  sum_ref: Any,
  acc_ref: Any,
) -> None:
  """Updates the online softmax of one head with the keys of several pages.

  Args:
    q_ref: Query rows, ``[f, R, f D]``.
    keys: Pages ``[page / f, f D]``, C positions in total.
    values: Pages of values, shaped as ``keys``.
    scales: Scales of keys and scales of values, ``[f, page / f]`` per page;
      empty for floats.
    sight: Attention mask of the step.
    top_ref: Running maxima of scores, ``[f, R, 1]``.
    sum_ref: Running sums of weights, ``[f, R, 1]``.
    acc_ref: Running weighted sums of values, ``[f, R, f D]``.
  """
  dtype = q_ref.dtype
  # [C / f, f D]
  keys, values = (_concatenate_pages(x, 0, dtype) for x in (keys, values))
  if scales:
    # [f, C / f] each
    key_scales, scales = (_concatenate_pages(x, 1, jnp.float32) for x in scales)
  else:
    # Masked slots may hold NaN. Weight 0 times NaN would be NaN, and so would
    # the zeros of a query times another token's key in the same row.
    alive = sight.element_mask(values.shape)
    values = jnp.where(alive, values, jnp.zeros_like(values))
    if sight.packing > 1:
      keys = jnp.where(alive, keys, jnp.zeros_like(keys))
  # float32 operands are multiplied in float32 instead of bfloat16 (default).
  exact = lax.Precision.HIGHEST if dtype == jnp.float32 else None
  for i in range(sight.packing):
    scores = lax.dot_general(
      q_ref[i], keys, (((1,), (1,)), ((), ())), precision=exact,
      preferred_element_type=jnp.float32,
    ) * sight.width**-0.5  # [R, C / f]
    if len(scales):
      scores *= key_scales[i : i + 1]
    scores = jnp.where(sight.seen(scores.shape, i), scores, MASKED_SCORE)
    top = jnp.maximum(top_ref[i], jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - top)
    past = jnp.exp(top_ref[i] - top)  # [R, 1], rescales the previous sums
    top_ref[i] = top
    total = jnp.sum(weights, axis=1, keepdims=True)
    sum_ref[i] = past * sum_ref[i] + total
    if len(scales):
      scale = scales[i : i + 1]
      alive = sight.scale_mask(scale.shape, i)
      weights *= jnp.where(alive, scale, 0.0)
    acc_ref[i] = past * acc_ref[i] + jnp.dot(
      weights.astype(dtype), values, precision=exact,
      preferred_element_type=jnp.float32,
    )


def _combine_softmaxes(
  top: jax.Array, total: jax.Array, acc: jax.Array, width: int
) -> jax.Array:
  """Combines f softmaxes over disjoint positions to the result ``[R, D]``.

  Args:
    top: Maxima of scores, ``[f, R, 1]``.
    total: Sums of weights, ``[f, R, 1]``.
    acc: Weighted sums of values, ``[f, R, f D]``.
    width: Channels of a head, D.
  """
  highest = functools.reduce(jnp.maximum, list(top))
  o, weight = 0.0, 0.0
  for i in range(len(top)):
    share = jnp.exp(top[i] - highest)
    weight += share * total[i]
    o += share * acc[i, :, i * width : (i + 1) * width]
  # Padding attends to no position, so that its result is 0 / 1.
  return o / jnp.where(weight == 0.0, 1.0, weight)


def _concatenate_pages(
  parts: Sequence[jax.Array], dim: int, dtype: Any
) -> jax.Array:
  """Concatenates pages along a dim, in ``dtype``."""
  x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dim)
  if x.dtype == jnp.int8 and dtype == jnp.bfloat16:
    x = x.astype(jnp.float32)  # Mosaic has no cast from int8 to bfloat16
  return x.astype(dtype)
