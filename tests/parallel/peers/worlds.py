"""Small groups of peers in one process, connected by real sockets."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import random
import socket
import subprocess
import threading
import time
from typing import Any

import numpy as np

from parallel.peers.ring import link_collectives
from parallel.peers.transport.handshake import Security, shut, with_tls
from parallel.peers.transport.links import LinkOptions, Links
from parallel.peers.transport.listener import Limits, Listener
from parallel.peers.transport.transfers import LinksLost

# Number of fuzzed frames and messages; 100,000 take one core some seconds.
FUZZED = int(os.environ.get("ELASTIC_FUZZED", "3000"))
SECURITY = Security(b"a token that all peers have")
# Time limit of tests for what must happen; it takes long on a loaded machine.
PATIENCE_S = float(os.environ.get("ELASTIC_PATIENCE_S", "240"))
_LIMITS, _OPTIONS = Limits(), LinkOptions()


@contextlib.contextmanager
def listeners(
  count: int, security: Security = SECURITY,
  limits: Limits = _LIMITS,
) -> Iterator[dict[str, Listener]]:
  """Yields listeners of peers p0, p1, ..., and closes them at the end."""
  with contextlib.ExitStack() as stack:
    yield {
      f"p{i}": stack.enter_context(
        Listener(f"p{i}", security, limits=limits)
      )
      for i in range(count)
    }


def connected(
  there: dict[str, Listener], options: LinkOptions = _OPTIONS, epoch: int = 1,
  security: Security = SECURITY,
) -> list[Links]:
  """Returns the links of all listeners' peers."""
  members = {name: x.address for name, x in there.items()}
  links = [Links(n, epoch, members, security, options) for n in there]
  together([
    lambda x=x: x.connect(there[x.me], PATIENCE_S) for x in links
  ])
  return links


