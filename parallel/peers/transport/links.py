"""Links of an epoch: connections between every ordered pair of members.

A link from one peer to another consists of a control connection and one or more
data connections, all dialed by the sender. The data connections of a link take
blocks from one queue, so a slow connection sends fewer. One thread per
connection sends, and one receives directly into the buffer that the operation
provides, without a copy.

A peer sends a block of an operation (such as a sum) only after the receiver has
sent OPEN for the operation on its control connection. Hence every block has a
buffer when it arrives, and an operation that one peer has not started does not
block other operations.

A failing link ends all links of the epoch on all peers: the peer that detects
the failure sends ABORT with the id of the lost peer, and shuts its sockets
down. Each new attempt uses a new epoch with new connections, so blocks of
different attempts cannot be mixed. A peer is lost when a connection breaks or
when its control connection is silent for `LinkOptions.silence_s`; a long
operation does not cause the loss of a peer.
"""

from collections.abc import Collection, Mapping
import contextlib
import os
import queue
import socket
import struct
import threading
from typing import Any

import numpy as np

from parallel.peers.membership.messages import Id
from parallel.peers.settings import MAX_CONNECTIONS, LinkOptions
from parallel.peers.transport import frames
from parallel.peers.transport.frames import FrameError, Header, Kind
from parallel.peers.transport.handshake import (
  HANDSHAKE_BYTES,
  Address,
  Cancelled,
  DialRequest,
  Purpose,
  Security,
  SocketGroup,
  dial,
  set_socket_options,
  shut,
)
from parallel.peers.transport.listener import AcceptRule, Listener
from parallel.peers.transport.transfers import (
  ByteCounts,
  LinksLost,
  Operation,
  OperationSpec,
  Traffic,
  UnreachableError,
)

_CONTROL = 0  # number of the control connection; data connections follow
# Limit on operations that other peers have opened and this one has not.
_MAX_UNOPENED = 4096
_ODD_FIRST_S = 0.5  # head start of a peer that made another call than most
_OPTIONS = LinkOptions()


