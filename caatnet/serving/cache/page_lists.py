"""Which pages are held, idle, being read or free, in Python.

It is the specification of `caatnet.serving.cache.compiled_lists`, which does
the same in less time.

Shape legend: S = slots, P = pages of a sequence.
"""

import collections
from collections.abc import Sequence
import itertools

import numpy as np

from caatnet.serving.cache import prefixes
from caatnet.serving.cache.groups import Groups

# What a page may be: held by one sequence, held by several, idle with a name,
# or given up while a copy reads it.
STATES = ("free", "held", "shared", "cached", "leaving")


class PageLists:
  """The pages of one cache, each in one state."""

  def __init__(self, num_pages: int, ahead: int, in_turn: bool) -> None:
    """Makes a cache of free pages.

    Args:
      num_pages: How many there are.
      ahead: How many are made free at a time, at least.
      in_turn: Whether pages without a name are idle before they are free.
    """
    self._names: dict[int, bytes] = {}  # of the pages that have one
    self._by_name: dict[bytes, int] = {}
    self._ahead, self._in_turn = ahead, in_turn
    self._groups = Groups(num_pages)
    self._holders = [0] * num_pages
    self._readers: collections.Counter[int] = collections.Counter()
    self._idle: dict[int, None] = {}  # those given up first are first
    # Given up in this order while a copy reads them.
    self._leaving: dict[int, None] = {}

  @property
  def num_available(self) -> int:
    """How many pages can be taken now: those that are free or idle."""
    return self._groups.num_free + len(self._idle)

  @property
  def num_leaving(self) -> int:
    """How many will be when the copies that read them end."""
    return len(self._leaving)

  def num_idle(self, pages: np.ndarray) -> int:
    """Returns how many of some pages are idle."""
    return sum(map(self._idle.__contains__, pages.tolist()))

  def hold(self, pages: np.ndarray) -> None:
    """Notes another sequence that reads pages."""
    for page in pages.tolist():
      if not self._holders[page]:
        self._idle.pop(page, None)
        self._leaving.pop(page, None)
      self._holders[page] += 1

  def find(self, names: bytes) -> np.ndarray:
    """Returns the pages of the longest known prefix of a run of names."""
    found: list[int] = []
    for name in prefixes.split(names):
      page = self._by_name.get(name)
      if page is None:
        break
      found.append(page)
    return np.array(found, np.int32)

  def publish(self, pages: np.ndarray, names: bytes) -> None:
    """Names pages that have none, but for names that other pages have."""
    for page, name in zip(pages.tolist(), prefixes.split(names), strict=True):
      if page not in self._names and name not in self._by_name:
        self._names[page], self._by_name[name] = name, page

  def names(self) -> dict[bytes, int]:
    """Returns the page of each name."""
    return dict(self._by_name)

  def take(self, count: int, after: int) -> tuple[np.ndarray, int]:
    """Hands out pages.

    Args:
      count: How many; no more than `num_available`.
      after: The page whose successors would be best; -1 for none.

    Returns:
      The pages, and how many idle ones became free and lost their names.
    """
    groups, gone = self._groups, 0
    missing = count - groups.num_free
    if missing > 0:
      gone = self._evict(min(max(missing, self._ahead), len(self._idle)))
    num = groups.take_at(after + 1, count) if after >= 0 else 0
    found = list(range(after + 1, after + 1 + num))
    if count > num:
      found += groups.take(count - num, room=after >= 0)
    for page in found:
      self._holders[page] = 1
    return np.array(found, np.int32), gone

  def grow(
    self, room: np.ndarray, tables: np.ndarray, slots: np.ndarray,
    computed: np.ndarray, longest: np.ndarray, most: int, size: int,
  ) -> tuple[list[int], int] | None:
    """Hands out pages to sequences that have filled theirs, in their order.

    Args:
      room: The positions that each slot's pages have, int64 ``[S]`` as those
        that follow; it is brought up to date.
      tables: These pages, int32 ``[S, P]``; new ones are put behind them.
      slots: The sequences that may grow, int64 ``[n]``; each has a page.
      computed: The positions that are in use.
      longest: Those that will be.
      most: How many pages a sequence gets at most.
      size: The positions of a page.

    Returns:
      The slots that got pages, and how many pages lost their names; None, and
      nothing is done, if not so many pages are available.
    """
    growing = slots[computed[slots] >= room[slots]]
    held = room[growing] // size
    counts = np.minimum(-(-longest[growing] // size) - held, most)
    if counts.sum() > self.num_available:
      return None
    grown, gone = growing.tolist(), 0
    for slot, first, count in zip(
      grown, held.tolist(), counts.tolist(), strict=True
    ):
      pages, evicted = self.take(count, int(tables[slot, first - 1]))
      tables[slot, first : first + count] = pages
      gone += evicted
    room[growing] += counts * size
    return grown, gone

  def _evict(self, count: int) -> int:
    """Makes the pages free that have been idle longest.

    Returns:
      How many of them had a name.
    """
    pages = list(itertools.islice(self._idle, count))
    self._groups.give(pages[::-1])  # a sequence's last page came first
    before = len(self._names)
    for page in pages:
      del self._idle[page]
      if page in self._names:
        del self._by_name[self._names.pop(page)]
    return before - len(self._names)

  def release(self, pages: np.ndarray) -> None:
    """Gives up the pages of a sequence, the last one first."""
    free = []
    holders, readers = self._holders, self._readers
    for page in reversed(pages.tolist()):
      left = holders[page] = holders[page] - 1
      if left:
        assert left > 0, page
      elif page in readers:
        self._leaving[page] = None
      elif self._in_turn or page in self._names:
        self._idle[page] = None
      else:
        free.append(page)
    self._groups.give(free[::-1])

  def begin_read(self, pages: Sequence[int]) -> None:
    """Notes a copy that reads pages, which are held."""
    for page in pages:
      assert self._holders[page], page
      self._readers[page] += 1

  def end_read(self, pages: Sequence[int]) -> None:
    """Notes the end of a copy; what was given up meanwhile becomes idle."""
    for page in reversed(pages):
      assert self._readers[page] > 0, page
      self._readers[page] -= 1
      if self._readers[page]:
        continue
      del self._readers[page]
      if page in self._leaving:
        del self._leaving[page]
        if self._in_turn or page in self._names:
          self._idle[page] = None
        else:
          self._groups.give([page])

  def is_read(self, page: int) -> bool:
    """Returns whether a copy reads a page."""
    return page in self._readers

  def states(self) -> np.ndarray:
    """Returns which of `STATES` each page is in, int8 ``[num_pages]``."""
    found = np.minimum(self._holders, 2).astype(np.int8)
    found[list(self._idle)] = STATES.index("cached")
    found[list(self._leaving)] = STATES.index("leaving")
    return found

  def sizes(self) -> list[int]:
    """Returns how many free groups there are of each 2^k pages."""
    return self._groups.sizes()

  def check(self) -> None:
    """Asserts that each page is in exactly one state."""
    held = sum(n > 0 for n in self._holders)
    parts = held, len(self._idle), len(self._leaving), self._groups.num_free
    assert sum(parts) == len(self._holders), parts
    assert not any(self._holders[page] for page in self._idle)
    assert not any(self._holders[page] for page in self._leaving)
    assert {n: page for page, n in self._names.items()} == self._by_name
    assert len(self._names) == len(self._by_name)
