"""Attention over pages, by the preferred implementation that is available.

Shape legend: S = sequences, T = new tokens of each, H = query heads, K = kv
heads, D = head width, P = pages in a table.
"""

import jax
import jax.numpy as jnp

from parallel.kernels.paged_attention import reference
from parallel.kernels.paged_attention.order import Pages
from parallel.kernels.selection import Choice, Implementation, choose


def choice(
  q: jax.Array,
  pages: Pages,
  tables: jax.Array,
  *,
  window: int = 0,
  implementation: Implementation = "auto",
) -> Choice:
  """Returns which implementation `paged_attention` uses, and why others do not.

  Args:
    q: Queries, ``[S, T, H, D]``. Of all arrays only shape and dtype are read,
      so a ``jax.ShapeDtypeStruct`` will do.
    pages: Keys and values.
    tables: ``[S, P]``.
    window: Positions that a row sees; 0 for all.
    implementation: "auto", or names in order of preference.

  Raises:
    ValueError: A name is unknown, or no preferred kernel takes the operands.
  """
  return choose("paged_attention", implementation, lambda kind: "none yet")


def paged_attention(
  q: jax.Array,
  pages: Pages,
  tables: jax.Array,
  first: jax.Array,
  lengths: jax.Array | None = None,
  *,
  window: int = 0,
  implementation: Implementation = "auto",
) -> jax.Array:
  """Attends from new tokens to all of their sequence that they may see.

  ``reference.paged_attention`` specifies the result.

  Args:
    q: Queries, ``[S, T, H, D]``, of one rank.
    pages: Keys and values; the new tokens' are written already.
    tables: int32 ``[S, P]``, the pages of each sequence. Entries past its last
      position are not used and may be out of range.
    first: int32 ``[S]``, the position of row 0; negative for a sequence that is
      only padding.
    lengths: int32 ``[S]``, positions of each sequence that hold a key, which is
      less than ``first + T`` where the last rows are padding; None for
      ``first + T``.
    window: Positions that a row sees, its own included; 0 for all.
    implementation: "auto", or names in order of preference; see
      `parallel.kernels.selection`.

  Returns:
    ``[S, T, H, D]``, of the dtype of q. Padding gives finite values.

  Raises:
    ValueError: A name is unknown, or no preferred kernel takes the operands.
  """
  choice(q, pages, tables, window=window, implementation=implementation)
  ends = first + q.shape[1]
  lengths = ends if lengths is None else jnp.minimum(lengths, ends)
  return reference.paged_attention(
    q, pages, tables, first, lengths, window=window
  )
