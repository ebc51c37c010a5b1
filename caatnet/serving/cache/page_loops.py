"""Page allocator and block-hash table, as loops compiled by numba if present.

A page is in at most one list: the idle list (evictable pages), the leaving list
(released pages that a copy still reads) or, if it is the first page of a free
block of 2^k pages, the free list of order k. So all lists are doubly linked
through the same two arrays.

Free pages form a buddy allocator: free blocks of 2^k pages are aligned to 2^k.
A block splits into two buddies, whose numbers differ in bit k, and two free
buddies merge. Unlike in the textbook allocator, an allocation may have any
length: the tail of the block that it is cut from is freed at once, so there is
no internal fragmentation.

The block hashes of full pages are in an open-addressing hash table with linear
probing. The low bits of a hash select its home slot, since they are uniformly
distributed (`caatnet.serving.cache.prefixes`).

Functions that compiled functions call must be in this file: to decide whether a
cached function is stale, numba checks only the date of that function's file.

Source: the dynamic block groups of FastSwitch (arXiv 2411.18424), which
allocates whole blocks; Knowlton, A fast storage allocator, CACM 1965.

Shape legend: N = pages, L = lists, M = slots of the hash table, n = pages or
slots that a call gets, S = slots of sequences, P = pages of a sequence.
"""

from typing import NamedTuple

import numpy as np

from caatnet.serving.compiling import COMPILES, compiled

# Numbers of the lists; FREE_LISTS + k is the allocator's free list of order k.
IDLE, LEAVING, FREE_LISTS = 1, 2, 3
NONE = -1  # no page


class AllocatorState(NamedTuple):
  """Bookkeeping of all pages: counters, flags and linked lists, int32 arrays.

  Attributes:
    holders: Number of sequences that hold a page, ``[N]``.
    readers: Number of copies that read a page, ``[N]``.
    hashed: Whether a page's block hash is in the table, ``[N]``.
    free: Whether a page is free, ``[N]``.
    where: Number of the list that a page is in, ``[N]``; 0 for none.
    grown: Its first entries are the slots of the sequences to which `grow` gave
      pages, ``[N]``.
    after: Next page in the list, ``[N + L]``; entry N + i is the sentinel at
      both ends of list i.
    before: Previous page in the list, ``[N + L]``.
    lengths: Lengths of the lists in the first ``[L]`` entries; entry 0 is the
      number of free pages.
  """

  holders: np.ndarray
  readers: np.ndarray
  hashed: np.ndarray
  free: np.ndarray
  where: np.ndarray
  grown: np.ndarray
  after: np.ndarray
  before: np.ndarray
  lengths: np.ndarray


# The fields of an `AllocatorState` are rows of two arrays, with N and with
# N + L columns: the overhead of a call grows with the number of array
# arguments.
_STATE_TYPES = "int32[:, ::1], int32[:, ::1]"
# Hash table, int64 [3, M]. Row 0 is indexed by table slot and holds the page;
# rows 1 and 2 are indexed by page and hold the two halves of its block hash.
# M is at least 2 N, so that the load factor is at most 1/2.
_TABLE_TYPE = "int64[:, ::1]"
_HASHES_TYPE = "Array(int64, 1, 'C', readonly=True)"


@compiled()
def view(array):
  """Returns `array`, or its memoryview (faster to read) if not compiled."""
  return array if COMPILES else memoryview(array)


@compiled()
def _unpack_state(pages, lists):
  """Returns rows of `pages` and `lists` (see `grow`) as an `AllocatorState`."""
  return AllocatorState(
    view(pages[0]), view(pages[1]), view(pages[2]), view(pages[3]),
    view(pages[4]), view(pages[5]), view(lists[0]), view(lists[1]),
    view(lists[2]),
  )


@compiled()
def _append(book, which, page):
  """Appends a page to list number `which` of the `AllocatorState` `book`."""
  end = len(book.where) + which
  last = book.before[end]
  book.after[last] = book.before[end] = page
  book.before[page], book.after[page] = last, end
  book.where[page] = which
  book.lengths[which] += 1


@compiled()
def _remove(book, page):
  """Unlinks a page from its list in the `AllocatorState` `book`."""
  last, following = book.before[page], book.after[page]
  book.after[last], book.before[following] = following, last
  book.lengths[book.where[page]] -= 1
  book.where[page] = 0


@compiled()
def _free_run(book, start, end):
  """Frees pages ``[start, end)`` as aligned blocks, merged with buddies."""
  while start < end:
    k = 0  # order of the largest aligned block within the run
    while start & (2 << k) - 1 == 0 and start + (2 << k) <= end:
      k += 1
    page = start
    start += 1 << k
    buddy = page ^ 1 << k
    while buddy < len(book.where) and book.where[buddy] == FREE_LISTS + k:
      _remove(book, buddy)
      page &= buddy
      k += 1
      buddy = page ^ 1 << k
    _append(book, FREE_LISTS + k, page)


