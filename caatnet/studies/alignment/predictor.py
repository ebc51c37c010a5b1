"""Lines and sectors of memory that a gather of rows touches, counted exactly.

A GPU reads the host's memory over PCIe in requests of one 128-byte line, or of
as many of its four 32-byte sectors as a warp asks for. A warp is 32 lanes of 4
bytes, so it asks for 128 bytes at a time. Where a row begins within a line, two
lines are asked for by each warp, and every line is asked for twice, unless
lanes are shifted: the warps then begin with the line, not with the row, and
lanes before the row do nothing (Min et al., arXiv 2103.03330, section 4.3).

With a row of R bytes at byte address s, and a = s mod 128:

    lines, shifted      floor((a + R - 1) / 128) + 1, those that the row is in
    lines, not shifted  the sum of that over pieces of 128 bytes from s on

and the same with sectors in place of lines: a piece is what a warp asks for.
"""

from typing import NamedTuple

import numpy as np

LINE_BYTES, SECTOR_BYTES = 128, 32


class Touched(NamedTuple):
  """What is asked for, added up over requests.

  Attributes:
    lines: Lines of 128 bytes, one request each.
    sectors: Sectors of 32 bytes, which cross the link.
  """

  lines: int
  sectors: int


def touched(
  ids: np.ndarray, row_bytes: int, offset: int = 0, *, shifted: bool
) -> Touched:
  """Counts what a gather of rows touches.

  A row that is in the list twice is read twice.

  Args:
    ids: The rows, int ``[n]``.
    row_bytes: R, the bytes from one row to the next.
    offset: The byte address of row 0.
    shifted: Whether lanes are shifted to where lines begin.
  """
  starts = offset + np.asarray(ids, np.int64) * row_bytes
  # Only where in a line a row begins matters: 128 cases at most.
  cases, counts = np.unique(starts % LINE_BYTES, return_counts=True)
  return Touched(*(
    int((blocks(cases, row_bytes, size, shifted=shifted) * counts).sum())
    for size in (LINE_BYTES, SECTOR_BYTES)
  ))


def blocks(
  starts: np.ndarray, row_bytes: int, size: int, *, shifted: bool
) -> np.ndarray:
  """Counts blocks of memory that each row asks for.

  Args:
    starts: Byte addresses of rows, int64 ``[n]``.
    row_bytes: R.
    size: Bytes of a block: ``LINE_BYTES`` or ``SECTOR_BYTES``.
    shifted: As of `touched`.

  Returns:
    int64 ``[n]``.
  """
  if row_bytes < 1:
    raise ValueError(f"row_bytes={row_bytes} must be at least 1")
  if shifted:
    return _spanned(starts, row_bytes, size)
  whole, rest = divmod(row_bytes, LINE_BYTES)
  # All whole pieces of a row begin at the same place of a line.
  total = whole * _spanned(starts, LINE_BYTES, size)
  if rest:
    total = total + _spanned(starts + whole * LINE_BYTES, rest, size)
  return total


def _spanned(starts: np.ndarray, num_bytes: int, size: int) -> np.ndarray:
  """Counts blocks that some bytes lie in, for each place where they begin."""
  return (starts + num_bytes - 1) // size - starts // size + 1


def mean_blocks(
  row_bytes: int, size: int, element: int = 4, *, shifted: bool
) -> float:
  """Returns the blocks of a row on average, rows packed without padding.

  Rows of R bytes begin at all multiples of gcd(R, 128) in a line, alike.

  Args:
    row_bytes: R, a multiple of ``element``.
    size: Bytes of a block.
    element: Bytes of an element.
    shifted: As of `touched`.
  """
  if row_bytes % element:
    raise ValueError(f"row_bytes={row_bytes} must be a multiple of {element}")
  ids = np.arange(LINE_BYTES)
  starts = ids * row_bytes % LINE_BYTES
  return float(blocks(starts, row_bytes, size, shifted=shifted).mean())
