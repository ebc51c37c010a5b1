"""jax's kernels of attention over pages, with the interface of `api.Kernels`.

Each kernel supports one order of pages and a subset of the operands;
``refusal`` returns the reason why operands are not supported. The kernels do
not declare the mesh axes over which their results vary, and are called through
`calls.call_unchecked`.

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

# Positions per step of a kernel, which load about as many bytes as a step of
# ``tpu.py`` and ``gpu.py``.
_TPU_POSITIONS = 512
_GPU_POSITIONS = 64
# Maximum number of programs over which jax's GPU kernel splits the positions of
# a sequence: its default.
_GPU_MAX_SPLITS = 16
# Query rows of a block of the ragged kernel: its default.
_RAGGED_ROWS = 32

# Reason to refuse any of these kernels: all multiply masked values (past a
# sequence's end, before a window, in padding) by weight zero.
NOT_FINITE_REASON = (
  "a NaN in a masked slot would make the result NaN (weight 0 times NaN), and "
  "the pages are not declared finite"
)


def refusal(
  name: str, q: jax.Array, pages: Pages, tables: jax.Array, window: int
) -> str | None:
  """Returns why operands are not supported, or None: `api.Kernels.refusal`.

  ``name`` is one of ``NAMES``.
  """
  return _REFUSALS[name](q, pages, tables, window)


def _refusal_of_decode(q, window):
  if q.shape[1] > 1:
    return f"{q.shape[1]} new tokens of a sequence: supports one"
  if window:
    return f"window {window}: not supported"
  return None


def _refusal_of_tpu_paged(q, pages, tables, window):
  del tables
  if pages.order != "packed":
    return f"pages in the order {pages.order!r}: reads 'packed' only"
  if pages.head_width % LANES:
    return f"heads of {pages.head_width} channels: multiples of {LANES} only"
  if pages.coded:
    return "int8 pages: needs scales as large as float32 pages"
  if not q.dtype == pages.dtype == jnp.bfloat16:
    return (
      f"queries of {q.dtype}, pages of {pages.dtype}: bfloat16 only"
    )
  return _refusal_of_decode(q, window)


def _refusal_of_ragged(q, pages, tables, window):
  del tables, window
  if pages.order != "interleaved":
    return f"pages in the order {pages.order!r}: reads 'interleaved' only"
  if pages.head_width % LANES:
    return f"heads of {pages.head_width} channels: multiples of {LANES} only"
  if pages.coded:
    return "int8 pages: supports only one scale for all pages"
  if q.dtype not in (jnp.float32, jnp.bfloat16) or q.dtype != pages.dtype:
    return (
      f"queries of {q.dtype}, pages of {pages.dtype}: float32 or bfloat16, both"
    )
  # The second to last dim of a page is the keys and values of all heads of a
  # token, and must consist of whole tiles of 32-bit words.
  words = 2 * pages.num_kv_heads * pages.dtype.itemsize // 4
  if words not in (1, 2, 4) and words % 8:
    return (
      f"{pages.num_kv_heads} kv heads: tiles of {pages.dtype} need 1, 2, 4 or "
      "a multiple of 8"
    )
  return None


def _refusal_of_gpu_paged(q, pages, tables, window):
  del tables
  if pages.order != "heads":
    return f"pages in the order {pages.order!r}: reads 'heads' only"
  for what, size in (
    ("heads of {} channels", pages.head_width),
    ("page_size {}", pages.page_size),
  ):
    if size < 16 or size & (size - 1):
      return f"{what.format(size)}: powers of two from 16 on only"
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
  """Calls a kernel of ``NAMES``: `api.Kernels.paged_attention`."""
  call, operands = _CALLS[name](
    q, pages, tables, first, lengths, window, interpret
  )
  with jax.numpy_dtype_promotion("standard"):  # the kernels rely on it
    out = calls.call_unchecked(call, *operands).reshape(q.shape)
  # The kernels' results for padding are undefined, and replaced by zeros.
  is_padding = (first < 0)[:, None, None, None]
  return jnp.where(is_padding, jnp.zeros_like(out), out)


def _prepare_tpu_paged(q, pages, tables, first, lengths, window, interpret):
  del first, window
  block = _largest_divisor(tables.shape[1], _TPU_POSITIONS // pages.page_size)

  def call(q, keys, values, lengths, tables):
    with _interpreter_mode(interpret):
      return tpu_paged.paged_attention(
        q, keys, values, lengths, tables, pages_per_compute_block=block
      )

  return call, (_scale_queries(q[:, 0]), *pages.data, lengths, tables)


def _prepare_ragged(q, pages, tables, first, lengths, window, interpret):
  if interpret:
    raise ValueError(
      "jax_tpu_ragged_interpret: jax's interpreter does not support the "
      "reshaped references of this kernel"
    )
  # All T rows of a sequence are treated as valid, since the rows of sequence s
  # start at s T.
  del lengths
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
      # Set explicitly: the default queries a TPU of this machine.
      num_kv_pages_per_block=block,
      num_queries_per_block=min(_RAGGED_ROWS, num_seqs * num_rows),
    )

  q = q.reshape(num_seqs * num_rows, num_heads, width)
  return call, (q, *pages.data, ends, tables)


def _prepare_gpu_paged(q, pages, tables, first, lengths, window, interpret):
  del first, window
  shares = _largest_divisor(tables.shape[1], _GPU_MAX_SPLITS, powers=True)
  block = _largest_divisor(
    tables.shape[1] // shares, _GPU_POSITIONS // pages.page_size, powers=True
  )
  # [K, N, 1, page] -> [K, N, page]
  scales = [x[:, :, 0] for x in pages.scales]

  def call(q, keys, values, tables, lengths, *scales):
    return gpu_paged.paged_attention(
      q, keys, values, tables, lengths, *scales, pages_per_compute_block=block,
      k_splits=shares, interpret=interpret,
    )

  return call, (_scale_queries(q[:, 0]), *pages.data, tables, lengths, *scales)


def _scale_queries(q: jax.Array) -> jax.Array:
  """Scales queries for kernels that do not scale their scores."""
  return (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)


def _largest_divisor(n: int, most: int, powers: bool = False) -> int:
  """Returns n's largest divisor up to ``most``; with ``powers``, one of 2^i."""
  return max(
    d for d in range(1, max(1, most) + 1)
    if n % d == 0 and not (powers and d & (d - 1))
  )


def _interpreter_mode(
  interpret: bool
) -> contextlib.AbstractContextManager[Any]:
  """Enables the interpreter for a TPU kernel without an argument for it."""
  if not interpret:
    return contextlib.nullcontext()
  return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())


_REFUSALS: dict[str, Callable[..., str | None]] = {
  "jax_tpu_ragged": _refusal_of_ragged,
  "jax_tpu_paged": _refusal_of_tpu_paged,
  "jax_gpu_paged": _refusal_of_gpu_paged,
}
_CALLS: dict[str, Callable[..., Any]] = {
  "jax_tpu_ragged": _prepare_ragged, "jax_tpu_paged": _prepare_tpu_paged,
  "jax_gpu_paged": _prepare_gpu_paged,
}
NAMES = tuple(_CALLS)
