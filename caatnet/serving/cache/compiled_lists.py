"""`page_lists` with compiled loops, of the extra `serve`."""

from collections.abc import Sequence

import numpy as np

from caatnet.serving.cache import compiled_pages as loops
from caatnet.serving.cache import prefixes
from caatnet.serving.cache.page_lists import STATES


class CompiledLists:
  """What `PageLists` is."""

  def __init__(self, num_pages: int, ahead: int, in_turn: bool) -> None:
    """Makes a cache of free pages, with the arguments of `PageLists`."""
    self._ahead, self._in_turn = ahead, in_turn
    num_lists = loops.GROUPS + num_pages.bit_length()
    pages = np.zeros((6, num_pages), np.int32)
    lists = np.zeros((3, num_pages + num_lists), np.int32)
    lists[:2] = np.arange(num_pages + num_lists)
    self._arrays, self._book = (pages, lists), loops.Book(*pages, *lists)
    # Python reads single values of it sooner than of an array.
    self._lengths = memoryview(self._book.lengths)
    self._table = np.full((3, 1 << (2 * num_pages).bit_length()), loops.NONE)
    self._book.holders[:] = 1  # all are held, and given up
    loops.release(*self._arrays, np.arange(num_pages, dtype=np.int32), False)

  @property
  def num_available(self) -> int:
    """How many pages can be taken now: those that are free or idle."""
    return self._lengths[0] + self._lengths[loops.IDLE]

  @property
  def num_leaving(self) -> int:
    """How many will be when the copies that read them end."""
    return self._lengths[loops.LEAVING]

  def num_idle(self, pages: np.ndarray) -> int:
    """Returns how many of some pages are idle."""
    return loops.num_idle(self._book.where, pages)

  def hold(self, pages: np.ndarray) -> None:
    """Notes another sequence that reads pages."""
    loops.hold(*self._arrays, pages)

  def find(self, names: bytes) -> np.ndarray:
    """Returns the pages of the longest known prefix of a run of names."""
    found = np.empty(len(names) // prefixes.SIZE, np.int32)
    count = loops.find(self._table, np.frombuffer(names, np.int64), found)
    return found[:count]

  def publish(self, pages: np.ndarray, names: bytes) -> None:
    """Names pages that have none, but for names that other pages have."""
    loops.publish(
      self._table, np.frombuffer(names, np.int64), pages, self._book.named
    )

  def names(self) -> dict[bytes, int]:
    """Returns the page of each name."""
    pages = self._table[0, self._table[0] != loops.NONE].tolist()
    return {self._table[1:, page].tobytes(): page for page in pages}

  def take(self, count: int, after: int) -> tuple[np.ndarray, int]:
    """Hands out pages, as `PageLists.take` does."""
    found = np.empty(count, np.int32)
    gone = loops.take(*self._arrays, self._table, found, after, self._ahead)
    return found, gone

  def grow(
    self, room: np.ndarray, tables: np.ndarray, slots: np.ndarray,
    computed: np.ndarray, longest: np.ndarray, most: int, size: int,
  ) -> tuple[list[int], int] | None:
    """Hands out pages to sequences that have filled theirs, likewise."""
    num, gone = loops.grow(
      *self._arrays, self._table, room, tables, slots, computed, longest, most,
      size, self._ahead,
    )
    if num < 0:
      return None
    return self._book.grown[:num].tolist(), gone

  def release(self, pages: np.ndarray) -> None:
    """Gives up the pages of a sequence, the last one first."""
    loops.release(*self._arrays, pages, self._in_turn)

  def begin_read(self, pages: Sequence[int]) -> None:
    """Notes a copy that reads pages, which are held."""
    read = np.array(pages, np.int32)
    assert self._book.holders[read].all(), pages
    np.add.at(self._book.readers, read, 1)

  def end_read(self, pages: Sequence[int]) -> None:
    """Notes the end of a copy; what was given up meanwhile becomes idle."""
    loops.end_read(*self._arrays, np.array(pages, np.int32), self._in_turn)

  def is_read(self, page: int) -> bool:
    """Returns whether a copy reads a page."""
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
    """Asserts that each page is in exactly one state."""
    book = self._book
    held = np.count_nonzero(book.holders)
    parts = held, *self._lengths[:loops.GROUPS]
    assert sum(parts) == len(book.where), parts
    listed = (book.where == loops.IDLE) | (book.where == loops.LEAVING)
    assert not (listed & (book.holders > 0)).any()
    assert not (book.free & (listed | (book.holders > 0))).any()
    assert not (book.free & book.named).any()
    names = self.names()
    assert sorted(names.values()) == np.flatnonzero(book.named).tolist()
    assert self.find(b"".join(names)).tolist() == list(names.values())
