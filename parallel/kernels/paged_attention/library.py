"""jax's own kernels of attention over pages, behind the arguments of ours.

Each one takes pages in one order and some of the operands; ``refusal`` says why
it does not take the others. None of them names the mesh axes over which its
result varies, so they are called by `calls.unchecked`.

Shape legend: S = sequences, T = new tokens of each, H = query heads, K = kv
heads, D = head width, P = pages in a table.
"""

from collections.abc import Callable
import contextlib
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import paged_attention as gpu_paged
from jax.experimental.pallas.ops.tpu import paged_attention as tpu_paged
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.paged_attention.order import LANES, Pages

# Positions that a step of a kernel takes: about as much memory as our own
# kernels load at a time.
_TPU_POSITIONS = 512
_GPU_POSITIONS = 64
# Programs that share the positions of a sequence on a GPU at most: its default.
_GPU_SHARES = 16
# Query rows of a block of the ragged kernel: its own default.
_RAGGED_ROWS = 32

# Of all of them: they multiply what no row sees by weight zero, be it past a
# sequence's end, before a window or in the place of padding.
NOT_FINITE = (
  "a NaN that no row sees would spoil the result (weight 0 times NaN), and "
  "nobody promises finite pages"
)


def refusal(
  name: str, q: jax.Array, pages: Pages, tables: jax.Array, window: int
) -> str | None:
  """Returns why a kernel does not take the operands: `api.Kernels.refusal`.

  ``name`` is one of ``NAMES``.
  """
  return _REFUSALS[name](q, pages, tables, window)


def _refusal_of_decode(q, window):
  if q.shape[1] > 1:
    return f"{q.shape[1]} new tokens of a sequence: it takes one"
  if window:
    return f"window {window}: it has none"
  return None


def _refusal_of_tpu_paged(q, pages, tables, window):
  del tables
  if pages.order != "packed":
    return f"pages in the order {pages.order!r}: it reads 'packed'"
  if pages.head_width % LANES:
    return f"heads of {pages.head_width} channels: multiples of {LANES} only"
  if pages.coded:
    return "int8 pages: it wants scales as large as float32 pages"
  if not q.dtype == pages.dtype == jnp.bfloat16:
    return (
      f"queries of {q.dtype}, pages of {pages.dtype}: it computes with bfloat16"
    )
  return _refusal_of_decode(q, window)


def _refusal_of_ragged(q, pages, tables, window):
  del tables, window
  if pages.order != "interleaved":
    return f"pages in the order {pages.order!r}: it reads 'interleaved'"
  if pages.head_width % LANES:
    return f"heads of {pages.head_width} channels: multiples of {LANES} only"
  if pages.coded:
    return "int8 pages: it takes one scale for all of them"
  if q.dtype not in (jnp.float32, jnp.bfloat16) or q.dtype != pages.dtype:
    return (
      f"queries of {q.dtype}, pages of {pages.dtype}: float32 or bfloat16, both"
    )
  # Keys and values of all heads of a token are the second to last dim of a
  # page, which must be whole tiles of 32-bit words.
  words = 2 * pages.num_kv_heads * pages.dtype.itemsize // 4
  if words not in (1, 2, 4) and words % 8:
    return (
      f"{pages.num_kv_heads} kv heads: tiles of {pages.dtype} want 1, 2, 4 or "
      "a multiple of 8"
    )
  return None


def _refusal_of_gpu_paged(q, pages, tables, window):
  del tables
  if pages.order != "heads":
    return f"pages in the order {pages.order!r}: it reads 'heads'"
  for what, size in (
    ("heads of {} channels", pages.head_width),
    ("page_size {}", pages.page_size),
  ):
    if size < 16 or size & (size - 1):
      return f"{what.format(size)}: it takes powers of two from 16 on"
  if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return f"dtype {q.dtype}: float32, bfloat16 or float16"
  if pages.dtype not in (q.dtype, jnp.int8):
    return f"pages of {pages.dtype}, queries of {q.dtype}: one dtype, or int8"
  return _refusal_of_decode(q, window)


