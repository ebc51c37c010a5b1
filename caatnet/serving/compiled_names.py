"""Names of pages in a hash table of arrays, compiled by numba.

A table is open: a name stands in the first place that was free from its home
on, which its first bits say. Names are hashes already, so any bits will do.

Shape legend: N = pages, M = places, at least 2 N, n = names of a call.
"""

import numba
import numpy as np

from caatnet.serving.compiling import compiled

_NONE = -1
_ROWS, _INT32 = numba.int64[:, ::1], numba.int32[::1]
_GIVEN = numba.types.Array(numba.int64, 1, "C", readonly=True)


def new_table(num_pages: int) -> np.ndarray:
  """Returns an empty table, int64 ``[1 + 2, M]``.

  Row 0 has the page in each place, the others the halves of each page's name.
  """
  return np.full((3, 1 << (2 * num_pages).bit_length()), _NONE)


def table_names(table: np.ndarray) -> dict[bytes, int]:
  """Returns the page of each name in a table."""
  pages = table[0, table[0] != _NONE].tolist()
  return {table[1:, page].tobytes(): page for page in pages}


@compiled()
def _place(table, first, second):
  """Returns where a name is, or the place where it would be."""
  mask = table.shape[1] - 1
  place = first & mask
  while table[0, place] != _NONE:
    page = table[0, place]
    if table[1, page] == first and table[2, page] == second:
      break
    place = (place + 1) & mask
  return place


@compiled()
def forget(table, page):
  """Takes the name of a page out of a table."""
  mask = table.shape[1] - 1
  gap = _place(table, table[1, page], table[2, page])
  place = (gap + 1) & mask
  while table[0, place] != _NONE:  # who would not be found behind a gap
    home = table[1, table[0, place]] & mask
    if (place - home) & mask >= (place - gap) & mask:
      table[0, gap], gap = table[0, place], place
    place = (place + 1) & mask
  table[0, gap] = _NONE


@compiled((_ROWS, _GIVEN, _INT32))
def find(table, names, found):
  """Writes the pages of a known prefix of names, and returns how many."""
  count = len(names) // 2
  for i in range(count):
    page = table[0, _place(table, names[2 * i], names[2 * i + 1])]
    if page == _NONE:
      return i
    found[i] = page
  return count


@compiled((_ROWS, _GIVEN, _INT32, _INT32))
def publish(table, names, pages, named):
  """Names pages that have none, but for names that other pages have.

  Args:
    table: The table.
    names: The names, ``[2 n]``.
    pages: The pages, ``[n]``.
    named: Whether each page has a name, ``[N]``; it is brought up to date.
  """
  for i in range(len(pages)):
    page = pages[i]
    if not named[page]:
      first, second = names[2 * i], names[2 * i + 1]
      place = _place(table, first, second)
      if table[0, place] == _NONE:
        table[0, place], named[page] = page, 1
        table[1, page], table[2, page] = first, second
