"""Cuts of a decoding step: each token is in one piece, with its sequence."""

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from caatnet.models.nanobatches import even_sizes, split
from caatnet.models.paged import Batch


def make_batch(decodes, chunks, length, written=None):
  """Returns a step with the token's number as the token, and as its place."""
  num, rows = decodes + chunks * length, decodes + chunks
  tokens = np.arange(num, dtype=np.int32)
  positions = 1000 + tokens
  places = tokens.copy()
  if written is not None:  # of the last chunk
    places[num - length + written :] = -1
  return Batch(
    tokens, positions, places, np.arange(rows, dtype=np.int32)[:, None],
    np.arange(rows), np.arange(rows), decodes, np.arange(rows),
  )


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(SIZES, st.integers(0, 9), st.data())
def test_each_token_is_in_one_piece_with_its_sequence(sizes, decodes, data):
  left = max(sum(sizes) - decodes, 0)
  chunks = data.draw(st.sampled_from(
    [n for n in range(1, left + 1) if not left % n] or [0]
  ))
  length = left // chunks if chunks else 0
  batch = make_batch(sum(sizes) - left, chunks, length)
  row_of = [*range(batch.num_decodes), *(
    batch.num_decodes + i for i in range(chunks) for _ in range(length)
  )]
  pieces = split(batch, sizes)
  assert len(pieces) == len(sizes)
  tokens = []
  for piece, size in zip(pieces, sizes, strict=True):
    # A cut moves by an eighth of the smallest piece at most.
    assert abs(len(piece.tokens) - size) <= min(sizes) / 4
    for rows, at, each in piece.parts:
      own = piece.tokens[at].reshape(-1, each)
      np.testing.assert_array_equal(
        own, own[:, :1] + np.arange(each)  # consecutive tokens
      )
      for row, of_row in zip(piece.tables[rows, 0], own, strict=True):
        assert {row_of[token] for token in of_row} == {row}
      np.testing.assert_array_equal(piece.states[rows], piece.tables[rows, 0])
    assert sum(a * b for a, b in piece.runs) == len(piece.tokens)
    tokens += piece.tokens.tolist()
    np.testing.assert_array_equal(piece.positions, 1000 + piece.tokens)
  assert tokens == list(range(sum(sizes)))


def test_cut_moves_to_a_near_border_only():
  batch = make_batch(4, 2, 30)
  # The border at 34 is 2 tokens away: an eighth of 16 or more.
  assert [len(x.tokens) for x in split(batch, (32, 32))] == [34, 30]
  assert [len(x.tokens) for x in split(batch, (36, 16, 12))] == [36, 16, 12]


def test_part_of_a_chunk_that_is_padding_attends_to_nothing():
  batch = make_batch(0, 1, 8, written=3)
  first, second = split(batch, (4, 4))
  assert first.positions.tolist() == [1000, 1001, 1002, 1003]
  assert second.positions.tolist() == [-4, -3, -2, -1]


@pytest.mark.parametrize("sizes", [(4, 3), (4, 5), (0, 8), (9, -1)])
def test_dropped_or_duplicated_tokens_are_refused(sizes):
  with pytest.raises(ValueError, match="must have 8 tokens in total"):
    split(make_batch(8, 0, 0), sizes)


def test_more_pieces_than_tokens_are_refused():
  with pytest.raises(ValueError, match="3 nano-batches are more than the 2 "):
    even_sizes(2, 3)
