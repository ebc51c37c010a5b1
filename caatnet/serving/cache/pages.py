"""Reference-counted pages of a key-value cache with prefix reuse.

A page is *held* by each sequence that reads it. A full page has a block hash
(`caatnet.serving.cache.prefixes`), by which other sequences find it. A page
with a block hash that its last holder releases is *idle* until its eviction;
other released pages are *free*. A copy to the host *reads* pages: a page that
is released during the copy is *leaving* until the copy ends. At any time

    held + idle + leaving + free = all pages.

Idle pages are evicted in the order of their release. A sequence releases its
last page first, and a sequence that holds a page holds all pages before it, so
an evicted page is always a leaf of the prefix tree.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from caatnet.serving.cache import page_loops as loops
from caatnet.serving.cache import prefixes
from caatnet.serving.scheduler.running import RunningRequests

# States of a page: free, held by one sequence, held by several, idle ("cached")
# or released while a copy reads it.
STATES = ("free", "held", "shared", "cached", "leaving")
# An eviction frees at least 1/_EVICTION_DIVISOR of all pages: some of so many
# pages are adjacent, so that later allocations have few contiguous ranges.
_EVICTION_DIVISOR = 64


def contiguous_runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
  """Yields (first page, number of pages) of each range of adjacent pages.

  Args:
    pages: Page numbers in the order of the sequence.

  Example:
    >>> list(contiguous_runs([4, 5, 6, 2, 9, 10]))
    [(4, 3), (2, 1), (9, 2)]
  """
  start, count = 0, 0
  for page in pages:
    if count and page == start + count:
      count += 1
      continue
    if count:
      yield start, count
    start, count = page, 1
  if count:
    yield start, count


@dataclasses.dataclass
class PageCounts:
  """Counters of page events.

  Attributes:
    hits: Pages that were found by their block hash.
    misses: Full pages of prompts that were looked up and not found.
    evicted: Idle pages with a block hash that were evicted.
    copied: Pages that were copied because another sequence may read them.
  """

  hits: int = 0
  misses: int = 0
  evicted: int = 0
  copied: int = 0


class Pages:
  """Allocator and prefix index of one cache.

  Methods take pages as int32 ``[n]``, in the order of a sequence; `begin_read`
  and `end_read` take any sequence of integers.

  Attributes:
    num_pages: Total number of pages.
    page_size: Tokens per page.
    counts: Counters of page events.

  Example:
    >>> pages = Pages(8, page_size=16)
    >>> held = pages.take(3)
    >>> held.tolist(), pages.sizes()  # free blocks of 1, 2, 4 and 8 pages
    ([0, 1, 2], [1, 0, 1, 0])
    >>> pages.publish(held[:1], b"0123456789abcdef")
    >>> pages.release(held)  # page 0 is idle, pages 1 and 2 are free
    >>> pages.find(b"0123456789abcdef").tolist(), pages.num_available
    ([0], 8)
  """

  def __init__(
    self, num_pages: int, page_size: int, reuse: bool = True,
    in_turn: bool = False,
  ) -> None:
    """Makes a cache of free pages.

    Args:
      num_pages: Total number of pages.
      page_size: Tokens per page.
      reuse: Whether pages are found by their block hash.
      in_turn: Whether released pages without a block hash join the idle list in
        the order of release, as in vLLM; otherwise they are free at once.
    """
    self.num_pages, self.page_size = num_pages, page_size
    self.counts = PageCounts()
    self._reuse, self._in_turn = reuse, in_turn
    self._ahead = 0 if in_turn else num_pages // _EVICTION_DIVISOR
    num_lists = loops.FREE_LISTS + num_pages.bit_length()
    pages = np.zeros((6, num_pages), np.int32)
    lists = np.zeros((3, num_pages + num_lists), np.int32)
    lists[:2] = np.arange(num_pages + num_lists)
    self._arrays, self._book = (pages, lists), loops.AllocatorState(
      *pages, *lists
    )
    # Python reads single values of a memoryview faster than of an array.
    self._lengths = memoryview(self._book.lengths)
    # Slots of the hash table: a power of two, at least twice the pages.
    places = 1 << (2 * num_pages * reuse).bit_length()
    self._table = np.full((3, places), loops.NONE)
    self._book.holders[:] = 1  # the release below makes all pages free
    loops.release(*self._arrays, np.arange(num_pages, dtype=np.int32), False)

  @property
  def num_available(self) -> int:
    """Number of pages that can be allocated now: free or idle ones."""
    return self._lengths[0] + self._lengths[loops.IDLE]

  @property
  def num_used(self) -> int:
    """Number of pages that cannot be allocated now: held or leaving ones."""
    return self.num_pages - self.num_available

  @property
  def num_leaving(self) -> int:
    """Number of pages that become available when the copies of them end."""
    return self._lengths[loops.LEAVING]

  def find(self, block_hashes: bytes) -> np.ndarray:
    """Returns the pages of the longest cached prefix of block hashes, int32."""
    found = np.empty(len(block_hashes) // prefixes.HASH_BYTES, np.int32)
    count = loops.find(
      self._table, np.frombuffer(block_hashes, np.int64), found
    )
    return found[:count]

  def num_idle(self, pages: np.ndarray) -> int:
    """Returns how many of `pages` are idle.

    Holding an idle page reduces the number of available pages.
    """
    return loops.num_idle(self._book.where, pages)

  def hold(self, pages: np.ndarray) -> None:
    """Adds a holder to pages that `find` returned."""
    self.counts.hits += len(pages)
    loops.hold(*self._arrays, pages)

  def take(self, count: int, after: int = -1) -> np.ndarray:
    """Allocates and returns writable pages, in few contiguous ranges.

    Args:
      count: Number of pages; at most `num_available`.
      after: Page that the new ones should follow; -1 for none.
    """
    found = np.empty(count, np.int32)
    self.counts.evicted += loops.take(
      *self._arrays, self._table, found, after, self._ahead
    )
    return found

  def grow(
    self, running: RunningRequests, slots: np.ndarray, most: int
  ) -> bool:
    """Allocates pages for running requests whose pages are full.

    Args:
      running: All running requests; their page tables are updated.
      slots: Slots of the requests that may get pages, in the order of
        allocation, int64 ``[n]``.
      most: Maximum number of pages per request.

    Returns:
      Whether enough pages were available; if not, nothing changes.
    """
    num, evicted = loops.grow(
      *self._arrays, self._table, running.room, running.tables, slots,
      running.computed, running.longest, most, self.page_size, self._ahead,
    )
    if num < 0:
      return False
    running.grown(self._book.grown[:num].tolist())
    self.counts.evicted += evicted
    return True

  def publish(self, pages: np.ndarray, block_hashes: bytes) -> None:
    """Makes full pages findable by their block hashes.

    Skips hashes that another page already has.

    Args:
      pages: Pages, int32 ``[n]``.
      block_hashes: Their block hashes, concatenated.
    """
    if self._reuse:
      loops.publish(
        self._table, np.frombuffer(block_hashes, np.int64), pages,
        self._book.hashed,
      )

  def block_hashes(self) -> dict[bytes, int]:
    """Returns the page numbers of all published pages, by block hash."""
    pages = self._table[0, self._table[0] != loops.NONE].tolist()
    return {self._table[1:, page].tobytes(): page for page in pages}

  def release(self, pages: np.ndarray) -> None:
    """Removes a holder from the pages of a sequence, the last page first.

    Args:
      pages: Pages in the order of the sequence, int32 ``[n]``.
    """
    loops.release(*self._arrays, pages, self._in_turn)

  def begin_read(self, pages: Sequence[int]) -> None:
    """Adds a reader to held pages, at the start of a copy."""
    read = np.array(pages, np.int32)
    assert self._book.holders[read].all(), pages
    np.add.at(self._book.readers, read, 1)

  def end_read(self, pages: Sequence[int]) -> None:
    """Removes a reader from pages; leaving pages then become available."""
    loops.end_read(*self._arrays, np.array(pages, np.int32), self._in_turn)

  def read(self, page: int) -> bool:
    """Returns whether a copy reads a page, which must then not be written."""
    return bool(self._book.readers[page])

  def states(self) -> np.ndarray:
    """Returns each page's state, an index of `STATES`, int8 ``[num_pages]``."""
    found = np.minimum(self._book.holders, 2).astype(np.int8)
    found[self._book.where == loops.IDLE] = STATES.index("cached")
    found[self._book.where == loops.LEAVING] = STATES.index("leaving")
    return found

  def sizes(self) -> list[int]:
    """Returns the number of free blocks of 2^k pages, for each k."""
    last = len(self._book.lengths) - len(self._book.where)
    return self._book.lengths[loops.FREE_LISTS:last].tolist()

  def check(self) -> None:
    """Asserts that each page is in one state and no free page has a hash."""
    book = self._book
    # The equation in the module docstring.
    held = np.count_nonzero(book.holders)
    parts = held, *self._lengths[: loops.FREE_LISTS]
    assert sum(parts) == len(book.where), parts
    listed = (book.where == loops.IDLE) | (book.where == loops.LEAVING)
    assert not (listed & (book.holders > 0)).any()
    assert not (book.free & (listed | (book.holders > 0))).any()
    assert not (book.free & book.hashed).any()
    published = self.block_hashes()  # block hash -> page
    assert sorted(published.values()) == np.flatnonzero(book.hashed).tolist()
    assert self.find(b"".join(published)).tolist() == list(published.values())
    states = self.states()
    assert all(states[page] for page in published.values())
