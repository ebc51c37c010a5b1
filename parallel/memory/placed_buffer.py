"""Buffer whose page ranges are on NUMA nodes or in memory-mapped files.

The addresses of a buffer are contiguous, so that one array covers all tiers.
`stripes` divides a buffer among tiers by fractions, as a placement
(`parallel.plans.placement`) gives them.

Example:
  >>> from parallel.memory import host_memory, placed_buffer
  >>> node, page = host_memory.nodes()[0], host_memory.PAGE
  >>> pieces = placed_buffer.stripes(8 * page, {node: 0.75, "/tmp": 0.25})
  >>> [((p.stop - p.start) // page, p.tier == node) for p in pieces]
  [(6, True), (2, False)]
  >>> buffer = placed_buffer.Buffer(pieces)
  >>> buffer.check()
  >>> len(buffer.array) == 8 * page, bool(buffer.array.any())
  (True, False)
"""

import bisect
from collections.abc import Mapping, Sequence
import ctypes
import dataclasses
import functools
import itertools
import mmap
import os
import pathlib
import tempfile
import weakref

import numpy as np

from parallel.base import checks
from parallel.memory import host_memory
from parallel.memory.host_memory import PAGE

# Number of a NUMA node, or the path of a folder in which a file is created.
Tier = int | str

STRIPE_BYTES = 2**21
# Bytes that are copied at a time if pages move to or from a file.
_COPY_BYTES = 2**26
_MAP_FIXED = 0x10


@dataclasses.dataclass(frozen=True)
class Piece:
  """Bytes of a buffer on one tier.

  Attributes:
    start, stop: Range of bytes, multiples of the page size.
    tier: Tier that holds the bytes.
  """

  start: int
  stop: int
  tier: Tier


