"""Delay line: forwards packets between TUN devices of two namespaces.

  python -m parallel.peers.emulation.wire DEVICE NAME_A NAME_B SECONDS \
    [JITTER_S LOSS LARGE]

Packets are delayed or lost, not bytes of a stream, so TCP's windows and slow
start behave as on a long link. Packets arrive in the order of their departure,
as over a radio link, which retransmits lost blocks. The delay has a normal
distribution, and is drawn again every `_REDRAW_INTERVAL_S`: if it were drawn
per packet, delivery in order would give nearly every packet the largest of many
delays. With LARGE=1, the kernel hands over several segments of TCP as one
packet, which takes less processor time. The program prints "ready" as a line of
JSON when both devices exist, or why they cannot be created.
"""

import collections
import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import signal
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUN, _NO_INFO = 0x400454CA, 0x0001, 0x1000
# Packets begin with a header that describes segments and checksum.
_TUNSETOFFLOAD, _HEADER, _CHECKSUM_AND_SEGMENTS = 0x400454D0, 0x4000, 0x3
_MAX_PACKETS = 100_000  # in flight in a direction; more are dropped
_MAX_READ = 64  # packets per call of `receive`
_MAX_BYTES = (1 << 16) + 16  # bytes of a packet with its header
_REDRAW_INTERVAL_S = 0.02
_IDLE_S = 1.0


def enter_namespace(path: str) -> None:
  """Moves the calling thread, not its process, into a network namespace.

  Args:
    path: Path of the namespace's file.
  """
  libc = ctypes.CDLL(None, use_errno=True)
  with open(path) as there:
    if libc.setns(there.fileno(), _CLONE_NEWNET):
      raise OSError(ctypes.get_errno(), f"namespace {path}")


def _tun(device: str, namespace: str, large: bool) -> int:
  """Enters a namespace, and returns the file of a new TUN device in it."""
  enter_namespace(f"/run/netns/{namespace}")
  file = os.open("/dev/net/tun", os.O_RDWR)
  flags = _TUN | _NO_INFO | (_HEADER if large else 0)
  fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
  if large:
    fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUM_AND_SEGMENTS)
  os.set_blocking(file, False)
  return file


class Delays:
  """Delays and losses of the packets of one direction."""

  def __init__(
    self, delay_s: float, jitter_s: float, loss: float = 0.0, seed: str = ""
  ) -> None:
    """Creates the delays.

    Args:
      delay_s: Mean delay in seconds.
      jitter_s: Standard deviation of the delay in seconds.
      loss: Probability that a packet is lost.
      seed: Seed of the random delays and losses.
    """
    self._delay_s, self._jitter_s, self._loss = delay_s, jitter_s, loss
    self._random = random.Random(seed)
    self._until, self._now_s = 0.0, delay_s

  def due(self, time_s: float) -> float | None:
    """Returns the time when a packet arrives; None if it is lost."""
    if self._loss and self._random.random() < self._loss:
      return None
    if self._jitter_s and time_s >= self._until:
      self._until = time_s + _REDRAW_INTERVAL_S
      drawn_s = self._random.gauss(self._delay_s, self._jitter_s)
      self._now_s = max(0.0, drawn_s)
    return time_s + self._now_s


class _Direction:
  """One direction: reads packets of one device, writes them when due."""

  def __init__(self, source: int, target: int, delays: Delays) -> None:
    self.source, self._target, self._delays = source, target, delays
    self._waiting: collections.deque[tuple[float, bytes]] = collections.deque()

  def receive(self) -> None:
    """Reads up to `_MAX_READ` packets, since waiting ones may become due."""
    with contextlib.suppress(BlockingIOError):
      for _ in range(_MAX_READ):
        packet = os.read(self.source, _MAX_BYTES)
        due = self._delays.due(time.monotonic())
        if due is not None and len(self._waiting) < _MAX_PACKETS:
          self._waiting.append((due, packet))

  def send(self) -> float:
    """Writes due packets; returns the seconds until the next one is due."""
    while self._waiting:
      due, packet = self._waiting[0]
      wait_s = due - time.monotonic()
      if wait_s > 0:
        return wait_s
      self._waiting.popleft()
      with contextlib.suppress(OSError):  # the other end is down
        os.write(self._target, packet)
    return _IDLE_S


def main(
  device: str, first: str, second: str, delay_s: str, jitter_s: str = "0",
  loss: str = "0", large: str = "0",
) -> None:
  """Delays packets between two namespaces until stdin is closed.

  Arguments are the texts that the module docstring describes.
  """
  # An interrupt from the terminal ends the parent, which closes stdin.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    a, b = (_tun(device, name, large == "1") for name in (first, second))
  except OSError as error:
    print(json.dumps(str(error)), flush=True)
    return
  # Different devices and directions have different losses.
  there, back = (
    Delays(float(delay_s), float(jitter_s), float(loss), device + way)
    for way in ("there", "back")
  )
  ways = (_Direction(a, b, there), _Direction(b, a, back))
  print(json.dumps("ready"), flush=True)
  # One thread, since threads that pass packets to each other take longer.
  while True:
    wait_s = min(way.send() for way in ways)
    ready, _, _ = select.select([a, b, 0], [], [], wait_s)
    if 0 in ready:  # stdin was closed: the parent has ended
      return
    for way in ways:
      if way.source in ready:
        way.receive()


if __name__ == "__main__":
  main(*sys.argv[1:])
