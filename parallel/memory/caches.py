"""Which rows to keep on a device, and what keeping them spares.

A hot cache is a set that is chosen once: the rows that are asked for most, by a
count such as that of a graph's edges or of batches that were sampled before. A
replacing cache changes with what is asked for: `lru` throws out what was not
asked for longest, `belady` what will not be asked for longest (Belady, IBM
Systems Journal 1966), which no cache can beat.

A stream is the ids that are asked for, batch after batch, each once per batch.
"""

from collections.abc import Iterable, Sequence
import heapq

import numpy as np


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
  """Returns the ids with the largest counts, the lowest of equal ones first.

  Args:
    counts: How often each id is asked for, ``[N]``.
    size: How many ids; at most N are returned.

  Returns:
    int64 ``[size]``, by falling count.
  """
  return np.argsort(-counts.astype(np.int64), kind="stable")[:size]


def count(stream: Iterable[np.ndarray], num_rows: int) -> np.ndarray:
  """Returns how many batches of a stream ask for each row, int64 ``[N]``.

  Args:
    stream: Ids of each batch, each at most once.
    num_rows: N.
  """
  counts = np.zeros(num_rows, np.int64)
  for ids in stream:
    counts[ids] += 1
  return counts


def hits_of_set(stream: Sequence[np.ndarray], kept: np.ndarray) -> int:
  """Returns how many of a stream's ids are in a set that does not change."""
  return sum(int(np.isin(ids, kept).sum()) for ids in stream)


def lru(stream: Sequence[np.ndarray], size: int) -> int:
  """Returns the hits of a cache that throws out what is least recent.

  Args:
    stream: Ids of each batch.
    size: Rows that it has room for.
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


def belady(stream: Sequence[np.ndarray], size: int) -> int:
  """Returns the most hits that any cache can have.

  A row that is asked for later than all that are kept need not be kept itself.

  Args:
    stream: Ids of each batch.
    size: Rows that it has room for.
  """
  ids = np.concatenate(stream)
  # When each is asked for again: later than the end if never.
  following = np.full(len(ids), len(ids), np.int64)
  order = np.argsort(ids, kind="stable")
  again = ids[order[1:]] == ids[order[:-1]]
  following[order[:-1][again]] = order[1:][again]
  kept: dict[int, int] = {}  # id -> when it is asked for again
  latest: list[tuple[int, int]] = []
  hits = 0
  for one, later in zip(ids.tolist(), following.tolist(), strict=True):
    hits += one in kept
    kept[one] = later
    heapq.heappush(latest, (-later, one))
    while len(kept) > size:
      time, other = heapq.heappop(latest)
      if kept.get(other) == -time:  # else an older request of a row
        del kept[other]
  return hits
