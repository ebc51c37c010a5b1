"""Who uses which page of the cache, and which pages may be written.

A page is *held* by as many sequences as read it. A full page has a name
(`caatnet.serving.cache.prefixes`), by which other sequences find it. A page
that no sequence holds any more is *idle* as long as its name may be of use, and
then *free*. A copy to the host *reads* pages: these are neither free nor idle
before it has ended, whoever gives them up. So at any time

    held + idle + read and given up + free = all pages.

Idle pages are taken in the order in which they were given up. A sequence gives
up its last page first, and who holds a page holds those before it, so what is
taken is a leaf of the tree of prefixes.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from caatnet.serving.cache import page_loops as loops
from caatnet.serving.cache import prefixes
from caatnet.serving.scheduler.running import Running

# The states of a page: held by one sequence, held by several, idle with a name,
# or given up while a copy reads it.
STATES = ("free", "held", "shared", "cached", "leaving")
# Of all pages this part is made free at a time: among many pages some lie one
# after another, so what is taken then is in few runs.
_AHEAD = 64


def runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
  """Yields (first page, number of pages) of the runs that pages consist of.

  Args:
    pages: Page numbers in the order of their use.
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

  Lists of pages are int32 ``[n]``, in the order of a sequence; those of copies
  are of any kind.

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
    self._ahead = 0 if in_turn else num_pages // _AHEAD
    num_lists = loops.GROUPS + num_pages.bit_length()
    pages = np.zeros((6, num_pages), np.int32)
    lists = np.zeros((3, num_pages + num_lists), np.int32)
    lists[:2] = np.arange(num_pages + num_lists)
    self._arrays, self._book = (pages, lists), loops.Book(*pages, *lists)
    # Python reads single values of it sooner than of an array.
    self._lengths = memoryview(self._book.lengths)
    places = 1 << (2 * num_pages * reuse).bit_length()
    self._table = np.full((3, places), loops.NONE)
    self._book.holders[:] = 1  # all are held, and given up
    loops.release(*self._arrays, np.arange(num_pages, dtype=np.int32), False)

  @property
  def num_available(self) -> int:
    """How many pages can be taken now: those that are free or idle."""
    return self._lengths[0] + self._lengths[loops.IDLE]

  @property
  def num_used(self) -> int:
    """How many cannot."""
    return self.num_pages - self.num_available

  @property
  def num_leaving(self) -> int:
    """How many will be available when the copies that read them end."""
    return self._lengths[loops.LEAVING]

  def find(self, names: bytes) -> np.ndarray:
    """Returns the pages of the longest known prefix of a run of names."""
    found = np.empty(len(names) // prefixes.SIZE, np.int32)
    count = loops.find(self._table, np.frombuffer(names, np.int64), found)
    return found[:count]

  def num_idle(self, pages: np.ndarray) -> int:
    """Returns how many of some pages are idle, so that to hold them takes."""
    return loops.num_idle(self._book.where, pages)

  def hold(self, pages: np.ndarray) -> None:
    """Notes another sequence that reads pages which `find` returned."""
    self.counts.hits += len(pages)
    loops.hold(*self._arrays, pages)

  def take(self, count: int, after: int = -1) -> np.ndarray:
    """Hands out pages to be written, in as few runs as possible.

    Args:
      count: How many; no more than `num_available`.
      after: The page whose successors would be best; -1 for none.
    """
    found = np.empty(count, np.int32)
    self.counts.evicted += loops.take(
      *self._arrays, self._table, found, after, self._ahead
    )
    return found

  def grow(
    self, running: Running, slots: np.ndarray, most: int
  ) -> bool:
    """Hands out pages to running requests that have filled theirs.

    Args:
      running: All of them; it has their new pages.
      slots: Those that may grow, in the order in which they do; int64 ``[n]``.
      most: How many pages one gets at most.

    Returns:
      Whether so many were available; if not, nothing is done.
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

  def publish(self, pages: np.ndarray, names: bytes) -> None:
    """Names full pages, but for names that other pages have.

    Args:
      pages: The pages.
      names: Their names, one after another.
    """
    if self._reuse:
      loops.publish(
        self._table, np.frombuffer(names, np.int64), pages, self._book.named
      )

  def names(self) -> dict[bytes, int]:
    """Returns the page of each name."""
    pages = self._table[0, self._table[0] != loops.NONE].tolist()
    return {self._table[1:, page].tobytes(): page for page in pages}

  def release(self, pages: np.ndarray) -> None:
    """Gives up the pages of a sequence, the last one first.

    Args:
      pages: They in the order of the sequence.
    """
    loops.release(*self._arrays, pages, self._in_turn)

  def begin_read(self, pages: Sequence[int]) -> None:
    """Notes a copy that reads pages, which are held."""
    read = np.array(pages, np.int32)
    assert self._book.holders[read].all(), pages
    np.add.at(self._book.readers, read, 1)

  def end_read(self, pages: Sequence[int]) -> None:
    """Notes the end of a copy; what was given up meanwhile becomes idle."""
    loops.end_read(*self._arrays, np.array(pages, np.int32), self._in_turn)

  def read(self, page: int) -> bool:
    """Returns whether a copy reads a page, so that it must not be written."""
    return bool(self._book.readers[page])

  def states(self) -> np.ndarray:
    """Returns which of `STATES` each page is in, int8 ``[num_pages]``."""
    found = np.minimum(self._book.holders, 2).astype(np.int8)
    found[self._book.where == loops.IDLE] = STATES.index("cached")
    found[self._book.where == loops.LEAVING] = STATES.index("leaving")
    return found

  def sizes(self) -> list[int]:
    """Returns how many free groups there are of each 2^k pages."""
    last = len(self._book.lengths) - len(self._book.where)
    return self._book.lengths[loops.GROUPS:last].tolist()

  def check(self) -> None:
    """Asserts that each page is in one state, and none free that has a name."""
    book = self._book
    held = np.count_nonzero(book.holders)
    parts = held, *self._lengths[: loops.GROUPS]
    assert sum(parts) == len(book.where), parts
    listed = (book.where == loops.IDLE) | (book.where == loops.LEAVING)
    assert not (listed & (book.holders > 0)).any()
    assert not (book.free & (listed | (book.holders > 0))).any()
    assert not (book.free & book.named).any()
    names = self.names()
    assert sorted(names.values()) == np.flatnonzero(book.named).tolist()
    assert self.find(b"".join(names)).tolist() == list(names.values())
    states = self.states()
    assert all(states[page] for page in names.values())