def together(functions: list) -> list:
  """Runs functions concurrently; returns their results, or raises."""
  found: list = [None] * len(functions)

  def run(i: int) -> None:
    try:
      found[i] = functions[i]()
    except Exception as error:
      found[i] = error

  threads = [
    threading.Thread(target=run, args=(i,)) for i in range(len(functions))
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
  return found


def until(condition: Callable[[], object]) -> None:
  """Waits for a condition that must become true."""
  end = time.monotonic() + PATIENCE_S
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


@contextlib.contextmanager
def world(count: int, options: LinkOptions = _OPTIONS) -> Iterator[list[Links]]:
  """Yields connected peers, which leave at the end."""
  with listeners(count) as there:
    links = connected(there, options)
    try:
      yield links
    finally:
      for x in links:
        x.close()


def arrays(count: int, size: int) -> list[np.ndarray]:
  """Returns arrays whose sum depends on the order of additions."""
  return [
    np.random.default_rng(i).normal(size=size).astype(np.float32)
    for i in range(count)
  ]


def in_rank_order(xs: list[np.ndarray]) -> np.ndarray:
  """Returns the sum in the order that ``direct`` states."""
  total = xs[0].copy()
  for x in xs[1:]:
    total = total + x
  return total


def around_the_ring(xs: list[np.ndarray]) -> np.ndarray:
  """Returns the sum in the order that ``ring`` states, chunk by chunk."""
  count, size = len(xs), xs[0].size
  chunk, total = -(-size // count), np.empty_like(xs[0])
  for c in range(count):
    part = slice(min(c * chunk, size), min((c + 1) * chunk, size))
    here = xs[c - 1][part]
    for step in range(2, count + 1):
      here = here + xs[(c - step) % count][part]
    total[part] = here
  return total


def inside_sites(xs: list[np.ndarray], sites: Sequence[int]) -> np.ndarray:
  """Returns the sum in the order that ``sites`` states."""
  ends = np.cumsum(sites)
  return in_rank_order([
    in_rank_order(xs[end - size : end])
    for size, end in zip(sites, ends, strict=True)
  ])


ORDERS = {"direct": in_rank_order, "ring": around_the_ring}


def spoilt(rng: random.Random, data: bytes) -> bytes:
  """Returns bytes with random changes, possibly truncated."""
  data = bytearray(data)
  for _ in range(rng.randint(1, 4)):
    where = rng.randrange(len(data)) if data else 0
    change = rng.randrange(4)
    if change == 0 and data:
      data[where] = rng.randrange(256)
    elif change == 1:
      data[where:where] = rng.randbytes(rng.randint(1, 9))
    elif change == 2:
      del data[where : where + rng.randint(1, 9)]
    else:
      data = data[: rng.randint(0, len(data))]
  return bytes(data)


class Relay:
  """Proxy of an address that limits the bytes per second in each direction."""

  def __init__(self, target: Any, bytes_per_s: float, port: int = 0) -> None:
    self.target, self.bytes_per_s = target, bytes_per_s
    self._server = socket.create_server(("127.0.0.1", port))
    self.address = self._server.getsockname()[:2]
    self._start(self._accept)

  def close(self) -> None:
    """Accepts no further connections."""
    shut(self._server)
    self._server.close()

  def _start(self, target: Any, *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()

  def _accept(self) -> None:
    with contextlib.suppress(OSError):
      while True:
        near, _ = self._server.accept()
        far = socket.create_connection(self.target)
        for sock in (near, far):  # limits the bytes in flight
          sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        self._start(self._connect, near, far)

  def _connect(self, near: socket.socket, far: socket.socket) -> None:
    """Forwards in both directions, then closes both ends."""
    with near, far:
      other = threading.Thread(target=self._forward, args=(far, near))
      other.start()
      self._forward(near, far)
      other.join()

  def _forward(self, source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
      while data := source.recv(1 << 16):
        time.sleep(len(data) / self.bytes_per_s)
        target.sendall(data)
    shut(source)
    shut(target)


class Tcp:
  """Simulated times of messages of a connection in slow start.

  The window doubles with each round trip, and persists between messages.
  """

  def __init__(self, rate: float, delay_s: float) -> None:
    self.rate, self.delay_s = rate, delay_s
    self._window = 10 * 1460  # bytes, RFC 6928

  def __call__(self, size: int) -> float:
    """Returns the time of a message of ``size`` bytes in seconds."""
    sent, waited_s = 0, 0.0
    # The sender pauses from the end of a window to its acknowledgement.
    while (
      sent + self._window < size
      and self._window / self.rate < 2 * self.delay_s
    ):
      waited_s += 2 * self.delay_s - self._window / self.rate
      sent, self._window = sent + self._window, 2 * self._window
    return self.delay_s + waited_s + size / self.rate


def live(me, pipe, size, order):
  """Runs a peer in its process: it sums until another peer dies."""
  listener = Listener(me, SECURITY)
  pipe.send(listener.address)
  members = pipe.recv()
  links = Links(me, 1, members, SECURITY, LinkOptions(silence_s=4))
  links.connect(listener, PATIENCE_S)
  x, count = np.ones(size, np.float32), 0
  try:
    while True:
      link_collectives.all_reduce(
        links, 0, x, order=order, sites=(2, 1) if order == "sites" else ()
      ).result(PATIENCE_S)
      count += 1
      if count == 1:
        pipe.send("first")
  except LinksLost as error:
    pipe.send((error.peer, error.tag, bool((x == 1).all())))


def certificates(folder):
  """Returns a TLS configuration, and one whose certificate is unsigned."""
  def made(name, *signed):
    subprocess.run(
      ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
       "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj",
       f"/CN={name}", "-keyout", folder / f"{name}.key", "-out",
       folder / f"{name}.pem", *signed],
      check=True, capture_output=True,
    )

  made("authority")
  made("peer", "-CA", folder / "authority.pem", "-CAkey",
       folder / "authority.key")
  made("stranger")
  return [
    with_tls(
      SECURITY.token, str(folder / f"{name}.pem"), str(folder / f"{name}.key"),
      str(folder / "authority.pem"),
    )
    for name in ("peer", "stranger")
  ]