def round_up_to_pages(size: int) -> int:
  """Returns a number of bytes, rounded up to whole pages."""
  return -(-size // PAGE) * PAGE


def stripes(
  size: int, shares: Mapping[Tier, float], start: int = 0,
  stripe_bytes: int = STRIPE_BYTES,
) -> list[Piece]:
  """Divides bytes into stripes that alternate between tiers, sized by shares.

  Args:
    size: Number of bytes, which is rounded up to whole pages.
    shares: Tier -> fraction of the bytes. The fractions sum to 1.
    start: First byte, a multiple of the page size.
    stripe_bytes: Mean size of a stripe. The bytes of a tier deviate from its
      fraction by at most one page per stripe.

  Raises:
    ValueError: A fraction is outside of [0, 1], or their sum is not 1.
  """
  for tier, share in shares.items():
    checks.fraction(f"share of tier {tier}", share)
  total = sum(shares.values())
  if abs(total - 1) > 1e-6:
    raise ValueError(f"shares of tiers sum to {total:g}; they must sum to 1")
  pages = round_up_to_pages(size) // PAGE
  used = {tier: share for tier, share in shares.items() if share > 0}
  rounds = max(1, pages * PAGE // (stripe_bytes * len(used)))
  if len(used) == 1:
    rounds = 1
  ends = [min(1.0, x / total) for x in itertools.accumulate(used.values())]
  found, last = [], 0
  for turn in range(rounds):
    for tier, end in zip(used, ends, strict=True):
      stop = round((turn + end) * pages / rounds)
      if stop > last:
        found.append(Piece(start + last * PAGE, start + stop * PAGE, tier))
      last = stop
  return found


class Buffer:
  """Buffer of zeros whose pages are placed before they are first touched.

  Its files are temporary: they are removed with the buffer or the process.

  Attributes:
    array: uint8 ``[size]``.
    pieces: Tiers of all byte ranges, in order.
  """

  def __init__(self, pieces: Sequence[Piece]) -> None:
    """Maps the pieces, which are contiguous and begin at byte 0.

    Raises:
      ValueError: A node does not exist, or a file system lacks space.
      OSError: A system call fails.
    """
    stops = [0, *(piece.stop for piece in pieces)]
    assert [piece.start for piece in pieces] == stops[:-1], "not contiguous"
    self.pieces = tuple(pieces)
    self._area = mmap.mmap(
      -1, stops[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    self.array = np.frombuffer(self._area, np.uint8)
    self._files: dict[str, tempfile._TemporaryFileWrapper] = {}
    self._check_space(pieces)
    for piece in pieces:
      if isinstance(piece.tier, str):
        self._map_file(piece)
      else:
        part = self.part(piece)
        host_memory.bind(part, piece.tier)
        part.fill(0)  # first touch

  @property
  def has_files(self) -> bool:
    """Whether a piece is in a file."""
    return any(isinstance(piece.tier, str) for piece in self.pieces)

  def part(self, piece: Piece) -> np.ndarray:
    """Returns the view of the buffer's bytes that a piece has."""
    return self.array[piece.start : piece.stop]

  def _check_space(self, pieces: Sequence[Piece]) -> None:
    """Raises ValueError if a file system has no room for pieces."""
    wanted: dict[str, int] = {}
    for piece in pieces:
      if isinstance(piece.tier, str):
        size = piece.stop - piece.start
        wanted[piece.tier] = wanted.get(piece.tier, 0) + size
    for tier, size in wanted.items():
      if not pathlib.Path(tier).is_dir():
        raise ValueError(f"tier {tier!r} must be a folder that exists")
      stat = os.statvfs(tier)
      free = stat.f_bavail * stat.f_frsize
      if size > free:
        raise ValueError(
          f"tier {tier!r}: {size / 1e9:.1f} GB do not fit into the "
          f"{free / 1e9:.1f} GB that are free"
        )

  def _map_file(self, piece: Piece) -> None:
    """Maps a piece to the tier's file, at the same offset as in the buffer."""
    if piece.tier not in self._files:
      file = tempfile.TemporaryFile(dir=piece.tier)  # noqa: SIM115
      weakref.finalize(self, file.close)  # open as long as the buffer exists
      self._files[piece.tier] = file
    number = self._files[piece.tier].fileno()
    size = piece.stop - piece.start
    # Reserves space: writing a mapped page to a full disk ends the process.
    os.posix_fallocate(number, piece.start, size)
    _map(self.part(piece), mmap.MAP_SHARED, number, piece.start)

  def check(self) -> None:
    """Asserts that the system has placed all pages on their tiers."""
    mapped = _mappings()
    for piece in self.pieces:
      if isinstance(piece.tier, str):
        address = self.array.ctypes.data + piece.start
        # For each mapping that overlaps the piece: file offset minus address.
        found = {
          offset - first if inode else None
          for first, last, offset, inode in mapped
          if first < address + piece.stop - piece.start and address < last
        }
        assert found == {piece.start - address}, f"{piece} is not in a file"
      else:
        on = set(host_memory.nodes_of(self.part(piece)))
        assert on == {piece.tier}, f"pages of {piece} are on nodes {on}"

  def move(self, pieces: Sequence[Piece]) -> None:
    """Moves pages to other tiers; their content remains.

    Args:
      pieces: New pieces of the whole buffer.

    Raises:
      ValueError: A node does not exist, or a file system lacks space.
      OSError: A system call fails.
    """
    assert pieces[-1].stop == len(self.array)
    changed = [
      (old.tier, Piece(
        max(old.start, new.start), min(old.stop, new.stop), new.tier
      ))
      for old, new in _overlaps(self.pieces, pieces) if old.tier != new.tier
    ]
    self._check_space([piece for _, piece in changed])
    for old_tier, piece in changed:
      if isinstance(old_tier, int) and isinstance(piece.tier, int):
        host_memory.move(self.part(piece), piece.tier)
        continue
      for start in range(piece.start, piece.stop, _COPY_BYTES):
        some = Piece(start, min(start + _COPY_BYTES, piece.stop), piece.tier)
        content = self.part(some).copy()
        if isinstance(piece.tier, str):
          self._map_file(some)
        else:
          _map(
            self.part(some), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
          )
          host_memory.bind(self.part(some), piece.tier)
        self.part(some)[:] = content
    self.pieces = tuple(pieces)

  def prefetch(self, start: int, stop: int) -> None:
    """Requests the file pages of a range of bytes, and does not wait for them.

    Without it, each thread waits for the pages it touches, a few at a time.
    """
    first = bisect.bisect_right(self.pieces, start, key=lambda p: p.stop)
    for piece in itertools.islice(self.pieces, first, None):
      if piece.start >= stop:
        break
      if isinstance(piece.tier, str):
        begin = max(piece.start, start // PAGE * PAGE)
        self._area.madvise(
          mmap.MADV_WILLNEED, begin, min(piece.stop, stop) - begin
        )

  def drop(self) -> None:
    """Writes files to disk and drops their pages from memory."""
    for piece in self.pieces:
      if isinstance(piece.tier, str):
        # The kernel does not drop pages that are mapped.
        self._area.madvise(
          mmap.MADV_DONTNEED, piece.start, piece.stop - piece.start
        )
    for file in self._files.values():
      os.fsync(file.fileno())
      os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _overlaps(
  old: Sequence[Piece], new: Sequence[Piece]
) -> list[tuple[Piece, Piece]]:
  """Returns all pairs (old piece, new piece) with common bytes, in order."""
  found, i, j = [], 0, 0
  while i < len(old) and j < len(new):
    if max(old[i].start, new[j].start) < min(old[i].stop, new[j].stop):
      found.append((old[i], new[j]))
    if old[i].stop <= new[j].stop:
      i += 1
    else:
      j += 1
  return found


@functools.cache
def _load_libc() -> ctypes.CDLL:
  library = ctypes.CDLL(None, use_errno=True)
  library.mmap.restype = ctypes.c_void_p
  library.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ctypes.c_long,
  )
  return library


def _map(part: np.ndarray, flags: int, number: int, offset: int) -> None:
  """Maps the pages of ``part`` anew, at the address that they have.

  ``flags``, ``number`` (of a file descriptor) and ``offset`` are those of mmap.
  """
  got = _load_libc().mmap(
    part.ctypes.data, part.nbytes, mmap.PROT_READ | mmap.PROT_WRITE,
    flags | _MAP_FIXED, number, offset,
  )
  if got != part.ctypes.data:
    error = ctypes.get_errno()
    raise OSError(error, os.strerror(error))


def _mappings() -> list[tuple[int, int, int, int]]:
  """Returns start, stop, file offset and inode of this process's mappings."""
  found = []
  for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
    addresses, _, offset, _, inode = line.split()[:5]
    first, last = (int(x, 16) for x in addresses.split("-"))
    found.append((first, last, int(offset, 16), int(inode)))
  return found
