"""Batch and cache of a decoding step.

A cache is a tuple of components, each of one of two kinds.

- *Paged*: the keys and values of all sequences in pages of equally many
  positions, of which a sequence has a table, in any order. It grows with its
  positions, and sequences with a common prefix may share pages. The pages of
  all layers are one array, in which page n of layer l is ``l * num_pages + n``,
  so that a kernel takes the whole array and no layer is sliced out.
- *Fixed-size*: a state per sequence, such as that of a recurrence, in one block
  that never grows. Block n of layer l is ``l * num_states + n``. A state
  summarises all tokens up to the last one, so it has no hash by which another
  sequence could find a prefix, and it cannot be rewound: padding leaves it
  unchanged, and a token that is read cannot be taken back. A scheduler that may
  have to take back a token copies the block before that step
  (`caatnet.inference.copies`).

Like all that is rank-local, arrays lead with lanes.

Shape legend: R = lanes, N = tokens of a step, S = sequences of a step, P =
pages of a sequence, K = key/value heads of a rank, D = head width, T = tokens
of each sequence of a part of a step.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from parallel.kernels.paged_attention import api, order
from parallel.kernels.paged_attention.order import Pages


class StateShape(NamedTuple):
  """One fixed-size component: the state of one layer, sequence and rank.

  Attributes:
    shape: Its dims.
    dtype: Its dtype.
  """

  shape: tuple[int, ...]
  dtype: str = "float32"


class CacheSizes(NamedTuple):
  """Sizes of a cache, as configs give them.

  Attributes:
    num_pages: The pages of each layer.
    page_size: The positions of a page.
    num_sequences: The sequences that have a state at a time.
    dtype: The dtype of keys and values: "int8", or "" for the activations'.
    kernels: Implementations of attention over pages in order of preference, of
      `parallel.kernels.paged_attention.api`.
  """

  num_pages: int
  page_size: int
  num_sequences: int
  dtype: str
  kernels: tuple[str, ...]


class Component(NamedTuple):
  """One component of a cache, as schedulers see it.

  Attributes:
    paged: Whether it has pages, of which a sequence needs more as it grows, and
      which sequences may share. Else a sequence has one block, its slot's.
    num_blocks: The number of pages, or of states.
    block_bytes: The bytes of one of them on one rank, over all layers.
  """

  paged: bool
  num_blocks: int
  block_bytes: int


@dataclasses.dataclass(frozen=True)
class CacheShape:
  """The sizes of a cache, and how it is read.

  A cache without keys and values has no paged component. Its pages take no
  memory, but still count positions: a step's `Batch.places` are in them.

  Attributes:
    num_layers: The layers of the model.
    num_pages: The pages of each layer.
    page_size: The positions of a page.
    num_kv_heads: The key/value heads of one rank; 0 without a paged component.
    head_width: The channels of a head.
    dtype: The dtype of keys and values; "int8" keeps codes and scales.
    order: How pages are laid out, of `parallel.kernels.paged_attention.order`.
    kernels: Implementations of attention in order of preference, of
      `parallel.kernels.paged_attention.api`.
    states: The fixed-size components.
    num_states: The sequences that have a state at a time.
  """

  num_layers: int
  num_pages: int
  page_size: int
  num_kv_heads: int
  head_width: int
  dtype: str
  order: str
  kernels: tuple[str, ...] = ("reference",)
  states: tuple[StateShape, ...] = ()
  num_states: int = 0

  def pages(self) -> Pages | tuple[()]:
    """Returns the shapes of one rank's pages; nothing if there are none."""
    if not self.num_kv_heads:
      return ()
    return order.shapes(
      self.order, self.num_layers * self.num_pages, self.page_size,
      self.num_kv_heads, self.head_width, self.dtype,
    )

  def state_arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes of one rank's states, ``[layers x states, ...]``."""
    count = self.num_layers * self.num_states
    return tuple(
      jax.ShapeDtypeStruct((count, *state.shape), state.dtype)
      for state in self.states
    )

  @property
  def components(self) -> tuple[Component, ...]:
    """The components: pages, where there are any, then states."""
    found = []
    if self.num_kv_heads:
      size = _size_bytes(self.pages()) // self.num_pages
      found.append(Component(True, self.num_pages, size))
    for x in self.state_arrays():
      size = _size_bytes(x) // self.num_states
      found.append(Component(False, self.num_states, size))
    return tuple(found)

  @property
  def paged(self) -> bool:
    """Whether there are keys and values."""
    return self.num_kv_heads > 0

  @property
  def shares_prefixes(self) -> bool:
    """Whether a sequence can begin with pages that another one has written.

    The state at the end of the common prefix would be needed, too, and only
    the state at the end of the other sequence is kept.
    """
    return not self.states

  @property
  def size_bytes(self) -> int:
    """The bytes of one rank's cache."""
    return _size_bytes((self.pages(), self.state_arrays()))


