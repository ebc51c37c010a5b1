"""What a peer and its coordinator talk over: messages both ways on a socket.

One thread reads and writes, since a TLS connection bears no two. It says all
the time that this side is there. Messages to send wait in a queue with a limit:
who does not read loses the connection, and holds nobody else up.
"""

import collections
from collections.abc import Callable, Sequence
import contextlib
import os
import selectors
import socket
import threading
import time
from typing import Any

from parallel.elastic.transport import frames
from parallel.elastic.transport.frames import (
  HEADER_BYTES,
  FrameError,
  Header,
  Kind,
)
from parallel.elastic.transport.handshake import shut

# A peer is told a few messages in a round. One that leaves so many is stuck.
_MOST_WAITING = 256
_PIECE = 1 << 16


class Channel:
  """A connection that carries messages.

  Attributes:
    heard: The `time.monotonic` of the last frame that came.
    reason: Why it was closed here; "" if it was not.
  """

  def __init__(
    self, sock: socket.socket, kinds: Sequence[type], silence_s: float,
    ends_silent: bool = False,
  ) -> None:
    """Takes a connection whose handshake is done.

    Args:
      sock: The connection.
      kinds: Classes of messages that are taken.
      silence_s: Seconds in which the other side must take what is sent.
      ends_silent: Whether it ends when nothing has come for so long, too. The
        connection may be half-open: what this side says arrives, and nothing
        comes back.
    """
    self._sock, self._kinds, self.silence_s = sock, kinds, silence_s
    self._ends_silent = ends_silent
    self._lock = threading.Lock()
    self._waiting: collections.deque[bytes] = collections.deque()
    self._bell, self._ringer = os.pipe()
    os.set_blocking(self._ringer, False)
    self._open = True
    self._ended = threading.Event()
    self._said = self.heard = time.monotonic()
    self.reason = ""

  def send(self, message: Any) -> None:
    """Sends a message, later; nothing if the connection has ended."""
    data = frames.encode(message)
    with self._lock:
      if not self._open:
        return
      self._waiting.append(data)
      full = len(self._waiting) > _MOST_WAITING
      self._ring()
    if full:
      self.close("does not read what it is told")

  def close(self, reason: str) -> None:
    """Ends the connection at once, from any thread."""
    self.reason = self.reason or reason
    shut(self._sock)

  def finish(self, limit_s: float) -> None:
    """Waits until the other side has closed it, then closes it here."""
    self._ended.wait(limit_s)
    self.close("done")

  def run(self, take: Callable[[Any], None]) -> None:
    """Sends and receives until the connection ends.

    Args:
      take: Is called with each message. While it does not return, nothing more
        is read, and the other side has to wait.

    Raises:
      OSError: The connection has ended.
      FrameError: The other side sends what is not right.
    """
    received = bytearray()
    try:
      with selectors.DefaultSelector() as selector:
        selector.register(self._sock, selectors.EVENT_READ)
        selector.register(self._bell, selectors.EVENT_READ, "bell")
        while True:
          self._flush()
          for key, _ in selector.select(self.silence_s / 8):
            if key.data == "bell":
              os.read(self._bell, _PIECE)
          while self._receive(received):
            self._read(received, take)
          silent_s = time.monotonic() - self.heard
          if self._ends_silent and silent_s > self.silence_s:
            raise TimeoutError(f"silent for {self.silence_s:g} s")
    finally:
      with self._lock:
        self._open = False
        os.close(self._bell)
        os.close(self._ringer)
      self._ended.set()

  def _ring(self) -> None:
    """Wakes the thread; with the lock held, while the pipe is there."""
    with contextlib.suppress(BlockingIOError):  # it has rung often enough
      os.write(self._ringer, b".")

  def _flush(self) -> None:
    """Sends what waits, and a sign of life if there was none for long."""
    self._sock.settimeout(self.silence_s)
    while True:
      with self._lock:
        if not self._waiting:
          break
        data = self._waiting.popleft()
      frames.send(self._sock, Header(Kind.MESSAGE), data, checked=True)
      self._said = time.monotonic()
    if time.monotonic() - self._said >= self.silence_s / 8:
      frames.send(self._sock, Header(Kind.KEEP_ALIVE))
      self._said = time.monotonic()

  def _receive(self, received: bytearray) -> bool:
    """Takes bytes that are there; returns whether there were any."""
    # Without waiting: a TLS record need not hold anything for us.
    self._sock.settimeout(0)
    try:
      data = self._sock.recv(_PIECE)
    except OSError as error:
      if isinstance(error, BlockingIOError) or type(error).__name__ in (
        "SSLWantReadError", "SSLWantWriteError"
      ):
        return False
      raise
    if not data:
      raise ConnectionResetError("the connection was closed")
    received += data
    return True

  def _read(self, received: bytearray, take: Callable[[Any], None]) -> None:
    """Takes whole frames from what was received."""
    while len(received) >= HEADER_BYTES:
      header = frames.unpack(received[:HEADER_BYTES])
      if header.kind not in (Kind.MESSAGE, Kind.KEEP_ALIVE):
        raise FrameError(f"a frame of kind {header.kind.name} is not for here")
      end = HEADER_BYTES + header.length
      if len(received) < end:
        return
      payload = bytes(received[HEADER_BYTES:end])
      del received[:end]
      frames.check(header, payload)
      self.heard = time.monotonic()
      if header.kind is Kind.MESSAGE:
        take(frames.decode(payload, self._kinds))
