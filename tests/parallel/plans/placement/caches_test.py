"""Caches: Belady's algorithm is optimal; static sets hold the hottest rows."""

import functools

import numpy as np
import pytest

from parallel.plans.placement import caches


def stream(seed, batches=6, size=5, num_rows=12):
  rng = np.random.default_rng(seed)
  weights = 1 / np.arange(1, num_rows + 1)
  return [
    rng.choice(num_rows, size, replace=False, p=weights / weights.sum())
    for _ in range(batches)
  ]


def best(stream, size):
  """Returns the most hits over all possible eviction sequences."""
  ids = tuple(np.concatenate(stream).tolist())

  @functools.cache
  def most(place, kept):
    if place == len(ids):
      return 0
    one = ids[place]
    if one in kept:
      return 1 + most(place + 1, kept)
    if len(kept) < size:
      return most(place + 1, kept | {one})
    return max(
      most(place + 1, kept),
      *(most(place + 1, kept - {other} | {one}) for other in kept),
    )

  return most(0, frozenset())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_belady_is_optimal_among_all_eviction_sequences(size):
  for seed in range(8):
    asked = stream(seed, batches=4, size=4, num_rows=8)
    assert caches.count_belady_hits(asked, size) == best(asked, size)


def test_no_cache_beats_belady_and_lru_gains_from_capacity():
  for seed in range(20):
    asked = stream(seed)
    counts = caches.count(asked, 12)
    before = 0
    for size in range(13):
      most = caches.count_belady_hits(asked, size)
      least_recent = caches.count_lru_hits(asked, size)
      kept = caches.most_frequent(counts, size)
      # A static set is loaded from the start: its first requests are hits, too.
      loaded = len(np.intersect1d(np.concatenate(asked), kept))
      assert caches.hits_of_set(asked, kept) - loaded <= most
      assert before <= least_recent <= most
      before = least_recent
    distinct = len(np.unique(np.concatenate(asked)))
    assert before == most == sum(map(len, asked)) - distinct


def test_lru_hits_rows_with_few_other_requests_since_their_last_one():
  """Fewer distinct rows than the cache holds, by definition."""
  for seed in range(10):
    asked = stream(seed)
    ids = np.concatenate(asked).tolist()
    for size in range(7):
      hits = 0
      for place, one in enumerate(ids):
        before = ids[:place][::-1]
        if one in before:
          hits += len(set(before[: before.index(one)])) < size
      assert caches.count_lru_hits(asked, size) == hits


def test_best_static_set_has_the_most_requested_rows():
  asked = [np.array([3, 1]), np.array([1, 2]), np.array([1, 2])]
  counts = caches.count(asked, 5)
  assert counts.tolist() == [0, 3, 2, 1, 0]
  assert caches.most_frequent(counts, 3).tolist() == [1, 2, 3]
  assert caches.most_frequent(counts, 9).tolist() == [1, 2, 3, 0, 4]
  assert caches.hits_of_set(asked, np.array([1, 2])) == 5
