"""Attention over the pages of a cache, in plain jnp: the specification.

A sequence has new tokens, whose keys are in the cache already, and attends to
them and to what came before: one new token to decode, several in a chunk of a
prompt. Its pages are gathered into a dense copy, one sequence after another, so
that the copy of one stays in a CPU's cache while it is used. With the copies of
all sequences at once XLA:CPU takes several times as long, as it does with small
products over each page where it lies.

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
  """Specifies `api.paged_attention`, whose operands it takes.

  Row t of a sequence stands at position ``first + t``. It sees the positions up
  to its own, as far as they are below ``lengths``, and with a window only the
  last ``window`` of them. Query head h reads kv head ``h // G``. Scores are
  scaled by ``D**-0.5``. All is computed in float32 and rounded once. Padding
  gives zeros.

  Slots that no row sees may hold NaN.
  """
  num_seqs, num_rows, _, width = q.shape
  grouped = (num_seqs, num_rows, pages.num_kv_heads, -1, width)

  def one(operands):
    q, table, first, length = operands
    # Cast, since XLA:CPU has no batch of products from bfloat16 to float32.
    keys, values = (
      x.astype(jnp.float32) for x in order.read(pages, table)  # [K, C, D]
    )
    place = jnp.arange(keys.shape[1])  # [C]
    row = first + jnp.arange(num_rows)[:, None]  # [T, 1]
    seen = (place <= row) & (place < length) & (first >= 0)  # [T, C]
    if window:
      seen &= place > row - window
    scores = jnp.einsum("tkgd,kcd->ktgc", q, keys)
    # A finite number, so that a row that sees nothing has no NaN.
    scores = jnp.where(seen[:, None], scores * width**-0.5, -1e30)
    weights = jax.nn.softmax(scores, axis=-1)
    # Weight 0 times NaN would be NaN.
    values = jnp.where(seen.any(axis=0)[:, None], values, 0)
    return jnp.einsum("ktgc,kcd->tkgd", weights, values)

  rows = q.astype(jnp.float32).reshape(grouped)
  out = lax.map(one, (rows, tables, first, lengths))
  return out.reshape(q.shape).astype(q.dtype)
