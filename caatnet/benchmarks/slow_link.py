"""A link with a rate and a delay between two network namespaces, for root.

  python -m caatnet.benchmarks.slow_link NAME_A NAME_B SECONDS

The kernel limits the rate (tbf). Where it cannot delay packets (netem is often
missing), this process does: it is the wire between a TUN device in each
namespace, and hands each packet on after a time. What is delayed are packets,
not bytes of a stream, so TCP's windows and its start are those of a long link.
"""

from collections.abc import Iterator
import contextlib
import ctypes
import fcntl
import os
import queue
import struct
import subprocess
import sys
import threading
import time

HOSTS = ("10.98.76.1", "10.98.76.2")
_DEVICE = "slow0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUN, _NO_INFO = 0x400454CA, 0x0001, 0x1000
_MOST_PACKETS = 100_000  # under way in a direction; more are dropped


@contextlib.contextmanager
def namespaces(
  mbit: int, rtt_ms: float
) -> Iterator[tuple[tuple[str, str], list[list[str]]]]:
  """Two network namespaces with a link between them.

  Args:
    mbit: Its rate in each direction, Mbit/s.
    rtt_ms: The time there and back that is added.

  Yields:
    The ends' addresses, and what to put before a command to run it there.
  """
  names = [f"slow{os.getpid()}a", f"slow{os.getpid()}b"]
  # Packets of an Ethernet, or long ones where the wire would be too slow.
  mtu = 1500 if mbit <= 100 else 9000
  wire: subprocess.Popen | None = None
  try:
    for name in names:
      _call(f"ip netns add {name}")
    if rtt_ms:
      wire = subprocess.Popen(
        [sys.executable, "-m", "caatnet.benchmarks.slow_link", *names,
         str(rtt_ms / 2000)], stdout=subprocess.PIPE, text=True,
      )
      if not wire.stdout.readline():
        raise RuntimeError("the wire has not begun")
    else:
      _call(f"ip link add {_DEVICE} netns {names[0]} type veth peer name "
            f"{_DEVICE} netns {names[1]}")
    for name, host in zip(names, HOSTS, strict=True):
      _call(f"ip -n {name} address add {host}/24 dev {_DEVICE}")
      _call(f"ip -n {name} link set lo up")
      _call(f"ip -n {name} link set {_DEVICE} mtu {mtu} txqueuelen 10000 up")
      burst = max(64, mbit // 4)  # at least rate / HZ, in kilobytes
      _call(f"tc -n {name} qdisc add dev {_DEVICE} root tbf rate {mbit}mbit "
            f"burst {burst}kb latency {50 + rtt_ms}ms")
    yield HOSTS, [["ip", "netns", "exec", name] for name in names]
  finally:
    if wire is not None:
      wire.kill()
      wire.wait()
      wire.stdout.close()
    for name in names:
      with contextlib.suppress(subprocess.CalledProcessError):
        _call(f"ip netns delete {name}")


def _call(text: str) -> None:
  subprocess.run(text.split(), check=True, capture_output=True)


def _tun(namespace: str) -> int:
  """Enters a namespace, and returns the file of a new TUN device in it."""
  libc = ctypes.CDLL(None, use_errno=True)
  with open(f"/run/netns/{namespace}") as there:
    if libc.setns(there.fileno(), _CLONE_NEWNET):
      raise OSError(ctypes.get_errno(), f"namespace {namespace}")
  file = os.open("/dev/net/tun", os.O_RDWR)
  fcntl.ioctl(
    file, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _TUN | _NO_INFO)
  )
  return file


def _carry(source: int, target: int, delay_s: float) -> None:
  """Hands packets on, each so many seconds after it came."""
  under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(_MOST_PACKETS)

  def arrive() -> None:
    while True:
      due, packet = under_way.get()
      wait_s = due - time.monotonic()
      if wait_s > 0:
        time.sleep(wait_s)
      with contextlib.suppress(OSError):  # the other end is not up yet
        os.write(target, packet)

  threading.Thread(target=arrive, daemon=True).start()
  while True:
    try:
      packet = os.read(source, 1 << 16)
    except OSError:  # this end is not up yet
      time.sleep(0.01)
      continue
    with contextlib.suppress(queue.Full):
      under_way.put_nowait((time.monotonic() + delay_s, packet))


def main(first: str, second: str, delay_s: str) -> None:
  """Is the wire, until it is killed."""
  a, b = _tun(first), _tun(second)
  print("ready", flush=True)
  threading.Thread(
    target=_carry, args=(a, b, float(delay_s)), daemon=True
  ).start()
  _carry(b, a, float(delay_s))


if __name__ == "__main__":
  main(*sys.argv[1:])
