"""Message channel between a peer and its coordinator over one socket.

One thread reads and writes, since TLS does not support two. It sends keep-alive
frames when there is no message. Outgoing messages wait in a bounded queue: a
receiver that does not read loses its connection, and does not delay other
receivers.
"""

import collections
from collections.abc import Callable, Sequence
import contextlib
import fcntl
import os
import selectors
import socket
import ssl
import termios
import threading
import time
from typing import Any

from parallel.peers.transport import frames
from parallel.peers.transport.frames import (
  HEADER_BYTES,
  FrameError,
  Header,
  Kind,
)
from parallel.peers.transport.handshake import shut

# A peer receives a few messages per round, so a queue of this length means
# that it does not read.
_MAX_WAITING = 256
_RECV_BYTES = 1 << 16  # bytes per recv


class Channel:
  """Connection that carries messages in both directions.

  Attributes:
    last_received: `time.monotonic()` of the last received frame.
    reason: Reason for which this side closed the connection; "" if it did not.
    silence_s: Timeout in seconds of sends, and of receives if ``ends_silent``.
    sent_bytes: Bytes of sent frames, without the overhead of TLS.
    received_bytes: Bytes of received frames, without the overhead of TLS.
  """

  def __init__(
    self, sock: socket.socket, kinds: Sequence[type], silence_s: float,
    ends_silent: bool = False, max_waiting: int = _MAX_WAITING,
  ) -> None:
    """Wraps a connection after its handshake.

    Args:
      sock: Connected socket.
      kinds: Accepted classes of messages.
      silence_s: Seconds within which the other side must accept sent data.
      ends_silent: Whether the connection also ends if nothing was received for
        ``silence_s``. This detects half-open connections, on which sent data
        arrives but nothing comes back.
      max_waiting: Maximum number of queued messages.
    """
    self._sock, self._kinds, self.silence_s = sock, kinds, silence_s
    self._ends_silent, self._max_waiting = ends_silent, max_waiting
    self.sent_bytes = self.received_bytes = 0
    self._lock = threading.Lock()
    self._waiting: collections.deque[bytes] = collections.deque()
    # A pipe wakes the thread that waits in `select`.
    self._bell, self._ringer = os.pipe()
    os.set_blocking(self._ringer, False)
    self._open = True
    self._ended = threading.Event()
    # Times of the last sent and of the last received frame.
    self._said = self.last_received = time.monotonic()
    self.reason = ""

  def send(self, message: Any) -> None:
    """Queues a message; has no effect after the connection has ended."""
    data = frames.encode(message)
    with self._lock:
      if not self._open:
        return
      self._waiting.append(data)
      full = len(self._waiting) > self._max_waiting
      self._wake()
    if full:
      self.close("does not read its messages")

  @property
  def sends(self) -> bool:
    """Whether messages are queued, or sent bytes are not acknowledged."""
    try:
      left = fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # closed
      return False
    return bool(self._waiting) or any(left)

  def close(self, reason: str) -> None:
    """Ends the connection immediately; thread-safe."""
    self.reason = self.reason or reason
    shut(self._sock)

  def finish(self, limit_s: float) -> None:
    """Waits until the other side closes the connection, then closes it."""
    self._ended.wait(limit_s)
    self.close("done")

  def run(self, take: Callable[[Any], None]) -> None:
    """Sends and receives until the connection ends.

    Args:
      take: Callback that receives each message. Reading pauses until it
        returns, which slows the other side down.

    Raises:
      OSError: The connection has ended.
      FrameError: The other side sent an invalid frame or message.
    """
    received = bytearray()
    try:
      with selectors.DefaultSelector() as selector:
        selector.register(self._sock, selectors.EVENT_READ)
        selector.register(self._bell, selectors.EVENT_READ, "bell")
        while True:
          more = self._send_next()
          # Wakes at least eight times per timeout, for keep-alives.
          for key, _ in selector.select(0 if more else self.silence_s / 8):
            if key.data == "bell":
              # Empty the pipe; the queue has the messages.
              os.read(self._bell, _RECV_BYTES)
          # TLS may have buffered data that `select` does not report.
          while self._receive(received):
            self._process_frames(received, take)
          silent_s = time.monotonic() - self.last_received
          if self._ends_silent and silent_s > self.silence_s:
            raise TimeoutError(f"silent for {self.silence_s:g} s")
    finally:
      with self._lock:
        self._open = False
        # Under the lock, since `send` writes to the pipe.
        os.close(self._bell)
        os.close(self._ringer)
      self._ended.set()

  def _wake(self) -> None:
    """Wakes the thread; the caller holds the lock and the pipe is open."""
    with contextlib.suppress(BlockingIOError):  # a full pipe wakes it, too
      os.write(self._ringer, b".")

  def _send_next(self) -> bool:
    """Sends one queued message, or a keep-alive if nothing was sent recently.

    It sends only one message per call, since both sides may send more than the
    sockets' buffers hold, and each can continue only if the other receives.

    Returns:
      Whether more messages are queued.
    """
    self._sock.settimeout(self.silence_s)
    with self._lock:
      data = self._waiting.popleft() if self._waiting else None
      more = bool(self._waiting)
    if data is not None:
      # Blocks for at most silence_s; then the connection ends.
      self.sent_bytes += frames.send(
        self._sock, Header(Kind.MESSAGE), data, checked=True
      )
      self._said = time.monotonic()
    elif time.monotonic() - self._said >= self.silence_s / 8:
      # Eight keep-alives per timeout, so a lost one does not end a connection.
      self.sent_bytes += frames.send(self._sock, Header(Kind.KEEP_ALIVE))
      self._said = time.monotonic()
    return more

  def _receive(self, received: bytearray) -> bool:
    """Receives available bytes; returns whether there were any."""
    # It must not block: a readable TLS socket may hold no application data.
    self._sock.settimeout(0)
    try:
      data = self._sock.recv(_RECV_BYTES)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
      return False
    if not data:
      raise ConnectionResetError("the connection was closed")
    received += data
    self.received_bytes += len(data)
    return True

  def _process_frames(
    self, received: bytearray, take: Callable[[Any], None]
  ) -> None:
    """Processes the complete frames of a buffer and removes them from it."""
    while len(received) >= HEADER_BYTES:
      header = frames.unpack(received[:HEADER_BYTES])
      if header.kind not in (Kind.MESSAGE, Kind.KEEP_ALIVE):
        raise FrameError(
          f"a frame of kind {header.kind.name} is not expected here: it must "
          "be a message"
        )
      # `unpack` has compared the length with its limit.
      end = HEADER_BYTES + header.length
      if len(received) < end:
        return
      payload = bytes(received[HEADER_BYTES:end])
      del received[:end]
      frames.check(header, payload)
      self.last_received = time.monotonic()
      if header.kind is Kind.MESSAGE:
        take(frames.decode(payload, self._kinds))
