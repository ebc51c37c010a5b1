"""What one step of decoding reads and writes: a batch, and a cache in pages.

A cache has the keys and values of all sequences in pages of equally many
positions, and a sequence has a table of its pages, in any order. The pages of
all layers are one array, in which page n of layer l is ``l * num_pages + n``,
so that a kernel takes the whole array and no layer is sliced out. Like all that
is rank-local, arrays lead with lanes.

Shape legend: R = lanes, N = tokens of a step, S = sequences of a step, P =
pages of a sequence, K = key/value heads of a rank, D = head width.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from parallel.kernels.paged_attention import api, order
from parallel.kernels.paged_attention.order import Pages


@dataclasses.dataclass(frozen=True)
class CacheShape:
  """The sizes of a cache, and how it is read.

  Attributes:
    num_layers: The layers of the model.
    num_pages: The pages of each layer.
    page_size: The positions of a page.
    num_kv_heads: The key/value heads of one rank.
    head_width: The channels of a head.
    dtype: The dtype of keys and values; "int8" keeps codes and scales.
    order: How pages are laid out, of `parallel.kernels.paged_attention.order`.
    kernels: Implementations of attention in order of preference, of
      `parallel.kernels.paged_attention.api`.
  """

  num_layers: int
  num_pages: int
  page_size: int
  num_kv_heads: int
  head_width: int
  dtype: str
  order: str
  kernels: tuple[str, ...] = ("reference",)

  def pages(self) -> Pages:
    """Returns the shapes of one rank's arrays."""
    return order.shapes(
      self.order, self.num_layers * self.num_pages, self.page_size,
      self.num_kv_heads, self.head_width, self.dtype,
    )

  @property
  def size_bytes(self) -> int:
    """The bytes of one rank's cache."""
    arrays = jax.tree.leaves(self.pages())
    return sum(x.size * x.dtype.itemsize for x in arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """What one step reads: first decodes, of one token each, then chunks.

  Chunks are equally long parts of prompts, of which the last may be padded at
  its end. All arrays are int32.

  Attributes:
    tokens: ``[N]``. A decode with -1 reads the token that its sequence was
      given last, which need not be known to the host.
    positions: ``[N]``, each token's place in its sequence, ascending by one
      within a chunk; -1 for a decode that stands for no sequence.
    places: ``[N]``, where the token's keys and values go, ``page * page_size +
      offset``; -1 for padding, of which nothing is kept.
    tables: ``[S, P]``, each sequence's pages in the order of its positions.
      What stands for pages that it does not have yet is not read.
    rows: ``[S]``, the token of each sequence whose logits are wanted.
    sequences: ``[S]``, the number under which the sequence's next token is
      kept, -1 for one that is not kept.
    num_decodes: How many of the sequences are decodes.
  """

  tokens: jax.Array
  positions: jax.Array
  places: jax.Array
  tables: jax.Array
  rows: jax.Array
  sequences: jax.Array
  num_decodes: int = dataclasses.field(metadata={"static": True})

  @property
  def parts(self) -> list[tuple[slice, slice, int]]:
    """The decodes and the chunks, as far as there are any.

    Of each the sequences, the tokens, and the tokens per sequence.
    """
    d, n, s = self.num_decodes, self.tokens.shape[0], self.tables.shape[0]
    parts = [(slice(0, d), slice(0, d), 1)] if d else []
    if s > d:
      parts.append((slice(d, s), slice(d, n), (n - d) // (s - d)))
    return parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """Keys and values of all sequences and layers.

  Attributes:
    pages: As `CacheShape.pages`, with a leading dim of lanes.
    shape: The sizes.
  """

  pages: Pages
  shape: CacheShape = dataclasses.field(metadata={"static": True})

  def write(
    self, layer: jax.Array, keys: jax.Array, values: jax.Array, batch: Batch
  ) -> "Cache":
    """Returns the cache with the keys and values of a step's tokens.

    Args:
      layer: The layer, a scalar.
      keys: ``[R, N, K, D]``.
      values: ``[R, N, K, D]``.
      batch: Says where they go.
    """
    first = layer * self.shape.num_pages * self.shape.page_size
    slots = jnp.where(batch.places < 0, -1, first + batch.places)

    def write(pages, keys, values):
      return order.write(pages, keys, values, slots)

    return Cache(_each_lane(write, self.pages, keys, values), self.shape)

  def attend(
    self, layer: jax.Array, queries: jax.Array, batch: Batch, window: int
  ) -> jax.Array:
    """Attends with a step's queries to what its sequences have in the cache.

    Args:
      layer: The layer, a scalar.
      queries: ``[R, N, heads, D]``.
      batch: Says which pages each sequence has.
      window: How many positions a query sees, its own among them; 0 for all.

    Returns:
      ``[R, N, heads, D]``.
    """
    lanes, _, *heads = queries.shape
    found = []
    for sequences, tokens, length in batch.parts:
      tables = layer * self.shape.num_pages + batch.tables[sequences]
      first = batch.positions[tokens].reshape(-1, length)[:, 0]
      written = batch.places[tokens].reshape(-1, length) >= 0

      def attend(
        queries, pages, tables=tables, first=first, written=written
      ):
        # Pages begin as zeros, and what a model writes is finite unless it has
        # diverged, in which case its logits are NaN anyway.
        return api.paged_attention(
          queries, pages, tables, first, first + jnp.sum(written, axis=1),
          window=window, finite=True, implementation=self.shape.kernels,
        )

      part = queries[:, tokens].reshape(lanes, -1, length, *heads)
      out = _each_lane(attend, part, self.pages)
      found.append(out.reshape(lanes, -1, *heads))
    return jnp.concatenate(found, axis=1)


def _each_lane(f: Callable[..., Any], *trees: Any) -> Any:
  """Lifts a rank's function over lanes; one lane alone is not batched.

  Pages of several lanes are not sliced either: gathers and scatters take a
  batch dim.
  """
  if jax.tree.leaves(trees)[0].shape[0] > 1:
    return jax.vmap(f)(*trees)
  result = f(*jax.tree.map(lambda x: x[0], trees))
  return jax.tree.map(lambda x: x[None], result)
