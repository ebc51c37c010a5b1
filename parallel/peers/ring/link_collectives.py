"""Collectives over the links of an epoch: float32 sums and gathers of bytes.

Float32 addition is not associative, so the order of additions determines the
result's bits. Both orders produce identical bits on all peers, and each of M
peers sends 2 (M - 1) / M of the array:

- ``direct``: the owner of a chunk receives all contributions to it, adds them
  in rank order, and sends the sum to all peers. The result equals adding the
  whole arrays in rank order, independently of M and the chunks. The
  contributions occupy a buffer of (M - 1) / M of the array.
- ``ring``: chunk c travels from rank c - 1 downwards to rank c; each rank adds
  its own contribution. The sum then travels upwards from rank c. Chunks (of
  ceil(n / M) elements) and order equal those of the ring in
  `parallel.plans.schedules`, so the bits equal those of its executor on a mesh.
  The result depends on the order of the ranks.

Each operation has a tag. Several may be in flight, in any order on each peer.
The threads of the connections do all the work: the thread that receives a block
adds and forwards it. Inputs are never written, so a failed operation leaves
them unchanged.

Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69,
2009; PCCL (arXiv 2505.14065), which distributes the remainder of n / M over the
first chunks instead of rounding up.

Example:
  >>> from parallel.peers.ring import link_collectives
  >>> payload, headers = link_collectives.sum_bytes(
  ...   "ring", size=1000, num_ranks=4, rank=0)
  >>> payload, 2 * (4 - 1) * 4000 // 4  # 2 (M - 1) / M of 4000 bytes
  (6000, 6000)
"""

from collections.abc import Sequence
import math
from typing import Any, Literal

import numpy as np

from parallel.base.checks import known
from parallel.peers.membership.messages import Id
from parallel.peers.ring.link_operations import END, LinkOperation
from parallel.peers.transport.frames import HEADER_BYTES, FrameError, Header
from parallel.peers.transport.links import Links
from parallel.peers.transport.transfers import Agreement

Order = Literal["direct", "ring"]
ORDERS = ("direct", "ring")
# Larger blocks cost less time per byte on fast links, and delay the first
# addition on slow ones: see configs/benchmark/ring.py.
BLOCK_BYTES = 1 << 20
# Elements added at once: several contributions fit into a core's cache.
_PIECE = 1 << 15
_PART, _WHOLE = 0, 1  # slots: contributions or partial sums, and final sums


