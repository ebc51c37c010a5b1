"""Loops over pages and their names, compiled by numba, of the extra `serve`.

A page is in one list at most: of the idle ones, of those that are leaving, or,
if a free group of 2^k pages begins with it, of these groups. So all lists are
doubly linked through the same two arrays.

Names are in an open hash table: a name stands in the first place that was free
from its home on, which its first bits say: they are as good as drawn at random
(`caatnet.serving.cache.prefixes`).

What one of these functions calls is in this file: numba looks at no other to
see whether what it kept of a function is still right.

Shape legend: N = pages, L = lists, M = places of names, n = names of a call.
"""

from typing import NamedTuple

import numba
from numba import boolean, int64
import numpy as np

from caatnet.serving.compiling import compiled

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


_INT32, _INT64, _ROWS = numba.int32[::1], int64[::1], numba.int32[:, ::1]
# A table, int64 [3, M]: row 0 has the page in each place, the others the halves
# of each page's name. M is at least 2 N.
_TABLE = int64[:, ::1]
_NAMES = numba.types.Array(int64, 1, "C", readonly=True)
# Those of a book with N and with N + L columns: a call takes as long as it has
# arrays for arguments.
_BOOK = _ROWS, _ROWS


@compiled()
def _open(pages, lists):
  return Book(
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
  pages = np.empty(count, np.int32)
  for i in range(count - 1, -1, -1):  # a sequence's last page came first
    page = pages[i] = book.after[len(book.where) + IDLE]
    _remove(book, page)
    if book.named[page]:
      book.named[page] = 0
      _forget(table, page)
      gone += 1
  _give(book, pages)
  return gone


@compiled((*_BOOK, _TABLE, _INT32, int64, int64))
def take(pages, lists, table, found, after, ahead):
  """Writes pages that it hands out; returns how many others lost a name."""
  return _take(_open(pages, lists), table, found, after, ahead)


@compiled((
  *_BOOK, _TABLE, _INT64, _ROWS, _INT64, _INT64, _INT64, int64, int64, int64
))
def grow(
  pages, lists, table, room, tables, slots, computed, longest, most, size, ahead
):
  """Hands pages out to slots that have filled theirs.

  Returns:
    How many slots, which are the first in `Book.grown`, and how many pages lost
    a name; -1 slots if there are too few pages.
  """
  book, needed = _open(pages, lists), 0
  for slot in slots:
    if computed[slot] >= room[slot]:
      left = -(-longest[slot] // size) - room[slot] // size
      needed += min(left, most)
  if needed > book.lengths[0] + book.lengths[IDLE]:
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


@compiled((_INT32, _INT32))
def num_idle(where, pages):
  """Returns how many of some pages are idle."""
  count = 0
  for page in pages:
    count += where[page] == IDLE
  return count


@compiled((*_BOOK, _INT32))
def hold(pages, lists, held):
  """Notes another sequence that holds pages."""
  book = _open(pages, lists)
  for page in held:
    if book.where[page]:  # idle, or leaving
      _remove(book, page)
    book.holders[page] += 1


@compiled((*_BOOK, _INT32, boolean))
def release(pages, lists, held, in_turn):
  """Notes a sequence less that holds pages, the last one first."""
  book = _open(pages, lists)
  free, num = np.empty(len(held), np.int32), len(held)
  for page in held[::-1]:
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


@compiled((*_BOOK, _INT32, boolean))
def end_read(pages, lists, read, in_turn):
  """Notes a copy less that reads pages, the last one first."""
  book = _open(pages, lists)
  for page in read[::-1]:
    assert book.readers[page] > 0
    book.readers[page] -= 1
    if not book.readers[page] and book.where[page] == LEAVING:
      _remove(book, page)
      if in_turn or book.named[page]:
        _append(book, IDLE, page)
      else:
        _give(book, np.array([page], np.int32))


@compiled((_TABLE, _NAMES, _INT32))
def find(table, names, found):
  """Writes the pages of a known prefix of names, and returns how many."""
  count = len(names) // 2
  for i in range(count):
    page = table[0, _place(table, names[2 * i], names[2 * i + 1])]
    if page == NONE:
      return i
    found[i] = page
  return count


@compiled((_TABLE, _NAMES, _INT32, _INT32))
def publish(table, names, pages, named):
  """Names pages that have none, but for names that other pages have.

  Args:
    table: The table.
    names: The names, ``[2 n]``.
    pages: The pages, ``[n]``.
    named: Whether each page has a name, ``[N]``; it is brought up to date.
  """
  assert len(names) == 2 * len(pages)
  for i in range(len(pages)):
    page = pages[i]
    if not named[page]:
      first, second = names[2 * i], names[2 * i + 1]
      place = _place(table, first, second)
      if table[0, place] == NONE:
        table[0, place], named[page] = page, 1
        table[1, page], table[2, page] = first, second
