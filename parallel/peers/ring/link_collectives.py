"""Collectives over the links of an epoch: float32 sums and gathers of bytes.

Float32 addition is not associative, so the order of additions determines the
result's bits. With each of the following orders, all peers get identical bits.
With ``direct`` and ``ring``, each of M peers sends 2 (M - 1) / M of the array.

- ``direct``: the owner of a chunk receives all contributions to it, adds them
  in rank order, and sends the sum to all peers. The result equals adding the
  whole arrays in rank order, independently of M and the chunks. The
  contributions occupy a buffer of (M - 1) / M of the array.
- ``ring``: chunk c travels from rank c - 1 downwards to rank c; each rank adds
  its own contribution. The sum then travels upwards from rank c. The chunks (of
  ceil(n / M) elements) and the order equal those of the ring schedule of
  `parallel.plans.schedules`, so its execution on a mesh has the same bits.
  The result depends on the order of the ranks.
- ``sites``: consecutive ranks form sites, whose peers share the links to other
  sites. If the smallest site has k ranks, the first k ranks of each site own a
  chunk. An owner adds its site's contributions in rank order, sends their sum
  to the owners of the chunk in other sites, adds the sums of all sites in their
  order, and sends the total to its site. Each site sends its sum once to each
  other site. ``direct`` is the case of one site.

Each operation has a tag. Several may be in flight, in any order on each peer.
The threads of the connections do all the work: the thread that receives a block
adds and forwards it. Inputs are never written, so a failed operation leaves
them unchanged.

Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69,
2009; PCCL (arXiv 2505.14065), which does not round n / M up, but makes the
first chunks one element longer.

Example:
  >>> from parallel.peers.ring import link_collectives
  >>> payload, headers = link_collectives.sum_sent_bytes(
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
from parallel.peers.ring.link_operations import END_OPERATION, LinkOperation
from parallel.peers.transport.frames import HEADER_BYTES, FrameError, Header
from parallel.peers.transport.links import Links
from parallel.peers.transport.transfers import OperationSpec

SumOrder = Literal["direct", "ring", "sites"]
SUM_ORDERS = ("direct", "ring", "sites")
# Larger blocks cost less time per byte on fast links, and delay the first
# addition on slow ones: see configs/benchmark/ring.py.
BLOCK_BYTES = 1 << 20
# Elements added per step: few, so that several terms fit into a core's cache.
_ELEMENTS_PER_ADD = 1 << 15
# Slots of contributions or partial sums, of final sums, and of sums of sites.
_PART_SLOT, _WHOLE_SLOT, _SITE_SLOT = 0, 1, 2


class Sum(LinkOperation):
  """Sum in progress; `result` waits for it."""

  def __init__(
    self, links: Links, tag: int, x: np.ndarray, ranks: Sequence[Id],
    what: str, num_chunks: int, out: np.ndarray | None, block_bytes: int,
  ) -> None:
    if x.dtype != np.float32 or not x.flags.c_contiguous:
      raise ValueError(
        f"x has dtype {x.dtype}; it must be contiguous and float32"
      )
    self._result = np.empty_like(x) if out is None else out
    if (
      self._result.shape != x.shape or self._result.dtype != x.dtype
      or not self._result.flags.c_contiguous
      or np.may_share_memory(self._result, x)
    ):
      raise ValueError(
        "out must have x's shape and dtype, be contiguous and not overlap x"
      )
    super().__init__(links, tag, ranks, what, x.nbytes, block_bytes)
    self._x, self._out = x.reshape(-1), self._result.reshape(-1)  # [n]
    self._chunk = -(-x.size // num_chunks)  # elements; the last may be shorter

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

  def _block_view(self, array: np.ndarray, header: Header, begin: int):
    """Returns an array's view of the block that ``header`` describes.

    The block's chunk starts at element ``begin``.
    """
    start = begin + header.offset // 4
    return _bytes(array[start : start + header.length // 4])

  def _num_blocks(self, chunk: int) -> int:
    return len(self._blocks(chunk))

  def _missing(self, peer: Id, slot: int, chunk: int) -> bool:
    """Returns whether a peer has not sent all blocks of a chunk yet.

    ``slot`` is the number of the buffer to which it sends them.
    """
    return any(
      (peer, slot, self._offset(chunk, start)) not in self._seen
      for start, _ in self._blocks(chunk)
    )


class DirectSum(Sum):
  """Sum in rank order inside each site, then over the sites in their order.

  In each site, the first ranks own and add one chunk each (module docstring).
  """

  def __init__(
    self, links, tag, x, ranks, out, block_bytes, sites: Sequence[int] = ()
  ) -> None:
    what = f"sum sites {' '.join(map(str, sites))}" if sites else "sum direct"
    sites = tuple(sites) or (len(ranks),)
    owners = min(sites)
    super().__init__(links, tag, x, ranks, what, owners, out, block_bytes)
    members = [ranks[sum(sites[:i]) :][:n] for i, n in enumerate(sites)]
    self._at = next(i for i, site in enumerate(members) if links.me in site)
    self._site = members[self._at]
    index = self._site.index(links.me)
    others = [peer for peer in self._site if peer != links.me]
    owned = index if index < owners else None
    # (peer, slot) -> (chunk, row of `_rows`) of a received block.
    self._from: dict[tuple[Id, int], tuple[int, int]] = {}
    self._far = []  # owners of the same chunk in other sites
    if owned is not None:
      self._from |= {(p, _PART_SLOT): (owned, i) for i, p in enumerate(others)}
      for i, site in enumerate(members):
        if i != self._at:
          self._from[site[owned], _SITE_SLOT] = owned, len(others) + i
          self._far.append(site[owned])
    for chunk, peer in enumerate(self._site[:owners]):
      if peer != links.me:
        self._from[peer, _WHOLE_SLOT] = chunk, -1  # -1: received into `_out`
    self._begin_at, stop = (0, 0) if owned is None else self._span(owned)
    # Contributions of the own site to the own chunk, and sums of all sites.
    num_rows = len(others) + (len(sites) if self._far else 0)
    shape = num_rows, stop - self._begin_at
    self._rows = links.borrow_buffer(4 * math.prod(shape)).reshape(shape)
    blocks = [] if owned is None else self._blocks(owned)
    self._missing_terms = {
      (slot, a): count for a, _ in blocks
      for slot, count in ((_PART_SLOT, len(others)), (_SITE_SLOT, len(sites)))
    }
    # Blocks that this peer adds, and blocks of sums that other owners send.
    self._left = sum(self._num_blocks(chunk) for chunk in range(owners))
    with self._lock:
      for chunk, peer in enumerate(self._site[:owners]):
        for a, b in self._blocks(chunk) if peer != links.me else ():
          self._push(
            # Each contribution is sent directly to the owner of its chunk.
            peer, _PART_SLOT, self._offset(chunk, a), _bytes(self._x[a:b])
          )
    if not others:
      for a, b in blocks:
        self._add_site(a, b)
    self._begin()

  def result(self, limit_s: float | None = None) -> np.ndarray:
    """Waits for the sum, as `wait` does, and returns it."""
    self.wait(limit_s)
    self._links.return_buffer(self._rows)  # for the next sum
    self._rows = self._rows[:0]
    return self._result

  def place(self, peer: Id, header: Header, scratch: memoryview) -> memoryview:
    """Returns memory for a contribution, a site's sum or an owner's sum."""
    del scratch
    if (peer, header.slot) not in self._from:
      raise FrameError(
        f"operation {self.tag} expects no data from {peer} for slot "
        f"{header.slot}"
      )
    chunk, row = self._from[peer, header.slot]
    start, stop = self._span(chunk)
    self._take(peer, header, 4 * (stop - start))
    if header.slot == _WHOLE_SLOT:
      return self._block_view(self._out, header, start)
    return self._block_view(self._rows[row], header, 0)

  def _use(self, peer: Id, header: Header, block: memoryview) -> None:
    del peer, block
    if header.slot == _WHOLE_SLOT:
      with self._lock:
        self._left -= 1
      return
    start = self._begin_at + header.offset // 4
    stop = start + header.length // 4
    if self._count_down_term(header.slot, start):
      added = (
        self._add_site if header.slot == _PART_SLOT else self._add_all_sites
      )
      added(start, stop)

  def _count_down_term(self, slot: int, start: int) -> bool:
    """Counts a received summand of a block; returns whether it was the last.

    The block starts at element ``start``; ``slot`` is the number of the buffer,
    for contributions of this site or for sums of sites.
    """
    with self._lock:
      self._missing_terms[slot, start] -= 1
      return not self._missing_terms[slot, start]

  # The thread that has received the last term of a block adds the block without
  # the lock, since no other thread uses the block.

  def _add_site(self, start: int, stop: int) -> None:
    """Adds this site's contributions to a block; sends the site's sum.

    The block has the elements [start, stop).
    """
    row = iter(self._rows_of_range(start, stop))
    terms = [
      self._x[start:stop] if peer == self._links.me else next(row)
      for peer in self._site
    ]
    if not self._far:
      _add(terms, self._out[start:stop])
      self._send_total(start, stop)
      return
    # The sum is not in `_out`, where the total replaces it before it is sent.
    own = self._rows_of_range(start, stop)[len(self._site) - 1 + self._at]
    _add(terms, own)
    with self._lock:
      for peer in self._far:
        self._push(peer, _SITE_SLOT, 4 * (start - self._begin_at), _bytes(own))
    if self._count_down_term(_SITE_SLOT, start):
      self._add_all_sites(start, stop)

  def _add_all_sites(self, start: int, stop: int) -> None:
    """Adds all sites' sums of a block, and sends the total to this site.

    The block has the elements [start, stop).
    """
    terms = list(self._rows_of_range(start, stop)[len(self._site) - 1 :])
    _add(terms, self._out[start:stop])
    self._send_total(start, stop)

  def _rows_of_range(self, start: int, stop: int) -> np.ndarray:
    """Returns elements [start, stop) of all received summands, one per row."""
    return self._rows[:, start - self._begin_at : stop - self._begin_at]

  def _send_total(self, start: int, stop: int) -> None:
    with self._lock:
      self._left -= 1
      for peer in self._site:
        if peer != self._links.me:
          self._push(
            peer, _WHOLE_SLOT, 4 * (start - self._begin_at),
            _bytes(self._out[start:stop]),
          )

  def _owing(self) -> Id | None:
    for (peer, slot), (chunk, _) in self._from.items():
      if self._missing(peer, slot, chunk):
        return peer
    return None


class RingSum(Sum):
  """Sum by a reduce-scatter and an all-gather around the ring of ranks."""

  def __init__(self, links, tag, x, ranks, out, block_bytes) -> None:
    super().__init__(
      links, tag, x, ranks, "sum ring", len(ranks), out, block_bytes
    )
    n, me = len(ranks), self._rank
    # Partial sums go down, final sums go up.
    self._down, self._up = ranks[(me - 1) % n], ranks[(me + 1) % n]
    if n == 1:
      np.copyto(self._out, self._x)
    else:
      # Reduce-scatter: a partial sum of each chunk arrives, except of the chunk
      # that starts here. All-gather: the final sums of other chunks arrive.
      first = (me + 1) % n  # the chunk that starts here
      self._left = sum(
        self._num_blocks(c) * ((c != first) + (c != me)) for c in range(n)
      )
      with self._lock:
        for a, b in self._blocks(first):
          self._push(
            self._down, 2 * first + _PART_SLOT, self._offset(first, a),
            _bytes(self._x[a:b]),
          )
    self._begin()

  def place(self, peer: Id, header: Header, scratch: memoryview) -> memoryview:
    """Returns scratch memory for a partial sum, and output for a final sum."""
    chunk, slot = divmod(header.slot, 2)
    n, me = len(self.ranks), self._rank
    # Partial sums come from the rank above, final sums from the rank below.
    source, not_here = (
      (self._up, (me + 1) % n) if slot == _PART_SLOT else (self._down, me)
    )
    if peer != source or chunk >= n or chunk == not_here:
      raise FrameError(
        f"operation {self.tag} expects no data from {peer} for slot "
        f"{header.slot}"
      )
    start, stop = self._span(chunk)
    self._take(peer, header, 4 * (stop - start))
    if slot == _PART_SLOT:
      # A partial sum is read once, so it needs no memory of its own.
      return scratch[: header.length]
    return self._block_view(self._out, header, start)

  def _use(self, peer: Id, header: Header, block: memoryview) -> None:
    chunk, slot = divmod(header.slot, 2)
    n, me = len(self.ranks), self._rank
    start = self._span(chunk)[0] + header.offset // 4
    stop = start + header.length // 4
    out = self._out[start:stop]
    if slot == _PART_SLOT:
      np.add(np.frombuffer(block, np.float32), self._x[start:stop], out=out)
    with self._lock:
      self._left -= 1
      # Partial sums are sent down to the owner, final sums up to the rank below
      # the owner. `out` holds a partial sum until the final sum arrives.
      if slot == _PART_SLOT and chunk != me:
        self._push(self._down, header.slot, header.offset, _bytes(out))
      elif chunk != (me + 1) % n:
        self._push(
          self._up, 2 * chunk + _WHOLE_SLOT, header.offset, _bytes(out)
        )

  def _owing(self) -> Id | None:
    n, me = len(self.ranks), self._rank
    for c in range(n):
      if c != (me + 1) % n and self._missing(self._up, 2 * c + _PART_SLOT, c):
        return self._up
      if c != me and self._missing(self._down, 2 * c + _WHOLE_SLOT, c):
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
        f"the value has {len(self._data):,} bytes; at most "
        f"max_bytes={max_bytes:,} are allowed"
      )
    super().__init__(
      links, tag, ranks, what, len(self._data), block_bytes
    )
    self._most, self._pieces = max_bytes, {links.me: self._data}
    with self._lock:
      for peer in ranks:
        if peer != links.me:
          for i in range(0, len(self._data), block_bytes):
            self._push(peer, _WHOLE_SLOT, i, self._data[i : i + block_bytes])
    self._begin()

  def result(self, limit_s: float | None = None) -> list[memoryview]:
    """Waits, as `wait` does; returns all peers' bytes in rank order."""
    self.wait(limit_s)
    return [self._pieces[peer] for peer in self.ranks]

  def _agrees(self, agreement: OperationSpec) -> bool:
    # Sizes may differ between peers.
    alike = agreement.digest == self._agreement.digest
    return alike and agreement.size <= self._most

  def _welcome(self, peer: Id, agreement: OperationSpec) -> None:
    # `_agrees` has compared the size with max_bytes.
    self._pieces[peer] = memoryview(np.empty(agreement.size, np.uint8))
    # The number of blocks is known only now.
    self._left += math.ceil(agreement.size / self._block)

  def place(self, peer: Id, header: Header, scratch: memoryview) -> memoryview:
    """Waits for the size of the peer's data; returns memory for the block."""
    del scratch
    with self._changed:
      # The size is in the peer's OPEN on the control connection, which it sent
      # before this block.
      self._changed.wait_for(lambda: peer in self._pieces or self._error)
      if self._error is not None:
        raise self._error
    piece = self._pieces[peer]
    if header.slot != _WHOLE_SLOT:
      raise FrameError(
        f"operation {self.tag} expects no data for slot {header.slot}"
      )
    self._take(peer, header, len(piece))
    return piece[header.offset : header.offset + header.length]

  def _use(self, peer: Id, header: Header, block: memoryview) -> None:
    with self._lock:
      self._left -= 1

  def _owing(self) -> Id | None:
    for peer, piece in self._pieces.items():
      if peer != self._links.me and any(
        (peer, _WHOLE_SLOT, i) not in self._seen
        for i in range(0, len(piece), self._block)
      ):
        return peer
    return None