class Links:
  """Connections of one peer in one epoch, a numbered list of members.

  Attributes:
    me: Id of this peer.
    members: Members of the epoch, in the order of their ranks.
    epoch: Number of the epoch.
    traffic: Counters of transferred bytes.
    options: Options of the connections.
  """

  def __init__(
    self, me: Id, epoch: int, members: Mapping[Id, Address],
    security: Security, options: LinkOptions = _OPTIONS,
  ) -> None:
    # Rank i is the i-th member.
    if me not in members:
      raise ValueError(f"{me} must be one of the members: {', '.join(members)}")
    self.me, self.epoch, self.members = me, epoch, tuple(members)
    self.traffic, self.options = Traffic(), options
    self._addresses = {p: a for p, a in members.items() if p != me}
    self._security, self._scope = security, SocketGroup()
    self._lock = threading.Lock()
    self._changed = threading.Condition(self._lock)
    # (peer, connection number) -> socket; number 0 is the control connection.
    self._inward: dict[tuple[Id, int], socket.socket] = {}
    self._control: dict[Id, socket.socket] = {}
    self._outward: list[tuple[Id, socket.socket]] = []  # control and data
    # One writer at a time per control connection.
    self._speaking = {p: threading.Lock() for p in self._addresses}
    self._ended = {p: threading.Event() for p in self._addresses}
    self._queues: dict[Id, queue.SimpleQueue] = {
      p: queue.SimpleQueue() for p in self._addresses
    }
    self._operations: dict[int, Operation] = {}
    # (tag, peer) -> OPEN frame of an operation that this peer has not started.
    self._unopened: dict[tuple[int, Id], OperationSpec] = {}
    # Number of data connections of each peer; until known, that of this peer.
    self._announced = dict.fromkeys(self._addresses, options.num_connections)
    self._error: LinksLost | None = None
    self._free: dict[int, list[np.ndarray]] = {}  # bytes -> reusable memory

  def connect(self, listener: Listener, limit_s: float) -> "Links":
    """Connects to all other members; each member calls it.

    Args:
      listener: Listener that accepts the other members' connections.
      limit_s: Time limit in seconds.

    Raises:
      UnreachableError: Some members could not be reached, or did not connect.
      LinksLost: The links were closed, or a connected peer was lost.
    """
    # It starts before dialing, so that early connections are kept alive.
    self._start(self._keep_alive)
    offer = AcceptRule(self.epoch, frozenset(self._addresses), self._receive)
    listener.serve(Purpose.DATA, offer)
    missing: dict[Id, str] = {}
    dialling = [
      threading.Thread(target=self._dial, args=(p, limit_s, missing))
      for p in self._addresses
    ]
    for thread in dialling:
      thread.start()
    for thread in dialling:
      thread.join()
    with self._changed:
      self._changed.wait_for(
        lambda: self._error or missing or not self._absent_peers(), limit_s
      )
      error = self._error
      # A failed dial ends the wait, so other peers may still connect later.
      absent = () if missing else self._absent_peers()
    if error is not None:
      raise error
    if missing or absent:
      self.close("could not connect to all members")
      raise UnreachableError(missing, absent)
    return self

  def _absent_peers(self) -> set[Id]:
    """Returns the peers that have not opened all of their connections yet."""
    return {
      peer for peer, count in self._announced.items()
      if any((peer, k) not in self._inward for k in range(count + 1))
    }

  def __enter__(self) -> "Links":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self, reason: str = "closed its links") -> None:
    """Ends all links; operations in progress fail on all peers."""
    self.fail(LinksLost(None, reason))

  def fail_by_disagreement(self, error: LinksLost) -> None:
    """Ends all links with the error of `transfers.disagreement`.

    A peer that made another call than most ends its links first: an earlier
    ABORT of other peers would prevent it from reading their OPEN frames, and so
    from finding its own error.
    """
    if error.peer != self.me:
      self._scope.closed.wait(_ODD_FIRST_S)
    self.fail(error)

  def fail(self, error: LinksLost) -> None:
    """Ends all links with an error; only the first call has an effect."""
    with self._changed:
      if self._error is not None:
        return
      for operation in self._operations.values():
        # A disagreement is reported if there is one: it may cause other errors.
        error = operation.disagreement() or error
      self._error = error
      # They fail below, without the lock, since `failed` calls `end`.
      operations = list(self._operations.values())
      self._operations.clear()
      self._changed.notify_all()
    for event in self._ended.values():
      event.set()
    # Report the lost peer to the others before the sockets are shut down.
    culprit = (error.peer or self.me).encode()
    # An ABORT has the length of the lost peer's id, this id, and the reason.
    word = struct.pack("!H", len(culprit)) + culprit
    word += error.reason.encode()[:512]
    for peer in list(self._control):
      with contextlib.suppress(OSError):
        self._say(peer, Header(Kind.ABORT), word, limit_s=0.2)
    # Wakes all threads blocked on outgoing connections.
    self._scope.close()
    with self._lock:
      for sock in self._inward.values():
        shut(sock)
    for waiting in self._queues.values():
      for _ in range(self.options.num_connections):
        waiting.put(None)  # ends one sending thread
    for operation in operations:
      operation.failed(LinksLost(error.peer, error.reason, operation.tag))

  @property
  def error(self) -> LinksLost | None:
    """Reason for which the links have ended; None while they have not."""
    return self._error

  def begin(self, operation: Operation, agreement: OperationSpec,
            ranks: tuple[Id, ...]) -> None:
    """Starts an operation: its blocks may arrive from now on.

    Args:
      operation: Operation. No operation in progress has the same tag.
      agreement: Description of the operation, which must be equal on all peers.
      ranks: Participating peers.

    Raises:
      LinksLost: The links have ended.
      ValueError: Another operation in progress has the same tag.
    """
    with self._lock:
      if self._error is not None:
        error = self._error
        raise LinksLost(error.peer, error.reason, operation.tag)
      if operation.tag in self._operations:
        raise ValueError(
          f"operation {operation.tag} is already in progress; use another tag"
        )
      # From here on, blocks of the operation are accepted.
      self._operations[operation.tag] = operation
      others = [p for p in ranks if p != self.me]
      # OPEN frames of peers that were faster than this one. A further OPEN of
      # such a peer with this tag belongs to the next operation with the tag.
      early = {
        peer: self._unopened.pop((operation.tag, peer))
        for peer in others if (operation.tag, peer) in self._unopened
      }
      operation.opened_by |= early
    for peer in others:
      # The offset field of an OPEN carries the size of this peer's input.
      header = Header(Kind.OPEN, tag=operation.tag, offset=agreement.size)
      try:
        self._say(peer, header, agreement.digest)
      except OSError as error:
        self._handle_broken(peer, error)
        raise LinksLost(peer, str(error), operation.tag) from error
    with self._lock:
      operation.opened_by[self.me] = early[self.me] = agreement
    for peer, word in early.items():
      try:
        operation.opened(peer, word)
      except FrameError as error:
        self.fail(LinksLost(peer, str(error)))

  def send(
    self, operation: Operation, peer: Id, slot: int, offset: int, block: Any
  ) -> None:
    """Queues a block for a peer that has opened the operation.

    The peer receives it at ``offset`` bytes in its buffer number ``slot``.
    """
    header = Header(Kind.DATA, tag=operation.tag, slot=slot, offset=offset)
    self._queues[peer].put((operation, header, block))

  def end(self, operation: Operation, sent: ByteCounts, received: ByteCounts,
          well: bool) -> None:
    """Removes an operation that ended ``well`` or failed.

    Its bytes ``sent`` and ``received`` are counted.
    """
    with self._lock:
      # A failed operation was removed before; its tag may be in use again.
      if self._operations.get(operation.tag) is operation:
        del self._operations[operation.tag]
      there = self.traffic
      for total, part in (
        (there.sent if well else there.aborted_sent, sent),
        (there.received if well else there.aborted_received, received),
      ):
        total.add(part.payload, part.framing)

  def borrow_buffer(self, size: int) -> np.ndarray:
    """Returns uninitialized float32 ``[size / 4]``, reused if possible.

    Reuse avoids the page faults of newly allocated memory.
    """
    with self._lock:
      free = self._free.get(size)
      if free:
        return free.pop()  # float32 [size / 4]
    return np.empty(size // 4, np.float32)

  def return_buffer(self, memory: np.ndarray) -> None:
    """Keeps memory of `borrow_buffer` for the next operation of equal size."""
    if memory.size:
      with self._lock:
        self._free.setdefault(memory.nbytes, []).append(memory.reshape(-1))

  def received_bytes(self, peers: Collection[Id] | None = None) -> int:
    """Returns the bytes that the kernel received on data connections.

    Handshakes are excluded; TLS overhead is included.

    Args:
      peers: Senders whose bytes are counted; all if None.
    """
    with self._lock:
      socks = [
        s for (peer, connection), s in self._inward.items()
        if connection != _CONTROL and (peers is None or peer in peers)
      ]
    # tcpi_bytes_received in struct tcp_info of linux/tcp.h, at offset 128.
    received = (
      struct.unpack_from(
        "=Q", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 128
      )[0]
      for s in socks
    )
    return sum(received) - HANDSHAKE_BYTES * len(socks)

  def _start(self, target: Any, *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()

  def _dial(self, peer: Id, limit_s: float, missing: dict[Id, str]) -> None:
    """Opens all connections to a peer; adds an error to ``missing``."""
    try:
      for connection in range(self.options.num_connections + 1):
        sock = dial(
          # The time limit applies to each connection.
          self._addresses[peer],
          DialRequest(Purpose.DATA, connection, self.epoch, self.me, peer),
          self._security, self._scope, limit_s,
        )
        self._outward.append((peer, sock))
        if connection == _CONTROL:
          # Control frames are short, so a send that blocks means a lost peer.
          sock.settimeout(self.options.silence_s)
          self._control[peer] = sock
          if self._scope.closed.is_set():  # `_keep_alive` may have ended
            self._scope.end(sock)
          self._say(
            peer, Header(Kind.KEEP_ALIVE, slot=self.options.num_connections)
          )
        else:
          # Blocks may take long, so only unacknowledged data ends a connection.
          set_socket_options(
            sock, self.options.silence_s, self.options.send_buffer
          )
          self._start(self._send, peer, sock)
    except OSError as error:
      missing[peer] = str(error)

  def _say(
    self, peer: Id, header: Header, payload: bytes = b"",
    limit_s: float | None = None,
  ) -> None:
    """Sends a short frame on the control connection."""
    if not self._speaking[peer].acquire(
      timeout=limit_s or self.options.silence_s
    ):
      raise TimeoutError("the control connection is blocked")
    try:
      # They always have checksums, since they determine the sizes of buffers.
      size = frames.send(
        self._control[peer], header, payload, checked=True
      )
      self.traffic.control += size
    finally:
      self._speaking[peer].release()

  def _keep_alive(self) -> None:
    """Sends keep-alives and checks all outgoing connections for errors.

    The check detects a broken connection after the last block was sent, when no
    further send would fail.
    """
    while not self._scope.closed.wait(self.options.silence_s / 4):
      for peer, sock in list(self._outward):
        try:
          # A pending error, e.g. after TCP_USER_TIMEOUT.
          broken = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
          if broken:
            raise OSError(broken, os.strerror(broken))
          if sock is self._control.get(peer):
            self._say(peer, Header(Kind.KEEP_ALIVE))
        except OSError as error:
          self._handle_broken(peer, error)
    for sock in list(self._control.values()):
      self._scope.end(sock)

  def _send(self, peer: Id, sock: socket.socket) -> None:
    """Sends the blocks of a peer's queue over one of its data connections."""
    waiting = self._queues[peer]
    try:
      while (item := waiting.get()) is not None:
        # `frames.send` sets the length and the checksum of the header.
        operation, header, block = item
        frames.send(sock, header, block, checked=self.options.checked)
        operation.sent(header, len(block))
    except OSError as error:
      self._handle_broken(peer, error)
    finally:
      self._scope.end(sock)

  def _receive(self, sock: socket.socket, request: DialRequest) -> None:
    """Receives from a connection until it ends, in a thread of the listener."""
    peer, connection = request.sender, request.connection
    with self._changed:
      if (
        # Reject connections to ended links, with invalid numbers, or
        # duplicates.
        self._error is not None or connection > MAX_CONNECTIONS
        or (peer, connection) in self._inward
      ):
        return
      self._inward[peer, connection] = sock
      self._changed.notify_all()
    try:
      if connection == _CONTROL:
        sock.settimeout(self.options.silence_s)
        self._receive_control(peer, sock)
      else:
        self._receive_blocks(peer, sock)
    except FrameError as error:
      self.fail(LinksLost(peer, f"sent invalid data: {error}"))
    except TimeoutError:
      self.fail(LinksLost(peer, f"silent for {self.options.silence_s:g} s"))
    except OSError as error:
      if connection == _CONTROL:
        # From now on, no ABORT can arrive from this peer.
        self._ended[peer].set()
      self._handle_broken(peer, error)
    finally:
      shut(sock)

  def _handle_broken(self, peer: Id, error: OSError) -> None:
    """Ends the links after a connection has broken.

    If the other side closed its connections because it lost a third peer, its
    ABORT on the control connection names that peer, and may be read slightly
    later than the error.
    """
    if isinstance(error, Cancelled):
      return
    self._ended[peer].wait(0.5)
    self.fail(LinksLost(peer, str(error) or type(error).__name__))

  def _receive_control(self, peer: Id, sock: socket.socket) -> None:
    """Processes the frames of a peer's control connection."""
    kinds = (Kind.KEEP_ALIVE, Kind.OPEN, Kind.ABORT)
    while True:
      header, payload = frames.read(sock, kinds)
      if header.kind is Kind.ABORT:
        # Untrusted: a short payload counts as length 0.
        (length,) = struct.unpack_from("!H", payload.ljust(2, b"\0"))
        culprit = payload[2 : 2 + length].decode(errors="replace")
        reason = frames.to_printable(
          payload[2 + length :].decode(errors="replace")
        )
        # This peer lives, so the connection to the sender is the problem.
        if culprit not in self.members or culprit == self.me:
          culprit, reason = peer, f"reports {culprit}: {reason}"
        self.fail(LinksLost(culprit, reason))
        return
      if header.kind is Kind.KEEP_ALIVE and header.slot:
        with self._changed:
          self._announced[peer] = min(header.slot, MAX_CONNECTIONS)
          self._changed.notify_all()
      if header.kind is Kind.OPEN:
        self._opened(
          peer, header.tag, OperationSpec(bytes(payload), header.offset)
        )

  def _opened(self, peer: Id, tag: int, agreement: OperationSpec) -> None:
    """Processes an OPEN, or keeps it until the operation starts here."""
    with self._lock:
      operation = self._operations.get(tag)
      if operation is None or peer in operation.opened_by:
        # This peer has not started the operation, or it is the tag's next one.
        if (tag, peer) in self._unopened:
          raise FrameError(f"operation {tag} was opened twice by the peer")
        if len(self._unopened) >= _MAX_UNOPENED:
          raise FrameError(
            f"the peer opened {_MAX_UNOPENED} operations that are not started "
            "here; no more are allowed"
          )
        self._unopened[tag, peer] = agreement
        return
      operation.opened_by[peer] = agreement
    operation.opened(peer, agreement)

  def _receive_blocks(self, peer: Id, sock: socket.socket) -> None:
    """Receives blocks of a data connection into their operations' buffers."""
    scratch = memoryview(bytearray())  # grows to the largest block
    while True:
      header = frames.read_header(sock)
      if header.kind is not Kind.DATA:
        raise FrameError(
          f"a data connection must not carry a frame of kind {header.kind.name}"
        )
      with self._lock:
        # It is open, since the sender waits for this peer's OPEN.
        operation = self._operations.get(header.tag)
        error = self._error
      if error is not None:
        return
      if operation is None:
        raise FrameError(
          f"a block was received for operation {header.tag}, which is not open "
          "here"
        )
      if header.length > len(scratch):
        scratch = memoryview(bytearray(header.length))
      # `place` validates slot, offset and length before a byte is written.
      block = operation.place(peer, header, scratch)
      try:
        frames.read_into(sock, block)  # no copy
        frames.check(header, block)
      except (OSError, FrameError):
        operation.missed()
        raise
      operation.arrived(peer, header, block)