@compiled()
def _free_pages(book, pages):
  """Frees pages, one contiguous range at a time."""
  book.lengths[0] += len(pages)
  start = 0
  for i in range(len(pages)):
    book.free[pages[i]] = 1
    if i + 1 == len(pages) or pages[i + 1] != pages[i] + 1:
      _free_run(book, pages[start], pages[i] + 1)
      start = i + 1


@compiled()
def _choose_block_order(book, count, room):
  """Returns the order k of the free block from which to cut `count` pages.

  A free block of order k has 2^k pages. If `room` is true (the sequence already
  has pages), it is the largest block, so that its next pages can follow in the
  same block. If `room` is false (a new sequence), it is the smallest block with
  at least `count` pages, or the largest block if none has as many.
  """
  last = len(book.lengths) - len(book.where) - 1
  if not room:
    k = 0
    while 1 << k < count:
      k += 1
    while FREE_LISTS + k <= last:
      if book.lengths[FREE_LISTS + k]:
        return k
      k += 1
  while not book.lengths[last]:
    last -= 1
  return last - FREE_LISTS


@compiled()
def _take_at(book, start, found):
  """Allocates consecutive free pages, the first of which is `start`.

  Writes them to the array `found` until it is full or the next page is not
  free. Returns their number.
  """
  end = start
  while (
    end < len(book.where) and book.free[end] and end - start < len(found)
  ):
    found[end - start] = end
    book.free[end] = 0
    end += 1
  # Each block that overlaps the run [start, end) is unlinked. Its pages outside
  # the run are freed again: those before `start` here, those after `end` below.
  page = start
  while page < end:
    k, first = 0, page
    while book.where[first] != FREE_LISTS + k:
      k += 1
      first = page >> k << k
    _remove(book, first)
    _free_run(book, first, start)
    page = first + (1 << k)
  _free_run(book, end, page)
  return end - start


@compiled()
def _find_slot(table, first, second):
  """Returns the table slot of a block hash, or the slot to insert it at.

  `first` and `second` are the halves of the hash.
  """
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
  """Removes a page's block hash from the table by backward-shift deletion."""
  mask = table.shape[1] - 1
  gap = _find_slot(table, table[1, page], table[2, page])
  place = (gap + 1) & mask
  # An entry whose probe sequence passes the gap moves into it.
  while table[0, place] != NONE:
    home = table[1, table[0, place]] & mask
    if (place - home) & mask >= (place - gap) & mask:
      table[0, gap], gap = table[0, place], place
    place = (place + 1) & mask
  table[0, gap] = NONE


@compiled()
def _take(book, table, found, after, ahead):
  """Fills the array `found` with pages, if possible those following `after`.

  `after` is the sequence's last page, -1 for none. If too few pages are free,
  evicts at least `ahead` idle ones. Returns the number of evicted pages that
  had a block hash.
  """
  count, gone = len(found), 0
  missing = count - book.lengths[0]
  if missing > 0:
    gone = _evict(book, table, max(missing, ahead))
  assert count <= book.lengths[0]
  # The successors of `after` first, then blocks of the free lists.
  num = _take_at(book, after + 1, found) if after >= 0 else 0
  book.lengths[0] -= count
  while num < count:
    which = FREE_LISTS + _choose_block_order(book, count - num, after >= 0)
    size = 1 << which - FREE_LISTS
    start = book.before[len(book.where) + which]
    _remove(book, start)
    used = min(size, count - num)
    for page in range(start, start + used):
      found[num], book.free[page] = page, 0
      num += 1
    _free_run(book, start + used, start + size)
  for page in found:
    book.holders[page] = 1
  return gone


@compiled()
def _evict(book, table, count):
  """Frees the `count` pages that have been idle longest.

  Returns the number of freed pages that had a block hash.
  """
  count, gone = min(count, book.lengths[IDLE]), 0
  pages = view(np.empty(count, np.int32))
  # A sequence releases its last page first: filled from the end, pages ascend.
  for i in range(count - 1, -1, -1):
    page = pages[i] = book.after[len(book.where) + IDLE]
    _remove(book, page)
    if book.hashed[page]:
      book.hashed[page] = 0
      _forget(table, page)
      gone += 1
  _free_pages(book, pages)
  return gone


@compiled(f"({_STATE_TYPES}, {_TABLE_TYPE}, int32[::1], int64, int64)")
def take(pages, lists, table, found, after, ahead):
  """Fills `found` with newly allocated pages; arguments as in `_take`.

  Returns:
    The number of evicted pages that had a block hash.
  """
  book = _unpack_state(pages, lists)
  return _take(book, view(table), view(found), after, ahead)


