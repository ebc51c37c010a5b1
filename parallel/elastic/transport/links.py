"""The links of an epoch: every member's connections to every other.

From each peer to each other one go a control lane and some data lanes, all of
them dialled by who sends. Lanes of a link take blocks from one queue, so a slow
lane takes fewer. A thread per lane sends, and one receives: into the buffer
that the operation names, without a copy.

Nobody sends a block before its receiver has said OPEN for the operation, on the
control lane. So no block comes that there is no buffer for, and an operation
that one peer has not begun blocks no other.

A link that fails ends all links of the epoch, here and at the others: who
notices says ABORT with the name of the lost peer, and shuts its sockets down.
Every attempt after a failure is in a new epoch, so no block of one can reach
another. A peer is lost when a connection breaks, or when its control lane is
silent for a time; it is never lost because an operation takes long.
"""

from collections.abc import Mapping
import contextlib
import os
import queue
import socket
import struct
import threading
from typing import Any

import numpy as np

from parallel.elastic.membership.messages import Id
from parallel.elastic.settings import Options
from parallel.elastic.transport import frames
from parallel.elastic.transport.frames import FrameError, Header, Kind
from parallel.elastic.transport.handshake import (
  HANDSHAKE_BYTES,
  Address,
  Cancelled,
  Purpose,
  Request,
  Scope,
  Security,
  dial,
  prepared,
  shut,
)
from parallel.elastic.transport.listener import Listener, Offer
from parallel.elastic.transport.transfers import (
  Agreement,
  Bytes,
  Lost,
  Operation,
  Traffic,
  Unreachable,
)

_CONTROL = 0  # the lane
# Operations that a peer may have opened and this one has not.
_MOST_UNOPENED = 4096
_OPTIONS = Options()


