"""Input arrays of a decoder's step, built from slots and page tables.

A decode reads the newest token of a sequence, a chunk reads part of a prompt.

Shape legend: D = decodes, C = chunks, S = D + C, P = width of the page tables
in pages, B = slots (places of running sequences).
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from caatnet.inference import buckets
from caatnet.inference.buckets import bucket
from caatnet.inference.decoder import Capacity
from caatnet.inference.requests import Request, stack_sampling_params
from caatnet.inference.sampling import Sampling
from caatnet.models.paged import Batch


class Chunk(NamedTuple):
  """Part of a sequence that a step reads.

  Attributes:
    slot: Slot of the sequence.
    start: Position of the first token.
    tokens: Token ids.
    draws: Whether the step draws the sequence's next token.
  """

  slot: int
  start: int
  tokens: Sequence[int] | np.ndarray
  draws: bool


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Bucketed sizes of a step's arrays, which determine its program.

  Attributes:
    decodes: Number of decodes.
    chunks: Number of chunks.
    length: Tokens per chunk.
    pages: Width of the page tables in pages, P.
  """

  decodes: int
  chunks: int
  length: int
  pages: int

  def holds(self, other: "Sizes") -> bool:
    """Returns whether a step of the sizes `other` can be padded to these."""
    pairs = zip(
      dataclasses.astuple(self), dataclasses.astuple(other), strict=True
    )
    return all(a >= b for a, b in pairs)


def sizes_of(
  capacity: Capacity, contexts: np.ndarray,
  chunks: Sequence[tuple[int, int]], factor: int = 4,
) -> Sizes:
  """Returns a step's sizes, each rounded up to one of a few buckets.

  Args:
    capacity: Capacity of a replica.
    contexts: Number of positions that each decode attends to, including its
      own, ``[D]``.
    chunks: First position and length of each chunk.
    factor: Ratio between successive bucket sizes for the number of decodes.
  """
  most = capacity.pages_per_sequence
  if capacity.batch_invariant:
    return Sizes(capacity.batch, 0, 0, most)
  last = int(max([contexts.max(initial=1), *map(sum, chunks)]))
  least = min(most, -(-buckets.SHORT // capacity.page_size))
  return Sizes(
    # At least one, so that no program is compiled for steps without decodes.
    bucket(len(contexts) or 1, 1, capacity.batch, factor),
    bucket(len(chunks), 1, math.inf, buckets.CHUNK_FACTOR),
    bucket(
      max((length for _, length in chunks), default=0), buckets.MIN_CHUNK,
      math.inf, buckets.CHUNK_FACTOR,
    ),
    bucket(-(-last // capacity.page_size), least, most, 2),
  )


def batch_of(
  sizes: Sizes, page_size: int, tables: np.ndarray, slots: np.ndarray,
  positions: np.ndarray, chunks: Sequence[Chunk],
) -> Batch:
  """Returns a step's arrays; unused entries are padding.

  The slot of a sequence is also the index of its recurrent state.

  Args:
    sizes: Sizes of the arrays.
    page_size: Positions per page.
    tables: Page table of each slot, int32 ``[B, n]``.
    slots: Slots of the decodes, int ``[D]``. A decode reads its slot's newest
      token, which may not be on the host yet.
    positions: Positions of these tokens in their sequences, int ``[D]``.
    chunks: Parts of sequences. If ``sizes.chunks`` is 0, each of their tokens
      is read like a decode, in a separate row of the batch.
  """
  d, length = sizes.decodes, sizes.length
  num_rows, num_tokens = d + sizes.chunks, d + sizes.chunks * length
  tokens = np.zeros(num_tokens, np.int32)
  at = np.full(num_tokens, -1, np.int32)
  places = np.full(num_tokens, -1, np.int32)
  own = np.zeros((num_rows, sizes.pages), np.int32)
  rows = np.arange(num_rows, dtype=np.int32)
  sequences = np.full(num_rows, -1, np.int32)
  states = np.full(num_rows, -1, np.int32)
  width = min(sizes.pages, tables.shape[1])

  known, draws = np.full(len(slots), -1), np.full(len(slots), True)
  if not sizes.chunks:
    for chunk in chunks:
      count = len(chunk.tokens)
      slots = np.append(slots, np.full(count, chunk.slot))
      positions = np.append(positions, chunk.start + np.arange(count))
      known = np.append(known, chunk.tokens)
      draws = np.append(draws, chunk.draws & (np.arange(count) == count - 1))
    chunks = ()
  num = len(slots)
  tokens[:num], at[:num] = known, positions
  sequences[:num] = np.where(draws, slots, -1)
  states[:num] = slots
  pages = tables[slots, positions // page_size]
  places[:num] = pages * page_size + positions % page_size
  own[:num, :width] = tables[slots, :width]
  # Positions continue in the padding of a chunk. A chunk that consists of
  # padding has the positions -length to -1, which no query attends to.
  counting = np.arange(length, dtype=np.int32)
  at[d:] = np.tile(counting - length, sizes.chunks)
  rows[d:] = d + length * np.arange(sizes.chunks)
  for row, chunk in enumerate(chunks, d):
    first, count = d + (row - d) * length, len(chunk.tokens)
    at[first : first + length] = chunk.start + counting
    inside = slice(first, first + count)
    tokens[inside] = chunk.tokens
    table, seen = tables[chunk.slot], at[inside]
    places[inside] = table[seen // page_size] * page_size + seen % page_size
    own[row, :width] = table[:width]
    rows[row] = first + count - 1
    states[row] = chunk.slot
    if chunk.draws:
      sequences[row] = chunk.slot
  return Batch(tokens, at, places, own, rows, sequences, d, states)


class SlotSampling:
  """Sampling parameters of all slots.

  Attributes:
    filters: Whether the request in a slot uses top-k or top-p, for which the
      logits of all ranks are gathered, bool ``[B]``.
    asked: Number of most probable tokens to return, int32 ``[B + 1]``; 0 in the
      last entry, which is for rows of a batch that draw nothing.
  """

  def __init__(self, num_slots: int) -> None:
    """Makes slots, all with greedy sampling."""
    self.filters = np.zeros(num_slots, bool)
    self.asked = np.zeros(num_slots + 1, np.int32)
    # The last entry, index -1, is for rows that draw nothing.
    self._arrays = stack_sampling_params([None] * (num_slots + 1))

  def set(self, slot: int, request: Request, num_top: int = 0) -> None:
    """Sets the sampling parameters of the request in a slot."""
    self.filters[slot] = request.filters
    self.asked[slot] = num_top
    for array, (value,) in zip(
      self._arrays, stack_sampling_params([request]), strict=True
    ):
      array[slot] = value

  def of(self, sequences: np.ndarray) -> Sampling:
    """Returns the parameters of the slots of a batch's rows.

    Args:
      sequences: Slot of each row, int ``[S]``; -1 for a row that draws nothing.
    """
    return Sampling(*(array[sequences] for array in self._arrays))


def add_replica_dim(tree: Any) -> Any:
  """Adds a first dim of replicas, of size 1, to the arrays of a tree."""
  return jax.tree.map(lambda x: x[None], tree)
