"""TCP relay with the rates and delays of links, for users without root.

Each client connects to a port of its own, and the relay forwards all clients to
one address. Bytes pass a token bucket, which the clients of a radio cell share,
and wait in a queue until they are due. Unlike with `namespaces.star`, a TCP
connection ends at the relay: its slow start sees only the round trip inside
this machine, and losses are emulated by a lower rate of the connection
(`parallel.plans.network.fluid.loss_limit`).
"""

from collections.abc import Sequence
import contextlib
import queue
import socket
import threading
import time
from typing import Any, Self

from parallel.peers.emulation.wire import Delays
from parallel.peers.transport.handshake import Address
from parallel.plans.hardware.client_links import Link
from parallel.plans.network import fluid

_BURST_S = 0.005  # burst size / rate; makes up for threads that wake up late
_PIECE_S, _MIN_PIECE, _MAX_PIECE = 0.002, 256, 1 << 16
_MAX_WAITING = 4096  # blocks read and not yet sent, per direction


class TokenBucket:
  """Token bucket: a limit in bytes per second that several threads share."""

  def __init__(self, rate: float) -> None:
    self._rate, self._lock = rate, threading.Lock()
    self._free = time.monotonic()

  @property
  def piece(self) -> int:
    """Largest number of bytes that may pass at once, in one call of `wait`."""
    return int(min(max(self._rate * _PIECE_S, _MIN_PIECE), _MAX_PIECE))

  def wait(self, num_bytes: int) -> None:
    """Blocks until `num_bytes` more bytes may pass."""
    with self._lock:
      earliest = time.monotonic() - _BURST_S
      self._free = max(self._free, earliest) + num_bytes / self._rate
      wait_s = self._free - time.monotonic()
    if wait_s > 0:
      time.sleep(wait_s)


class Relay:
  """Relay between clients and a server on this machine.

  Attributes:
    addresses: (host, port) that each client connects to.
  """

  def __init__(
    self, target: Address, links: Sequence[Link],
    cells: dict[tuple[str, str], TokenBucket] | None = None,
  ) -> None:
    """Listens on one port for each client.

    Args:
      target: Address of the server.
      links: Link of each client. Shared links with equal names are one cell.
      cells: (direction, link name) -> bucket. The relays of several servers
        share the buckets of this dict; None for new ones.
    """
    self._target = target
    self._sockets: set[socket.socket] = set()
    self._lock = threading.Lock()
    self._open = True
    cells = {} if cells is None else cells
    self.addresses: list[Address] = []
    for k, link in enumerate(links):
      buckets = {
        way: cells.setdefault(
          (way, link.name if link.shared else f"client {k}"),
          TokenBucket(getattr(link, way)),
        ) for way in ("down", "up")
      }
      server = socket.create_server(("127.0.0.1", 0))
      self._sockets.add(server)
      self.addresses.append(server.getsockname()[:2])
      threading.Thread(
        target=self._accept, args=(server, k, link, buckets), daemon=True
      ).start()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: Any) -> None:
    with self._lock:
      self._open = False
      for sock in self._sockets:
        _close(sock)

  def _add(self, sock: socket.socket) -> None:
    """Registers a socket, which `__exit__` closes."""
    with self._lock:
      self._sockets.add(sock)
      if not self._open:
        _close(sock)

  def _accept(
    self, server: socket.socket, client: int, link: Link,
    buckets: dict[str, TokenBucket],
  ) -> None:
    """Forwards the connections of one client to the target.

    ``server`` is the listening socket of the client's port; ``buckets`` limit
    the rates "down" and "up".
    """
    while True:
      try:
        near, _ = server.accept()
      except OSError:  # closed
        return
      try:
        far = socket.create_connection(self._target)
      except OSError:  # the client sees a connection that ends
        _close(near)
        continue
      for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._add(sock)
      for way, source, sink in (("down", far, near), ("up", near, far)):
        # Different clients and directions have different delays.
        delays = Delays(
          link.rtt_s / 2, link.jitter_s, seed=f"{client} {way}"
        )
        # Losses limit each connection, also in a cell.
        own = TokenBucket(fluid.loss_limit(link.rtt_s, link.loss))
        _start(source, sink, (buckets[way], own), delays)


def _start(
  source: socket.socket, sink: socket.socket, buckets: Sequence[TokenBucket],
  delays: Delays,
) -> None:
  """Forwards bytes from ``source`` to ``sink``, in two threads.

  They pass all ``buckets``, which limit the rate, and wait as ``delays`` say.
  """
  waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(_MAX_WAITING)
  piece = min(bucket.piece for bucket in buckets)

  def read() -> None:
    data = b"more"
    while data:
      try:
        data = source.recv(piece)
      except OSError:
        data = b""
      for bucket in buckets:
        bucket.wait(len(data))
      waiting.put((delays.due(time.monotonic()), data))

  def write() -> None:
    while True:
      due, data = waiting.get()
      wait_s = due - time.monotonic()
      if wait_s > 0:
        time.sleep(wait_s)
      try:
        if not data:
          sink.shutdown(socket.SHUT_WR)
          return
        sink.sendall(data)
      except OSError:
        # Ends `read`, which may wait for a place in the queue.
        _close(source)
        with contextlib.suppress(queue.Empty):
          while True:
            waiting.get_nowait()
        return

  for part in (read, write):
    threading.Thread(target=part, daemon=True).start()


def _close(sock: socket.socket) -> None:
  """Closes a connection or a listener; wakes threads that wait for it."""
  with contextlib.suppress(OSError):
    sock.shutdown(socket.SHUT_RDWR)
  with contextlib.suppress(OSError):
    sock.close()
