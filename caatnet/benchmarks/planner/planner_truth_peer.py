"""Device of `caatnet.benchmarks.planner.planner_truth`: executes its jobs.

A job is the device's part of one training step in the order of the pipeline
schedule: it waits for the input of a chunk, computes, reduces with its tensor
ranks, and sends the chunk's output. After all actions it reduces over its data
ring. There is no training: compute is a wait during which a core is busy for a
fraction of the time. Messages are arbitrary float32, but sums are computed.
"""

import contextlib
import queue
import socket
import struct
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from caatnet.benchmarks.harness.sockets import connect_all
from parallel.elastic.transport.frames import read_into

_HEAD = struct.Struct("<qqd")  # tag, bytes, time at which it was sent
_SLICE_S = 0.01
_BARRIER, _HERE = -1, -2


class Links:
  """One connection in each direction to each other process.

  Each connection has a thread, so that messages move during compute.
  """

  def __init__(self, me: int, host: str) -> None:
    self.me = me
    self._server = socket.create_server((host, 0))
    self.address = self._server.getsockname()[:2]
    self._out: dict[int, queue.Queue[Any]] = {}
    self._in: dict[int, queue.Queue[Any]] = {}
    self.sent_bytes = 0

  def connect(self, addresses: list[tuple[str, int]]) -> None:
    """Makes all connections."""
    outward, inward = connect_all(
      str(self.me), self._server,
      {str(i): tuple(address) for i, address in enumerate(addresses)},
    )
    for name in outward:
      self._out[int(name)], self._in[int(name)] = queue.Queue(), queue.Queue()
      self._thread(self._write, outward[name], self._out[int(name)])
      self._thread(self._read, inward[name], self._in[int(name)])

  def _thread(self, work, sock: socket.socket, messages: queue.Queue) -> None:
    threading.Thread(target=work, args=(sock, messages), daemon=True).start()

  def _write(self, sock: socket.socket, messages: queue.Queue) -> None:
    with contextlib.suppress(OSError):  # the other process has ended
      while True:
        tag, data, begun = messages.get()
        sock.sendall(_HEAD.pack(tag, data.nbytes, begun))
        if data.size:
          sock.sendall(memoryview(data).cast("B"))

  def _read(self, sock: socket.socket, messages: queue.Queue) -> None:
    head = bytearray(_HEAD.size)
    with contextlib.suppress(OSError):
      while True:
        read_into(sock, memoryview(head))
        tag, size, begun = _HEAD.unpack(head)
        data = np.empty(size // 4, np.float32)  # size in bytes
        if size:
          read_into(sock, memoryview(data).cast("B"))
        messages.put((tag, data, begun))

  def send(self, target: int, tag: int, data: np.ndarray) -> None:
    """Queues a message for its link, which sends it when it is free."""
    self.sent_bytes += data.nbytes
    self._out[target].put((tag, data.copy(), time.monotonic()))

  def receive(self, source: int, tag: int) -> tuple[np.ndarray, float]:
    """Returns a link's next message, and its seconds from send to receive."""
    found, data, begun = self._in[source].get(timeout=300)
    assert found == tag, (self.me, source, found, tag)
    return data, time.monotonic() - begun

  def barrier(self, count: int) -> None:
    """Waits until all processes have reached this point."""
    none = np.zeros(0, np.float32)
    # Process 0 collects a message of all others, then releases them.
    if self.me:
      self.send(0, _BARRIER, none)
      self.receive(0, _BARRIER)
      return
    for other in range(1, count):
      self.receive(other, _BARRIER)
    for other in range(1, count):
      self.send(other, _BARRIER, none)


def ring_sum(links: Links, ring: list[int], x: np.ndarray) -> np.ndarray:
  """Returns the sum of all ranks' arrays, in 2 (k - 1) steps of a k-th each."""
  k, me = len(ring), ring.index(links.me)
  if k == 1:
    return x
  chunks = [c.copy() for c in np.array_split(x, k)]
  ahead, behind = ring[(me + 1) % k], ring[me - 1]
  # k - 1 steps of reduce-scatter, then k - 1 of all-gather.
  for step in range(2 * (k - 1)):
    here = (me - step - 1) % k
    links.send(ahead, step, chunks[(me - step) % k])
    data, _ = links.receive(behind, step)
    chunks[here] = chunks[here] + data if step < k - 1 else data
  return np.concatenate(chunks)


def compute(seconds: float, quota: float) -> None:
  """Waits for a time, with a core busy for a fraction of it.

  Time is divided into slices; if the machine is too busy to provide that
  fraction, it takes longer.
  """
  start, x = time.monotonic(), np.ones((48, 48), np.float32)
  for i in range(max(1, round(seconds / _SLICE_S))):
    length = min(_SLICE_S, seconds)
    busy = time.thread_time() + quota * length
    while time.thread_time() < busy:  # uses `quota` of the slice
      x @ x
    left = start + min((i + 1) * length, seconds) - time.monotonic()
    if left > 0:
      time.sleep(left)


def run(links: Links, count: int, job: dict[str, Any]) -> dict[str, float]:
  """Executes a device's part of a step.

  Returns:
    Start and end on the machine's clock, number of bytes sent, and the first
    element of the sum over its data ring.
  """
  quota, sent = job["quota"], links.sent_bytes
  boundary = np.zeros(job["boundary"] // 4, np.float32)
  reduction = np.zeros(job["reduction"] // 4, np.float32)
  # Different values per process, so that the result of the sum is checked.
  gradients = np.full(job["gradients"] // 4, 1.0 + links.me, np.float32)
  links.barrier(count)
  start = time.monotonic()
  for source, into, seconds, reductions, target, out in job["actions"]:
    if source is not None:
      links.receive(source, into)
    compute(seconds, quota)
    for _ in range(reductions):
      ring_sum(links, job["tensor"], reduction)
    if target is not None:
      links.send(target, out, boundary)
  compute(job["head_s"], quota)
  links.barrier(count)
  found = ring_sum(links, job["data"], gradients)
  end = time.monotonic()
  return {
    "start": start, "end": end, "sent": links.sent_bytes - sent,
    "sum": float(found[:1].sum()),
  }


class Rounds(NamedTuple):
  """Measurement of links in rounds of pairs.

  Attributes:
    rounds: Pairs of each round.
    size: Bytes of a message.
    train: Number of consecutive messages.
    times: Number of repetitions. The median of empty messages is used, and the
      fastest train for a rate: disturbances only slow messages down.
  """

  rounds: list[list[list[int]]]
  size: int
  train: int
  times: int


def measure(
  links: Links, count: int, options: Rounds
) -> dict[int, list[float]]:
  """Measures links in rounds of pairs, both ways at once.

  A link that was idle lets some packets pass at once, so the rate is that of
  several consecutive messages.

  Args:
    links: The links.
    count: Number of processes.
    options: Rounds and messages.

  Returns:
    For each other process, the seconds of an empty message from there to here,
    from send to receive, and bytes per second.
  """
  size, train = options.size, options.train
  none, data = np.zeros(0, np.float32), np.zeros(size // 4, np.float32)
  found: dict[int, list[float]] = {}
  for pairs in options.rounds:
    links.barrier(count)
    pair = next((p for p in pairs if links.me in p), None)
    if pair is None:
      continue
    other, rows = pair[pair[0] == links.me], []
    for _ in range(options.times):
      links.send(other, _HERE, none)
      empty_s = links.receive(other, _HERE)[1]
      for i in range(train):
        links.send(other, i, data)
      seconds = [links.receive(other, i)[1] for i in range(train)]
      rows.append([empty_s, seconds[-1]])
      links.send(other, _HERE, none)
      links.receive(other, _HERE)  # or the next one would wait for this one
    empty_s, all_s = zip(*rows, strict=True)
    least_s = min(all_s)
    # Noise can exceed the difference on a link without a limit.
    sent_s = max(least_s - min(empty_s), least_s / 100)
    found[other] = [float(np.median(empty_s)), train * size / sent_s]  # bytes/s
  return found


class Peer:
  """Orders that a device executes."""

  def __init__(self, me: str, host: str) -> None:
    self._links, self._count = Links(int(me), host), 1

  def address(self) -> tuple[str, int]:
    """Returns the address on which it listens."""
    return self._links.address

  def connect(self, addresses: list[tuple[str, int]]) -> None:
    """Opens all connections."""
    self._links.connect(addresses)
    self._count = len(addresses)

  def run(self, job: dict[str, Any]) -> dict[str, float]:
    """Executes its part of a step."""
    return run(self._links, self._count, job)

  def measure(self, **options: Any) -> dict[int, list[float]]:
    """Measures its links."""
    return measure(self._links, self._count, Rounds(**options))
