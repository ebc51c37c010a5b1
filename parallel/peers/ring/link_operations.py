"""Base class of operations over links: readiness, progress and completion.

An operation succeeds when all its peers have opened it, all blocks of the local
result are computed, and all outgoing blocks have been passed to the kernel. It
fails when the links end. Its traffic is recorded once in either case.
"""

import abc
from collections.abc import Sequence
import hashlib
import threading
from typing import Any

from parallel.peers.membership.messages import Id
from parallel.peers.transport.frames import (
  HEADER_BYTES,
  MAX_PAYLOAD_BYTES,
  FrameError,
  Header,
  Kind,
)
from parallel.peers.transport.links import Links
from parallel.peers.transport.transfers import (
  ByteCounts,
  LinksLost,
  OperationSpec,
  disagreement,
)

# Kind of the operation that a peer opens if it has no further operation.
END_OPERATION = "end"


class LinkOperation(abc.ABC):
  """Base class of sums and gathers over links.

  Subclasses decrement `_left`, the number of blocks of the local result that
  are not computed yet, and hold `_lock` while they change state. Callbacks run
  in the threads of the connections.

  Attributes:
    tag: Number of the operation, equal on all peers.
    ranks: Participating peers, in the order of their ranks.
    ready: Peers that have opened the operation and can receive blocks.
    opened_by: peer -> content of its OPEN frame, if it has arrived; includes
      this peer once it has sent its own. Guarded by the lock of the links.
  """

  def __init__(
    self, links: Links, tag: int, ranks: Sequence[Id], what: str, size: int,
    block_bytes: int,
  ) -> None:
    if links.me not in ranks:
      raise ValueError(
        f"{links.me} must be one of the ranks of the operation: "
        f"{', '.join(ranks)}"
      )
    if len(set(ranks)) < len(ranks) or not {*ranks} <= {*links.members}:
      raise ValueError(f"ranks {ranks} must be different members")
    if not 0 < block_bytes <= MAX_PAYLOAD_BYTES[Kind.DATA] or block_bytes % 4:
      raise ValueError(
        f"block_bytes={block_bytes} must be a multiple of 4, and at most "
        f"{MAX_PAYLOAD_BYTES[Kind.DATA]}"
      )
    self.tag, self.ranks, self.ready = tag, tuple(ranks), set[Id]()
    self.opened_by: dict[Id, OperationSpec] = {}
    self._links, self._rank = links, tuple(ranks).index(links.me)
    self._kind = what.split()[0]
    # A multiple of 4, so that blocks contain whole float32 values.
    self._block = block_bytes
    # Peers compare this digest, so that mismatched calls fail early.
    self._agreement = OperationSpec(self._digest(what), size)
    self._lock = threading.Lock()
    self._changed = threading.Condition(self._lock)
    # Blocks for peers that are not ready: (slot, offset, block).
    self._held: dict[Id, list[tuple[int, int, Any]]] = {}
    self._seen: set[tuple[Id, int, int]] = set()  # (peer, slot, offset)
    # Blocks to compute, blocks to pass to the kernel, blocks being received.
    self._left = self._sending = self._writing = 0
    self._sent, self._received = ByteCounts(), ByteCounts()
    self._error: LinksLost | None = None
    self._booked = False  # whether success or failure has been recorded

  def _digest(self, what: str) -> bytes:
    text = f"{what} {self._block} {' '.join(self.ranks)}"
    return hashlib.sha256(text.encode()).digest()

  def _begin(self) -> None:
    # Blocks may arrive before this returns.
    self._links.begin(self, self._agreement, self.ranks)
    self._check_done()

  def done(self) -> bool:
    """Returns whether the operation has succeeded or failed."""
    with self._lock:
      return self._booked

  def wait(self, limit_s: float | None = None) -> None:
    """Waits until the operation has ended.

    Args:
      limit_s: Seconds after which all links are ended, since a connected peer
        that makes no progress blocks all others; None for no limit.

    Raises:
      LinksLost: A peer was lost, or the time limit was exceeded.
    """
    with self._changed:
      ended = self._changed.wait_for(lambda: self._booked, limit_s)
      # Name the peer that blocks progress, while the lock is held.
      late = None if ended else self._blocking_peer()
    if not ended:
      self._links.fail(LinksLost(
        late, f"operation {self.tag} has not ended within {limit_s:g} s"
      ))
    with self._changed:
      # A thread may still be writing into the output after a failure.
      self._changed.wait_for(lambda: self._booked and not self._writing)
      if self._error is not None:
        raise self._error

  def _blocking_peer(self) -> Id | None:
    """Returns a peer that has not opened the operation or owes a block."""
    for peer in self.ranks:
      if peer != self._links.me and peer not in self.ready:
        return peer
    return self._owing()

  @abc.abstractmethod
  def _owing(self) -> Id | None:
    """Returns a peer whose block has not arrived; None if there is none."""

  def opened(self, peer: Id, agreement: OperationSpec) -> None:
    """Processes a peer's OPEN frame: sends it the blocks that waited for it.

    A peer that opens a different operation with this tag receives no blocks.
    Once all peers have opened an operation, the links end with `disagreement`.

    Raises:
      FrameError: The peer is not among the ranks.
    """
    if peer not in self.ranks:
      raise FrameError(
        f"{peer} is not one of the ranks of operation {self.tag}"
      )
    with self._changed:
      if self._agrees(agreement) and peer != self._links.me:
        self.ready.add(peer)
        self._welcome(peer, agreement)
        for item in self._held.pop(peer, ()):
          # Blocks computed before the peer was ready.
          self._links.send(self, peer, *item)
      self._changed.notify_all()
    # The links end only after this peer's own OPEN, which the others must read.
    error = self.disagreement() if self._links.me in self.opened_by else None
    if error is not None:
      self._links.fail_by_disagreement(error)
    self._check_done()

  def disagreement(self) -> LinksLost | None:
    """Returns an error if all peers have opened, but not the same operation."""
    said = {**self.opened_by, self._links.me: self._agreement}
    if not {*self.ranks} <= said.keys():
      return None
    calls = {}
    for peer in self.ranks:
      digest, size = said[peer]
      if digest == self._digest(END_OPERATION):
        calls[peer] = "no further operation"
        continue
      if digest != self._agreement.digest:
        # The digest distinguishes several other operations.
        calls[peer] = f"another operation ({digest[:3].hex()})"
        continue
      if self._agrees(said[peer]):
        size = self._agreement.size  # sizes may differ in a gather
      calls[peer] = f"a {self._kind} of {size:,} bytes"
    if len(set(calls.values())) < 2:
      return None
    return disagreement(
      self._links.me, calls, "must call the same operations in the same order, "
      "with arrays of equal size"
    )

  def _agrees(self, agreement: OperationSpec) -> bool:
    return agreement == self._agreement

  def _welcome(self, peer: Id, agreement: OperationSpec) -> None:
    """Prepares for a peer's data after its OPEN; the caller holds the lock."""
    del peer, agreement

  def _push(self, peer: Id, slot: int, offset: int, block: Any) -> None:
    """Sends a block once the peer is ready; the caller holds the lock."""
    self._sending += 1
    if peer in self.ready:
      self._links.send(self, peer, slot, offset, block)
    else:
      self._held.setdefault(peer, []).append((slot, offset, block))

  def _take(self, peer: Id, header: Header, size: int) -> None:
    """Validates the offset and length of a block in a slot of ``size`` bytes.

    Raises:
      FrameError: The block is misaligned, out of range or a duplicate.
    """
    key = peer, header.slot, header.offset
    wanted = min(self._block, size - header.offset)  # the last may be shorter
    with self._lock:
      if (
        header.offset % self._block or wanted <= 0 or header.length != wanted
        or key in self._seen or peer not in self.ranks
      ):
        raise FrameError(
          f"operation {self.tag} expects no block of {header.length:,} bytes "
          f"at offset {header.offset:,} of slot {header.slot}, or has received "
          "it already"
        )
      # A second copy of a block would be added twice.
      self._seen.add(key)
      self._writing += 1

  def arrived(self, peer: Id, header: Header, block: memoryview) -> None:
    """Processes a received block."""
    self._use(peer, header, block)
    with self._changed:
      self._writing -= 1
      self._received.add(header.length, HEADER_BYTES)
      self._changed.notify_all()
    self._check_done()

  @abc.abstractmethod
  def _use(self, peer: Id, header: Header, block: memoryview) -> None:
    """Adds, stores or forwards a received block."""

  def missed(self) -> None:
    """Releases the destination of a block that failed to arrive."""
    with self._changed:
      self._writing -= 1
      self._changed.notify_all()

  def sent(self, header: Header, size: int) -> None:
    """Counts a block that has been passed to the kernel."""
    del header
    with self._lock:
      self._sending -= 1
      self._sent.add(size, HEADER_BYTES)
    self._check_done()

  def failed(self, error: LinksLost) -> None:
    """Ends the operation with an error, since the links have ended."""
    with self._changed:
      if self._booked:
        return
      self._error, self._booked = error, True
      self._held.clear()
      self._changed.notify_all()
    # Without the lock: `end` takes the lock of the links.
    self._links.end(self, self._sent, self._received, False)

  def _check_done(self) -> None:
    """Ends the operation once all blocks are computed and sent."""
    with self._lock:
      if (
        self._left or self._sending or self._writing or self._booked
        # Also wait for peers that are not ready, so that a tag can be reused.
        or len(self.ready) < len(self.ranks) - 1
      ):
        return
      self._booked = True
    self._links.end(self, self._sent, self._received, True)
    with self._changed:
      self._changed.notify_all()
