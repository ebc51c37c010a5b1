"""Batch and cache of an inference step.

A cache consists of components of two kinds.

- *Paged*: keys and values of all sequences, in pages with a fixed number of
  positions. Each sequence has a page table, whose pages may be anywhere in the
  cache. The number of its pages grows with its positions, and sequences with a
  common prefix may share pages. The pages of all layers are one array, in which
  page n of layer l has the index ``l * num_pages + n``, so that a kernel reads
  the whole array and no layer is sliced out.
- *Fixed-size*: one state per sequence, for example of a recurrence, in one
  block that never grows. Block n of layer l has the index ``l * num_states +
  n``. A state summarises all tokens up to the last one. Therefore it cannot
  serve as another sequence's prefix, and a token that has been read cannot be
  undone; padding leaves the state unchanged. A scheduler that may have to undo
  a token copies the block before the step (`caatnet.inference.copies`).

All arrays are rank-local, with a leading dim of lanes (the tensor ranks of one
device).

Shape legend: R = lanes, N = tokens of a step, S = sequences of a step, P =
pages of a sequence, K = key/value heads of a rank, D = head width, T = tokens
per sequence in one part of a step (decodes or chunks).
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from parallel.kernels.paged_attention import api, order
from parallel.kernels.paged_attention.order import Pages


class StateShape(NamedTuple):
  """Fixed-size component: shape and dtype of one state.

  Attributes:
    shape: Shape of the state of one sequence, in one layer on one rank.
    dtype: Dtype of the state.
  """

  shape: tuple[int, ...]
  dtype: str = "float32"


class CacheSizes(NamedTuple):
  """Sizes of a cache, as a config gives them.

  Attributes:
    num_pages: Pages per layer.
    page_size: Positions per page.
    num_sequences: Largest number of sequences that have a state concurrently.
    dtype: The dtype of keys and values: "int8", or "" for the dtype of the
      activations.
    kernels: Implementations of paged attention in order of preference, names of
      `parallel.kernels.paged_attention.api`.
  """

  num_pages: int
  page_size: int
  num_sequences: int
  dtype: str
  kernels: tuple[str, ...]


class Component(NamedTuple):
  """One component of a cache, as a scheduler sees it.

  Attributes:
    paged: Whether the component has pages, which sequences may share. If not,
      each sequence has one block, at the index of the sequence's batch slot.
    num_blocks: The number of pages, or of states.
    block_bytes: Bytes of one page or state on one rank, over all layers.
  """

  paged: bool
  num_blocks: int
  block_bytes: int


@dataclasses.dataclass(frozen=True)
class CacheShape:
  """Sizes, memory layout and attention kernels of a cache.

  A cache without keys and values has no paged component. Its pages take no
  memory; they only define the indices in `Batch.places`.

  Attributes:
    num_layers: Layers of the model.
    num_pages: Pages per layer.
    page_size: Positions per page.
    num_kv_heads: Key/value heads of one rank; 0 without a paged component.
    head_width: Channels of a head.
    dtype: The dtype of keys and values; "int8" stores codes and scales.
    order: Memory layout of a page, a name of
      `parallel.kernels.paged_attention.order`.
    kernels: Implementations of attention in order of preference, names of
      `parallel.kernels.paged_attention.api`.
    states: The fixed-size components.
    num_states: Largest number of sequences that have a state concurrently.

  Example:
    >>> shape = CacheShape(
    ...   num_layers=2, num_pages=16, page_size=8, num_kv_heads=4,
    ...   head_width=64, dtype="bfloat16", order="heads",
    ... )
    >>> shape.components  # 2 layers x (K and V) x 8 x 4 x 64 x 2 bytes
    (Component(paged=True, num_blocks=16, block_bytes=16384),)
    >>> shape.size_bytes
    262144
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
    """Returns the shapes of one rank's page arrays; () without pages."""
    if not self.num_kv_heads:
      return ()
    return order.shapes(
      self.order, self.num_layers * self.num_pages, self.page_size,
      self.num_kv_heads, self.head_width, self.dtype,
    )

  def state_arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes of one rank's states, ``[layers * states, ...]``."""
    count = self.num_layers * self.num_states
    return tuple(
      jax.ShapeDtypeStruct((count, *state.shape), state.dtype)
      for state in self.states
    )

  @property
  def components(self) -> tuple[Component, ...]:
    """The paged component, if any, followed by the fixed-size components."""
    found = []
    if self.num_kv_heads:
      size = _size_bytes(self.pages()) // self.num_pages
      found.append(Component(True, self.num_pages, size))
    for x in self.state_arrays():
      size = _size_bytes(x) // self.num_states
      found.append(Component(False, self.num_states, size))
    return tuple(found)

  @property
  def keeps_dims(self) -> bool:
    """Whether a step keeps all leading dims of pages, even those of size 1.

    XLA:CPU copies the pages if a step removes one of several dims of size 1 and
    adds it again.
    """
    return self.order == "heads" and {*self.kernels} <= {"cpu", "reference"}

  @property
  def paged(self) -> bool:
    """Whether the cache has keys and values."""
    return self.num_kv_heads > 0

  @property
  def shares_prefixes(self) -> bool:
    """Whether sequences with a common prefix can share pages.

    With states this is impossible: a sequence would need the state at the end
    of the common prefix, but only the state after the last token is stored.
    """
    return not self.states

  @property
  def size_bytes(self) -> int:
    """Size of one rank's cache in bytes."""
    return _size_bytes((self.pages(), self.state_arrays()))


