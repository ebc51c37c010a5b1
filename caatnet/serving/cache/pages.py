"""Who uses which page of the cache, and which pages may be written.

A page is *held* by as many sequences as read it. A full page has a name
(`caatnet.serving.cache.prefixes`), by which other sequences find it. A page
that nobody holds any more is *idle* as long as its name may be of use, and then
*free*. A copy to the host *reads* pages: these are neither free nor idle before
it has ended, whoever gives them up. So at any time

    held + idle + read and given up + free = all pages.

Idle pages are taken in the order in which they were given up. A sequence gives
up its last page first, and who holds a page holds those before it, so what is
taken is a leaf of the tree of prefixes.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from caatnet.serving import compiling
from caatnet.serving.cache.page_lists import PageLists
from caatnet.serving.scheduler.running import Running

# Of all pages this part is made free at a time: among many pages some lie one
# after another, so what is taken then is in few runs.
_AHEAD = 64


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
    implementation: "reference" or "compiled".
    counts: What happened to them.
  """

  def __init__(
    self, num_pages: int, page_size: int, reuse: bool = True,
    in_turn: bool = False, implementation: str = "auto",
  ) -> None:
    """Makes a cache of free pages.

    Args:
      num_pages: How many there are.
      page_size: The tokens of a page.
      reuse: Whether pages are found by name.
      in_turn: Whether pages without a name wait in one line with those that
        have one, as in vLLM; else they are free at once.
      implementation: One of `compiling.IMPLEMENTATIONS`.

    Raises:
      ValueError: There is no such implementation, or no numba for it.
    """
    self.num_pages, self.page_size = num_pages, page_size
    self.counts = PageCounts()
    self.implementation = compiling.choose(implementation)
    self._reuse = reuse
    ahead = 0 if in_turn else num_pages // _AHEAD
    make = PageLists
    if self.implementation == "compiled":
      from caatnet.serving.cache.compiled_lists import CompiledLists as make
    self._lists = make(num_pages, ahead, in_turn)

  @property
  def num_available(self) -> int:
    """How many pages can be taken now: those that are free or idle."""
    return self._lists.num_available

  @property
  def num_used(self) -> int:
    """How many cannot."""
    return self.num_pages - self.num_available

  @property
  def num_leaving(self) -> int:
    """How many will be available when the copies that read them end."""
    return self._lists.num_leaving

  def find(self, names: bytes) -> np.ndarray:
    """Returns the pages of the longest known prefix of a run of names."""
    return self._lists.find(names)

  def num_idle(self, pages: np.ndarray) -> int:
    """Returns how many of some pages are idle, so that to hold them takes."""
    return self._lists.num_idle(pages)

  def hold(self, pages: np.ndarray) -> None:
    """Notes another sequence that reads pages which `find` returned."""
    self.counts.hits += len(pages)
    self._lists.hold(pages)

  def take(self, count: int, after: int = -1) -> np.ndarray:
    """Hands out pages to be written, in as few runs as possible.

    Args:
      count: How many; no more than `num_available`.
      after: The page whose successors would be best; -1 for none.
    """
    pages, evicted = self._lists.take(count, after)
    self.counts.evicted += evicted
    return pages

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
    taken = self._lists.grow(
      running.room, running.tables, slots, running.computed, running.longest,
      most, self.page_size,
    )
    if taken is None:
      return False
    grown, evicted = taken
    running.grown(grown)
    self.counts.evicted += evicted
    return True

  def publish(self, pages: np.ndarray, names: bytes) -> None:
    """Names full pages, but for names that other pages have.

    Args:
      pages: The pages.
      names: Their names, one after another.
    """
    if self._reuse:
      self._lists.publish(pages, names)

  def release(self, pages: np.ndarray) -> None:
    """Gives up the pages of a sequence, the last one first.

    Args:
      pages: They in the order of the sequence.
    """
    self._lists.release(pages)

  def begin_read(self, pages: Sequence[int]) -> None:
    """Notes a copy that reads pages, which are held."""
    self._lists.begin_read(pages)

  def end_read(self, pages: Sequence[int]) -> None:
    """Notes the end of a copy; what was given up meanwhile becomes idle."""
    self._lists.end_read(pages)

  def read(self, page: int) -> bool:
    """Returns whether a copy reads a page, so that it must not be written."""
    return self._lists.is_read(page)

  def states(self) -> np.ndarray:
    """Returns which of `STATES` each page is in, int8 ``[num_pages]``."""
    return self._lists.states()

  def sizes(self) -> list[int]:
    """Returns how many free groups there are of each 2^k pages."""
    return self._lists.sizes()

  def check(self) -> None:
    """Asserts that each page is in one state, and none free that has a name."""
    self._lists.check()
    states = self.states()
    assert all(states[page] for page in self._lists.names().values())
