"""Cache policies for rows on a device, and their numbers of hits.

A static ("hot") cache holds a fixed set: the most frequently requested rows, by
a count such as the degrees of a graph's nodes or the requests of previously
sampled batches. A replacing cache changes with the requests: `count_lru_hits`
evicts the row with the least recent request, `count_belady_hits` the row with
the latest next request (Belady, IBM Systems Journal 1966), which is optimal.

A stream is the sequence of requested ids, batch by batch, each id at most once
per batch.
"""

from collections.abc import Iterable, Sequence
import heapq

import numpy as np


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
  """Returns the ids with the largest counts; ties are in ascending order.

  Args:
    counts: Number of requests of each id, integer ``[N]``.
    size: Number of ids; at most N are returned.

  Returns:
    int64 ``[min(size, N)]``, by descending count.

  Example:
    >>> most_frequent(np.array([3, 7, 7, 1]), 2).tolist()
    [1, 2]
  """
  return np.argsort(-counts.astype(np.int64), kind="stable")[:size]


def count(stream: Iterable[np.ndarray], num_rows: int) -> np.ndarray:
  """Counts the batches of a stream that request each row, int64 ``[N]``.

  Args:
    stream: Ids of each batch, each at most once.
    num_rows: Number of rows N.
  """
  counts = np.zeros(num_rows, np.int64)
  for ids in stream:
    counts[ids] += 1
  return counts


def hits_of_set(stream: Sequence[np.ndarray], kept: np.ndarray) -> int:
  """Counts the requests of a stream for ids in the static cache ``kept``."""
  return sum(int(np.isin(ids, kept).sum()) for ids in stream)


def count_lru_hits(stream: Sequence[np.ndarray], size: int) -> int:
  """Counts the hits of a cache that evicts the least recently used row.

  Args:
    stream: Ids of each batch.
    size: Capacity of the cache in rows.

  Example:
    >>> stream = [np.array([0, 1]), np.array([0, 2]), np.array([1])]
    >>> count_lru_hits(stream, size=2)  # it evicts row 1
    1
    >>> count_belady_hits(stream, size=2)
    2
  """
  kept: dict[int, None] = {}  # in the order of the last request
  hits = 0
  for one in np.concatenate(stream).tolist():
    if one in kept:
      hits += 1
      del kept[one]
    elif len(kept) >= size > 0:
      del kept[next(iter(kept))]
    if size:
      kept[one] = None
  return hits


def count_belady_hits(stream: Sequence[np.ndarray], size: int) -> int:
  """Counts the hits of the optimal cache, an upper bound for all caches.

  A requested row is not inserted if its next request is later than the next
  requests of all cached rows.

  Args:
    stream: Ids of each batch.
    size: Capacity of the cache in rows.
  """
  ids = np.concatenate(stream)
  # Position of the next request of the same id; len(ids) if there is none.
  following = np.full(len(ids), len(ids), np.int64)
  order = np.argsort(ids, kind="stable")
  again = ids[order[1:]] == ids[order[:-1]]
  following[order[:-1][again]] = order[1:][again]
  kept: dict[int, int] = {}  # id -> position of its next request
  # Heap by latest next request. Entries are not updated when a row is requested
  # again; outdated ones are skipped when they are popped.
  latest: list[tuple[int, int]] = []
  hits = 0
  for one, later in zip(ids.tolist(), following.tolist(), strict=True):
    hits += one in kept
    kept[one] = later
    heapq.heappush(latest, (-later, one))
    while len(kept) > size:
      time, other = heapq.heappop(latest)
      if kept.get(other) == -time:  # else an outdated entry
        del kept[other]
  return hits
