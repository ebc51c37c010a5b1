"""Who uses which page of the cache, and which pages may be written.

A page is *held* by as many sequences as read it. A full page has a name
(`caatnet.serving.prefixes`), by which other sequences find it. A page that
nobody holds any more is *idle* as long as its name may be of use, and then
*free*. A copy to the host *reads* pages: these are neither free nor idle before
it has ended, whoever gives them up. So at any time

    held + idle + read and given up + free = all pages.

Idle pages are taken in the order in which they were given up. A sequence gives
up its last page first, and who holds a page holds those before it, so what is
taken is a leaf of the tree of prefixes.
"""

import collections
from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np

from caatnet.serving.groups import Groups

# Of all pages this part is made free at a time: among many pages some lie one
# after another, so what is taken then is in few runs.
_AHEAD = 64
# What a page may be: held by one sequence, held by several, idle with a name,
# or given up while a copy reads it.
STATES = ("free", "held", "shared", "cached", "leaving")


@dataclasses.dataclass
class PageCounts:
  """What happened to pages.

  Attributes:
    hits: Pages that were found by name.
    misses: Pages of prompts, full ones, that were looked for and not found.
    evicted: Idle pages with a name that were taken for something else.
    copied: Pages that were copied since another sequence may read them.
  """

  hits: int = 0
  misses: int = 0
  evicted: int = 0
  copied: int = 0


class Pages:
  """The pages of one cache.

  Attributes:
    num_pages: How many there are.
    page_size: The tokens of a page.
    counts: What happened to them.
  """

  def __init__(
    self, num_pages: int, page_size: int, reuse: bool = True,
    in_turn: bool = False,
  ) -> None:
    """Makes a cache of free pages.

    Args:
      num_pages: How many there are.
      page_size: The tokens of a page.
      reuse: Whether pages are found by name.
      in_turn: Whether pages without a name wait in one line with those that
        have one, as in vLLM; else they are free at once.
    """
    self.num_pages, self.page_size = num_pages, page_size
    self.counts = PageCounts()
    self._reuse, self._in_turn = reuse, in_turn
    self._groups = Groups(num_pages)
    self._ahead = 0 if in_turn else num_pages // _AHEAD
    self._holders = [0] * num_pages
    self._names: list[bytes | None] = [None] * num_pages
    self._by_name: dict[bytes, int] = {}
    self._idle: dict[int, None] = {}  # those given up first are first
    self._readers: collections.Counter[int] = collections.Counter()
    # Given up in this order while a copy reads them.
    self._waiting: dict[int, None] = {}

  @property
  def num_available(self) -> int:
    """How many pages can be taken now: those that are free or idle."""
    return self._groups.num_free + len(self._idle)

  @property
  def num_used(self) -> int:
    """How many cannot."""
    return self.num_pages - self.num_available

  @property
  def num_leaving(self) -> int:
    """How many will be available when the copies that read them end."""
    return len(self._waiting)

  def find(self, names: Sequence[bytes]) -> list[int]:
    """Returns the pages of the longest known prefix of a list of names."""
    found: list[int] = []
    if self._reuse:
      for name in names:
        page = self._by_name.get(name)
        if page is None:
          break
        found.append(page)
    return found

  def num_idle(self, pages: Sequence[int]) -> int:
    """Returns how many of some pages are idle, so that to hold them takes."""
    return sum(map(self._idle.__contains__, pages))

  def hold(self, pages: Sequence[int]) -> None:
    """Notes another sequence that reads pages which `find` returned."""
    self.counts.hits += len(pages)
    for page in pages:
      if not self._holders[page]:
        self._idle.pop(page, None)
        self._waiting.pop(page, None)
      self._holders[page] += 1

  def take(self, count: int, after: int = -1) -> list[int]:
    """Hands out pages to be written, in as few runs as possible.

    Args:
      count: How many; no more than `num_available`.
      after: The page whose successors would be best; -1 for none.
    """
    groups, holders = self._groups, self._holders
    missing = count - groups.num_free
    if missing > 0:
      assert missing <= len(self._idle), (count, self.num_available)
      self._evict(min(max(missing, self._ahead), len(self._idle)))
    num = groups.take_at(after + 1, count) if after >= 0 else 0
    found = list(range(after + 1, after + 1 + num))
    if count > num:
      found += groups.take(count - num, room=after >= 0)
    for page in found:
      holders[page] = 1
    return found

  def _evict(self, count: int) -> None:
    """Makes the pages free that have been idle longest."""
    idle, names, before = self._idle, self._names, len(self._by_name)
    pages = list(itertools.islice(idle, count))
    for page in pages:
      del idle[page]
      name = names[page]
      if name is not None:
        del self._by_name[name]
        names[page] = None
    self.counts.evicted += before - len(self._by_name)
    self._groups.give(pages[::-1])  # a sequence's last page came first

  def publish(
    self, pages: Sequence[int], names: Sequence[bytes]
  ) -> list[bytes]:
    """Names full pages, but for names that other pages have.

    Returns:
      The names that no page had.
    """
    new: list[bytes] = []
    if not self._reuse:
      return new
    of, by = self._names, self._by_name
    for page, name in zip(pages, names, strict=True):
      if of[page] is None and name not in by:
        of[page] = name
        by[name] = page
        new.append(name)
    return new

  def release(self, pages: Sequence[int]) -> None:
    """Gives up the pages of a sequence, the last one first.

    Args:
      pages: They in the order of the sequence.
    """
    free = []
    holders, readers, names = self._holders, self._readers, self._names
    idle, in_turn = self._idle, self._in_turn
    for page in reversed(pages):
      left = holders[page] = holders[page] - 1
      if left:
        assert left > 0, page
      elif page in readers:
        self._waiting[page] = None
      elif in_turn or names[page] is not None:
        idle[page] = None
      else:
        free.append(page)
    if free:
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
      if page in self._waiting:
        del self._waiting[page]
        if self._in_turn or self._names[page] is not None:
          self._idle[page] = None
        else:
          self._groups.give([page])

  def read(self, page: int) -> bool:
    """Returns whether a copy reads a page, so that it must not be written."""
    return page in self._readers

  def states(self) -> np.ndarray:
    """Returns which of `STATES` each page is in, int8 ``[num_pages]``."""
    found = np.minimum(self._holders, 2).astype(np.int8)
    found[list(self._idle)] = STATES.index("cached")
    found[list(self._waiting)] = STATES.index("leaving")
    return found

  def sizes(self) -> list[int]:
    """Returns how many free groups there are of each 2^k pages."""
    return self._groups.sizes()

  def check(self) -> None:
    """Asserts that each page is in exactly one state."""
    held = sum(n > 0 for n in self._holders)
    parts = held, len(self._idle), len(self._waiting), self._groups.num_free
    assert sum(parts) == self.num_pages, parts
    assert not any(self._holders[page] for page in self._idle)
    assert not any(self._holders[page] for page in self._waiting)
    for name, page in self._by_name.items():
      assert self._names[page] == name
      assert self._holders[page] or page in self._idle or page in self._waiting
    assert sum(n is not None for n in self._names) == len(self._by_name)
