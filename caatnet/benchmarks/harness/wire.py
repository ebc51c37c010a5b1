"""Delay line: forwards packets between TUN devices of two namespaces.

  python -m caatnet.benchmarks.harness.wire DEVICE NAME_A NAME_B SECONDS

Packets are delayed, not bytes of a stream, so TCP's windows and slow start
behave as on a long link. It prints a line of JSON when both devices exist.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import queue
import struct
import sys
import threading
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUN, _NO_INFO = 0x400454CA, 0x0001, 0x1000
_MOST_PACKETS = 100_000  # in flight in a direction; more are dropped


def _tun(device: str, namespace: str) -> int:
  """Enters a namespace, and returns the file of a new TUN device in it."""
  libc = ctypes.CDLL(None, use_errno=True)
  with open(f"/run/netns/{namespace}") as there:
    # setns applies to the calling thread only.
    if libc.setns(there.fileno(), _CLONE_NEWNET):
      raise OSError(ctypes.get_errno(), f"namespace {namespace}")
  file = os.open("/dev/net/tun", os.O_RDWR)
  fcntl.ioctl(
    file, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TUN | _NO_INFO)
  )
  return file


def _carry(source: int, target: int, delay_s: float) -> None:
  """Forwards each packet a number of seconds after its arrival."""
  under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(_MOST_PACKETS)

  def arrive() -> None:
    while True:
      due, packet = under_way.get()
      wait_s = due - time.monotonic()
      if wait_s > 0:
        time.sleep(wait_s)
      with contextlib.suppress(OSError):  # the other end is down
        os.write(target, packet)

  threading.Thread(target=arrive, daemon=True).start()
  while True:
    try:
      packet = os.read(source, 1 << 16)
    except OSError:  # this end is down
      time.sleep(0.01)
      continue
    with contextlib.suppress(queue.Full):  # drops the packet
      under_way.put_nowait((time.monotonic() + delay_s, packet))


def main(device: str, first: str, second: str, delay_s: str) -> None:
  """Forwards packets in both directions until it is killed."""
  a, b = _tun(device, first), _tun(device, second)
  print(json.dumps("ready"), flush=True)
  threading.Thread(
    target=_carry, args=(a, b, float(delay_s)), daemon=True
  ).start()
  _carry(b, a, float(delay_s))


if __name__ == "__main__":
  main(*sys.argv[1:])
