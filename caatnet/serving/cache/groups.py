"""Contiguous runs of pages out of one range of page numbers.

Free pages are kept in groups of 2^k, which begin at multiples of 2^k. A group
splits into two buddies, whose numbers differ in the bit 2^k, and two free
buddies merge. What is handed out is a run of any length: the tail of the group
that it was cut from goes back at once, so no page is lost to rounding.

Source: the dynamic block groups of FastSwitch (arXiv 2411.18424); Knowlton, A
fast storage allocator, CACM 1965. There a group is handed out whole.
"""

from collections.abc import Iterator, Sequence


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


class Groups:
  """The free pages of a range, in groups of powers of two.

  Attributes:
    num_pages: The pages of the range, which need no power of two.
    num_free: How many of them are free.
  """

  def __init__(self, num_pages: int) -> None:
    """Makes a range of which all pages are free."""
    self.num_pages = num_pages
    self.num_free = 0
    # By k the first pages of free groups, in the order of their release.
    self._free: list[dict[int, None]] = [
      {} for _ in range(num_pages.bit_length())
    ]
    self._sizes = 0  # bit k: there is a free group of 2^k pages
    self._is_free = bytearray(num_pages)
    self.give(range(num_pages))

  def take(self, count: int, room: bool = False) -> list[int]:
    """Takes pages in as few runs as the free groups allow.

    Args:
      count: How many; no more than are free.
      room: Whether to cut from a largest group, so that a sequence which grows
        finds the pages after its own free; else from a smallest that suffices.

    Returns:
      The pages, run by run.
    """
    assert count <= self.num_free, (count, self.num_free)
    self.num_free -= count
    found: list[int] = []
    while count:
      k = self._choose(count, room)
      size, free = 1 << k, self._free[k]
      while True:
        start, _ = free.popitem()
        used = size if size < count else count
        found += range(start, start + used)
        self._is_free[start : start + used] = bytes(used)
        count -= used
        if count < size or not free:  # else these are the largest still
          break
      if not free:
        self._sizes ^= size
      if used < size:
        self._join(start + used, size - used)
    return found

  def _choose(self, count: int, room: bool) -> int:
    least = (count - 1).bit_length()
    enough = self._sizes >> least << least
    if room or not enough:
      return self._sizes.bit_length() - 1
    return (enough & -enough).bit_length() - 1

  def take_at(self, start: int, count: int) -> int:
    """Takes pages from a given one on, as far as these are free.

    Returns:
      How many it took.
    """
    end = self._is_free.find(0, start, start + count)
    if end < 0:  # all are free, but for those behind the range
      end = min(start + count, self.num_pages)
    if end <= start:
      return 0
    self._is_free[start:end] = bytes(end - start)
    self.num_free -= end - start
    page = start
    while page < end:
      k, first = 0, page
      while first not in self._free[k]:
        k += 1
        first = page >> k << k
      self._pop(k, first)
      if first < start:
        self._join(first, start - first)
      page = first + (1 << k)
    self._join(end, page - end)
    return end - start

  def give(self, pages: Sequence[int]) -> None:
    """Gives pages back, and merges buddies."""
    self.num_free += len(pages)
    for start, count in runs(pages):
      self._is_free[start : start + count] = b"\1" * count
      self._join(start, count)

  def _join(self, start: int, count: int) -> None:
    """Makes groups of a run of free pages, which merge with their buddies."""
    end, free = start + count, self._free
    while start < end:
      size = 1 << (end - start).bit_length() - 1
      if start and start & -start < size:
        size = start & -start
      k, page = size.bit_length() - 1, start
      start += size
      while page ^ size in free[k]:
        self._pop(k, page ^ size)
        page &= ~size
        k, size = k + 1, size << 1
      free[k][page] = None
      self._sizes |= size

  def _pop(self, k: int, start: int) -> None:
    """Takes one group out of the free ones."""
    del self._free[k][start]
    if not self._free[k]:
      self._sizes ^= 1 << k

  def sizes(self) -> list[int]:
    """Returns how many free groups there are of each 2^k."""
    return [len(free) for free in self._free]
