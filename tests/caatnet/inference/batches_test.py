"""Arrays of a step: buckets, page tables, padding, and sampling parameters."""

import numpy as np
import pytest

from caatnet.inference import batches
from caatnet.inference.batches import Chunk, Sizes
from caatnet.inference.buckets import bucket, chunk_sizes
from caatnet.inference.decoder import Capacity
from caatnet.inference.requests import Request
from caatnet.inference.stops import Stops

TABLES = np.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]], np.int32)


@pytest.mark.parametrize("draws", [True, False])
def test_step_has_decodes_chunks_and_padding(draws):
  """Two of four decodes and one of two chunks are padding; pages of 4."""
  batch = batches.batch_of(
    Sizes(decodes=4, chunks=2, length=4, pages=2), 4, TABLES,
    np.array([2, 0]), np.array([5, 3]), [Chunk(1, 2, (7, 8, 9), draws)],
  )
  expected = {
    "tokens": [-1, -1, 0, 0, 7, 8, 9, 0, 0, 0, 0, 0],
    "positions": [5, 3, -1, -1, 2, 3, 4, 5, -4, -3, -2, -1],
    # Page 31 of the first decode, pages 20 and 21 of the chunk.
    "places": [125, 43, -1, -1, 82, 83, 84, -1, -1, -1, -1, -1],
    "tables": [[30, 31], [10, 11], [0, 0], [0, 0], [20, 21], [0, 0]],
    "rows": [0, 1, 2, 3, 6, 8],
    "sequences": [2, 0, -1, -1, 1 if draws else -1, -1],
    "states": [2, 0, -1, -1, 1, -1],
  }
  for name, values in expected.items():
    found = getattr(batch, name)
    assert found.dtype == np.int32
    assert found.tolist() == values, name
  assert batch.num_decodes == 4


def test_tables_are_padded_to_the_pages_of_a_program():
  batch = batches.batch_of(
    Sizes(1, 2, 4, 5), 4, TABLES, np.array([1]), np.array([11]),
    [Chunk(0, 0, (1, 2, 3, 4), True), Chunk(2, 8, (5,), True)],
  )
  assert batch.tables.tolist() == [
    [20, 21, 22, 0, 0], [10, 11, 12, 0, 0], [30, 31, 32, 0, 0]
  ]
  assert batch.places.tolist() == [91, 40, 41, 42, 43, 128, -1, -1, -1]
  assert batch.rows.tolist() == [0, 4, 5]


@pytest.mark.parametrize(("contexts", "chunks", "changes", "expected"), [
  ([], [], {}, (1, 0, 0, 64)),
  ([1024], [], {}, (1, 0, 0, 64)),  # 1024 positions are the least
  ([1025, 1], [], {}, (4, 0, 0, 128)),
  ([1, 1], [], {"factor": 2}, (2, 0, 0, 64)),
  ([1] * 5, [], {}, (8, 0, 0, 64)),
  ([4096], [(4000, 96)], {}, (1, 1, 256, 256)),
  ([], [(0, 16)], {}, (1, 1, 16, 64)),
  ([], [(0, 17), (1000, 24)], {}, (1, 4, 64, 64)),
  ([], [(0, 1)] * 4 + [(1000, 25)], {}, (1, 16, 64, 128)),
  ([100], [], {"context": 100}, (1, 0, 0, 7)),
  ([3000], [], {"context": 3001}, (1, 0, 0, 188)),  # not 256 pages
])
def test_sizes_of_a_step_are_bucketed(contexts, chunks, changes, expected):
  options = dict(changes)
  capacity = Capacity(8, options.pop("context", 4096), 16, 256)
  assert batches.sizes_of(
    capacity, np.array(contexts, int), chunks, **options
  ) == Sizes(*expected)


@pytest.mark.parametrize(("context", "pages"), [(1, 1), (16, 1), (17, 2)])
def test_context_is_rounded_up_to_pages(context, pages):
  assert Capacity(1, context, 16, 8).pages_per_sequence == pages


@pytest.mark.parametrize(("chunk", "batch", "expected"), [
  (256, 8, [(1, 256), (4, 64), (16, 16)]), (256, 1, [(1, 256)]),
  (256, 2, [(1, 256), (4, 64)]), (63, 8, [(1, 63)]),
  (64, 8, [(1, 64), (4, 16)]), (300, 4, [(1, 300), (4, 75)]),
])
def test_steps_have_few_long_or_many_short_chunks(chunk, batch, expected):
  assert chunk_sizes(chunk, batch) == expected


def test_buckets_grow_by_a_factor():
  sizes = [bucket(size, 3, 30, 3) for size in range(31)]
  assert sizes == [0] + [3] * 3 + [9] * 6 + [27] * 18 + [30] * 3


def test_slots_keep_their_sampling_parameters():
  drawing = batches.SlotSampling(3)
  assert drawing.filters.tolist() == [False] * 3
  drawing.set(
    1, Request((1,), Stops(4), temperature=0.5, top_k=3, min_p=0.25, seed=7)
  )
  drawing.set(2, Request((1,), Stops(4), top_k=3))  # greedy
  assert drawing.filters.tolist() == [False, True, False]
  found = drawing.of(np.array([-1, 1, 2, 0]))
  assert found.temperature.tolist() == [0, 0.5, 0, 0]
  assert found.top_k.tolist() == [0, 3, 3, 0]
  assert found.top_p.tolist() == [1, 1, 1, 1]
  assert found.min_p.tolist() == [0, 0.25, 0, 0]
  assert found.seed.tolist() == [0, 7, 0, 0]
  drawing.set(1, Request((1,), Stops(4)))
  assert not drawing.filters.any()
  assert drawing.of(np.array([1])).seed.tolist() == [0]
