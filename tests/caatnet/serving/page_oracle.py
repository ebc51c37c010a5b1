"""Reference implementation of `caatnet.serving.cache.pages` with dicts."""

import collections
from collections.abc import Sequence
import itertools

import numpy as np

from caatnet.serving.cache import prefixes
from caatnet.serving.cache.pages import STATES, PageCounts, contiguous_runs
from caatnet.serving.scheduler.running import RunningRequests


class BuddyAllocator:
  """Buddy allocator: free pages of a range in groups of powers of two.

  Attributes:
    num_pages: Number of pages of the range, not necessarily a power of two.
    num_free: Number of free pages.
  """

  def __init__(self, num_pages: int) -> None:
    """Makes a range in which all pages are free."""
    self.num_pages = num_pages
    self.num_free = 0
    # For each k: first pages of the free groups, in the order of their release.
    self._free: list[dict[int, None]] = [
      {} for _ in range(num_pages.bit_length())
    ]
    self._sizes = 0  # bit k: there is a free block of 2^k pages
    self._is_free = bytearray(num_pages)
    self.give(range(num_pages))

  def take(self, count: int, room: bool = False) -> list[int]:
    """Takes pages in as few runs as the free blocks allow.

    Args:
      count: Number of pages, at most `num_free`.
      room: Whether to cut from a largest group, which leaves free pages behind
        a growing sequence; otherwise from the smallest group that suffices.

    Returns:
      The page numbers, run by run.
    """
    assert count <= self.num_free, (count, self.num_free)
    self.num_free -= count
    found: list[int] = []
    while count:
      k = self._choose(count, room)
      size, free = 1 << k, self._free[k]
      while True:
        start, _ = free.popitem()
        used = size if size < count else count
        found += range(start, start + used)
        self._is_free[start : start + used] = bytes(used)
        count -= used
        if count < size or not free:  # else group k is still the largest
          break
      if not free:
        self._sizes ^= size
      if used < size:
        self._join(start + used, size - used)
    return found

  def _choose(self, count: int, room: bool) -> int:
    least = (count - 1).bit_length()
    enough = self._sizes >> least << least
    if room or not enough:
      return self._sizes.bit_length() - 1
    return (enough & -enough).bit_length() - 1

  def take_at(self, start: int, count: int) -> int:
    """Takes the free pages that directly follow a given one.

    Returns:
      Number of pages taken.
    """
    end = self._is_free.find(0, start, start + count)
    if end < 0:  # all pages up to the end of the range are free
      end = min(start + count, self.num_pages)
    if end <= start:
      return 0
    self._is_free[start:end] = bytes(end - start)
    self.num_free -= end - start
    page = start
    while page < end:
      k, first = 0, page
      while first not in self._free[k]:
        k += 1
        first = page >> k << k
      self._pop(k, first)
      if first < start:
        self._join(first, start - first)
      page = first + (1 << k)
    self._join(end, page - end)
    return end - start

  def give(self, pages: Sequence[int]) -> None:
    """Frees pages, and merges buddies."""
    self.num_free += len(pages)
    for start, count in contiguous_runs(pages):
      self._is_free[start : start + count] = b"\1" * count
      self._join(start, count)

  def _join(self, start: int, count: int) -> None:
    """Adds a run of free pages as groups, and merges these with buddies."""
    end, free = start + count, self._free
    while start < end:
      size = 1 << (end - start).bit_length() - 1
      if start and start & -start < size:
        size = start & -start
      k, page = size.bit_length() - 1, start
      start += size
      while page ^ size in free[k]:
        self._pop(k, page ^ size)
        page &= ~size
        k, size = k + 1, size << 1
      free[k][page] = None
      self._sizes |= size

  def _pop(self, k: int, start: int) -> None:
    """Removes one group from the free ones."""
    del self._free[k][start]
    if not self._free[k]:
      self._sizes ^= 1 << k

  def sizes(self) -> list[int]:
    """Returns the number of free groups of each size 2^k."""
    return [len(free) for free in self._free]


