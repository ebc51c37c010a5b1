"""Collectives over the links of an epoch: sums of float32, gathers of bytes.

The order in which a sum adds is a part of its value, since float32 addition is
not associative. Both orders give the same bits to all peers and send
2 (M - 1) / M of the array from each of M peers:

- ``direct``: the owner of a chunk receives all contributions to it, adds them
  in the order of the ranks, and sends the sum to all. The value is that of
  adding the whole arrays in rank order, whatever M and the chunks are. The
  contributions wait in a buffer of (M - 1) / M of the array.
- ``ring``: chunk c is summed on its way from rank c - 1 down to rank c, each
  adding its own, and the sum goes up from there. Chunks and order are those of
  the ring of `parallel.schedules` (chunks of ceil(n / M) elements), so the bits
  are those of its executor on a mesh. Its value depends on the ranks' order.

An operation has a tag. Several may be under way, in any order on each peer.
Lanes' threads do all the work: whoever receives a block adds it and passes it
on. The inputs are only read, so a failed operation leaves them as they were.

Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69,
2009; PCCL (arXiv 2505.14065), whose chunks have the remainder of n / M spread
over the first ones.
"""

from collections.abc import Sequence
import math
from typing import Any, Literal

import numpy as np

from parallel.elastic.membership.messages import Id
from parallel.elastic.ring.link_operations import Operation
from parallel.elastic.transport.frames import HEADER_BYTES, FrameError, Header
from parallel.elastic.transport.links import Links
from parallel.elastic.transport.transfers import Agreement

Order = Literal["direct", "ring"]
ORDERS = ("direct", "ring")
# More than this costs less time per byte where links are fast, and delays the
# first addition where they are slow: see configs/benchmark/ring.py.
BLOCK_BYTES = 1 << 20
# Additions of several contributions stay in a core's cache.
_PIECE = 1 << 15
_PART, _WHOLE = 0, 1  # slots: contributions, and finished sums