def all_reduce(
  links: Links, tag: int, x: np.ndarray, *, order: SumOrder = "direct",
  ranks: Sequence[Id] | None = None, out: np.ndarray | None = None,
  block_bytes: int = BLOCK_BYTES, sites: Sequence[int] = (),
) -> Sum:
  """Starts an asynchronous sum of all ranks' arrays.

  Args:
    links: Links of the epoch.
    tag: Number of the operation, equal on all peers. It may be reused after the
      result.
    x: float32 ``[...]``, contiguous, of equal shape on all peers. The sum does
      not write it; the caller must not modify it before the result.
    order: Order of additions, "direct", "ring" or "sites"; see the module
      docstring.
    ranks: Peers whose arrays are summed, in the order of their ranks, equal on
      all peers; all members if None.
    out: Output array; a new one if None. Its content is undefined after a
      failure.
    block_bytes: Bytes sent and added at once, equal on all peers.
    sites: Number of ranks of each site, in the order of the ranks; for
      "sites" only.

  Returns:
    The operation. Its `result` is float32 with x's shape.

  Raises:
    ValueError: An argument is invalid.
    LinksLost: The links have ended.
  """
  known("order=", order, SUM_ORDERS)
  ranks = tuple(ranks or links.members)
  if order == "ring":
    return RingSum(links, tag, x, ranks, out, block_bytes)
  if order == "direct":
    return DirectSum(links, tag, x, ranks, out, block_bytes)
  if min(sites, default=0) < 1 or sum(sites) != len(ranks):
    raise ValueError(
      f"sites={tuple(sites)} must be positive numbers of ranks whose sum is "
      f"{len(ranks)}"
    )
  return DirectSum(links, tag, x, ranks, out, block_bytes, sites)


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
    LinksLost: The links have ended.
  """
  return Gather(
    links, tag, data, ranks or links.members, max_bytes, block_bytes,
    f"gather {max_bytes}",
  )


def wait_for_end(links: Links, tag: int, ranks: Sequence[Id]) -> None:
  """Waits until all ranks call it, and so start no operation with this tag.

  Args:
    links: Links of the epoch.
    tag: Number that a further operation would have.
    ranks: Participating peers.

  Raises:
    LinksLost: The links have ended, as if a peer starts a further operation.
  """
  Gather(links, tag, b"", ranks, 0, BLOCK_BYTES, END_OPERATION).wait()


def sum_sent_bytes(
  order: SumOrder, size: int, num_ranks: int, rank: int,
  block_bytes: int = BLOCK_BYTES, sites: Sequence[int] = (),
) -> tuple[int, int]:
  """Returns (payload bytes, header bytes) that a rank sends in a sum.

  Args:
    order: Order of additions, as for `all_reduce`.
    size: Number of float32 elements of the array.
    num_ranks: Number of participating ranks.
    rank: Rank whose bytes are counted.
    block_bytes: Bytes sent at once.
    sites: Number of ranks of each site, for "sites".
  """
  sites = tuple(sites) or (num_ranks,)
  # The chunks are those of `Sum._span`.
  chunks = min(sites)
  chunk = -(-size // chunks)
  lengths = [4 * max(0, min(chunk, size - c * chunk)) for c in range(chunks)]
  members, index = num_ranks, rank
  for members in sites:  # finds the rank's site, and its index there
    if index < members:
      break
    index -= members
  # Contributions to, or partial sums of, all chunks but the rank's own.
  sent = lengths[:index] + lengths[index + 1 :]
  if order == "ring":  # sums of all chunks but that of the rank above
    above = (rank + 1) % num_ranks
    sent = sent + lengths[:above] + lengths[above + 1 :]
  elif index < chunks:  # the site's sum to other sites, the total to its own
    sent = sent + (len(sites) - 1 + members - 1) * [lengths[index]]
  # One header per block.
  frames = sum(-(-length // block_bytes) for length in sent)
  return sum(sent), HEADER_BYTES * frames


def _add(terms: Sequence[np.ndarray], out: np.ndarray) -> None:
  """Adds arrays in order, so that the bits do not depend on the chunks."""
  if len(terms) == 1:
    np.copyto(out, terms[0])
    return
  for a in range(0, len(out), _ELEMENTS_PER_ADD):
    piece = slice(a, a + _ELEMENTS_PER_ADD)
    np.add(terms[0][piece], terms[1][piece], out=out[piece])
    for term in terms[2:]:
      np.add(out[piece], term[piece], out=out[piece])


def _bytes(array: np.ndarray) -> memoryview:
  return memoryview(array).cast("B")