@compiled(
  f"({_STATE_TYPES}, {_TABLE_TYPE}, int64[::1], int32[:, ::1], int64[::1], "
  "int64[::1], "
  "int64[::1], int64, int64, int64)"
)
def grow(
  pages, lists, table, room, tables, slots, computed, longest, most, size, ahead
):
  """Allocates pages for sequences whose pages are full, in the given order.

  Args:
    pages: Fields of an `AllocatorState` that have N entries, ``[6, N]``.
    lists: Its other fields, ``[3, N + L]``.
    table: Hash table, ``[3, M]``.
    room: Number of positions in each slot's pages, ``[S]``; updated in place.
    tables: Page tables, ``[S, P]``; new pages are appended.
    slots: Slots of the sequences that may get pages, ``[n]``; each sequence has
      at least one page.
    computed: Number of positions that each slot uses, ``[S]``.
    longest: Maximum number that each slot may use, ``[S]``.
    most: Maximum number of pages that the call allocates per sequence.
    size: Positions per page.
    ahead: Minimum number of pages that an eviction frees.

  Returns:
    The number of slots that got pages, which are the first entries of
    `AllocatorState.grown`, and the number of evicted pages that had a block
    hash; (-1, 0) if there are too few pages.
  """
  book, hash_table = _unpack_state(pages, lists), view(table)
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
    gone += _take(book, hash_table, found, own[first - 1], ahead)
  return len(growing), gone


@compiled("(int32[::1], int32[::1])")
def num_idle(where, pages):
  """Returns how many of `pages` are idle by `AllocatorState.where`."""
  return np.count_nonzero(where[pages] == IDLE)


@compiled(f"({_STATE_TYPES}, int32[::1])")
def hold(pages, lists, held):
  """Increments the number of sequences that hold each of the pages `held`."""
  book = _unpack_state(pages, lists)
  for page in view(held):
    if book.where[page]:  # idle, or leaving
      _remove(book, page)
    book.holders[page] += 1


@compiled(f"({_STATE_TYPES}, int32[::1], boolean)")
def release(pages, lists, held, in_turn):
  """Decrements the number of holders of the pages `held`, the last first.

  A page without holders becomes leaving if a copy reads it, else idle if it has
  a block hash, else free. With `in_turn`, pages without a block hash become
  idle too, so that they are reused in the order of their release.
  """
  book = _unpack_state(pages, lists)
  free, num = view(np.empty(len(held), np.int32)), len(held)
  for page in view(held)[::-1]:
    book.holders[page] -= 1
    if book.holders[page]:
      assert book.holders[page] > 0
    elif book.readers[page]:
      _append(book, LEAVING, page)
    elif in_turn or book.hashed[page]:
      _append(book, IDLE, page)
    else:
      num -= 1
      free[num] = page
  _free_pages(book, free[num:])


@compiled(f"({_STATE_TYPES}, int32[::1], boolean)")
def end_read(pages, lists, read, in_turn):
  """Decrements the number of copies that read the pages `read`, the last first.

  A leaving page without readers becomes idle or free as in `release`.
  """
  book = _unpack_state(pages, lists)
  for page in view(read)[::-1]:
    assert book.readers[page] > 0
    book.readers[page] -= 1
    if not book.readers[page] and book.where[page] == LEAVING:
      _remove(book, page)
      if in_turn or book.hashed[page]:
        _append(book, IDLE, page)
      else:
        _free_pages(book, view(np.array([page], np.int32)))


@compiled(f"({_TABLE_TYPE}, {_HASHES_TYPE}, int32[::1])")
def find(table, block_hashes, found):
  """Writes the pages of the longest cached prefix to `found`.

  Returns:
    The number of these pages.
  """
  table, block_hashes = view(table), view(block_hashes)
  count = len(block_hashes) // 2
  for i in range(count):
    page = table[
      0, _find_slot(table, block_hashes[2 * i], block_hashes[2 * i + 1])
    ]
    if page == NONE:
      return i
    found[i] = page
  return count


@compiled(f"({_TABLE_TYPE}, {_HASHES_TYPE}, int32[::1], int32[::1])")
def publish(table, block_hashes, pages, hashed):
  """Inserts the block hashes of pages into the table.

  Skips pages that already have an entry, and hashes that another page has.

  Args:
    table: Hash table, ``[3, M]``.
    block_hashes: Two halves of each block hash, ``[2 n]``.
    pages: Pages, ``[n]``.
    hashed: Whether each page has a block hash, ``[N]``; updated in place.
  """
  assert len(block_hashes) == 2 * len(pages)
  table, block_hashes = view(table), view(block_hashes)
  pages, hashed = view(pages), view(hashed)
  for i in range(len(pages)):
    page = pages[i]
    if not hashed[page]:
      first, second = block_hashes[2 * i], block_hashes[2 * i + 1]
      place = _find_slot(table, first, second)
      if table[0, place] == NONE:
        table[0, place], hashed[page] = page, 1
        table[1, page], table[2, page] = first, second
