"""`caatnet.serving.page_lists` compiled by numba, of the extra `serve`.

A page is in one list at most: of the idle ones, of those that are leaving, or,
if a free group of 2^k pages begins with it, of these groups. So all lists are
doubly linked through the same two arrays.

Shape legend: N = pages, L = lists.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numba
from numba import boolean, int64
import numpy as np

from caatnet.serving import compiled_names, prefixes
from caatnet.serving.compiling import compiled
from caatnet.serving.page_lists import STATES

_IDLE, _LEAVING, _GROUPS = 1, 2, 3  # lists; _GROUPS + k of groups of 2^k pages


class _Book(NamedTuple):
  """The state of all pages, int32.

  Attributes:
    holders: Sequences that hold a page, ``[N]``.
    readers: Copies that read it.
    named: Whether it has a name.
    free: Whether it is free.
    where: The list that it is in; 0 for none.
    grown: Space for slots that get pages, as many at most.
    after: The next one in its list, ``[N + L]``; N + i begins and ends list i.
    before: The one before it.
    lengths: Of the lists, first ``[L]``; of list 0, how many pages are free.
  """

  holders: np.ndarray
  readers: np.ndarray
  named: np.ndarray
  free: np.ndarray
  where: np.ndarray
  grown: np.ndarray
  after: np.ndarray
  before: np.ndarray
  lengths: np.ndarray


_INT32, _INT64, _ROWS = numba.int32[::1], int64[::1], numba.int32[:, ::1]
_TABLE = int64[:, ::1]
# Those of a book with N and with N + L columns: a call takes as long as it has
# arrays for arguments.
_BOOK = _ROWS, _ROWS


@compiled()
def _open(pages, lists):
  return _Book(
    pages[0], pages[1], pages[2], pages[3], pages[4], pages[5],
    lists[0], lists[1], lists[2],
  )


@compiled()
def _append(book, which, page):
  end = len(book.where) + which
  last = book.before[end]
  book.after[last] = book.before[end] = page
  book.before[page], book.after[page] = last, end
  book.where[page] = which
  book.lengths[which] += 1


@compiled()
def _remove(book, page):
  last, following = book.before[page], book.after[page]
  book.after[last], book.before[following] = following, last
  book.lengths[book.where[page]] -= 1
  book.where[page] = 0


@compiled()
def _join(book, start, end):
  """Makes groups of a run of free pages, which merge with their buddies."""
  while start < end:
    k = 0  # of the largest group that begins here and ends within
    while start & (2 << k) - 1 == 0 and start + (2 << k) <= end:
      k += 1
    page = start
    start += 1 << k
    buddy = page ^ 1 << k
    while buddy < len(book.where) and book.where[buddy] == _GROUPS + k:
      _remove(book, buddy)
      page &= buddy
      k += 1
      buddy = page ^ 1 << k
    _append(book, _GROUPS + k, page)


@compiled()
def _give(book, pages):
  """Makes pages free, run by run."""
  book.lengths[0] += len(pages)
  start = 0
  for i in range(len(pages)):
    book.free[pages[i]] = 1
    if i + 1 == len(pages) or pages[i + 1] != pages[i] + 1:
      _join(book, pages[start], pages[i] + 1)
      start = i + 1


@compiled()
def _choose(book, count, room):
  """Returns k of the groups to cut from."""
  last = len(book.lengths) - len(book.where) - 1
  if not room:
    k = 0
    while 1 << k < count:
      k += 1
    while _GROUPS + k <= last:
      if book.lengths[_GROUPS + k]:
        return k
      k += 1
  while not book.lengths[last]:
    last -= 1
  return last - _GROUPS


@compiled()
def _take_at(book, start, found):
  """Takes pages from a given one on, as far as these are free."""
  end = start
  while (
    end < len(book.where) and book.free[end] and end - start < len(found)
  ):
    found[end - start] = end
    book.free[end] = 0
    end += 1
  page = start
  while page < end:
    k, first = 0, page
    while book.where[first] != _GROUPS + k:
      k += 1
      first = page >> k << k
    _remove(book, first)
    _join(book, first, start)
    page = first + (1 << k)
  _join(book, end, page)
  return end - start


@compiled()
def _take(book, table, found, after, ahead):
  """Takes pages after one, else in few runs; returns how many lost a name."""
  count, gone = len(found), 0
  missing = count - book.lengths[0]
  if missing > 0:
    gone = _evict(book, table, max(missing, ahead))
  assert count <= book.lengths[0]
  num = _take_at(book, after + 1, found) if after >= 0 else 0
  book.lengths[0] -= count
  while num < count:
    which = _GROUPS + _choose(book, count - num, after >= 0)
    size = 1 << which - _GROUPS
    start = book.before[len(book.where) + which]
    _remove(book, start)
    used = min(size, count - num)
    for page in range(start, start + used):
      found[num], book.free[page] = page, 0
      num += 1
    _join(book, start + used, start + size)
  for page in found:
    book.holders[page] = 1
  return gone


@compiled()
def _evict(book, table, count):
  """Makes the pages free that have been idle longest."""
  count, gone = min(count, book.lengths[_IDLE]), 0
  pages = np.empty(count, np.int32)
  for i in range(count - 1, -1, -1):  # a sequence's last page came first
    page = pages[i] = book.after[len(book.where) + _IDLE]
    _remove(book, page)
    if book.named[page]:
      book.named[page] = 0
      compiled_names.forget(table, page)
      gone += 1
  _give(book, pages)
  return gone


@compiled((*_BOOK, _TABLE, _INT32, int64, int64))
def _take_pages(pages, lists, table, found, after, ahead):
  return _take(_open(pages, lists), table, found, after, ahead)


@compiled((
  *_BOOK, _TABLE, _INT64, _ROWS, _INT64, _INT64, _INT64, int64, int64, int64
))
def _grow(
  pages, lists, table, room, tables, slots, computed, longest, most, size, ahead
):
  book, needed = _open(pages, lists), 0
  for slot in slots:
    if computed[slot] >= room[slot]:
      left = -(-longest[slot] // size) - room[slot] // size
      needed += min(left, most)
  if needed > book.lengths[0] + book.lengths[_IDLE]:
    return -1, 0
  num = gone = 0
  for slot in slots:
    if computed[slot] >= room[slot]:
      first = room[slot] // size
      last = first + min(-(-longest[slot] // size) - first, most)
      own = tables[slot]
      gone += _take(book, table, own[first:last], own[first - 1], ahead)
      room[slot], book.grown[num] = last * size, slot
      num += 1
  return num, gone


@compiled((*_BOOK, _INT32))
def _hold(pages, lists, held):
  book = _open(pages, lists)
  for page in held:
    if book.where[page]:  # idle, or leaving
      _remove(book, page)
    book.holders[page] += 1


@compiled((*_BOOK, _INT32, boolean))
def _release(pages, lists, held, in_turn):
  book = _open(pages, lists)
  free, num = np.empty(len(held), np.int32), len(held)
  for page in held[::-1]:
    book.holders[page] -= 1
    if book.holders[page]:
      assert book.holders[page] > 0
    elif book.readers[page]:
      _append(book, _LEAVING, page)
    elif in_turn or book.named[page]:
      _append(book, _IDLE, page)
    else:
      num -= 1
      free[num] = page
  _give(book, free[num:])


@compiled((*_BOOK, _INT32, boolean))
def _end_read(pages, lists, read, in_turn):
  book = _open(pages, lists)
  for page in read[::-1]:
    assert book.readers[page] > 0
    book.readers[page] -= 1
    if not book.readers[page] and book.where[page] == _LEAVING:
      _remove(book, page)
      if in_turn or book.named[page]:
        _append(book, _IDLE, page)
      else:
        _give(book, np.array([page], np.int32))


class CompiledLists:
  """What `PageLists` is."""

  def __init__(self, num_pages: int, ahead: int, in_turn: bool) -> None:
    """Makes a cache of free pages, with the arguments of `PageLists`."""
    self._ahead, self._in_turn = ahead, in_turn
    num_lists = _GROUPS + num_pages.bit_length()
    pages = np.zeros((6, num_pages), np.int32)
    lists = np.zeros((3, num_pages + num_lists), np.int32)
    lists[:2] = np.arange(num_pages + num_lists)
    self._arrays, self._book = (pages, lists), _Book(*pages, *lists)
    # Python reads single values of these sooner than of arrays.
    self._where, self._lengths = map(
      memoryview, (self._book.where, self._book.lengths)
    )
    self._table = compiled_names.new_table(num_pages)
    _give(self._book, np.arange(num_pages, dtype=np.int32))

  @property
  def num_available(self) -> int:
    """How many pages can be taken now: those that are free or idle."""
    return self._lengths[0] + self._lengths[_IDLE]

  @property
  def num_leaving(self) -> int:
    """How many will be when the copies that read them end."""
    return self._lengths[_LEAVING]

  def num_idle(self, pages: np.ndarray) -> int:
    """Returns how many of some pages are idle."""
    return np.count_nonzero(self._book.where[pages] == _IDLE)

  def hold(self, pages: np.ndarray) -> None:
    """Notes another sequence that reads pages."""
    _hold(*self._arrays, pages)

  def find(self, names: bytes) -> np.ndarray:
    """Returns the pages of the longest known prefix of a run of names."""
    found = np.empty(len(names) // prefixes.SIZE, np.int32)
    count = compiled_names.find(
      self._table, np.frombuffer(names, np.int64), found
    )
    return found[:count]

  def publish(self, pages: np.ndarray, names: bytes) -> None:
    """Names pages that have none, but for names that other pages have."""
    compiled_names.publish(
      self._table, np.frombuffer(names, np.int64), pages, self._book.named
    )

  def names(self) -> dict[bytes, int]:
    """Returns the page of each name."""
    return compiled_names.table_names(self._table)

  def take(self, count: int, after: int) -> tuple[np.ndarray, int]:
    """Hands out pages, as `PageLists.take` does."""
    found = np.empty(count, np.int32)
    gone = _take_pages(*self._arrays, self._table, found, after, self._ahead)
    return found, gone

  def grow(
    self, room: np.ndarray, tables: np.ndarray, slots: np.ndarray,
    computed: np.ndarray, longest: np.ndarray, most: int, size: int,
  ) -> tuple[list[int], int] | None:
    """Hands out pages to sequences that have filled theirs, likewise."""
    num, gone = _grow(
      *self._arrays, self._table, room, tables, slots, computed, longest, most,
      size, self._ahead,
    )
    if num < 0:
      return None
    return self._book.grown[:num].tolist(), gone

  def release(self, pages: np.ndarray) -> None:
    """Gives up the pages of a sequence, the last one first."""
    _release(*self._arrays, pages, self._in_turn)

  def begin_read(self, pages: Sequence[int]) -> None:
    """Notes a copy that reads pages, which are held."""
    assert self._book.holders[pages].all(), pages
    np.add.at(self._book.readers, pages, 1)

  def end_read(self, pages: Sequence[int]) -> None:
    """Notes the end of a copy; what was given up meanwhile becomes idle."""
    _end_read(*self._arrays, np.array(pages, np.int32), self._in_turn)

  def is_read(self, page: int) -> bool:
    """Returns whether a copy reads a page."""
    return bool(self._book.readers[page])

  def states(self) -> np.ndarray:
    """Returns which of `STATES` each page is in, int8 ``[num_pages]``."""
    found = np.minimum(self._book.holders, 2).astype(np.int8)
    found[self._book.where == _IDLE] = STATES.index("cached")
    found[self._book.where == _LEAVING] = STATES.index("leaving")
    return found

  def sizes(self) -> list[int]:
    """Returns how many free groups there are of each 2^k pages."""
    last = len(self._book.lengths) - len(self._book.where)
    return self._book.lengths[_GROUPS:last].tolist()

  def check(self) -> None:
    """Asserts that each page is in exactly one state."""
    book = self._book
    held = np.count_nonzero(book.holders)
    parts = held, *self._lengths[:_GROUPS]
    assert sum(parts) == len(book.where), parts
    listed = (book.where == _IDLE) | (book.where == _LEAVING)
    assert not (listed & (book.holders > 0)).any()
    assert not (book.free & (listed | (book.holders > 0))).any()
    assert not (book.free & book.named).any()
    names = self.names()
    assert sorted(names.values()) == np.flatnonzero(book.named).tolist()
    assert self.find(b"".join(names)).tolist() == list(names.values())
