"""What links carry, how they end, and what they want of an operation."""

from collections.abc import Mapping
import dataclasses
from typing import NamedTuple, Protocol

from parallel.elastic.membership.messages import Id
from parallel.elastic.transport.frames import Header


class Lost(ConnectionError):
  """An epoch's links have ended.

  Attributes:
    peer: Who was lost; None if it was this peer's own wish.
    reason: What was seen.
    tag: The operation that this ended; None for none.
  """

  def __init__(
    self, peer: Id | None, reason: str, tag: int | None = None
  ) -> None:
    self.peer, self.reason, self.tag = peer, reason, tag
    where = "" if tag is None else f"operation {tag}: "
    super().__init__(where + (f"peer {peer}: " if peer else "") + reason)


class Unreachable(ConnectionError):
  """Some members could not be connected to.

  Attributes:
    peers: Which, with what was seen.
  """

  def __init__(self, peers: Mapping[Id, str]) -> None:
    self.peers = dict(peers)
    super().__init__(", ".join(f"{k}: {v}" for k, v in self.peers.items()))


@dataclasses.dataclass
class Bytes:
  """Bytes of blocks, counted when a block is through.

  Attributes:
    payload: Of the blocks themselves.
    framing: Of their headers.
  """

  payload: int = 0
  framing: int = 0

  def add(self, payload: int, framing: int) -> None:
    """Adds to both."""
    self.payload += payload
    self.framing += framing


@dataclasses.dataclass
class Traffic:
  """What an epoch's links have carried.

  Attributes:
    sent: Blocks of operations that have ended well.
    received: Blocks of operations that have ended well.
    aborted_sent: Blocks of operations that have failed.
    aborted_received: Blocks of operations that have failed.
    control: Bytes sent on control lanes.
  """

  sent: Bytes = dataclasses.field(default_factory=Bytes)
  received: Bytes = dataclasses.field(default_factory=Bytes)
  aborted_sent: Bytes = dataclasses.field(default_factory=Bytes)
  aborted_received: Bytes = dataclasses.field(default_factory=Bytes)
  control: int = 0

  @property
  def sent_bytes(self) -> int:
    """All that was sent, headers, too."""
    return self.control + sum(
      part.payload + part.framing for part in (self.sent, self.aborted_sent)
    )


class Agreement(NamedTuple):
  """What a peer takes an operation to be.

  Attributes:
    digest: 32 bytes that all peers of the operation must have alike.
    size: Bytes that the peer gives to it, which may differ.
  """

  digest: bytes
  size: int


class Operation(Protocol):
  """What links carry blocks for. Its functions run in the lanes' threads."""

  tag: int
  ready: set[Id]  # who has opened it

  def opened(self, peer: Id, agreement: Agreement) -> None:
    """A peer is ready to receive."""

  def place(self, peer: Id, header: Header, scratch: memoryview) -> memoryview:
    """Returns where a block goes: a place of its own, or the lane's scratch."""

  def arrived(self, peer: Id, header: Header, block: memoryview) -> None:
    """A block is there."""

  def missed(self) -> None:
    """A block that had a place has not come."""

  def sent(self, header: Header, size: int) -> None:
    """A block has been given to the kernel."""

  def failed(self, error: Lost) -> None:
    """The links have ended."""
