"""Attention over pages, by the preferred implementation that is available.

jax's kernels are preferred if they support the operands, then ``tpu.py``,
``gpu.py`` or ``cpu.py``.

Shape legend: S = sequences, T = new tokens of each, H = query heads, K = kv
heads, D = head width, P = pages in a table.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from parallel.kernels.paged_attention import (
  cpu,
  gpu,
  library,
  order,
  reference,
  tpu,
)
from parallel.kernels.paged_attention.order import Pages
from parallel.kernels.selection import (
  Implementation,
  SelectedKernel,
  choose,
  preference,
)

KERNELS = {
  "tpu": ("jax_tpu_ragged", "jax_tpu_paged", "tpu"),
  "gpu": ("jax_gpu_paged", "gpu"),
  "cpu": ("cpu",),
}
# Kernel -> memory layout of the arrays of pages that it reads (`order`).
ORDERS = {
  "jax_tpu_ragged": "interleaved",
  "jax_tpu_paged": "packed",
  "tpu": "packed",
  "jax_gpu_paged": "heads",
  "gpu": "heads",
  "cpu": "heads",
}


class Kernels(Protocol):
  """Kernels of a platform: functions of ``tpu.py``, ``gpu.py`` and ``cpu.py``.

  `library` has the same functions for jax's kernels, with the name of the
  kernel as an additional first argument.
  """

  def refusal(
    self, q: jax.Array, pages: Pages, tables: jax.Array, window: int
  ) -> str | None:
    """Returns the reason why operands are not supported, or None if they are.

    Only shapes and dtypes of the arrays are used.

    Args:
      q: Queries, ``[S, T, H, D]``.
      pages: Keys and values.
      tables: Pages of each sequence, ``[S, P]``.
      window: Number of positions that a query attends to; 0 for all.
    """
    ...

  def paged_attention(
    self, q: jax.Array, pages: Pages, tables: jax.Array, first: jax.Array,
    lengths: jax.Array, *, window: int = 0, interpret: bool = False,
  ) -> jax.Array:
    """Computes causal attention from new tokens to their sequences.

    Same operands as the function `paged_attention`, except that all entries of
    ``tables`` are valid pages, and ``lengths`` is 0 for padding.

    Args:
      q: Queries.
      pages: Keys and values.
      tables: Pages of each sequence.
      first: Position of the first new token of each sequence.
      lengths: Number of positions that hold a key.
      window: Number of positions that a query attends to; 0 for all.
      interpret: Whether to run in the interpreter, on any machine.
    """
    ...


OWN_KERNELS: dict[str, Kernels] = {"tpu": tpu, "gpu": gpu, "cpu": cpu}


def select_kernel(
  q: jax.Array,
  pages: Pages,
  tables: jax.Array,
  *,
  window: int = 0,
  finite: bool = False,
  implementation: Implementation = "auto",
) -> SelectedKernel:
  """Selects the first preferred implementation that supports the operands.

  Only shapes and dtypes of the arrays are used, so that each may be a
  ``jax.ShapeDtypeStruct``.

  Args:
    q: Queries, ``[S, T, H, D]``.
    pages: Keys and values.
    tables: Pages of each sequence, ``[S, P]``.
    window: Number of positions that a query attends to; 0 for all.
    finite: Whether no slot of the pages holds NaN or infinity.
    implementation: "auto", or names in order of preference.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """

  def refusal(kind):
    if kind in OWN_KERNELS:
      return OWN_KERNELS[kind].refusal(q, pages, tables, window)
    # All of jax's kernels additionally require finite pages.
    found = library.refusal(kind, q, pages, tables, window)
    return found or (None if finite else library.NOT_FINITE_REASON)

  return choose("paged_attention", implementation, refusal, KERNELS)


def preferred_kernels(platform: str, mapped: bool) -> tuple[str, ...]:
  """Returns the implementations for a platform in order of preference.

  Args:
    platform: "tpu", "gpu" or "cpu".
    mapped: Whether calls are mapped by ``jax.vmap``, over lanes (ranks on one
      device) or replicas. jax's kernels are then excluded: ``vmap`` loops over
      them and slices the pages of each lane.

  Example:
    >>> preferred_kernels("gpu", mapped=True)
    ('gpu', 'reference')
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
  """Returns the layout of page arrays for the most preferred implementation.

  A layout is the order of the elements of these arrays in memory (`order`). For
  each layout, `select_kernel` selects one implementation for decoding (1 new
  token) and one for prompt chunks (16 tokens); the less preferred one
  determines the rank of the layout.

  Args:
    names: Implementations in order of preference, including "reference".
    num_heads: Number of query heads of one rank, H.
    num_kv_heads: Number of kv heads of one rank, K.
    head_width: Channels of a head, D.
    page_size: Number of slots of a page.
    dtype: Dtype of queries.
    stored: Dtype of the pages; int8 for codes with scales.
    window: Number of positions that a query attends to; 0 for all.
    finite: Whether no slot of the pages holds NaN or infinity.

  Returns:
    One of ``order.NAMES``.
  """
  tables = jax.ShapeDtypeStruct((1, 1), jnp.int32)

  def rank(name):
    try:
      pages = order.shapes(
        name, 1, page_size, num_kv_heads, head_width, stored
      )
    except ValueError:  # a page is not a whole number of rows
      return len(names)
    chosen = [
      select_kernel(
        jax.ShapeDtypeStruct((1, rows, num_heads, head_width), dtype), pages,
        tables, window=window, finite=finite, implementation=names,
      )
      for rows in (1, 16)
    ]
    return max(names.index(each.name) for each in chosen)

  # On ties the first layout, "heads": the reference reads it on any platform.
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
  """Computes causal attention from new tokens to their sequences.

  ``reference.paged_attention`` specifies the result. Kernels read each visible
  page once per block of query rows, and make no dense copy.

  Args:
    q: Queries, ``[S, T, H, D]``, of one rank.
    pages: Keys and values, including those of the new tokens.
    tables: int32 ``[S, P]``, the pages of each sequence. Entries past the last
      position of a sequence are not used and may be out of range.
    first: int32 ``[S]``, position of the first new token; negative for a
      sequence that consists of padding.
    lengths: int32 ``[S]``, number of positions of each sequence that hold a
      key, less than ``first + T`` if the last new tokens are padding; None for
      ``first + T``.
    window: Number of positions that a query attends to, including its own; 0
      for all.
    finite: Whether no slot of the pages holds NaN or infinity, which jax's
      kernels require. True for pages that were initialised with zeros, as long
      as all written keys and values were finite.
    implementation: "auto", or names in order of preference: "reference" or a
      name in ``KERNELS``, with the suffix "_interpret" to run on any machine.

  Returns:
    ``[S, T, H, D]``, in the dtype of q. Padding gives finite values.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """
  chosen = select_kernel(
    q, pages, tables, window=window, finite=finite,
    implementation=implementation,
  )
  # Keys past the last row of a sequence do not exist; padding has no keys.
  ends = first + q.shape[1]
  lengths = ends if lengths is None else jnp.minimum(lengths, ends)
  lengths = jnp.where(first < 0, 0, lengths)
  if chosen.name == "reference":
    return reference.paged_attention(
      q, pages, tables, first, lengths, window=window
    )
  # Kernels may load pages that they do not use, so that all must be valid.
  tables = jnp.clip(tables, 0, pages.num_pages - 1)
  operands = q, pages, tables, first, lengths
  options = {"window": window, "interpret": chosen.interpret}
  if chosen.kind in OWN_KERNELS:
    return OWN_KERNELS[chosen.kind].paged_attention(*operands, **options)
  return library.paged_attention(chosen.kind, *operands, **options)