def _size_bytes(arrays: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


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
    states: ``[S]``, the block of each sequence's state, -1 for one that stands
      for no sequence; None where the cache has pages only. A sequence occurs
      once in a step, and one whose first position is 0 starts from zeros,
      whatever its block holds.
  """

  tokens: jax.Array
  positions: jax.Array
  places: jax.Array
  tables: jax.Array
  rows: jax.Array
  sequences: jax.Array
  num_decodes: int = dataclasses.field(metadata={"static": True})
  states: jax.Array | None = None

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
  """Cache of all sequences in all layers.

  Attributes:
    pages: Keys and values, as `CacheShape.pages`, with a leading dim of lanes.
    shape: The sizes.
    states: Arrays of `CacheShape.state_arrays`, with a leading dim of lanes.
  """

  pages: Pages | tuple[()]
  shape: CacheShape = dataclasses.field(metadata={"static": True})
  states: tuple[jax.Array, ...] = ()

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

    return dataclasses.replace(
      self, pages=_each_lane(write, self.pages, keys, values)
    )

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

  def recur(
    self,
    layer: jax.Array,
    x: jax.Array,
    batch: Batch,
    step: Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]],
  ) -> tuple[jax.Array, "Cache"]:
    """Runs a recurrence over a step's tokens from their sequences' states.

    Args:
      layer: The layer, a scalar.
      x: ``[R, N, ...]``, what the recurrence reads of each token.
      batch: Batch with the state of each sequence.
      step: A function ``(x [R, S, T, ...], states [R, S, ...], written bool
        [S, T]) -> (y [R, S, T, ...], states)``. What is not written is padding
        at the end of a sequence, and must leave states unchanged.

    Returns:
      The results y, ``[R, N, ...]``, and the cache with the new states.
    """
    lanes, first = x.shape[0], layer * self.shape.num_states
    states, found = self.states, []
    for sequences, tokens, length in batch.parts:
      slots = batch.states[sequences]
      written = batch.places[tokens].reshape(-1, length) >= 0
      fresh = batch.positions[tokens].reshape(-1, length)[:, 0] <= 0
      blocks = first + jnp.maximum(slots, 0)

      def read(state, blocks=blocks, fresh=fresh):
        mask = fresh.reshape(-1, *[1] * (state.ndim - 2))
        return jnp.where(mask, 0, state[:, blocks])

      part = x[:, tokens].reshape(lanes, -1, length, *x.shape[2:])
      y, new = step(part, tuple(map(read, states)), written)
      # What stands for no sequence is written behind the end, that is, nowhere.
      kept = (slots >= 0) & written[:, 0]
      blocks = jnp.where(kept, blocks, states[0].shape[1])
      states = tuple(
        old.at[:, blocks].set(value.astype(old.dtype), mode="drop")
        for old, value in zip(states, new, strict=True)
      )
      found.append(y.reshape(lanes, -1, *y.shape[3:]))
    y = jnp.concatenate(found, axis=1)
    return y, dataclasses.replace(self, states=states)


def _each_lane(f: Callable[..., Any], *trees: Any) -> Any:
  """Lifts a rank's function over lanes; one lane alone is not batched.

  Pages of several lanes are not sliced either: gathers and scatters take a
  batch dim.
  """
  if jax.tree.leaves(trees)[0].shape[0] > 1:
    return jax.vmap(f)(*trees)
  result = f(*jax.tree.map(lambda x: x[0], trees))
  return jax.tree.map(lambda x: x[None], result)