class DictPages:
  """Reference for `Pages`, with the same interface."""

  def __init__(
    self, num_pages: int, page_size: int, reuse: bool = True,
    in_turn: bool = False,
  ) -> None:
    """Makes a cache of free pages, with the arguments of `Pages`."""
    self.num_pages, self.page_size = num_pages, page_size
    self.counts, self._reuse = PageCounts(), reuse
    self._block_hashes: dict[int, bytes] = {}  # hash of each published page
    self._by_hash: dict[bytes, int] = {}
    self._ahead = 0 if in_turn else num_pages // 64
    self._in_turn = in_turn
    self._allocator = BuddyAllocator(num_pages)
    self._holders = [0] * num_pages
    self._readers: collections.Counter[int] = collections.Counter()
    self._idle: dict[int, None] = {}  # least recently released first
    # Released pages that a copy still reads, in the order of release.
    self._leaving: dict[int, None] = {}

  @property
  def num_available(self) -> int:
    """Number of pages that can be taken now: free or idle."""
    return self._allocator.num_free + len(self._idle)

  @property
  def num_leaving(self) -> int:
    """Number of released pages that a copy still reads."""
    return len(self._leaving)

  def num_idle(self, pages: np.ndarray) -> int:
    """Returns the number of idle pages among the given ones."""
    return sum(map(self._idle.__contains__, pages.tolist()))

  def hold(self, pages: np.ndarray) -> None:
    """Adds a sequence to the holders of pages."""
    self.counts.hits += len(pages)
    for page in pages.tolist():
      if not self._holders[page]:
        self._idle.pop(page, None)
        self._leaving.pop(page, None)
      self._holders[page] += 1

  def find(self, block_hashes: bytes) -> np.ndarray:
    """Returns the pages of the longest cached prefix of block hashes."""
    found: list[int] = []
    for block_hash in prefixes.split(block_hashes):
      page = self._by_hash.get(block_hash)
      if page is None:
        break
      found.append(page)
    return np.array(found, np.int32)

  def publish(self, pages: np.ndarray, block_hashes: bytes) -> None:
    """Assigns hashes to pages, except where either one is already assigned."""
    if not self._reuse:
      return
    split = prefixes.split(block_hashes)
    for page, block_hash in zip(pages.tolist(), split, strict=True):
      if page not in self._block_hashes and block_hash not in self._by_hash:
        self._block_hashes[page], self._by_hash[block_hash] = block_hash, page

  def block_hashes(self) -> dict[bytes, int]:
    """Returns the page of each block hash."""
    return dict(self._by_hash)

  def take(self, count: int, after: int = -1) -> np.ndarray:
    """Takes pages, preferably those after a given one."""
    allocator = self._allocator
    missing = count - allocator.num_free
    if missing > 0:
      self.counts.evicted += self._evict(
        min(max(missing, self._ahead), len(self._idle))
      )
    num = allocator.take_at(after + 1, count) if after >= 0 else 0
    found = list(range(after + 1, after + 1 + num))
    if count > num:
      found += allocator.take(count - num, room=after >= 0)
    for page in found:
      self._holders[page] = 1
    return np.array(found, np.int32)

  def grow(
    self, running: RunningRequests, slots: np.ndarray, most: int
  ) -> bool:
    """Takes pages for sequences that have filled theirs, in the given order."""
    size = self.page_size
    growing = [s for s in slots if running.computed[s] >= running.room[s]]
    counts = [
      min(-(-running.longest[s] // size) - running.room[s] // size, most)
      for s in growing
    ]
    if sum(counts) > self.num_available:
      return False
    for slot, count in zip(growing, counts, strict=True):
      held = running.room[slot] // size
      last = running.tables[slot, held - 1]
      pages = self.take(int(count), int(last))
      running.extend(running.requests[slot], pages, held)
    return True

  def _evict(self, count: int) -> int:
    """Frees the pages that have been idle longest.

    Returns:
      Number of evicted pages that had a block hash.
    """
    pages = list(itertools.islice(self._idle, count))
    self._allocator.give(pages[::-1])  # a sequence's last page came first
    before = len(self._block_hashes)
    for page in pages:
      del self._idle[page]
      if page in self._block_hashes:
        del self._by_hash[self._block_hashes.pop(page)]
    return before - len(self._block_hashes)

  def release(self, pages: np.ndarray) -> None:
    """Releases the pages of a sequence, the last one first."""
    free = []
    holders, readers = self._holders, self._readers
    for page in reversed(pages.tolist()):
      left = holders[page] = holders[page] - 1
      if left:
        assert left > 0, page
      elif page in readers:
        self._leaving[page] = None
      elif self._in_turn or page in self._block_hashes:
        self._idle[page] = None
      else:
        free.append(page)
    self._allocator.give(free[::-1])

  def begin_read(self, pages: Sequence[int]) -> None:
    """Registers a copy that reads held pages."""
    for page in pages:
      assert self._holders[page], page
      self._readers[page] += 1

  def end_read(self, pages: Sequence[int]) -> None:
    """Ends a copy; pages that were released meanwhile become idle."""
    for page in reversed(pages):
      assert self._readers[page] > 0, page
      self._readers[page] -= 1
      if self._readers[page]:
        continue
      del self._readers[page]
      if page in self._leaving:
        del self._leaving[page]
        if self._in_turn or page in self._block_hashes:
          self._idle[page] = None
        else:
          self._allocator.give([page])

  def read(self, page: int) -> bool:
    """Returns whether a copy reads a page."""
    return page in self._readers

  def states(self) -> np.ndarray:
    """Returns the index into `STATES` of each page, int8 ``[num_pages]``."""
    found = np.minimum(self._holders, 2).astype(np.int8)
    found[list(self._idle)] = STATES.index("cached")
    found[list(self._leaving)] = STATES.index("leaving")
    return found

  def sizes(self) -> list[int]:
    """Returns the number of free groups of each size 2^k."""
    return self._allocator.sizes()

  def check(self) -> None:
    """Asserts that each page is in exactly one state."""
    held = sum(n > 0 for n in self._holders)
    parts = held, len(self._idle), len(self._leaving), self._allocator.num_free
    assert sum(parts) == len(self._holders), parts
    assert not any(self._holders[page] for page in self._idle)
    assert not any(self._holders[page] for page in self._leaving)
    assert {n: page for page, n in self._block_hashes.items()} == self._by_hash
    assert len(self._block_hashes) == len(self._by_hash)