class Sum(Operation):
  """A sum under way; `result` waits for it."""

  def __init__(
    self, links: Links, tag: int, x: np.ndarray, ranks: Sequence[Id],
    order: Order, out: np.ndarray | None, block_bytes: int,
  ) -> None:
    if order not in ORDERS:
      raise ValueError(f"order={order!r} must be one of {', '.join(ORDERS)}")
    if x.dtype != np.float32 or not x.flags.c_contiguous:
      raise ValueError(f"x must be contiguous float32, not {x.dtype}")
    self._result = np.empty_like(x) if out is None else out
    if (
      self._result.shape != x.shape or self._result.dtype != x.dtype
      or not self._result.flags.c_contiguous
      or np.may_share_memory(self._result, x)
    ):
      raise ValueError("out must be an array like x, and apart from it")
    super().__init__(
      links, tag, ranks, f"sum {order}", x.nbytes, block_bytes
    )
    self._x, self._out = x.reshape(-1), self._result.reshape(-1)
    self._chunk = -(-x.size // len(ranks))

  def result(self, limit_s: float | None = None) -> np.ndarray:
    """Waits for the sum, as `wait` does, and returns it."""
    self.wait(limit_s)
    return self._result

  def _span(self, chunk: int) -> tuple[int, int]:
    """Returns where a chunk begins and ends, in elements."""
    size = self._x.size
    return min(chunk * self._chunk, size), min((chunk + 1) * self._chunk, size)

  def _blocks(self, chunk: int) -> list[tuple[int, int]]:
    """Returns where the blocks of a chunk begin and end, in elements."""
    start, stop = self._span(chunk)
    step = self._block // 4
    return [(i, min(i + step, stop)) for i in range(start, stop, step)]

  def _offset(self, chunk: int, start: int) -> int:
    return 4 * (start - self._span(chunk)[0])

  def _place_in(self, array: np.ndarray, header: Header, begin: int):
    start = begin + header.offset // 4
    return _bytes(array[start : start + header.length // 4])

  def _count(self, chunk: int) -> int:
    return len(self._blocks(chunk))

  def _missing(self, peer: Id, slot: int, chunk: int) -> bool:
    """Returns whether a block of a chunk has not come from a peer."""
    return any(
      (peer, slot, self._offset(chunk, start)) not in self._seen
      for start, _ in self._blocks(chunk)
    )


class Direct(Sum):
  """A sum in rank order."""

  def __init__(self, links, tag, x, ranks, out, block_bytes) -> None:
    super().__init__(links, tag, x, ranks, "direct", out, block_bytes)
    me, others = self._rank, [r for r in range(len(ranks)) if r != self._rank]
    start, stop = self._span(me)
    shape = len(others), stop - start
    self._parts = links.borrow(4 * math.prod(shape)).reshape(shape)
    self._missing_parts = {a: len(others) for a, _ in self._blocks(me)}
    self._left = self._count(me) + sum(self._count(r) for r in others)
    if not others:
      np.copyto(self._out, self._x)
      self._left = 0
    with self._lock:
      for r in others:
        for a, b in self._blocks(r):
          self._push(
            ranks[r], _PART, self._offset(r, a), _bytes(self._x[a:b])
          )
    self._begin()

  def result(self, limit_s: float | None = None) -> np.ndarray:
    """Waits for the sum, as `wait` does, and returns it."""
    self.wait(limit_s)
    self._links.give_back(self._parts)
    self._parts = self._parts[:0]
    return self._result

  def place(self, peer: Id, header: Header, scratch: memoryview) -> memoryview:
    """Returns the place of a contribution, or of another owner's sum."""
    del scratch
    source = self.ranks.index(peer)
    owner = self._rank if header.slot == _PART else source
    start, stop = self._span(owner)
    if header.slot not in (_PART, _WHOLE):
      raise FrameError(f"operation {self.tag} has no slot {header.slot}")
    self._take(peer, header, 4 * (stop - start))
    if header.slot == _WHOLE:
      return self._place_in(self._out, header, start)
    return self._place_in(self._parts[self._row(source)], header, 0)

  def _row(self, rank: int) -> int:
    return rank - (rank > self._rank)

  def _use(self, peer: Id, header: Header, block: memoryview) -> None:
    del block
    if header.slot == _WHOLE:
      with self._lock:
        self._left -= 1
      return
    begin, end = self._span(self._rank)
    start = begin + header.offset // 4
    with self._lock:
      self._missing_parts[start] -= 1
      if self._missing_parts[start]:
        return
    stop = min(start + self._block // 4, end)
    for a in range(start, stop, _PIECE):
      self._add(a, min(a + _PIECE, stop), begin)
    with self._lock:
      self._left -= 1
      for other in self.ranks:
        if other != self._links.me:
          self._push(
            other, _WHOLE, header.offset, _bytes(self._out[start:stop])
          )

  def _add(self, start: int, stop: int, begin: int) -> None:
    """Adds all contributions to some elements, in the order of the ranks."""
    terms = [
      self._x[start:stop] if r == self._rank
      else self._parts[self._row(r), start - begin : stop - begin]
      for r in range(len(self.ranks))
    ]
    out = self._out[start:stop]
    np.add(terms[0], terms[1], out=out)
    for term in terms[2:]:
      np.add(out, term, out=out)

  def _owing(self) -> Id | None:
    for r, peer in enumerate(self.ranks):
      if r != self._rank and (
        self._missing(peer, _PART, self._rank)
        or self._missing(peer, _WHOLE, r)
      ):
        return peer
    return None


class Ring(Sum):
  """A sum around the ring of the ranks."""

  def __init__(self, links, tag, x, ranks, out, block_bytes) -> None:
    super().__init__(links, tag, x, ranks, "ring", out, block_bytes)
    n, me = len(ranks), self._rank
    self._down, self._up = ranks[(me - 1) % n], ranks[(me + 1) % n]
    if n == 1:
      np.copyto(self._out, self._x)
    else:
      # Every chunk but the one that starts here comes by to be added to, and
      # every one but this rank's own comes by again as a sum.
      first = (me + 1) % n
      self._left = sum(
        self._count(c) * ((c != first) + (c != me)) for c in range(n)
      )
      with self._lock:
        for a, b in self._blocks(first):
          self._push(
            self._down, 2 * first + _PART, self._offset(first, a),
            _bytes(self._x[a:b]),
          )
    self._begin()

  def place(self, peer: Id, header: Header, scratch: memoryview) -> memoryview:
    """Returns the lane's scratch for what is added to, or a sum's place."""
    chunk, slot = divmod(header.slot, 2)
    n, me = len(self.ranks), self._rank
    source, not_here = (
      (self._up, (me + 1) % n) if slot == _PART else (self._down, me)
    )
    if peer != source or chunk >= n or chunk == not_here:
      raise FrameError(
        f"operation {self.tag} takes no slot {header.slot} from {peer}"
      )
    start, stop = self._span(chunk)
    self._take(peer, header, 4 * (stop - start))
    if slot == _PART:
      return scratch[: header.length]
    return self._place_in(self._out, header, start)

  def _use(self, peer: Id, header: Header, block: memoryview) -> None:
    chunk, slot = divmod(header.slot, 2)
    n, me = len(self.ranks), self._rank
    start = self._span(chunk)[0] + header.offset // 4
    stop = start + header.length // 4
    out = self._out[start:stop]
    if slot == _PART:
      np.add(np.frombuffer(block, np.float32), self._x[start:stop], out=out)
    with self._lock:
      self._left -= 1
      if slot == _PART and chunk != me:
        self._push(self._down, header.slot, header.offset, _bytes(out))
      elif chunk != (me + 1) % n:
        self._push(
          self._up, 2 * chunk + _WHOLE, header.offset, _bytes(out)
        )

  def _owing(self) -> Id | None:
    n, me = len(self.ranks), self._rank
    for c in range(n):
      if c != (me + 1) % n and self._missing(self._up, 2 * c + _PART, c):
        return self._up
      if c != me and self._missing(self._down, 2 * c + _WHOLE, c):
        return self._down
    return None


class Gather(Operation):
  """A gather of bytes under way; `result` waits for it."""

  def __init__(
    self, links: Links, tag: int, data: Any, ranks: Sequence[Id],
    most_bytes: int, block_bytes: int,
  ) -> None:
    self._data = memoryview(data).cast("B").toreadonly()
    if len(self._data) > most_bytes:
      raise ValueError(
        f"{len(self._data):,} bytes are more than most_bytes={most_bytes:,}"
      )
    super().__init__(
      links, tag, ranks, f"gather {most_bytes}", len(self._data), block_bytes
    )
    self._most, self._pieces = most_bytes, {links.me: self._data}
    with self._lock:
      for peer in ranks:
        if peer != links.me:
          for i in range(0, len(self._data), block_bytes):
            self._push(peer, _WHOLE, i, self._data[i : i + block_bytes])
    self._begin()

  def result(self, limit_s: float | None = None) -> list[memoryview]:
    """Waits, as `wait` does; returns all peers' bytes in rank order."""
    self.wait(limit_s)
    return [self._pieces[peer] for peer in self.ranks]

  def _agrees(self, agreement: Agreement) -> bool:
    alike = agreement.digest == self._agreement.digest
    return alike and agreement.size <= self._most

  def _welcome(self, peer: Id, agreement: Agreement) -> None:
    self._pieces[peer] = memoryview(np.empty(agreement.size, np.uint8))
    self._left += math.ceil(agreement.size / self._block)

  def place(self, peer: Id, header: Header, scratch: memoryview) -> memoryview:
    """Returns a peer's place, once the peer has said how much comes."""
    del scratch
    with self._changed:
      # It has said so on its control lane before it sent this.
      self._changed.wait_for(lambda: peer in self._pieces or self._error)
      if self._error is not None:
        raise self._error
    piece = self._pieces[peer]
    if header.slot != _WHOLE:
      raise FrameError(f"operation {self.tag} has no slot {header.slot}")
    self._take(peer, header, len(piece))
    return piece[header.offset : header.offset + header.length]

  def _use(self, peer: Id, header: Header, block: memoryview) -> None:
    with self._lock:
      self._left -= 1

  def _owing(self) -> Id | None:
    for peer, piece in self._pieces.items():
      if peer != self._links.me and any(
        (peer, _WHOLE, i) not in self._seen
        for i in range(0, len(piece), self._block)
      ):
        return peer
    return None


def all_reduce(
  links: Links, tag: int, x: np.ndarray, *, order: Order = "direct",
  ranks: Sequence[Id] | None = None, out: np.ndarray | None = None,
  block_bytes: int = BLOCK_BYTES,
) -> Sum:
  """Begins a sum of all ranks' arrays, and returns at once.

  Args:
    links: The links of the epoch.
    tag: The operation's number, the same on all peers; it may be used again
      after the result.
    x: float32 ``[...]``, contiguous, the same shape on all. It is not written,
      and must not change before the result.
    order: In which order is added.
    ranks: The peers whose arrays are summed, in the order of their ranks, the
      same on all; all members if None.
    out: Where the sum goes; a new array if None. After a failure its content
      is undefined.
    block_bytes: Bytes that are sent and added at once, the same on all.

  Returns:
    The operation. Its `result` is float32, of x's shape.

  Raises:
    ValueError: Arguments do not fit.
    Lost: The links have ended.
  """
  make = {"direct": Direct, "ring": Ring}.get(order)
  if make is None:
    raise ValueError(f"order={order!r} must be one of {', '.join(ORDERS)}")
  return make(links, tag, x, ranks or links.members, out, block_bytes)


def gather(
  links: Links, tag: int, data: Any, *, ranks: Sequence[Id] | None = None,
  most_bytes: int = 1 << 32, block_bytes: int = BLOCK_BYTES,
) -> Gather:
  """Begins a gather of all ranks' bytes, which may be unequally many.

  Args:
    links: The links of the epoch.
    tag: The operation's number, as for `all_reduce`.
    data: A contiguous buffer, which must not change before the result.
    ranks: The peers that give bytes, in the order of their ranks.
    most_bytes: What one peer may give, the same on all.
    block_bytes: Bytes that are sent at once, the same on all.

  Returns:
    The operation. Its `result` is a list of buffers in the order of the ranks.

  Raises:
    ValueError: Arguments do not fit.
    Lost: The links have ended.
  """
  return Gather(
    links, tag, data, ranks or links.members, most_bytes, block_bytes
  )


def sum_bytes(
  order: Order, size: int, num_ranks: int, rank: int,
  block_bytes: int = BLOCK_BYTES,
) -> tuple[int, int]:
  """Returns the bytes that a rank sends in a sum: of blocks, of their headers.

  Args:
    order: In which order is added.
    size: Elements of the array.
    num_ranks: Ranks that take part.
    rank: Which of them.
    block_bytes: Bytes that are sent at once.
  """
  chunk = -(-size // num_ranks)
  lengths = [
    4 * max(0, min(chunk, size - c * chunk)) for c in range(num_ranks)
  ]
  if num_ranks == 1:
    sent = []
  elif order == "direct":  # others' chunks, and its own to each other
    sent = lengths[:rank] + lengths[rank + 1 :]
    sent += (num_ranks - 1) * [lengths[rank]]
  else:  # all but its own, and then all but the one above it
    sent = lengths[:rank] + lengths[rank + 1 :]
    above = (rank + 1) % num_ranks
    sent += lengths[:above] + lengths[above + 1 :]
  frames = sum(-(-length // block_bytes) for length in sent)
  return sum(sent), HEADER_BYTES * frames


def _bytes(array: np.ndarray) -> memoryview:
  return memoryview(array).cast("B")
