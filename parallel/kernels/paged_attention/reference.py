"""Attention over the pages of a cache, in plain jnp: the specification.

The queries are the new tokens of each sequence: one in a decoding step, several
in a chunk of a prompt. Their keys and values are already in the cache. They
attend to the new and all preceding tokens of the sequence. Pages are gathered
into a dense copy, one sequence at a time, so that the copy remains in a CPU's
cache while it is used. Gathering all sequences at once takes several times as
long on XLA:CPU, as do small products over each page in place.

Shape legend: S = sequences, T = new tokens of each, H = query heads, K = kv
heads, G = H / K, D = head width, P = pages in a table, C = P * page_size.
"""

import jax
from jax import lax
import jax.numpy as jnp

from parallel.kernels.paged_attention import order
from parallel.kernels.paged_attention.order import Pages


def paged_attention(
  q: jax.Array,
  pages: Pages,
  tables: jax.Array,
  first: jax.Array,
  lengths: jax.Array,
  *,
  window: int = 0,
) -> jax.Array:
  """Implements `api.paged_attention` in plain jnp.

  Row t of a sequence has position ``first + t``. It attends to the positions up
  to its own that are less than ``lengths``, and with a window only to the last
  ``window`` of them. Query head h uses kv head ``h // G``. Scores are scaled by
  ``D**-0.5``. Computation is in float32; the result is rounded once. Padding
  gives zeros.

  Slots to which no query attends may hold NaN.
  """
  num_seqs, num_rows, _, width = q.shape
  grouped = (num_seqs, num_rows, pages.num_kv_heads, -1, width)

  def one(operands):
    q, table, first, length = operands
    # XLA:CPU has no batched bfloat16 products with float32 results.
    keys, values = (
      x.astype(jnp.float32) for x in order.read(pages, table)  # [K, C, D]
    )
    place = jnp.arange(keys.shape[1])[None]  # [1, C]
    row = first + jnp.arange(num_rows)[:, None]  # [T, 1]
    seen = (place <= row) & (place < length) & (first >= 0)  # [T, C]
    if window:
      seen &= place > row - window
    scores = jnp.einsum("tkgd,kcd->ktgc", q, keys)
    # Finite, so that the softmax of a fully masked row is not NaN.
    scores = jnp.where(seen[:, None], scores * width**-0.5, -1e30)
    weights = jax.nn.softmax(scores, axis=-1)
    # Masked values are replaced, since weight 0 times NaN is NaN.
    values = jnp.where(seen.any(axis=0)[:, None], values, 0)
    return jnp.einsum("ktgc,kcd->tkgd", weights, values)

  rows = q.astype(jnp.float32).reshape(grouped)
  out = lax.map(one, (rows, tables, first, lengths))
  return out.reshape(q.shape).astype(q.dtype)