class Sum(LinkOperation):
  """Sum in progress; `result` waits for it."""

  def __init__(
    self, links: Links, tag: int, x: np.ndarray, ranks: Sequence[Id],
    order: Order, out: np.ndarray | None, block_bytes: int,
  ) -> None:
    if x.dtype != np.float32 or not x.flags.c_contiguous:
      raise ValueError(f"x must be contiguous float32, not {x.dtype}")
    self._result = np.empty_like(x) if out is None else out
    if (
      self._result.shape != x.shape or self._result.dtype != x.dtype
      or not self._result.flags.c_contiguous
      or np.may_share_memory(self._result, x)
    ):
      raise ValueError(
        "out must have x's shape and dtype, be contiguous and not overlap x"
      )
    super().__init__(
      links, tag, ranks, f"sum {order}", x.nbytes, block_bytes
    )
    self._x, self._out = x.reshape(-1), self._result.reshape(-1)  # [n]
    self._chunk = -(-x.size // len(ranks))  # elements; the last may be shorter

  def result(self, limit_s: float | None = None) -> np.ndarray:
    """Waits for the sum, as `wait` does, and returns it."""
    self.wait(limit_s)
    return self._result

  def _span(self, chunk: int) -> tuple[int, int]:
    """Returns (start, stop) of a chunk, in elements."""
    size = self._x.size
    return min(chunk * self._chunk, size), min((chunk + 1) * self._chunk, size)

  def _blocks(self, chunk: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of each block of a chunk, in elements."""
    start, stop = self._span(chunk)
    step = self._block // 4  # float32 elements per block
    return [(i, min(i + step, stop)) for i in range(start, stop, step)]

  def _offset(self, chunk: int, start: int) -> int:
    """Returns the byte offset of an element within its chunk."""
    return 4 * (start - self._span(chunk)[0])  # bytes

  def _place_in(self, array: np.ndarray, header: Header, begin: int):
    """Returns a view of a block; `begin` is the chunk's first element."""
    start = begin + header.offset // 4
    return _bytes(array[start : start + header.length // 4])

  def _count(self, chunk: int) -> int:
    return len(self._blocks(chunk))

  def _missing(self, peer: Id, slot: int, chunk: int) -> bool:
    """Returns whether a peer owes a block of a chunk."""
    return any(
      (peer, slot, self._offset(chunk, start)) not in self._seen
      for start, _ in self._blocks(chunk)
    )


class Direct(Sum):
  """Sum in rank order: each rank owns and adds one chunk."""

  def __init__(self, links, tag, x, ranks, out, block_bytes) -> None:
    super().__init__(links, tag, x, ranks, "direct", out, block_bytes)
    me, others = self._rank, [r for r in range(len(ranks)) if r != self._rank]
    start, stop = self._span(me)
    shape = len(others), stop - start  # [M - 1, elements of the own chunk]
    # Contributions of the other ranks to the own chunk.
    self._parts = links.borrow(4 * math.prod(shape)).reshape(shape)
    self._missing_parts = {a: len(others) for a, _ in self._blocks(me)}
    # Own blocks to add, and finished blocks of the other owners to receive.
    self._left = self._count(me) + sum(self._count(r) for r in others)
    if not others:
      np.copyto(self._out, self._x)
      self._left = 0
    with self._lock:
      for r in others:
        for a, b in self._blocks(r):
          self._push(
            # Each contribution goes directly to the owner of its chunk.
            ranks[r], _PART, self._offset(r, a), _bytes(self._x[a:b])
          )
    self._begin()

  def result(self, limit_s: float | None = None) -> np.ndarray:
    """Waits for the sum, as `wait` does, and returns it."""
    self.wait(limit_s)
    self._links.give_back(self._parts)  # for the next sum
    self._parts = self._parts[:0]
    return self._result

  def place(self, peer: Id, header: Header, scratch: memoryview) -> memoryview:
    """Returns the destination of a contribution or of another owner's sum."""
    del scratch
    source = self.ranks.index(peer)
    # A contribution is for this rank's chunk; a sum is of the sender's.
    owner = self._rank if header.slot == _PART else source
    start, stop = self._span(owner)
    if header.slot not in (_PART, _WHOLE):
      raise FrameError(f"operation {self.tag} has no slot {header.slot}")
    self._take(peer, header, 4 * (stop - start))
    if header.slot == _WHOLE:
      return self._place_in(self._out, header, start)
    return self._place_in(self._parts[self._row(source)], header, 0)

  def _row(self, rank: int) -> int:
    """Returns a rank's row in `_parts`, which has no row for this rank."""
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
    # This thread received the last contribution to the block, and adds it.
    stop = min(start + self._block // 4, end)
    # Without the lock: only this thread has this block.
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
    """Adds all contributions to a range of elements in rank order."""
    terms = [
      self._x[start:stop] if r == self._rank
      else self._parts[self._row(r), start - begin : stop - begin]
      for r in range(len(self.ranks))
    ]
    out = self._out[start:stop]
    # Left to right in rank order: the same bits for every chunking.
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
  """Sum by a reduce-scatter and an all-gather around the ring of ranks."""

  def __init__(self, links, tag, x, ranks, out, block_bytes) -> None:
    super().__init__(links, tag, x, ranks, "ring", out, block_bytes)
    n, me = len(ranks), self._rank
    # Partial sums go down, final sums go up.
    self._down, self._up = ranks[(me - 1) % n], ranks[(me + 1) % n]
    if n == 1:
      np.copyto(self._out, self._x)
    else:
      # Reduce-scatter: every chunk arrives to be added to, except the one that
      # starts here. All-gather: every sum arrives, except this rank's own.
      first = (me + 1) % n  # the chunk that starts here
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
    """Returns the scratch buffer for a partial sum, or a sum's destination."""
    chunk, slot = divmod(header.slot, 2)
    n, me = len(self.ranks), self._rank
    # Partial sums come from above, final sums from below.
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
      # A partial sum is read once, so it needs no own memory.
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
      # A partial sum continues down until its owner, a final sum up until the
      # rank below the owner. `out` holds a partial sum until the final one.
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


class Gather(LinkOperation):
  """Gather of bytes in progress; `result` waits for it."""

  def __init__(
    self, links: Links, tag: int, data: Any, ranks: Sequence[Id],
    max_bytes: int, block_bytes: int, what: str,
  ) -> None:
    self._data = memoryview(data).cast("B").toreadonly()
    if len(self._data) > max_bytes:
      raise ValueError(
        f"{len(self._data):,} bytes are more than max_bytes={max_bytes:,}"
      )
    super().__init__(
      links, tag, ranks, what, len(self._data), block_bytes
    )
    self._most, self._pieces = max_bytes, {links.me: self._data}
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
    # Sizes may differ between peers.
    alike = agreement.digest == self._agreement.digest
    return alike and agreement.size <= self._most

  def _welcome(self, peer: Id, agreement: Agreement) -> None:
    # Checked against max_bytes in `_agrees`.
    self._pieces[peer] = memoryview(np.empty(agreement.size, np.uint8))
    # The number of blocks is known only now.
    self._left += math.ceil(agreement.size / self._block)

  def place(self, peer: Id, header: Header, scratch: memoryview) -> memoryview:
    """Returns the destination of a block, once the peer's size is known."""
    del scratch
    with self._changed:
      # The size is in the peer's OPEN on the control connection, which it sent
      # before this block.
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
  """Starts an asynchronous sum of all ranks' arrays.

  Args:
    links: Links of the epoch.
    tag: Number of the operation, equal on all peers. It may be reused after the
      result.
    x: float32 ``[...]``, contiguous, of equal shape on all peers. The sum does
      not write it; the caller must not modify it before the result.
    order: Order of additions, "direct" or "ring"; see the module docstring.
    ranks: Peers whose arrays are summed, in the order of their ranks, equal on
      all peers; all members if None.
    out: Output array; a new one if None. Its content is undefined after a
      failure.
    block_bytes: Bytes sent and added at once, equal on all peers.

  Returns:
    The operation. Its `result` is float32 with x's shape.

  Raises:
    ValueError: An argument is invalid.
    Lost: The links have ended.
  """
  known("order=", order, ORDERS)
  make = Ring if order == "ring" else Direct
  return make(links, tag, x, ranks or links.members, out, block_bytes)


def gather(
  links: Links, tag: int, data: Any, *, ranks: Sequence[Id] | None = None,
  max_bytes: int = 1 << 32, block_bytes: int = BLOCK_BYTES,
) -> Gather:
  """Starts an asynchronous gather of all ranks' bytes; sizes may differ.

  Args:
    links: Links of the epoch.
    tag: Number of the operation, as for `all_reduce`.
    data: Contiguous buffer, which must not be modified before the result.
    ranks: Participating peers, in the order of their ranks; all members if
      None.
    max_bytes: Maximum number of bytes per peer, equal on all peers.
    block_bytes: Bytes sent at once, equal on all peers.

  Returns:
    The operation. Its `result` is a list of buffers in the order of the ranks.

  Raises:
    ValueError: An argument is invalid.
    Lost: The links have ended.
  """
  return Gather(
    links, tag, data, ranks or links.members, max_bytes, block_bytes,
    f"gather {max_bytes}",
  )


def end(links: Links, tag: int, ranks: Sequence[Id]) -> None:
  """Returns when all ranks call it, in place of an operation with this tag.

  Args:
    links: Links of the epoch.
    tag: Number that a further operation would have.
    ranks: Participating peers.

  Raises:
    Lost: The links have ended, as they do if a peer calls a further operation.
  """
  Gather(links, tag, b"", ranks, 0, BLOCK_BYTES, END).wait()


def sum_bytes(
  order: Order, size: int, num_ranks: int, rank: int,
  block_bytes: int = BLOCK_BYTES,
) -> tuple[int, int]:
  """Returns (payload bytes, header bytes) that a rank sends in a sum.

  Args:
    order: Order of additions.
    size: Number of float32 elements of the array.
    num_ranks: Number of participating ranks.
    rank: Rank whose bytes are counted.
    block_bytes: Bytes sent at once.
  """
  # Same chunks as `Sum._span`.
  chunk = -(-size // num_ranks)
  lengths = [
    4 * max(0, min(chunk, size - c * chunk)) for c in range(num_ranks)
  ]
  if num_ranks == 1:
    sent = []
  elif order == "direct":  # a contribution to, and its own sum for, each other
    sent = lengths[:rank] + lengths[rank + 1 :]
    sent += (num_ranks - 1) * [lengths[rank]]
  else:  # partial sums of all chunks but its own; sums of all but the one above
    sent = lengths[:rank] + lengths[rank + 1 :]
    above = (rank + 1) % num_ranks
    sent += lengths[:above] + lengths[above + 1 :]
  # One header per block.
  frames = sum(-(-length // block_bytes) for length in sent)
  return sum(sent), HEADER_BYTES * frames


def _bytes(array: np.ndarray) -> memoryview:
  return memoryview(array).cast("B")
