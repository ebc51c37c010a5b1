"""Loops over pages and their names, compiled by numba where it is installed.

A page is in one list at most: of the idle ones, of those that are leaving, or,
if a free group of 2^k pages begins with it, of these groups. So all lists are
doubly linked through the same two arrays.

Free pages are kept in groups of 2^k, which begin at multiples of 2^k. A group
splits into two buddies, whose numbers differ in the bit 2^k, and two free
buddies merge. Pages are handed out as a run of any length: the tail of the
group that it was cut from is free again at once, so no page is lost to
rounding.

Names are in an open hash table: a name is at the first place that was free
from its home on. Its first bits give the home, since they are as good as drawn
at random (`caatnet.serving.cache.prefixes`).

Functions that one of these calls are in this file: numba compares no other
file's date to decide whether a cached function is stale.

Source: the dynamic block groups of FastSwitch (arXiv 2411.18424), which are
handed out whole there; Knowlton, A fast storage allocator, CACM 1965.

Shape legend: N = pages, L = lists, M = places of names, n = names of a call,
S = slots, P = pages of a sequence.
"""

from typing import NamedTuple

import numpy as np

from caatnet.serving.compiling import COMPILES, compiled

IDLE, LEAVING, GROUPS = 1, 2, 3  # lists; GROUPS + k of groups of 2^k pages
NONE = -1  # no page


class Book(NamedTuple):
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


# Arrays with N and with N + L columns, of which `_open` makes a `Book`: a call
# takes as long as it has arrays for arguments.
_BOOK = "int32[:, ::1], int32[:, ::1]"
# A table, int64 [3, M]: row 0 has the page in each place, the others the halves
# of each page's name. M is at least 2 N.
_TABLE = "int64[:, ::1]"
_NAMES = "Array(int64, 1, 'C', readonly=True)"


@compiled()
def view(array):
  """Returns an array; in Python a memoryview, whose items are read faster."""
  return array if COMPILES else memoryview(array)


