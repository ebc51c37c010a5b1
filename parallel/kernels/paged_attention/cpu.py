"""Decoding attention over pages on CPUs, in place and in one pass.

Keys and values are read where they are, in the order of each sequence's table.
The reference copies them first, in a loop over sequences. Loops are compiled by
numba (`cpu_loops`), and the tasks, pairs of a sequence and a kv head, are cut
into pieces that XLA executes concurrently.

Shape legend: S = sequences, H = query heads, K = kv heads, G = H / K, D = head
width.
"""

import jax
import jax.numpy as jnp

from parallel.kernels.calls import compiles_loops
from parallel.kernels.paged_attention.order import Pages


def refusal(
  q: jax.Array, pages: Pages, tables: jax.Array, window: int
) -> str | None:
  """Implements `api.Kernels.refusal`."""
  del tables, window
  if q.shape[1] != 1:
    return f"{q.shape[1]} rows per sequence: products are faster for several"
  if pages.order != "heads":
    return f"order={pages.order!r}: 'heads'"
  if pages.dtype not in (jnp.float32, jnp.int8):
    return f"pages of {pages.dtype}: float32 or int8"
  if not compiles_loops():
    return "numba is not installed, or disabled"
  return None


def paged_attention(
  q: jax.Array,
  pages: Pages,
  tables: jax.Array,
  first: jax.Array,
  lengths: jax.Array,
  *,
  window: int = 0,
  interpret: bool = False,
) -> jax.Array:
  """Implements `api.Kernels.paged_attention`."""
  # Compiles, or reads numba's cache: only programs with this kernel need it.
  from parallel.kernels import cpu_calls
  from parallel.kernels.paged_attention import cpu_loops

  del interpret  # it runs on any machine
  num_seqs, _, num_heads, width = q.shape
  heads = pages.num_kv_heads
  group = num_heads // heads
  rows = (q.astype(jnp.float32) * width**-0.5).reshape(
    num_seqs, heads, group, width
  )
  stop = jnp.minimum(lengths, first + 1)
  start = jnp.maximum(first + 1 - window, 0) if window else stop * 0
  tables, start, stop = (x.astype(jnp.int32) for x in (tables, start, stop))
  out = cpu_calls.call(
    cpu_loops.CODE_KERNEL if pages.coded else cpu_loops.FLOAT_KERNEL,
    num_seqs * heads,
    (group, width), rows, *pages.data, tables, start, stop, *pages.scales,
  )
  return out.reshape(q.shape).astype(q.dtype)
