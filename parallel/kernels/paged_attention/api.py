"""Attention over pages, by the preferred implementation that is available.

jax's own kernels come first where they take the operands, then ours.

Shape legend: S = sequences, T = new tokens of each, H = query heads, K = kv
heads, D = head width, P = pages in a table.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from parallel.kernels.paged_attention import (
  gpu,
  library,
  order,
  reference,
  tpu,
)
from parallel.kernels.paged_attention.order import Pages
from parallel.kernels.selection import (
  Choice,
  Implementation,
  choose,
  preference,
)

KERNELS = {
  "tpu": ("jax_tpu_ragged", "jax_tpu_paged", "tpu"),
  "gpu": ("jax_gpu_paged", "gpu"),
}
# The order of pages that each kernel reads.
ORDERS = {
  "jax_tpu_ragged": "interleaved",
  "jax_tpu_paged": "packed",
  "tpu": "packed",
  "jax_gpu_paged": "heads",
  "gpu": "heads",
}


class Kernels(Protocol):
  """Our kernels of a platform: the functions of ``tpu.py`` and ``gpu.py``.

  `library` has the same functions of jax's kernels, with the kernel's name
  first.
  """

  def refusal(
    self, q: jax.Array, pages: Pages, tables: jax.Array, window: int
  ) -> str | None:
    """Returns why the kernel does not take the operands, or None if it does.

    Args:
      q: Queries, ``[S, T, H, D]``. Of all arrays only shape and dtype are read.
      pages: Keys and values.
      tables: ``[S, P]``.
      window: Positions that a row sees; 0 for all.
    """
    ...

  def paged_attention(
    self, q: jax.Array, pages: Pages, tables: jax.Array, first: jax.Array,
    lengths: jax.Array, *, window: int = 0, interpret: bool = False,
  ) -> jax.Array:
    """Attends from new tokens to all of their sequence that they may see.

    The operands are those of `paged_attention`; entries of ``tables`` are valid
    pages, and ``lengths`` is 0 for padding.

    Args:
      q: Queries.
      pages: Keys and values.
      tables: The pages of each sequence.
      first: The position of row 0.
      lengths: Positions that hold a key.
      window: Positions that a row sees.
      interpret: Whether to run in the interpreter, on any machine.
    """
    ...


OWN: dict[str, Kernels] = {"tpu": tpu, "gpu": gpu}


def choice(
  q: jax.Array,
  pages: Pages,
  tables: jax.Array,
  *,
  window: int = 0,
  finite: bool = False,
  implementation: Implementation = "auto",
) -> Choice:
  """Returns which implementation `paged_attention` uses, and why others do not.

  Args:
    q: Queries, ``[S, T, H, D]``. Of all arrays only shape and dtype are read,
      so a ``jax.ShapeDtypeStruct`` will do.
    pages: Keys and values.
    tables: ``[S, P]``.
    window: Positions that a row sees; 0 for all.
    finite: Whether no slot of the pages holds NaN or infinity.
    implementation: "auto", or names in order of preference.

  Raises:
    ValueError: A name is unknown, or no preferred kernel takes the operands.
  """

  def refusal(kind):
    if kind in OWN:
      return OWN[kind].refusal(q, pages, tables, window)
    found = library.refusal(kind, q, pages, tables, window)
    return found or (None if finite else library.NOT_FINITE)

  return choose("paged_attention", implementation, refusal, KERNELS)


def preferred(platform: str, mapped: bool) -> tuple[str, ...]:
  """Returns the implementations for a platform in order of preference.

  Args:
    platform: "tpu", "gpu" or "cpu".
    mapped: Whether calls are under ``jax.vmap``, over lanes or replicas. That
      goes through jax's own kernels one by one and slices out the pages of
      each, so they are left out.
  """
  names = preference("auto", platform, KERNELS)
  return tuple(x for x in names if not mapped or x not in library.NAMES)


def best_order(
  names: tuple[str, ...],
  *,
  num_heads: int,
  num_kv_heads: int,
  head_width: int,
  page_size: int,
  dtype: Any,
  stored: Any,
  window: int = 0,
  finite: bool = False,
) -> str:
  """Returns in which order pages suit the kernels.

  It is the one whose first choice of a kernel, for chunks of a prompt and for
  decoding alike, is preferred most.

  Args:
    names: Implementations in order of preference, "reference" among them.
    num_heads: Query heads of one rank, H.
    num_kv_heads: Heads of keys and values of one rank, K.
    head_width: Channels of a head, D.
    page_size: Slots of a page.
    dtype: Dtype of queries.
    stored: Dtype of the pages; int8 for codes with scales.
    window: Positions that a row sees; 0 for all.
    finite: Whether no slot of the pages holds NaN or infinity.
  """
  tables = jax.ShapeDtypeStruct((1, 1), jnp.int32)

  def rank(name):
    try:
      pages = order.shapes(
        name, 1, page_size, num_kv_heads, head_width, stored
      )
    except ValueError:  # rows of several tokens do not fill a page
      return len(names)
    chosen = [
      choice(
        jax.ShapeDtypeStruct((1, rows, num_heads, head_width), dtype), pages,
        tables, window=window, finite=finite, implementation=names,
      )
      for rows in (1, 16)
    ]
    return max(names.index(each.name) for each in chosen)

  # Of orders alike the first one: "heads", which every platform can read.
  return min(order.NAMES, key=rank)


def paged_attention(
  q: jax.Array,
  pages: Pages,
  tables: jax.Array,
  first: jax.Array,
  lengths: jax.Array | None = None,
  *,
  window: int = 0,
  finite: bool = False,
  implementation: Implementation = "auto",
) -> jax.Array:
  """Attends from new tokens to all of their sequence that they may see.

  ``reference.paged_attention`` specifies the result. Kernels read each page in
  sight once for a block of query rows, and make no dense copy.

  Args:
    q: Queries, ``[S, T, H, D]``, of one rank.
    pages: Keys and values; those of the new tokens are written already.
    tables: int32 ``[S, P]``, the pages of each sequence. Entries past its last
      position are not used and may be out of range.
    first: int32 ``[S]``, the position of row 0; negative for a sequence that is
      only padding.
    lengths: int32 ``[S]``, positions of each sequence that hold a key, which is
      less than ``first + T`` where the last rows are padding; None for
      ``first + T``.
    window: Positions that a row sees, its own included; 0 for all.
    finite: Whether no slot of the pages holds NaN or infinity, which jax's own
      kernels need. It holds for pages that began as zeros, as long as no key
      and no value that was written was NaN or infinite.
    implementation: "auto", or names in order of preference: those of
      ``KERNELS``, with "_interpret" behind it for any machine, or "reference".

  Returns:
    ``[S, T, H, D]``, of the dtype of q. Padding gives finite values.

  Raises:
    ValueError: A name is unknown, or no preferred kernel takes the operands.
  """
  chosen = choice(
    q, pages, tables, window=window, finite=finite,
    implementation=implementation,
  )
  ends = first + q.shape[1]
  lengths = ends if lengths is None else jnp.minimum(lengths, ends)
  lengths = jnp.where(first < 0, 0, lengths)
  if chosen.name == "reference":
    return reference.paged_attention(
      q, pages, tables, first, lengths, window=window
    )
  # Kernels may load a page that they do not use.
  tables = jnp.clip(tables, 0, pages.num_pages - 1)
  operands = q, pages, tables, first, lengths
  options = {"window": window, "interpret": chosen.interpret}
  if chosen.kind in OWN:
    return OWN[chosen.kind].paged_attention(*operands, **options)
  return library.paged_attention(chosen.kind, *operands, **options)
