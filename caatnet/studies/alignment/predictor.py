"""Exact counts of the lines and sectors of memory that a row gather touches.

A GPU reads the host's memory over PCIe by requests for a 128-byte line, or for
those 32-byte sectors of a line that a warp needs. A warp is 32 threads of 4
bytes, so it reads 128 bytes at a time. If a row begins inside a line, each warp
touches two lines, and every line is requested twice. The circular shift avoids
this: warps begin with the line instead of the row, and threads before the row
are idle (Min et al., arXiv 2103.03330, section 4.3).

With a row of R bytes at byte address s, and a = s mod 128:

    lines, shifted      floor((a + R - 1) / 128) + 1, those that contain the row
    lines, not shifted  the sum of this formula over the pieces of the row

A piece is the 128 bytes that one warp reads; the first piece begins at s. The
same formulas with 32 instead of 128 count sectors.
"""

from typing import NamedTuple

import numpy as np

from parallel.base.checks import at_least

LINE_BYTES, SECTOR_BYTES = 128, 32


class RequestCounts(NamedTuple):
  """Numbers of lines and sectors that a gather requests, over all its rows.

  Attributes:
    lines: Lines of 128 bytes, one request each.
    sectors: Sectors of 32 bytes, the units that are sent over PCIe.
  """

  lines: int
  sectors: int


def count_requests(
  ids: np.ndarray, row_bytes: int, offset: int = 0, *, shifted: bool
) -> RequestCounts:
  """Counts the lines and sectors that a gather of rows touches.

  A row that occurs twice in ``ids`` is read twice.

  Example:
    A row of 128 bytes at byte 64 spans two lines, that is four sectors:

    >>> count_requests(np.array([0]), row_bytes=128, offset=64, shifted=True)
    RequestCounts(lines=2, sectors=4)

  Args:
    ids: Numbers of the rows to gather, int ``[n]``.
    row_bytes: R, bytes from one row to the next.
    offset: Byte address of row 0.
    shifted: Whether warps begin at lines (circular shift) instead of rows.
  """
  starts = offset + np.asarray(ids, np.int64) * row_bytes
  # Only the row's offset within a line matters: 128 cases at most.
  cases, counts = np.unique(starts % LINE_BYTES, return_counts=True)
  return RequestCounts(*(
    int((count_blocks(cases, row_bytes, size, shifted=shifted) * counts).sum())
    for size in (LINE_BYTES, SECTOR_BYTES)
  ))


def count_blocks(
  starts: np.ndarray, row_bytes: int, size: int, *, shifted: bool
) -> np.ndarray:
  """Counts the blocks of memory requested for each row.

  Args:
    starts: Byte addresses of the n rows, int64 ``[n]``.
    row_bytes: R, bytes of a row.
    size: Bytes of a block: ``LINE_BYTES`` or ``SECTOR_BYTES``.
    shifted: Whether warps begin at lines instead of rows, as in
      `count_requests`.

  Returns:
    Number of blocks of each row, int64 ``[n]``.

  Raises:
    ValueError: ``row_bytes`` is less than 1.
  """
  at_least("row_bytes", row_bytes)
  if shifted:
    return _count_spanned_blocks(starts, row_bytes, size)
  whole, rest = divmod(row_bytes, LINE_BYTES)
  # All whole pieces of a row begin at the same offset within a line.
  total = whole * _count_spanned_blocks(starts, LINE_BYTES, size)
  if rest:
    total = total + _count_spanned_blocks(
      starts + whole * LINE_BYTES, rest, size
    )
  return total


def _count_spanned_blocks(
  starts: np.ndarray, num_bytes: int, size: int
) -> np.ndarray:
  """Counts the blocks that ``num_bytes`` bytes from each start overlap."""
  return (starts + num_bytes - 1) // size - starts // size + 1


def mean_blocks(
  row_bytes: int, size: int, element: int = 4, *, shifted: bool
) -> float:
  """Returns the mean number of blocks per row, for rows without padding.

  The offsets of rows of R bytes within a line are the multiples of gcd(R, 128),
  all equally frequent.

  Args:
    row_bytes: R, a multiple of ``element``.
    size: Bytes of a block.
    element: Bytes of an element.
    shifted: Whether warps begin at lines instead of rows, as in
      `count_requests`.

  Raises:
    ValueError: ``row_bytes`` is not a multiple of ``element``.
  """
  if row_bytes % element:
    raise ValueError(f"row_bytes={row_bytes} must be a multiple of {element}")
  # Offsets repeat after at most LINE_BYTES rows.
  ids = np.arange(LINE_BYTES)
  starts = ids * row_bytes % LINE_BYTES
  return float(count_blocks(starts, row_bytes, size, shifted=shifted).mean())
