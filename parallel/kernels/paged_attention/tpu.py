"""Attention over pages for TPUs: pages stream from HBM by their table.

The table and the positions of the sequences lie in scalar memory, where the
index maps of the blocks read them: the pipeline that loads the next block while
one is worked on then follows the table. A grid step takes several pages, each a
block of its own of the same array, and goes through them with the softmax of
FlashAttention (arXiv 2205.14135, 2307.08691): a running maximum and sum.

Steps past a sequence's end name the page that was loaded last, which the
pipeline does not load again, and do nothing. Pages that lie out of a window's
sight are not visited.

Where f narrow heads lie side by side in a row, the queries come f times, each
time with zeros in the lanes of the others: so one product scores every f-th
position. Each of these f sets of positions has a softmax of its own, and the
last step puts them together.

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

# Positions that a grid step aims at: a step then loads 2 x 128 KB for a head of
# 128 bfloat16 channels, which takes longer than to begin a step.
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
  """Returns why the kernel does not take operands: `api.Kernels.refusal`."""
  if pages.order != "packed":
    return f"pages in the order {pages.order!r}: it reads 'packed'"
  if pages.packing * pages.head_width % LANES:
    return (
      f"heads of {pages.head_width} channels: a divisor or multiple of "
      f"{LANES}, or XLA would copy all pages to pad them"
    )
  if q.dtype not in (jnp.float32, jnp.bfloat16):
    return f"dtype {q.dtype}: float32 or bfloat16"
  if pages.dtype not in (q.dtype, jnp.int8):
    return f"pages of {pages.dtype}, queries of {q.dtype}: one dtype, or int8"
  # Scales fill the lanes, too, or XLA would copy them all.
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
  if not _blocks(q, pages, tables, window):
    return f"a block of rows does not fit {calls.VMEM_BYTES >> 20} MB"
  return None


def _blocks(
  q: jax.Array, pages: Pages, tables: jax.Array, window: int, lanes: int = 1
) -> _Blocks | None:
  """Cuts the work such that a grid step fits VMEM; None if it cannot."""
  _, num_rows, num_heads, width = q.shape
  k, page = pages.num_kv_heads // lanes, pages.page_size
  group = num_heads // k
  # Whole tiles of rows, or all of them.
  tokens = min(num_rows, max(16, _ROWS // group // 16 * 16))
  # Pages that a block of rows sees, wherever its first row lies in a page.
  reach = tables.shape[1]
  if window:
    reach = min(reach, (window + tokens - 2) // page + 2)
  count = min(reach, _PAGES, max(1, _POSITIONS // page))
  rows, positions = tokens * group, count * page
  f, wide = pages.packing, pages.packing * width
  # Of each head: two buffers of keys, values and scales, two of queries and
  # results, and the accumulator. Of one head: its keys and values in float32,
  # and its scores thrice.
  per_head = (
    4 * (positions // f) * wide * pages.dtype.itemsize
    + (128 * positions if pages.coded else 0)
    + rows * f * (2 * wide * (q.dtype.itemsize + 2) + 1024)
    + 2 * rows * LANES * q.dtype.itemsize
  )
  room = calls.VMEM_BYTES - (12 * rows + 8 * wide) * (positions // f)
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
  """Attends to pages: `api.Kernels.paged_attention`.

  Under ``jax.vmap`` it stays one kernel, which reads the pages of all lanes
  where they are. A ``pallas_call`` whose scalars are mapped would become a loop
  that slices out each lane's. ``detect_races`` is for the interpreter.
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
  q: jax.Array,
  pages: Pages,
  tables: jax.Array,
  first: jax.Array,
  lengths: jax.Array,
  *,
  lanes: int,
  window: int,
  interpret: bool,
  detect_races: bool,
) -> jax.Array:
  """Calls the kernel; sequences and heads of pages are lane after lane."""
  num_seqs, num_rows, num_heads, width = q.shape
  k, page = pages.num_kv_heads // lanes, pages.page_size
  group, f = num_heads // k, pages.packing
  blocks = _blocks(q, pages, tables, window, lanes)
  tokens, rows = blocks.tokens, blocks.tokens * group
  # [S, T, H, D] -> [S, K, T G, D]: a kv head's rows side by side.
  heads_first = q.reshape(num_seqs, num_rows, k, group, width).swapaxes(1, 2)
  heads_first = heads_first.reshape(num_seqs, k, num_rows * group, width)
  # [S, K, f, T G, f D]: in copy i the channels lie where those of token i do.
  spread = jnp.stack([
    jnp.pad(heads_first, ((0, 0),) * 3 + ((i * width, (f - 1 - i) * width),))
    for i in range(f)
  ], axis=2)

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
      sight=_Sight(None, None, None, group, width, f, window),
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
    out_shape=calls.shaped(heads_first.shape, q.dtype, heads_first),
  )(*calls.same_axes(*scalars, spread, *operands))
  out = out.reshape(num_seqs, k, num_rows, group, width).swapaxes(1, 2)
  return out.reshape(q.shape)


def _span(first, length, block, tokens, window, page):
  """Returns the first page that a block of rows sees, and how many it sees."""
  row = first + block * tokens  # position of the block's first row
  low = jnp.maximum(row - window + 1, 0) // page if window else 0
  end = jnp.minimum(row + tokens, length)
  count = (jnp.maximum(end - low * page, 0) + page - 1) // page
  return low, count


