"""Nano-batches: contiguous ranges (*pieces*) of the tokens of a decoding step.

A piece's matrix products run during the all-reduce of another piece. A step is
cut between two sequences or, if no border between sequences is near, within a
prompt chunk: the second part of the chunk then reads the first from the cache.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools

import jax
import jax.numpy as jnp

from caatnet.models.paged import Batch

# A cut within a chunk, which needs one more attention kernel, moves to the
# chunk's border if the distance is at most this fraction of the smallest piece.
_MOVE_FRACTION = 1 / 8


@dataclasses.dataclass(frozen=True)
class NanobatchRule:
  """Rule by which decoding steps are cut into nano-batches.

  Attributes:
    sizes: Function from a step to the numbers of tokens of its nano-batches.
    ordered: Whether collectives are ordered by data flow, as on CPUs
      (`parallel.collectives.order_both`).
  """

  sizes: Callable[[Batch], Sequence[int]]
  ordered: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nanobatch(Batch):
  """Nano-batch: contiguous tokens of a step; ``rows``, ``sequences`` are empty.

  Attributes:
    runs: (number of sequences, tokens per sequence) for each run of consecutive
      sequences that have equally many tokens in this nano-batch.
  """

  runs: tuple[tuple[int, int], ...] = dataclasses.field(
    default=(), metadata={"static": True}
  )

  @property
  def parts(self) -> list[tuple[slice, slice, int]]:
    found, row, token = [], 0, 0
    for count, length in self.runs:
      rows = slice(row, row + count)
      found.append((rows, slice(token, token + count * length), length))
      row, token = row + count, token + count * length
    return found


def even_sizes(tokens: int, count: int) -> tuple[int, ...]:
  """Returns sizes of ``count`` nano-batches, which differ by at most one token.

  Raises:
    ValueError: There are more nano-batches than tokens.

  Example:
    >>> even_sizes(11, 4)
    (3, 3, 3, 2)
  """
  if count > tokens:
    raise ValueError(
      f"{count} nano-batches are more than the {tokens} tokens of a step; use "
      "at most one per token"
    )
  least, more = divmod(tokens, count)
  return (least + 1,) * more + (least,) * (count - more)


def split(batch: Batch, sizes: Sequence[int]) -> list[Nanobatch]:
  """Cuts a step into nano-batches, near the requested sizes.

  Args:
    batch: The step.
    sizes: Tokens of each nano-batch, in the order of the step's tokens.

  Returns:
    The nano-batches, in the order of ``sizes``; each token is in one of them.

  Raises:
    ValueError: The sum of the sizes is not the step's number of tokens.
  """
  total = batch.tokens.shape[0]
  if sum(sizes) != total or min(sizes) < 1:
    raise ValueError(
      f"nano-batches of {', '.join(map(str, sizes))} tokens must have {total} "
      "tokens in total, the tokens of a step"
    )
  # Indices of each sequence's first token, and after its last token.
  spans = [
    (first, first + length)
    for _, tokens, length in batch.parts
    for first in range(tokens.start, tokens.stop, length)
  ]
  borders = [0, *(stop for _, stop in spans)]
  cuts = []
  for cut in itertools.accumulate(sizes[:-1]):
    nearest = min(borders, key=lambda border: abs(border - cut))
    moves = abs(nearest - cut) <= _MOVE_FRACTION * min(sizes)
    cuts.append(nearest if moves else cut)
  return [
    _make_nanobatch(batch, spans, start, stop)
    for start, stop in itertools.pairwise([0, *cuts, total])
  ]


def _make_nanobatch(
  batch: Batch, spans: Sequence[tuple[int, int]], start: int, stop: int
) -> Nanobatch:
  """Returns the nano-batch of a step's tokens from ``start`` to ``stop``.

  ``spans`` has (first token, token after the last) of each sequence.
  """
  rows = [i for i, (a, b) in enumerate(spans) if a < stop and b > start]
  lengths = [
    min(stop, b) - max(start, a) for a, b in spans[rows[0] : rows[-1] + 1]
  ]
  own, tokens = slice(rows[0], rows[-1] + 1), slice(start, stop)
  none = batch.rows[:0]
  piece = Nanobatch(
    batch.tokens[tokens], batch.positions[tokens], batch.places[tokens],
    batch.tables[own], none, none, 0,
    None if batch.states is None else batch.states[own],
    tuple((len(list(same)), n) for n, same in itertools.groupby(lengths)),
  )
  # A part of a chunk may consist of padding beyond the sequence's pages. Like a
  # chunk of padding, it gets positions before 0, which attend to nothing.
  positions = []
  for _, part, length in piece.parts:
    at = piece.positions[part].reshape(-1, length)
    is_read = piece.places[part].reshape(-1, length) >= 0
    padding = jnp.arange(length, dtype=at.dtype) - length
    positions.append(
      jnp.where(is_read.any(axis=1, keepdims=True), at, padding).ravel()
    )
  return dataclasses.replace(piece, positions=jnp.concatenate(positions))