def _size_bytes(arrays: Any) -> int:
  """Returns the bytes of all arrays of a tree."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """Tokens of one step: first decodes of one token each, then prompt chunks.

  Chunks are parts of prompts of equal length; the last chunk of a prompt may be
  padded at its end. All arrays are int32.

  Attributes:
    tokens: ``[N]``. In a decode -1 stands for the newest sampled token of its
      sequence, which the host may not know yet.
    positions: ``[N]``, each token's position in its sequence, ascending by one
      within a chunk; -1 for a decode slot without a sequence.
    places: ``[N]``, the cache slot for the token's keys and values, ``page *
      page_size + offset``; -1 for padding, which is not written.
    tables: ``[S, P]``, each sequence's pages in the order of its positions.
      Entries after its last page are not read.
    rows: ``[S]``, the index into ``tokens`` of the token of each sequence whose
      logits are returned.
    sequences: ``[S]``, the index of each sequence in the array of newest
      tokens, in which its next token is stored; -1 if it is not stored.
    num_decodes: Number of decodes among the S sequences.
    states: ``[S]``, the block of each sequence's state; -1 for a slot without a
      sequence. None if the cache has pages only. A sequence occurs once in a
      step. A sequence whose first position is 0 starts from zeros, regardless
      of the content of its block.
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
    """Slices of the decodes and of the chunks, unless there are none.

    A part is a tuple ``(slice of the sequences, slice of the tokens, tokens per
    sequence)``.
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
    pages: Keys and values: arrays of `CacheShape.pages` with a leading dim of
      lanes (the tensor ranks of one device). If `CacheShape.keeps_dims`, dims
      of the data-parallel levels, of size 1 in one replica, precede it.
    shape: Sizes, layout and kernels.
    states: Arrays of `CacheShape.state_arrays` with a leading dim of lanes.
  """

  pages: Pages | tuple[()]
  shape: CacheShape = dataclasses.field(metadata={"static": True})
  states: tuple[jax.Array, ...] = ()

  def write(
    self, layer: jax.Array, keys: jax.Array, values: jax.Array, batch: Batch
  ) -> "Cache":
    """Returns the cache with the keys and values of a step's tokens.

    Args:
      layer: Index of the layer, an int32 scalar.
      keys: ``[R, N, K, D]``.
      values: ``[R, N, K, D]``.
      batch: The step; ``batch.places`` are the slots that are written.
    """
    first = layer * self.shape.num_pages * self.shape.page_size
    slots = jnp.where(batch.places < 0, -1, first + batch.places)

    def write(pages, keys, values):
      return order.write(pages, keys, values, slots)

    return dataclasses.replace(
      self, pages=self._each_rank(write, self.shape.keeps_dims, keys, values)
    )

  def attend(
    self, layer: jax.Array, queries: jax.Array, batch: Batch, window: int
  ) -> jax.Array:
    """Computes attention of a step's queries over their cached sequences.

    Args:
      layer: Index of the layer, an int32 scalar.
      queries: ``[R, N, heads, D]``.
      batch: The step; ``batch.tables`` are the pages of each sequence.
      window: Sliding window in positions, including the query's position; 0
        for full causal attention.

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
        pages, queries, tables=tables, first=first, written=written
      ):
        # Pages are initialised with zeros, and written values are finite unless
        # the model has diverged, in which case its logits are NaN anyway.
        return api.paged_attention(
          queries, pages, tables, first, first + jnp.sum(written, axis=1),
          window=window, finite=True, implementation=self.shape.kernels,
        )

      part = queries[:, tokens].reshape(lanes, -1, length, *heads)
      out = self._each_rank(attend, self._has_single_dims, part)
      found.append(out.reshape(lanes, -1, *heads))
    return jnp.concatenate(found, axis=1)

  def recur(
    self,
    layer: jax.Array,
    x: jax.Array,
    batch: Batch,
    step: Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]],
  ) -> tuple[jax.Array, "Cache"]:
    """Runs a recurrence over a step's tokens, starting from cached states.

    Args:
      layer: Index of the layer, an int32 scalar.
      x: ``[R, N, ...]``, input of the recurrence for each token.
      batch: The step; ``batch.states`` are the blocks of its sequences.
      step: A function ``(x [R, S, T, ...], states [R, S, ...], written bool
        [S, T]) -> (y [R, S, T, ...], states)``. Positions with ``written`` =
        False are padding at the end of a sequence and must leave the states
        unchanged.

    Returns:
      The outputs y, ``[R, N, ...]``, and the cache with the new states.
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
      # Slots without a sequence get an index after the end, where `set` with
      # mode="drop" writes nothing.
      kept = (slots >= 0) & written[:, 0]
      blocks = jnp.where(kept, blocks, states[0].shape[1])
      states = tuple(
        old.at[:, blocks].set(value.astype(old.dtype), mode="drop")
        for old, value in zip(states, new, strict=True)
      )
      found.append(y.reshape(lanes, -1, *y.shape[3:]))
    y = jnp.concatenate(found, axis=1)
    return y, dataclasses.replace(self, states=states)


  @property
  def _lead_dims(self) -> tuple[int, ...]:
    """Sizes of the leading dims of pages, before those of one rank."""
    x = self.pages.data[0]
    return x.shape[: x.ndim - len(self.shape.pages().data[0].shape)]

  @property
  def _has_single_dims(self) -> bool:
    """Whether pages have a dim of size 1 other than the first dim.

    XLA:CPU copies such pages even for a reshape that removes leading dims.
    """
    if not self.shape.keeps_dims:
      return False
    lead = self._lead_dims
    # Pages without dims of data-parallel levels are in a `vmap` over replicas.
    first = len(lead) + (len(lead) > 1 and max(lead) == 1)
    return any(1 in x.shape[first:] for x in jax.tree.leaves(self.pages))

  def _each_rank(
    self, f: Callable[..., Any], keeps_dims: bool, *trees: Any
  ) -> Any:
    """Maps ``f`` over this device's ranks, with their pages and trees' slices.

    Trees are ``[R, ...]`` for R ranks. ``keeps_dims``: whether pages are not
    reshaped; ``f`` is then mapped over all of their leading dims.
    """
    lead = self._lead_dims
    if not keeps_dims:
      pages = jax.tree.map(
        lambda x: x.reshape(x.shape[len(lead) - 1 :]), self.pages
      )
      return _each_lane(f, pages, *trees)
    for _ in lead:
      f = jax.vmap(f)
    return f(
      self.pages,
      *jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), trees)
    )


def _each_lane(f: Callable[..., Any], *trees: Any) -> Any:
  """Maps a rank-local function over lanes, the tensor ranks of one device.

  A single lane is not batched.

  With several lanes, `vmap` adds a batch dim to gathers and scatters, so pages
  are not sliced.
  """
  if jax.tree.leaves(trees)[0].shape[0] > 1:
    return jax.vmap(f)(*trees)
  result = f(*jax.tree.map(lambda x: x[0], trees))
  return jax.tree.map(lambda x: x[None], result)
