"""Named shapes of paged_attention, shared by tests and benchmarks.

Shape legend: S = sequences, T = new tokens of each, H = query heads, K = kv
heads, D = head width, P = pages in a table.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from parallel.kernels.paged_attention import order
from parallel.kernels.paged_attention.order import Pages


class AttentionCase(NamedTuple):
  """Sizes and options of one call of the kernel.

  Attributes:
    seqs: Number of sequences, S.
    rows: New tokens of each sequence, T.
    heads: Query heads of one rank, H.
    kv_heads: Kv heads of one rank, K.
    width: Head width, D.
    page_size: Slots of a page.
    pages: Pages in a table, P.
    window: Number of positions that a query attends to; 0 for all.
    dtype: Dtype of the queries.
    stored: Dtype of the pages; "" for ``dtype``, "int8" for codes.
    layers: Number of layers, each with as many pages as the tables contain.
  """

  seqs: int
  rows: int
  heads: int
  kv_heads: int
  width: int
  page_size: int
  pages: int
  window: int = 0
  dtype: str = "float32"
  stored: str = ""
  layers: int = 1

  @property
  def num_pages(self) -> int:
    """Number of pages of all layers: those in tables, and two unused ones."""
    return self.layers * (self.seqs * self.pages + 2)

  def types(self, name: str) -> tuple[jax.ShapeDtypeStruct, Pages, ...]:
    """Returns the types of q, pages, tables and first.

    Args:
      name: Order of the pages, one of ``order.NAMES``.
    """
    pages = order.shapes(
      name, self.num_pages, self.page_size, self.kv_heads, self.width,
      self.stored or self.dtype,
    )
    q = self.seqs, self.rows, self.heads, self.width
    return (
      jax.ShapeDtypeStruct(q, jnp.dtype(self.dtype)),
      pages,
      jax.ShapeDtypeStruct((self.seqs, self.pages), jnp.int32),
      jax.ShapeDtypeStruct((self.seqs,), jnp.int32),
    )


# All kernels support these pages: rows of 128 channels form whole tiles of 8
# rows.
CASES = {
  "decode, no groups, bf16": AttentionCase(
    2, 1, 3, 3, 64, 16, 2, dtype="bfloat16"
  ),
  "window": AttentionCase(2, 6, 4, 2, 64, 16, 3, window=18),
  "int8": AttentionCase(1, 2, 2, 1, 128, 128, 2, stored="int8"),
  # More rows than a block, with a window that starts differently in each block.
  "blocks of rows": AttentionCase(1, 40, 16, 1, 128, 32, 2, window=20),
  # More pages than a TPU grid step, and enough positions for several programs
  # of a GPU.
  "steps": AttentionCase(1, 3, 2, 1, 128, 256, 3),
}

# Sizes on one of 8 tensor ranks of a 7B and of a 70B model, four layers.
_7B = AttentionCase(32, 1, 4, 4, 128, 128, 16, dtype="bfloat16", layers=4)
_70B = _7B._replace(heads=8, kv_heads=1)
_NARROW = _7B._replace(heads=8, kv_heads=8, width=64)
LARGE = {
  "7B, decode": _7B,
  "7B, chunk": _7B._replace(seqs=4, rows=256),
  "7B, decode, window": _7B._replace(window=512),
  "70B, decode": _70B,
  "70B, chunk": _70B._replace(seqs=4, rows=256),
  "70B, decode, int8": _70B._replace(stored="int8"),
  "narrow heads, decode": _NARROW,
  "narrow heads, chunk": _NARROW._replace(seqs=4, rows=256),
  "5 heads, float32, decode": _7B._replace(
    heads=5, kv_heads=5, dtype="float32"
  ),
}
