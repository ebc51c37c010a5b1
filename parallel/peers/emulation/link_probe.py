"""Measured round trips and rates of emulated links.

Each process that measures is a peer of `processes.Peers`: peer 0 is the server,
and peer k + 1 is client k, with one connection to the server.
"""

from collections.abc import Sequence
import concurrent.futures
import contextlib
import socket
import statistics
import time

from parallel.peers.emulation import processes, relay
from parallel.peers.transport.frames import read_into
from parallel.plans.hardware.client_links import Link

_PINGS = 9
_PIECE = 1 << 16
_NUMBER_BYTES = 4
# A measured stream has as many bytes as a link transmits in `_STREAM_S` seconds
# and `_ROUND_TRIPS` round trips, the duration of TCP's slow start.
_STREAM_S, _ROUND_TRIPS = 0.4, 4


class Probe:
  """Server or client of a measurement; its methods are orders of `Peers`."""

  def __init__(self, me: str) -> None:
    self._client = int(me) - 1  # -1 for the server
    self._sockets: dict[int, socket.socket] = {}

  def listen(self, host: str) -> list | None:
    """Starts the server; returns its [host, port], but None in a client."""
    if self._client >= 0:
      return None
    self._listener = socket.create_server((host, 0))
    return list(self._listener.getsockname())

  def connect(self, num: int, address: Sequence | None = None) -> None:
    """Connects a client to ``address``; the server accepts ``num`` clients."""
    if self._client >= 0:
      sock = socket.create_connection(tuple(address))
      sock.sendall(self._client.to_bytes(_NUMBER_BYTES))
      self._sockets[self._client] = sock
    else:
      for _ in range(num):
        sock, _ = self._listener.accept()
        number = bytearray(_NUMBER_BYTES)
        read_into(sock, memoryview(number))
        self._sockets[int.from_bytes(number)] = sock
    for sock in self._sockets.values():
      sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

  def ping(self, client: int) -> float | None:
    """Returns a client's median round trip in seconds, in this client only."""
    byte = memoryview(bytearray(1))
    sock = self._sockets.get(client)
    if sock is None:
      return None
    found = []
    for _ in range(_PINGS):
      start = time.monotonic()
      if self._client < 0:
        read_into(sock, byte)
        sock.sendall(byte)
      else:
        sock.sendall(byte)
        read_into(sock, byte)
      found.append(time.monotonic() - start)
    return statistics.median(found)

  def stream(
    self, sizes: Sequence[tuple[int, int]], down: bool
  ) -> dict[int, float]:
    """Sends bytes to or from several clients at once.

    Args:
      sizes: Pairs of a client and its number of bytes.
      down: Whether the server is the sender.

    Returns:
      At a receiver, client -> bytes per second; at a sender, {}.
    """
    mine = [(k, size) for k, size in sizes if k in self._sockets]
    if not mine:
      return {}
    sends = down == (self._client < 0)
    with concurrent.futures.ThreadPoolExecutor(len(mine)) as pool:
      found = [
        pool.submit(
          _send if sends else _measure_receive_rate, self._sockets[k], size
        )
        for k, size in mine
      ]
      rates = [each.result() for each in found]
    return {} if sends else dict(zip([k for k, _ in mine], rates, strict=True))


def measure_links(
  links: Sequence[Link], host: str, namespace: str,
  prefixes: Sequence[Sequence[str]],
) -> list[dict[str, float]]:
  """Measures the round trip and the rates of each client's link.

  Args:
    links: Link of each client.
    host: Address of the server.
    namespace: Network namespace of the server; "" for links by a relay.
    prefixes: Command prefix of each client, as in `namespaces.Star.prefixes`.

  Returns:
    For each client, "measured_rtt_s" in seconds, and "measured_down" and
    "measured_up" in bytes per second, while only this client sends. If several
    clients are in radio cells, "together_down" and "together_up" are their
    rates while all of these send at once.
  """
  num = len(links)
  sizes = {
    down: [int(
      (link.down if down else link.up) * (_STREAM_S + _ROUND_TRIPS * link.rtt_s)
    ) for link in links] for down in (True, False)
  }
  server = ["ip", "netns", "exec", namespace] if namespace else []
  with contextlib.ExitStack() as stack:
    peers = stack.enter_context(processes.Peers(
      "parallel.peers.emulation.link_probe:Probe",
      [[k] for k in range(num + 1)], [server, *prefixes],
    ))
    address = tuple(peers.do("listen", lambda _: {"host": host}).found[0])
    addresses = [address] * num
    if not namespace:
      addresses = stack.enter_context(relay.Relay(address, links)).addresses
    peers.do("connect", lambda me: {"num": num} | (
      {"address": addresses[me - 1]} if me else {}
    ))

    def stream(down: bool, clients: Sequence[int]) -> dict[int, float]:
      some = [(k, sizes[down][k]) for k in clients]
      found = peers.do("stream", lambda _: {"sizes": some, "down": down}).found
      return {int(k): rate for each in found for k, rate in each.items()}

    found: list[dict[str, float]] = []
    for k in range(num):
      round_trips = peers.do("ping", lambda _, k=k: {"client": k}).found
      found.append({
        "measured_rtt_s": round_trips[k + 1],
        "measured_down": stream(True, [k])[k],
        "measured_up": stream(False, [k])[k],
      })
    cells = [k for k, link in enumerate(links) if link.shared]
    if len(cells) > 1:
      for way, down in (("down", True), ("up", False)):
        for k, rate in stream(down, cells).items():
          found[k][f"together_{way}"] = rate
    return found


def _send(sock: socket.socket, size: int) -> None:
  piece = memoryview(bytes(_PIECE))
  while size:
    size -= sock.send(piece[:size])


def _measure_receive_rate(sock: socket.socket, size: int) -> float:
  """Returns the bytes/s of a stream's second half, after TCP's slow start."""
  first = left = size
  start = time.monotonic()
  while left:
    num_bytes = len(sock.recv(min(left, _PIECE)))
    if not num_bytes:
      raise ConnectionError("the sender has ended")
    left -= num_bytes
    if left > size / 2:
      first, start = left, time.monotonic()
  return (first - left) / (time.monotonic() - start)
