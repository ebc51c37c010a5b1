"""Pages of keys and values, in the memory orders of attention kernels.

A cache consists of pages of ``page_size`` slots. A slot holds the key and the
value of one token, for all kv heads of one rank. A sequence has a table of its
pages, so that sequences grow without being moved, and their pages need not be
contiguous. With several layers, each layer has separate page numbers (``layer *
num_pages + page``): one array holds all layers, and kernels receive the whole
array.

The order of elements in these arrays is one of:

  heads        separate keys and values, ``[K, N, page, D]`` each: a page of one
               head is contiguous. XLA:CPU gathers it about as fast as it slices
               a dense cache (`configs/benchmark/decoding.py` times both). Read
               by ``gpu.py``, ``cpu.py`` and jax's kernel for GPUs.
  packed       for TPUs: as "heads", but if heads are narrower than the 128
               lanes of a tile, a row holds f = 128 / D consecutive tokens:
               ``[K, N, page / f, f D]``. XLA uses another layout for rows of
               fewer lanes, and would copy the whole array for each kernel. Read
               by ``tpu.py`` and, if f = 1, by jax's paged kernel for TPUs.
  interleaved  keys and values in one array ``[N, page, 2 K, D]``, the key of a
               head before its value. Read by jax's ragged kernel for TPUs.

Pages of dtype int8 hold codes of the codec "int8" of `parallel.kernels.codec`,
with one block per token and head. Their float32 scales are in separate arrays,
``[K, N, f, page / f]`` each, or ``[N, page, 2 K]``.

Shape legend: N = pages of all layers, K = kv heads of one rank, D = head width,
f = tokens in a row (1 but for "packed"), n = tokens, P = pages in a table.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from parallel.base.checks import known
from parallel.kernels import calls
from parallel.kernels.codec import reference as codec
from parallel.kernels.codec.reference import Codec

NAMES = ("heads", "packed", "interleaved")

# Lanes of a TPU's tile.
LANES = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """Pages of one rank: a pytree of arrays in a static order.

  The properties assume arrays of one rank, without a dim of ranks.

  Attributes:
    data: Keys and values, or their codes: two arrays, or one interleaved array.
    scales: Scales of the codes, as many arrays as ``data``; empty for floats.
    order: One of ``NAMES``.
    head_width: Channels of a head, D.
  """

  data: tuple[Any, ...]
  scales: tuple[Any, ...]
  order: str = dataclasses.field(metadata={"static": True})
  head_width: int = dataclasses.field(metadata={"static": True})

  @property
  def num_pages(self) -> int:
    """Number of pages of all layers, N."""
    return self.data[0].shape[0 if self.order == "interleaved" else 1]

  @property
  def page_size(self) -> int:
    """Number of slots of a page."""
    if self.order == "interleaved":
      return self.data[0].shape[1]
    return self.data[0].shape[2] * self.packing

  @property
  def num_kv_heads(self) -> int:
    """Number of kv heads, K."""
    if self.order == "interleaved":
      return self.data[0].shape[2] // 2
    return self.data[0].shape[0]

  @property
  def packing(self) -> int:
    """Number of consecutive tokens in a row of a page, f."""
    return self.data[0].shape[-1] // self.head_width

  @property
  def dtype(self) -> jnp.dtype:
    """Dtype of the stored elements: a float, or int8 for codes."""
    return jnp.dtype(self.data[0].dtype)

  @property
  def coded(self) -> bool:
    """Whether the pages hold codes and scales."""
    return bool(self.scales)


def shapes(
  order: str,
  num_pages: int,
  page_size: int,
  num_kv_heads: int,
  head_width: int,
  dtype: Any,
) -> Pages:
  """Returns the types of the arrays of one rank's pages.

  The arrays should be initialised with zeros, so that slots are finite before
  they are written.

  Args:
    order: One of ``NAMES``.
    num_pages: Number of pages of all layers, N.
    page_size: Number of slots of a page; a multiple of f.
    num_kv_heads: Number of kv heads of one rank, K.
    head_width: Channels of a head, D.
    dtype: Float dtype, or int8 for codes with scales.

  Returns:
    ``Pages`` of ``jax.ShapeDtypeStruct``.

  Raises:
    ValueError: The order is unknown, or f does not divide ``page_size``.

  Example:
    >>> pages = shapes("packed", 10, 16, 2, 64, jnp.bfloat16)
    >>> pages.data[0].shape, pages.packing  # rows of 2 tokens, 128 lanes
    ((2, 10, 8, 128), 2)
  """
  n, page, k, d = num_pages, page_size, num_kv_heads, head_width
  known("order ", order, NAMES)
  if order == "interleaved":
    data, scale, arrays = (n, page, 2 * k, d), (n, page, 2 * k), 1
  else:
    f = LANES // d if order == "packed" and LANES % d == 0 else 1
    if page % f:
      raise ValueError(
        f"page_size={page} must be a multiple of {f} in the order {order!r} "
        f"with heads of {d} channels, since a row of {LANES} channels holds "
        f"{f} tokens"
      )
    data, scale, arrays = (k, n, page // f, f * d), (k, n, f, page // f), 2
  coded = jnp.dtype(dtype) == jnp.int8
  return Pages(
    (jax.ShapeDtypeStruct(data, jnp.dtype(dtype)),) * arrays,
    (jax.ShapeDtypeStruct(scale, jnp.float32),) * (arrays if coded else 0),
    order, head_width,
  )


def write(
  pages: Pages, keys: jax.Array, values: jax.Array, slots: jax.Array
) -> Pages:
  """Writes tokens to their slots.

  With donated pages, ``jax.jit`` scatters in place.

  Args:
    pages: Pages to update.
    keys: ``[n, K, D]``; cast to the dtype of the pages, or encoded.
    values: ``[n, K, D]``.
    slots: int32 ``[n]``, ``page * page_size + offset``. Tokens with slots out
      of range are dropped; slots in range must be distinct.

  Returns:
    The updated pages.

  Example:
    >>> types = shapes("heads", 4, 2, 1, 2, jnp.float32)
    >>> pages = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)
    >>> key = jnp.array([[[1.0, 2.0]]])
    >>> slots = jnp.array([5])  # page 2, offset 1
    >>> pages = jax.jit(write)(pages, key, 3 * key, slots)
    >>> keys, values = jax.jit(read)(pages, jnp.array([2]))
    >>> keys.tolist(), values.tolist()
    ([[[0.0, 0.0], [1.0, 2.0]]], [[[0.0, 0.0], [3.0, 6.0]]])
  """
  if len(slots) == 1:
    # XLA rewrites a scatter of one window to a dynamic-update-slice, for which
    # XLA:CPU copies all pages several times. A second window, out of range and
    # thus dropped, prevents that.
    keys, values = (jnp.concatenate([x, x]) for x in (keys, values))
    slots = jnp.concatenate([slots, jnp.full_like(slots, -1)])
  size, f = pages.page_size, pages.packing
  # Slots out of range get a page number out of range, which scatters drop.
  inside = (slots >= 0) & (slots < pages.num_pages * size)
  page = jnp.where(inside, slots // size, pages.num_pages)
  offset = slots % size
  tokens, scales = (keys, values), ()
  if pages.coded:
    tokens, scales = zip(*map(_encode, tokens), strict=True)
  if pages.order == "interleaved":
    dims, window = (0, 1), (2, 3)
    at = scale_at = (page, offset)
    tokens, scales = _interleave(tokens), _interleave(scales)
  else:
    # Windows [K, 1, 1, D] at (page, row, first channel of the token).
    dims, window = (1, 2, 3), (0, 3)
    row, part = offset // f, offset % f
    at, scale_at = (page, row, part * pages.head_width), (page, part, row)
    if pages.order == "packed":
      # One window per head: for a window over all heads, XLA:TPU copies all
      # pages to a layout with adjacent heads and channels, and back.
      dims, window = (0, *dims), (3,)
      heads = jnp.tile(jnp.arange(pages.num_kv_heads), len(slots))
      at, scale_at = (
        (heads, *(jnp.repeat(x, pages.num_kv_heads) for x in each))
        for each in (at, scale_at)
      )
      tokens, scales = (
        [x.reshape(-1, *x.shape[2:]) for x in each] for each in (tokens, scales)
      )
  return dataclasses.replace(
    pages,
    data=_scatter(pages.data, tokens, at, dims, window),
    scales=_scatter(
      pages.scales, scales, scale_at, dims,
      tuple(d for d in window if d not in dims),
    ),
  )


def _scatter(
  arrays: Sequence[jax.Array],
  updates: Sequence[jax.Array],
  at: Sequence[jax.Array],
  dims: tuple[int, ...],
  window: tuple[int, ...],
) -> tuple[jax.Array, ...]:
  """Writes n windows to each array.

  Args:
    arrays: Arrays to update.
    updates: Windows ``[n, ...]``, one array of them for each of ``arrays``.
    at: Start indices of the windows, int32 ``[n]`` for each of ``dims``.
    dims: Dims of the arrays to which the start indices refer; windows start at
      0 in other dims.
    window: Dims in which windows are longer than 1.
  """
  starts = jnp.stack(at, axis=-1)
  found = []
  for x, new in zip(arrays, updates, strict=True):
    numbers = lax.ScatterDimensionNumbers(
      update_window_dims=tuple(range(1, new.ndim)),
      inserted_window_dims=tuple(d for d in range(x.ndim) if d not in window),
      scatter_dims_to_operand_dims=dims,
    )
    found.append(lax.scatter(
      *calls.unify_varying_axes(x, starts, new.astype(x.dtype)), numbers,
      unique_indices=True, mode=lax.GatherScatterMode.FILL_OR_DROP,
    ))
  return tuple(found)


def read(pages: Pages, table: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Gathers the keys and values of one sequence.

  Args:
    pages: Pages of all sequences.
    table: int32 ``[P]``, the pages of the sequence. Entries out of range are
      clipped, and read pages of other sequences.

  Returns:
    Keys and values, ``[K, P * page_size, D]``, in the order of the table;
    decoded to float32 if the pages hold codes.
  """
  k, d = pages.num_kv_heads, pages.head_width
  scales: Any = ()
  if pages.order == "interleaved":

    def gather(x):  # [N, page, 2 K, ...] -> [2, K, P * page, ...]
      x = jnp.take(x, table, axis=0, mode="clip")
      return jnp.moveaxis(x.reshape(-1, k, 2, *x.shape[3:]), (2, 1), (0, 1))

    data = tuple(gather(pages.data[0]))
    if pages.coded:
      scales = tuple(gather(pages.scales[0]))
  else:

    def gather(x):  # [K, N, ...] -> [K, P, ...]
      return jnp.take(x, table, axis=1, mode="clip")

    data = tuple(gather(x).reshape(k, -1, d) for x in pages.data)
    # [K, P, f, page / f] -> [K, P, page / f, f]: the order of tokens.
    scales = [gather(x).swapaxes(2, 3).reshape(k, -1) for x in pages.scales]
  if pages.coded:
    data = tuple(
      x.astype(jnp.float32) * scale[..., None]
      for x, scale in zip(data, scales, strict=True)
    )
  keys, values = data
  return keys, values


def _encode(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Encodes ``[n, K, D]``: int8 codes, and float32 scales ``[n, K]``."""
  encoded = codec.encode(x, Codec("int8", block=x.shape[-1]))
  codes = lax.bitcast_convert_type(encoded.payload, jnp.int8)
  return codes, encoded.scales[..., 0]


def _interleave(pair: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
  """Interleaves two arrays ``[n, K, ...]`` to one, ``[n, 2 K, ...]``."""
  if not pair:
    return ()
  n, num_heads, *rest = pair[0].shape
  return (jnp.stack(pair, axis=2).reshape(n, 2 * num_heads, *rest),)
