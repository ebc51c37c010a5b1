"""Pages of keys and values, in the orders that attention kernels read.

A cache is cut into pages of ``page_size`` slots, and a slot holds the key and
the value of one token, for all kv heads of one rank. A sequence has a table of
the pages that hold it, so sequences grow without moving, and their pages may
lie anywhere. Who has several layers gives each one its own page numbers
(``layer * num_pages + page``), so that one array holds all layers and a kernel
takes it whole.

The order of elements within these arrays is a value:

  heads        keys and values apart, ``[K, N, page, D]`` each: a page of one
               head is one run of memory. XLA:CPU gathers it as fast as it reads
               a dense cache, and our kernels, jax's paged kernel for TPUs and
               the one for GPUs read it.
  interleaved  keys and values in one array ``[N, page, 2 K, D]``, the key of a
               head before its value: jax's ragged kernel for TPUs.

Pages of dtype int8 hold codes of the codec "int8" of `parallel.kernels.codec`
in blocks of one head's channels, and one float32 scale per token and head in
arrays beside them: ``[K, N, 1, page]`` each, or ``[N, page, 2 K]``.

Measured for the choice of "heads" on CPUs: LOG.md, "Attention over pages".

Shape legend: N = pages of all layers, K = kv heads of one rank, D = head width,
n = tokens, P = pages in a table.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from parallel.kernels.codec import reference as codec
from parallel.kernels.codec.reference import Codec

NAMES = ("heads", "interleaved")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
  """The pages of one rank: a pytree of arrays whose order is static.

  The properties are those of a rank, without a dim of lanes.

  Attributes:
    data: Keys and values, or codes of them; two arrays in the order "heads",
      one in the order "interleaved".
    scales: Scales of int8 codes, as many arrays; empty for floats.
    order: One of ``NAMES``.
  """

  data: tuple[Any, ...]
  scales: tuple[Any, ...]
  order: str = dataclasses.field(metadata={"static": True})

  @property
  def num_pages(self) -> int:
    """Pages of all layers, N."""
    return self.data[0].shape[1 if self.order == "heads" else 0]

  @property
  def page_size(self) -> int:
    """Slots of a page."""
    return self.data[0].shape[2 if self.order == "heads" else 1]

  @property
  def num_kv_heads(self) -> int:
    """Heads of keys and values, K."""
    if self.order == "heads":
      return self.data[0].shape[0]
    return self.data[0].shape[2] // 2

  @property
  def head_width(self) -> int:
    """Channels of a head, D."""
    return self.data[0].shape[-1]

  @property
  def dtype(self) -> jnp.dtype:
    """Dtype of what is stored: a float, or int8 for codes."""
    return jnp.dtype(self.data[0].dtype)

  @property
  def coded(self) -> bool:
    """Whether codes are stored, with scales beside them."""
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

  Start them as zeros: a slot that nobody wrote is then finite.

  Args:
    order: One of ``NAMES``.
    num_pages: Pages of all layers, N.
    page_size: Slots of a page.
    num_kv_heads: Heads of keys and values of one rank, K.
    head_width: Channels of a head, D.
    dtype: A float, or int8 for codes with scales.

  Raises:
    ValueError: The order is unknown.
  """
  n, page, k, d = num_pages, page_size, num_kv_heads, head_width
  if order == "heads":
    data, scale, arrays = (k, n, page, d), (k, n, 1, page), 2
  elif order == "interleaved":
    data, scale, arrays = (n, page, 2 * k, d), (n, page, 2 * k), 1
  else:
    raise ValueError(f"order {order!r} must be one of {', '.join(NAMES)}")
  coded = jnp.dtype(dtype) == jnp.int8
  return Pages(
    (jax.ShapeDtypeStruct(data, dtype),) * arrays,
    (jax.ShapeDtypeStruct(scale, jnp.float32),) * (arrays if coded else 0),
    order,
  )


def zeros(types: Pages) -> Pages:
  """Returns pages without a token, given what `shapes` returned."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)


def write(
  pages: Pages, keys: jax.Array, values: jax.Array, slots: jax.Array
) -> Pages:
  """Writes tokens into their slots.

  Under ``jax.jit`` with donated pages XLA scatters in place.

  Args:
    pages: Where to.
    keys: ``[n, K, D]``; cast to the dtype of the pages, or encoded.
    values: ``[n, K, D]``.
    slots: int32 ``[n]``, ``page * page_size + offset``. A token whose slot is
      out of range is dropped; no two others may have the same one.

  Returns:
    The pages with these tokens.
  """
  size = pages.page_size
  inside = (slots >= 0) & (slots < pages.num_pages * size)
  # A scatter drops what is past the end, but counts negative ones from there.
  page = jnp.where(inside, slots // size, pages.num_pages)
  offset = slots % size
  tokens = [keys, values]
  scales: list[jax.Array] = []
  if pages.coded:
    tokens, scales = zip(*(_encode(x) for x in tokens), strict=True)
  if pages.order == "interleaved":
    tokens, scales = _interleave(tokens), _interleave(scales)
    data_at, scale_at = (page, offset), (page, offset)
  else:
    tokens = [x.swapaxes(0, 1) for x in tokens]  # [K, n, D]
    scales = [x.swapaxes(0, 1) for x in scales]  # [K, n]
    data_at = (slice(None), page, offset)
    scale_at = (slice(None), page, 0, offset)

  def scatter(arrays, updates, at):
    return tuple(
      x.at[at].set(new.astype(x.dtype), mode="drop", unique_indices=True)
      for x, new in zip(arrays, updates, strict=True)
    )

  return dataclasses.replace(
    pages,
    data=scatter(pages.data, tokens, data_at),
    scales=scatter(pages.scales, scales, scale_at),
  )


def read(pages: Pages, table: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Gathers the keys and values of one sequence.

  Args:
    pages: The pages of all sequences.
    table: int32 ``[P]``, the pages of the sequence. Entries out of range are
      clipped, so what is read for them belongs to somebody else.

  Returns:
    Keys and values, ``[K, P * page_size, D]``, in the order of the table;
    decoded to float32 if the pages hold codes.
  """
  heads = pages.order == "heads"

  def gather(x):
    if heads:
      x = jnp.take(x, table, axis=1, mode="clip")  # [K, P, page, ...]
      return (x.reshape(x.shape[0], -1, *x.shape[3:]),)
    x = jnp.take(x, table, axis=0, mode="clip")  # [P, page, 2 K, ...]
    x = x.reshape(-1, pages.num_kv_heads, 2, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0).swapaxes(1, 2)  # [2, K, P * page, ...]

  found = [each for x in pages.data for each in gather(x)]
  if pages.coded:
    flat = [x[:, :, 0] if heads else x for x in pages.scales]
    scales = [each for x in flat for each in gather(x[..., None])]
    found = [
      x.astype(jnp.float32) * scale
      for x, scale in zip(found, scales, strict=True)
    ]
  keys, values = found
  return keys, values


def _encode(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Encodes ``[n, K, D]``: int8 codes, and float32 scales ``[n, K]``."""
  encoded = codec.encode(x, Codec("int8", block=x.shape[-1]))
  codes = lax.bitcast_convert_type(encoded.payload, jnp.int8)
  return codes, encoded.scales[..., 0]


def _interleave(pair: Any) -> list[jax.Array]:
  """Puts two arrays ``[n, K, ...]`` into one, ``[n, 2 K, ...]``."""
  if not pair:
    return []
  n, num_heads, *rest = pair[0].shape
  return [jnp.stack(pair, axis=2).reshape(n, 2 * num_heads, *rest)]