def paged_attention(
  name: str,
  q: jax.Array,
  pages: Pages,
  tables: jax.Array,
  first: jax.Array,
  lengths: jax.Array,
  *,
  window: int = 0,
  interpret: bool = False,
) -> jax.Array:
  """Runs a kernel of ``NAMES``: `api.Kernels.paged_attention`."""
  call, operands = _CALLS[name](
    q, pages, tables, first, lengths, window, interpret
  )
  out = calls.unchecked(call, *operands).reshape(q.shape)
  # What padding gives is undefined.
  is_padding = (first < 0)[:, None, None, None]
  return jnp.where(is_padding, jnp.zeros_like(out), out)


def _tpu_paged(q, pages, tables, first, lengths, window, interpret):
  del first, window
  block = _divisor(tables.shape[1], _TPU_POSITIONS // pages.page_size)

  def call(q, keys, values, lengths, tables):
    with _interpreted(interpret):
      return tpu_paged.paged_attention(
        q, keys, values, lengths, tables, pages_per_compute_block=block
      )

  return call, (_scaled(q[:, 0]), *pages.data, lengths, tables)


def _ragged(q, pages, tables, first, lengths, window, interpret):
  if interpret:
    raise ValueError(
      "jax_tpu_ragged_interpret: jax's interpreter does not know the reshaped "
      "references of this kernel"
    )
  del lengths  # all T rows count as real, as rows begin at multiples of T
  num_seqs, num_rows, num_heads, width = q.shape
  ends = jnp.maximum(first, 0) + num_rows
  block = max(1, min(tables.shape[1], _TPU_POSITIONS // pages.page_size))

  def call(q, both, ends, tables):
    return ragged.ragged_paged_attention(
      q, both, ends, tables,
      jnp.arange(num_seqs + 1, dtype=jnp.int32) * num_rows,
      jnp.full((1,), num_seqs, jnp.int32),
      sm_scale=width**-0.5,
      sliding_window=window or None,
      # Given, as it would ask a TPU of this machine which ones are best.
      num_kv_pages_per_block=block,
      num_queries_per_block=min(_RAGGED_ROWS, num_seqs * num_rows),
    )

  q = q.reshape(num_seqs * num_rows, num_heads, width)
  return call, (q, *pages.data, ends, tables)


def _gpu_paged(q, pages, tables, first, lengths, window, interpret):
  del first, window
  shares = _divisor(tables.shape[1], _GPU_SHARES, powers=True)
  block = _divisor(
    tables.shape[1] // shares, _GPU_POSITIONS // pages.page_size, powers=True
  )
  # [K, N, 1, page] -> [K, N, page]
  scales = [x[:, :, 0] for x in pages.scales]

  def call(q, keys, values, tables, lengths, *scales):
    return gpu_paged.paged_attention(
      q, keys, values, tables, lengths, *scales, pages_per_compute_block=block,
      k_splits=shares, interpret=interpret,
    )

  return call, (_scaled(q[:, 0]), *pages.data, tables, lengths, *scales)


def _scaled(q: jax.Array) -> jax.Array:
  """Scales queries for kernels that do not scale their scores."""
  return (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)


def _divisor(n: int, most: int, powers: bool = False) -> int:
  """Returns the largest divisor of n, or power of two among them, to most."""
  return max(
    d for d in range(1, max(1, most) + 1)
    if n % d == 0 and not (powers and d & (d - 1))
  )


def _interpreted(interpret: bool) -> contextlib.AbstractContextManager[Any]:
  """Interprets a kernel for TPUs that has no argument for it."""
  if not interpret:
    return contextlib.nullcontext()
  return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())


_REFUSALS: dict[str, Callable[..., str | None]] = {
  "jax_tpu_ragged": _refusal_of_ragged,
  "jax_tpu_paged": _refusal_of_tpu_paged,
  "jax_gpu_paged": _refusal_of_gpu_paged,
}
_CALLS: dict[str, Callable[..., Any]] = {
  "jax_tpu_ragged": _ragged,
  "jax_tpu_paged": _tpu_paged,
  "jax_gpu_paged": _gpu_paged,
}
NAMES = tuple(_CALLS)