@compiled()
def _open(pages, lists):
  return Book(
    view(pages[0]), view(pages[1]), view(pages[2]), view(pages[3]),
    view(pages[4]), view(pages[5]), view(lists[0]), view(lists[1]),
    view(lists[2]),
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
    while buddy < len(book.where) and book.where[buddy] == GROUPS + k:
      _remove(book, buddy)
      page &= buddy
      k += 1
      buddy = page ^ 1 << k
    _append(book, GROUPS + k, page)


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
    while GROUPS + k <= last:
      if book.lengths[GROUPS + k]:
        return k
      k += 1
  while not book.lengths[last]:
    last -= 1
  return last - GROUPS


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
    while book.where[first] != GROUPS + k:
      k += 1
      first = page >> k << k
    _remove(book, first)
    _join(book, first, start)
    page = first + (1 << k)
  _join(book, end, page)
  return end - start


@compiled()
def _place(table, first, second):
  """Returns where a name is, or the place where it would be."""
  mask = table.shape[1] - 1
  place = first & mask
  while table[0, place] != NONE:
    page = table[0, place]
    if table[1, page] == first and table[2, page] == second:
      break
    place = (place + 1) & mask
  return place


@compiled()
def _forget(table, page):
  """Takes the name of a page out of a table."""
  mask = table.shape[1] - 1
  gap = _place(table, table[1, page], table[2, page])
  place = (gap + 1) & mask
  while table[0, place] != NONE:  # who would not be found behind a gap
    home = table[1, table[0, place]] & mask
    if (place - home) & mask >= (place - gap) & mask:
      table[0, gap], gap = table[0, place], place
    place = (place + 1) & mask
  table[0, gap] = NONE


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
    which = GROUPS + _choose(book, count - num, after >= 0)
    size = 1 << which - GROUPS
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
  count, gone = min(count, book.lengths[IDLE]), 0
  pages = view(np.empty(count, np.int32))
  for i in range(count - 1, -1, -1):  # a sequence's last page came first
    page = pages[i] = book.after[len(book.where) + IDLE]
    _remove(book, page)
    if book.named[page]:
      book.named[page] = 0
      _forget(table, page)
      gone += 1
  _give(book, pages)
  return gone


@compiled(f"({_BOOK}, {_TABLE}, int32[::1], int64, int64)")
def take(pages, lists, table, found, after, ahead):
  """Writes the pages that are handed out; returns how many lost a name."""
  book = _open(pages, lists)
  return _take(book, view(table), view(found), after, ahead)


@compiled(
  f"({_BOOK}, {_TABLE}, int64[::1], int32[:, ::1], int64[::1], int64[::1], "
  "int64[::1], int64, int64, int64)"
)
def grow(
  pages, lists, table, room, tables, slots, computed, longest, most, size, ahead
):
  """Hands out pages to sequences that have filled theirs, in their order.

  Args:
    pages: Rows of a book.
    lists: The others.
    table: Names.
    room: The positions that each slot's pages have, ``[S]`` like those that
      follow; it is brought up to date.
    tables: These pages, ``[S, P]``; new ones are written behind them.
    slots: The sequences that may grow; each has a page.
    computed: The positions that are in use.
    longest: The positions that will be.
    most: The pages that a sequence gets at most.
    size: The positions of a page.
    ahead: The pages that are made free at a time, at least.

  Returns:
    The number of slots that got pages, which are the first in `Book.grown`, and
    how many pages lost a name; -1 slots if there are too few pages.
  """
  book, names = _open(pages, lists), view(table)
  growing = slots[computed[slots] >= room[slots]]
  held = room[growing] // size
  counts = np.minimum(-(-longest[growing] // size) - held, most)
  if counts.sum() > book.lengths[0] + book.lengths[IDLE]:
    return -1, 0
  room[growing] += counts * size
  gone = 0
  for i in range(len(growing)):
    slot = book.grown[i] = growing[i]
    first, own = held[i], view(tables[slot])
    found = own[first : first + counts[i]]
    gone += _take(book, names, found, own[first - 1], ahead)
  return len(growing), gone


@compiled("(int32[::1], int32[::1])")
def num_idle(where, pages):
  """Returns how many of some pages are idle."""
  return np.count_nonzero(where[pages] == IDLE)


@compiled(f"({_BOOK}, int32[::1])")
def hold(pages, lists, held):
  """Notes another sequence that holds pages."""
  book = _open(pages, lists)
  for page in view(held):
    if book.where[page]:  # idle, or leaving
      _remove(book, page)
    book.holders[page] += 1


@compiled(f"({_BOOK}, int32[::1], boolean)")
def release(pages, lists, held, in_turn):
  """Notes a sequence less that holds pages, the last one first."""
  book = _open(pages, lists)
  free, num = view(np.empty(len(held), np.int32)), len(held)
  for page in view(held)[::-1]:
    book.holders[page] -= 1
    if book.holders[page]:
      assert book.holders[page] > 0
    elif book.readers[page]:
      _append(book, LEAVING, page)
    elif in_turn or book.named[page]:
      _append(book, IDLE, page)
    else:
      num -= 1
      free[num] = page
  _give(book, free[num:])


@compiled(f"({_BOOK}, int32[::1], boolean)")
def end_read(pages, lists, read, in_turn):
  """Notes a copy less that reads pages, the last one first."""
  book = _open(pages, lists)
  for page in view(read)[::-1]:
    assert book.readers[page] > 0
    book.readers[page] -= 1
    if not book.readers[page] and book.where[page] == LEAVING:
      _remove(book, page)
      if in_turn or book.named[page]:
        _append(book, IDLE, page)
      else:
        _give(book, view(np.array([page], np.int32)))


@compiled(f"({_TABLE}, {_NAMES}, int32[::1])")
def find(table, names, found):
  """Writes the pages of a known prefix of names, and returns how many."""
  table, names = view(table), view(names)
  count = len(names) // 2
  for i in range(count):
    page = table[0, _place(table, names[2 * i], names[2 * i + 1])]
    if page == NONE:
      return i
    found[i] = page
  return count


@compiled(f"({_TABLE}, {_NAMES}, int32[::1], int32[::1])")
def publish(table, names, pages, named):
  """Names pages that have none, but for names that other pages have.

  Args:
    table: The table.
    names: The names, ``[2 n]``.
    pages: The pages, ``[n]``.
    named: Whether each page has a name, ``[N]``; it is brought up to date.
  """
  assert len(names) == 2 * len(pages)
  table, names = view(table), view(names)
  pages, named = view(pages), view(named)
  for i in range(len(pages)):
    page = pages[i]
    if not named[page]:
      first, second = names[2 * i], names[2 * i + 1]
      place = _place(table, first, second)
      if table[0, place] == NONE:
        table[0, place], named[page] = page, 1
        table[1, page], table[2, page] = first, second