class Links:
  """The connections of one epoch.

  Attributes:
    me: This peer.
    members: All peers of the epoch, in the order of their ranks.
    epoch: Its number.
    traffic: What has been carried.
  """

  def __init__(
    self, me: Id, epoch: int, members: Mapping[Id, Address],
    security: Security, options: Options = _OPTIONS,
  ) -> None:
    if me not in members:
      raise ValueError(f"{me} is no member: {', '.join(members)}")
    self.me, self.epoch, self.members = me, epoch, tuple(members)
    self.traffic, self.options = Traffic(), options
    self._addresses = {p: a for p, a in members.items() if p != me}
    self._security, self._scope = security, Scope()
    self._lock = threading.Lock()
    self._changed = threading.Condition(self._lock)
    self._inward: dict[tuple[Id, int], socket.socket] = {}
    self._control: dict[Id, socket.socket] = {}
    self._outward: list[tuple[Id, socket.socket]] = []  # all lanes
    self._speaking = {p: threading.Lock() for p in self._addresses}
    self._ended = {p: threading.Event() for p in self._addresses}
    self._queues: dict[Id, queue.SimpleQueue] = {
      p: queue.SimpleQueue() for p in self._addresses
    }
    self._operations: dict[int, Operation] = {}
    self._unopened: dict[tuple[int, Id], Agreement] = {}
    self._error: Lost | None = None
    self._free: dict[int, list[np.ndarray]] = {}

  def connect(self, listener: Listener, limit_s: float) -> "Links":
    """Connects to all other members, who do the same.

    Args:
      listener: Where the others connect to.
      limit_s: Seconds after which this gives up.

    Raises:
      Unreachable: Some members could not be reached, or did not come.
      Lost: The links were closed meanwhile, or a peer was lost again.
    """
    self._start(self._keep_alive)
    offer = Offer(self.epoch, frozenset(self._addresses), self._receive)
    listener.serve(Purpose.LANE, offer)
    missing: dict[Id, str] = {}
    dialling = [
      threading.Thread(target=self._dial, args=(p, limit_s, missing))
      for p in self._addresses
    ]
    for thread in dialling:
      thread.start()
    for thread in dialling:
      thread.join()
    wanted = {
      (p, k) for p in self._addresses for k in range(self.options.lanes + 1)
    }
    with self._changed:
      self._changed.wait_for(
        lambda: self._error or missing or wanted <= self._inward.keys(),
        limit_s,
      )
      error = self._error
      for peer, _ in wanted - self._inward.keys():
        missing.setdefault(peer, f"did not connect within {limit_s:g} s")
    if error is not None:
      raise error
    if missing:
      self.close("could not connect to all members")
      raise Unreachable(missing)
    return self

  def __enter__(self) -> "Links":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self, reason: str = "closed its links") -> None:
    """Ends everything at once; operations under way fail, here and there."""
    self.fail(Lost(None, reason))

  def fail(self, error: Lost) -> None:
    """Ends all links for a reason; the first one counts."""
    with self._changed:
      if self._error is not None:
        return
      self._error = error
      operations = list(self._operations.values())
      self._operations.clear()
      self._changed.notify_all()
    for event in self._ended.values():
      event.set()
    culprit = (error.peer or self.me).encode()
    word = struct.pack("!H", len(culprit)) + culprit
    word += error.reason.encode()[:512]
    for peer in list(self._control):
      with contextlib.suppress(OSError):
        self._say(peer, Header(Kind.ABORT), word, limit_s=0.2)
    self._scope.close()
    with self._lock:
      for sock in self._inward.values():
        shut(sock)
    for waiting in self._queues.values():
      for _ in range(self.options.lanes):
        waiting.put(None)
    for operation in operations:
      operation.failed(Lost(error.peer, error.reason, operation.tag))

  def begin(self, operation: Operation, agreement: Agreement,
            ranks: tuple[Id, ...]) -> None:
    """Takes part in an operation: its blocks may come from now on.

    Args:
      operation: The operation, whose tag is used by no other one under way.
      agreement: What it is.
      ranks: The peers of it.

    Raises:
      Lost: The links have ended.
    """
    with self._lock:
      if self._error is not None:
        error = self._error
        raise Lost(error.peer, error.reason, operation.tag)
      if operation.tag in self._operations:
        raise ValueError(f"operation {operation.tag} is under way")
      self._operations[operation.tag] = operation
      others = [p for p in ranks if p != self.me]
      # A peer's next word with this tag is of the tag's next use.
      early = {
        peer: self._unopened.pop((operation.tag, peer))
        for peer in others if (operation.tag, peer) in self._unopened
      }
      operation.heard.update(early)
    for peer in others:
      header = Header(Kind.OPEN, tag=operation.tag, offset=agreement.size)
      try:
        self._say(peer, header, agreement.digest)
      except OSError as error:
        self._broke(peer, error)
        raise Lost(peer, str(error), operation.tag) from error
    for peer, word in early.items():
      try:
        operation.opened(peer, word)
      except FrameError as error:
        self.fail(Lost(peer, str(error)))

  def send(
    self, operation: Operation, peer: Id, slot: int, offset: int, block: Any
  ) -> None:
    """Sends a block to a peer that has opened the operation, later."""
    header = Header(Kind.DATA, tag=operation.tag, slot=slot, offset=offset)
    self._queues[peer].put((operation, header, block))

  def end(self, operation: Operation, sent: Bytes, received: Bytes,
          well: bool) -> None:
    """Books an operation, which is over here."""
    with self._lock:
      if self._operations.get(operation.tag) is operation:
        del self._operations[operation.tag]
      there = self.traffic
      for total, part in (
        (there.sent if well else there.aborted_sent, sent),
        (there.received if well else there.aborted_received, received),
      ):
        total.add(part.payload, part.framing)

  def borrow(self, size: int) -> np.ndarray:
    """Returns float32 ``[size / 4]`` of memory that may have been used before.

    The kernel takes its time to give pages that are new.
    """
    with self._lock:
      free = self._free.get(size)
      if free:
        return free.pop()
    return np.empty(size // 4, np.float32)

  def give_back(self, memory: np.ndarray) -> None:
    """Keeps memory for the next operation of this size, while links last."""
    if memory.size:
      with self._lock:
        self._free.setdefault(memory.nbytes, []).append(memory.reshape(-1))

  def socket_bytes(self) -> int:
    """Returns what the kernel has received on data lanes, after handshakes.

    TLS is not taken off.
    """
    with self._lock:
      socks = [s for (_, lane), s in self._inward.items() if lane != _CONTROL]
    # tcpi_bytes_received of linux/tcp.h.
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
    """Makes all lanes to a peer."""
    try:
      for lane in range(self.options.lanes + 1):
        sock = dial(
          self._addresses[peer],
          Request(Purpose.LANE, lane, self.epoch, self.me, peer),
          self._security, self._scope, limit_s,
        )
        self._outward.append((peer, sock))
        if lane == _CONTROL:
          # What is said there is short: a send that blocks is a lost peer.
          sock.settimeout(self.options.silence_s)
          self._control[peer] = sock
        else:
          prepared(sock, self.options.silence_s, self.options.send_buffer)
          self._start(self._send, peer, sock)
    except OSError as error:
      missing[peer] = str(error)

  def _say(
    self, peer: Id, header: Header, payload: bytes = b"",
    limit_s: float | None = None,
  ) -> None:
    """Sends a short frame on the control lane."""
    if not self._speaking[peer].acquire(
      timeout=limit_s or self.options.silence_s
    ):
      raise TimeoutError("the control lane is full")
    try:
      size = frames.send(
        self._control[peer], header, payload, checked=True
      )
      self.traffic.control += size
    finally:
      self._speaking[peer].release()

  def _keep_alive(self) -> None:
    """Says all the time that this peer is there, and looks at all lanes.

    Who has sent the last block would not see that it does not arrive.
    """
    while not self._scope.closed.wait(self.options.silence_s / 4):
      for peer, sock in list(self._outward):
        try:
          broken = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
          if broken:
            raise OSError(broken, os.strerror(broken))
          if sock is self._control.get(peer):
            self._say(peer, Header(Kind.KEEP_ALIVE))
        except OSError as error:
          self._broke(peer, error)
    for sock in list(self._control.values()):
      self._scope.end(sock)

  def _send(self, peer: Id, sock: socket.socket) -> None:
    """A data lane's thread: sends what is in the peer's queue."""
    waiting = self._queues[peer]
    try:
      while (item := waiting.get()) is not None:
        operation, header, block = item
        frames.send(sock, header, block, checked=self.options.checked)
        operation.sent(header, len(block))
    except OSError as error:
      self._broke(peer, error)
    finally:
      self._scope.end(sock)

  def _receive(self, sock: socket.socket, request: Request) -> None:
    """A lane's thread, as the listener runs it."""
    peer, lane = request.sender, request.lane
    with self._changed:
      if (
        self._error is not None or lane > self.options.lanes
        or (peer, lane) in self._inward
      ):
        return
      self._inward[peer, lane] = sock
      self._changed.notify_all()
    try:
      if lane == _CONTROL:
        sock.settimeout(self.options.silence_s)
        self._listen(peer, sock)
      else:
        self._take_blocks(peer, sock)
    except FrameError as error:
      self.fail(Lost(peer, f"sends what is not right: {error}"))
    except TimeoutError:
      self.fail(Lost(peer, f"silent for {self.options.silence_s:g} s"))
    except OSError as error:
      if lane == _CONTROL:
        self._ended[peer].set()
      self._broke(peer, error)
    finally:
      shut(sock)

  def _broke(self, peer: Id, error: OSError) -> None:
    """A connection has broken: names who is to blame.

    If the other side has closed its connections because of a third peer, it
    has said so on its control lane, which may be read a little later.
    """
    if isinstance(error, Cancelled):
      return
    self._ended[peer].wait(0.5)
    self.fail(Lost(peer, str(error) or type(error).__name__))

  def _listen(self, peer: Id, sock: socket.socket) -> None:
    """Takes what a peer says on its control lane."""
    kinds = (Kind.KEEP_ALIVE, Kind.OPEN, Kind.ABORT)
    while True:
      header, payload = frames.read(sock, kinds)
      if header.kind is Kind.ABORT:
        (length,) = struct.unpack_from("!H", payload.ljust(2, b"\0"))
        culprit = payload[2 : 2 + length].decode(errors="replace")
        reason = payload[2 + length :].decode(errors="replace")
        if culprit not in self.members or culprit == self.me:
          culprit, reason = peer, f"says of {culprit}: {reason}"
        self.fail(Lost(culprit, reason))
        return
      if header.kind is Kind.OPEN:
        self._opened(peer, header.tag, Agreement(bytes(payload), header.offset))

  def _opened(self, peer: Id, tag: int, agreement: Agreement) -> None:
    with self._lock:
      operation = self._operations.get(tag)
      if operation is None or peer in operation.heard:
        # Not begun here, or the tag's next use, which is not begun here.
        if (tag, peer) in self._unopened:
          raise FrameError(f"operation {tag} is opened twice")
        if len(self._unopened) >= _MOST_UNOPENED:
          raise FrameError(f"{_MOST_UNOPENED} operations wait to be begun")
        self._unopened[tag, peer] = agreement
        return
      operation.heard.add(peer)
    operation.opened(peer, agreement)

  def _take_blocks(self, peer: Id, sock: socket.socket) -> None:
    """Receives blocks where their operations want them."""
    scratch = memoryview(bytearray())
    while True:
      header = frames.read_header(sock)
      if header.kind is not Kind.DATA:
        raise FrameError(f"a frame of kind {header.kind.name} on a data lane")
      with self._lock:
        operation = self._operations.get(header.tag)
        error = self._error
      if error is not None:
        return
      if operation is None:
        raise FrameError(f"a block of operation {header.tag}, not opened here")
      if header.length > len(scratch):
        scratch = memoryview(bytearray(header.length))
      block = operation.place(peer, header, scratch)
      try:
        frames.read_into(sock, block)
        frames.check(header, block)
      except (OSError, FrameError):
        operation.missed()
        raise
      operation.arrived(peer, header, block)
