"""Peers that `caatnet.benchmarks.elastic.ring` measures, one per process."""

from collections.abc import Mapping
import socket
import threading
import time
from typing import Any

import numpy as np

from parallel.peers.ring import bandwidth, link_collectives
from parallel.peers.ring.measured_links import LIMIT_S, SECURITY
from parallel.peers.transport.frames import read_into
from parallel.peers.transport.links import LinkOptions, Links
from parallel.peers.transport.listener import Listener

_NAME_BYTES = 16


class RingPeer:
  """Peer that sums arrays over its links, and sends bytes over raw sockets."""

  def __init__(self, me: str, host: str) -> None:
    self.me, self.host = me, host
    self.listener = Listener(me, SECURITY, (host, 0))
    self.server = socket.create_server((host, 0))
    self.links: Links | None = None
    self.outward: dict[str, socket.socket] = {}
    self.inward: dict[str, socket.socket] = {}

  def addresses(self) -> tuple[Any, Any]:
    """Returns (address for links, address for raw connections)."""
    return self.listener.address, self.server.getsockname()[:2]

  def arrays(self, size: int) -> None:
    """Allocates the peer's array of ``size`` elements, and one for the sum."""
    self.x = np.random.default_rng(len(self.me)).normal(size=size).astype("f4")
    self.out = np.ones_like(self.x)

  def connect(
    self, epoch: int, members: dict[str, Any], raw: dict[str, Any],
    options: dict[str, Any],
  ) -> None:
    """Opens links to all other peers; the first call also raw connections."""
    if self.links is not None:
      self.links.close()
    self.links = Links(
      self.me, epoch, {k: tuple(v) for k, v in members.items()}, SECURITY,
      LinkOptions(**options),
    ).connect(self.listener, LIMIT_S)
    if not self.inward:
      self.outward, self.inward = _connect_all(
        self.me, self.server, {k: tuple(v) for k, v in raw.items()},
        options["send_buffer"],
      )

  def measure(self) -> list[Any]:
    """Measures the links; returns the values of `times.MeasuredLinks`."""
    return [x.tolist() for x in bandwidth.measure(self.links, 1)]

  def sum(
    self, order: str, block_bytes: int, ranks: list[str] | None = None
  ) -> dict[str, int]:
    """Sums all peers' arrays; returns bytes sent, by kind, and received.

    ``order`` is that of the floating-point sums, ``ranks`` that of the peers.
    """
    before = self.links.traffic.sent.payload, self.links.traffic.sent.framing
    kernel = self.links.received_bytes()
    link_collectives.all_reduce(
      self.links, 0, self.x, order=order, out=self.out,
      block_bytes=block_bytes, ranks=ranks,
    ).result(LIMIT_S)
    sent = self.links.traffic.sent
    return {
      "payload": sent.payload - before[0], "framing": sent.framing - before[1],
      "kernel": self.links.received_bytes() - kernel,
    }

  def several(self, count: int, block_bytes: int) -> None:
    """Sums in ``count`` concurrent operations, each on a part of the array."""
    cut = len(self.x) // count
    operations = [
      link_collectives.all_reduce(
        self.links, i, self.x[i * cut : (i + 1) * cut], order="ring",
        out=self.out[i * cut : (i + 1) * cut], block_bytes=block_bytes,
      )
      for i in range(count)
    ]
    for operation in operations:
      operation.result(LIMIT_S)

  def raw(self, plan: dict[str, int]) -> None:
    """Sends bytes to peers and receives as many, without any sum.

    Args:
      plan: Peer -> number of bytes in each direction.
    """
    source = memoryview(self.x).cast("B")
    target = memoryview(self.out).cast("B")
    threads, start = [], 0
    for name, count in plan.items():
      view = slice(start, start + count)
      start += count
      threads.append(threading.Thread(
        target=self.outward[name].sendall, args=(_part(source, view),)
      ))
      threads.append(threading.Thread(
        target=read_into, args=(self.inward[name], _part(target, view))
      ))
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

  def add(self, size: int, block_bytes: int) -> None:
    """Performs the additions of a ring all-reduce, without communication."""
    step = block_bytes // 4
    scratch = self.x[:step].copy()
    for i in range(0, size, step):
      j = min(i + step, size)
      np.add(scratch[: j - i], self.x[i:j], out=self.out[i:j])


def _connect_all(
  me: str, server: socket.socket, addresses: Mapping[str, tuple[str, int]],
  send_buffer: int = 0,
) -> tuple[dict[str, socket.socket], dict[str, socket.socket]]:
  """Connects to all other peers, which call this at the same time.

  Args:
    me: Name of this peer, at most 16 bytes.
    server: Socket that listens at its address.
    addresses: Address of each peer by its name.
    send_buffer: Bytes of the kernel's send buffers; 0 lets the kernel choose.

  Returns:
    Connections for sending and connections for receiving, by the others' names.
  """
  others = [name for name in addresses if name != me]
  outward, inward = {}, {}
  for name in others:
    outward[name] = socket.create_connection(addresses[name], LIMIT_S)
    # Connections are accepted in any order, so each starts with a name.
    outward[name].sendall(me.encode().ljust(_NAME_BYTES))
  for _ in others:
    sock, _ = server.accept()
    name = bytearray(_NAME_BYTES)
    read_into(sock, memoryview(name))
    inward[name.decode().strip()] = sock
  for sock in (*outward.values(), *inward.values()):
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages
    if send_buffer:
      sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
  return outward, inward


def _part(view: memoryview, part: slice) -> memoryview:
  """Returns a part of an array, shifted to end within the array.

  The parts of a plan may together be longer than the array, so that one extends
  past the end. No single part is longer than the array.
  """
  size = part.stop - part.start
  start = min(part.start, len(view) - size)
  return view[start : start + size]


class Gloo:
  """Process that takes part in jax's all-reduces over gloo."""

  def __init__(self, index: str, count: str, port: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))

  def sums(self, size: int, rounds: int) -> list[float]:
    """Sums an array several times; returns the seconds of each sum.

    Args:
      size: Elements of each process, float32.
      rounds: Number of timed sums, after the first one, which compiles.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("a",))
    x = jax.make_array_from_process_local_data(
      NamedSharding(mesh, P("a")), np.ones((1, size), np.float32)
    )
    add = jax.jit(jax.shard_map(
      lambda x: jax.lax.psum(x, "a")[0], mesh=mesh, in_specs=P("a"),
      out_specs=P(),
    ))
    seconds = []
    for _ in range(rounds + 1):
      start = time.monotonic()
      jax.block_until_ready(add(x))
      seconds.append(time.monotonic() - start)
    return seconds[1:]
