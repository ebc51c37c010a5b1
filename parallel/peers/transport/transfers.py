"""Traffic counters, errors and the operation interface of links."""

from collections.abc import Iterable, Mapping
import dataclasses
from typing import NamedTuple, Protocol

from parallel.peers.membership.messages import Id
from parallel.peers.membership.reachability import format_peers
from parallel.peers.transport.frames import Header


class LinksLost(ConnectionError):
  """Error: the links of an epoch have ended.

  Attributes:
    peer: Peer that was lost; None if this peer closed the links; this peer's
      own id if it has to end, since it would fail in each attempt.
    reason: Observed error.
    tag: Tag of the operation that failed; None if none was in progress.
  """

  def __init__(
    self, peer: Id | None, reason: str, tag: int | None = None
  ) -> None:
    self.peer, self.reason, self.tag = peer, reason, tag
    # "operation 3: peer p2: the connection was closed".
    where = "" if tag is None else f"operation {tag}: "
    super().__init__(where + (f"peer {peer}: " if peer else "") + reason)


def disagreement(me: Id, calls: Mapping[Id, str], wanted: str) -> LinksLost:
  """Returns this peer's error when peers call different operations.

  The most frequent call counts as right, as in a vote. A peer that has made it
  gets an error that names a peer with another call. Each other peer gets an
  error that names itself. If several calls are the most frequent, each peer
  gets an error that names itself.

  Args:
    me: This peer.
    calls: peer -> description of its call; at least two descriptions differ.
    wanted: Requirement; completes a sentence that begins with "all peers".
  """
  peers: dict[str, list[Id]] = {}
  for peer in sorted(calls):
    peers.setdefault(calls[peer], []).append(peer)
  *others, most = sorted(peers, key=lambda call: len(peers[call]))
  decided = len(peers[others[-1]]) < len(peers[most])
  odd = peers[others[0]][0] if decided and calls[me] == most else me
  # Rare calls first, since long texts are truncated.
  said = "; ".join(f"{x} at {format_peers(peers[x])}" for x in (*others, most))
  return LinksLost(odd, f"{said}, but all peers {wanted}")


class UnreachableError(ConnectionError):
  """Error: connections to or from some members are missing.

  Attributes:
    peers: Peer that could not be reached -> error of the last attempt.
    absent: Peers that did not connect to this one.
  """

  def __init__(
    self, peers: Mapping[Id, str], absent: Iterable[Id] = ()
  ) -> None:
    self.peers, self.absent = dict(peers), tuple(sorted(absent))
    super().__init__(", ".join([
      *(f"{k}: {v}" for k, v in self.peers.items()),
      *(f"{k}: did not connect" for k in self.absent),
    ]))


@dataclasses.dataclass
class ByteCounts:
  """Counters of the bytes of complete blocks.

  Attributes:
    payload: Bytes of the blocks' data.
    framing: Bytes of the blocks' headers.
  """

  payload: int = 0
  framing: int = 0

  def add(self, payload: int, framing: int) -> None:
    """Adds bytes to both counters."""
    self.payload += payload
    self.framing += framing


@dataclasses.dataclass
class Traffic:
  """Counters of the bytes on an epoch's links.

  Attributes:
    sent: Bytes of blocks sent by operations that succeeded.
    received: Bytes of blocks received by operations that succeeded.
    aborted_sent: Bytes of blocks sent by operations that failed.
    aborted_received: Bytes of blocks received by operations that failed.
    control: Bytes sent on control connections.
  """

  sent: ByteCounts = dataclasses.field(default_factory=ByteCounts)
  received: ByteCounts = dataclasses.field(default_factory=ByteCounts)
  aborted_sent: ByteCounts = dataclasses.field(default_factory=ByteCounts)
  aborted_received: ByteCounts = dataclasses.field(default_factory=ByteCounts)
  control: int = 0

  @property
  def sent_bytes(self) -> int:
    """Total bytes sent, headers and failed operations included."""
    return self.control + sum(
      part.payload + part.framing for part in (self.sent, self.aborted_sent)
    )


class OperationSpec(NamedTuple):
  """Description of an operation, which peers exchange in OPEN frames.

  Attributes:
    digest: 32-byte hash of the operation's kind, block size and ranks; must be
      equal on all peers.
    size: Bytes of the peer's input.
  """

  digest: bytes
  size: int


class Operation(Protocol):
  """Interface that `Links` requires of an operation, such as a sum.

  The methods run in the threads of the connections.

  Attributes:
    tag: Number of the operation, equal on all peers.
    ready: Peers that have opened the operation and can receive blocks.
    opened_by: peer -> content of its OPEN frame, this peer's own included.
  """

  tag: int
  ready: set[Id]
  opened_by: dict[Id, OperationSpec]

  def disagreement(self) -> LinksLost | None:
    """Returns an error if all peers have opened, but not the same operation."""

  def opened(self, peer: Id, agreement: OperationSpec) -> None:
    """Processes the OPEN frame of a peer, which can now receive blocks."""

  def place(self, peer: Id, header: Header, scratch: memoryview) -> memoryview:
    """Returns the memory into which a block is received, possibly ``scratch``.

    Each call is followed by one call of `arrived` or `missed`.
    """

  def arrived(self, peer: Id, header: Header, block: memoryview) -> None:
    """Processes a completely received block."""

  def missed(self) -> None:
    """Releases the destination of a block that failed to arrive."""

  def sent(self, header: Header, size: int) -> None:
    """Counts a block that has been passed to the kernel."""

  def failed(self, error: LinksLost) -> None:
    """Ends the operation, since the links have ended."""