class _Sight(NamedTuple):
  """Who sees what in a grid step.

  Attributes:
    row: Position of the first query row.
    place: Position of the first key.
    length: Positions of the sequence.
    group: Query rows of one position, G.
    width: Channels of a head, D.
    packing: Keys that lie side by side in a row, f.
    window: Positions that a row sees; 0 for all.
  """

  row: jax.Array
  place: jax.Array
  length: jax.Array
  group: int
  width: int
  packing: int
  window: int

  def seen(self, shape: tuple[int, int], part: int) -> jax.Array:
    """Returns which keys ``[R, C / f]`` the rows see, of those at one place.

    Args:
      shape: Query rows, rows of keys.
      part: Which of the f keys in each row.
    """
    row = self.row + lax.broadcasted_iota(jnp.int32, shape, 0) // self.group
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    place = self.place + self.packing * column + part
    seen = (place <= row) & (place < self.length)
    return seen & (place > row - self.window) if self.window else seen

  def _any(self, place: jax.Array) -> jax.Array:
    alive = place < self.length
    return alive & (place > self.row - self.window) if self.window else alive

  def alive(self, shape: tuple[int, int]) -> jax.Array:
    """Returns which elements of rows ``[C / f, f D]`` may be seen at all."""
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    part = lax.broadcasted_iota(jnp.int32, shape, 1) // self.width
    return self._any(self.place + self.packing * row + part)

  def alive_scales(self, shape: tuple[int, int], part: int) -> jax.Array:
    """Returns the same of scales ``[1, C / f]``."""
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    return self._any(self.place + self.packing * column + part)


def _kernel(tables_ref, first_ref, length_ref, q_ref, *refs, blocks, sight,
            page):
  del tables_ref  # the index maps have read it
  *in_refs, o_ref, top_ref, sum_ref, acc_ref = refs
  n = blocks.pages
  sequence, block, step = (pl.program_id(i) for i in (0, 2, 3))
  first, length = first_ref[sequence], length_ref[sequence]
  low, count = _span(first, length, block, blocks.tokens, sight.window, page)

  @pl.when(step == 0)
  def start():
    top_ref[...] = jnp.full(top_ref.shape, UNSEEN, jnp.float32)
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
      _update(
        q_ref.at[head], keys, values, scales, here, top_ref.at[head],
        sum_ref.at[head], acc_ref.at[head],
      )

  @pl.when(step == pl.num_programs(3) - 1)
  def finish():
    for head in range(blocks.heads):
      o = _together(
        top_ref[head], sum_ref[head], acc_ref[head], sight.width
      )
      o_ref[head] = o.astype(o_ref.dtype)


def _update(
  q_ref: Any,
  keys: Sequence[jax.Array],
  values: Sequence[jax.Array],
  scales: Sequence[Sequence[jax.Array]],
  sight: _Sight,
  top_ref: Any,
  sum_ref: Any,
  acc_ref: Any,
) -> None:
  """Adds what one head's rows see in some pages.

  Args:
    q_ref: The rows, ``[f, R, f D]``.
    keys: Pages ``[page / f, f D]``, C positions together.
    values: Likewise.
    scales: Those of keys and those of values, ``[f, page / f]`` for each page;
      empty for floats.
    sight: Who sees what.
    top_ref: Largest scores so far, ``[f, R, 1]``.
    sum_ref: Sums of weights so far, ``[f, R, 1]``.
    acc_ref: Weighted sums of values so far, ``[f, R, f D]``.
  """
  dtype = q_ref.dtype
  keys, values = (_joined(x, 0, dtype) for x in (keys, values))  # [C / f, f D]
  if scales:
    # [f, C / f] each
    key_scales, scales = (_joined(x, 1, jnp.float32) for x in scales)
  else:
    # A slot that no row sees may hold NaN. Weight 0 times NaN would be NaN, and
    # so would a query's zeros times another key in the same row.
    alive = sight.alive(values.shape)
    values = jnp.where(alive, values, jnp.zeros_like(values))
    if sight.packing > 1:
      keys = jnp.where(alive, keys, jnp.zeros_like(keys))
  # float32 operands are multiplied in float32, not in bfloat16.
  exact = lax.Precision.HIGHEST if dtype == jnp.float32 else None
  for i in range(sight.packing):
    scores = lax.dot_general(
      q_ref[i], keys, (((1,), (1,)), ((), ())), precision=exact,
      preferred_element_type=jnp.float32,
    ) * sight.width**-0.5  # [R, C / f]
    if len(scales):
      scores *= key_scales[i : i + 1]
    scores = jnp.where(sight.seen(scores.shape, i), scores, UNSEEN)
    top = jnp.maximum(top_ref[i], jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - top)
    past = jnp.exp(top_ref[i] - top)  # [R, 1]
    top_ref[i] = top
    total = jnp.sum(weights, axis=1, keepdims=True)
    sum_ref[i] = past * sum_ref[i] + total
    if len(scales):
      scale = scales[i : i + 1]
      alive = sight.alive_scales(scale.shape, i)
      weights *= jnp.where(alive, scale, 0.0)
    acc_ref[i] = past * acc_ref[i] + jnp.dot(
      weights.astype(dtype), values, precision=exact,
      preferred_element_type=jnp.float32,
    )


def _together(
  top: jax.Array, total: jax.Array, acc: jax.Array, width: int
) -> jax.Array:
  """Returns the result ``[R, D]`` of f softmaxes over parts of the positions.

  Args:
    top: Largest scores, ``[f, R, 1]``.
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
  # Padding sees nothing: 0 / 1.
  return o / jnp.where(weight == 0.0, 1.0, weight)


def _joined(
  parts: Sequence[jax.Array], dim: int, dtype: Any
) -> jax.Array:
  """Puts pages side by side."""
  x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dim)
  if x.dtype == jnp.int8 and dtype == jnp.bfloat16:
    x = x.astype(jnp.float32)  # Mosaic has no cast between the two
  return x.astype(dtype)
