"""Delay line: errors of namespaces, and packets that are due."""

import concurrent.futures
import contextlib
import fcntl
import os
import socket
import struct
import time

import numpy as np
import pytest

from parallel.peers.emulation import namespaces, wire
from tests import unavailable


def test_file_that_is_no_namespace_is_an_error_with_the_kernels_reason(
  tmp_path
):
  path = tmp_path / "file"
  path.touch()
  with pytest.raises(OSError, match=f"namespace {path}") as error:
    wire.enter_namespace(str(path))
  assert error.value.errno


def test_packets_of_one_direction_are_written_in_order_when_due():
  ends = os.pipe(), os.pipe()
  (source, given), (found, target) = ends
  os.set_blocking(source, False)
  delay_s, start = 0.05, time.monotonic()
  way = wire._Direction(source, target, wire.Delays(delay_s, 0.0))
  try:
    for packet in (b"first", b"second"):
      os.write(given, packet)
      way.receive()
    wait_s = way.send()
    if time.monotonic() < start + delay_s:
      assert 0 < wait_s <= delay_s
    end = start + delay_s - time.monotonic()
    time.sleep(max(0.0, end))
    while way.send() < delay_s:  # until there is none
      pass
    assert time.monotonic() >= start + delay_s
    assert os.read(found, 100) == b"firstsecond"
  finally:
    for file in (*ends[0], *ends[1]):
      os.close(file)


def test_the_largest_packet_is_forwarded_whole():
  """IP packets have up to 65,535 bytes, their header here has 10."""
  with contextlib.ExitStack() as stack:
    given, source, target, found = (
      stack.enter_context(end) for _ in range(2)
      for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    )
    source.setblocking(False)
    way = wire._Direction(
      source.fileno(), target.fileno(), wire.Delays(0.0, 0.0)
    )
    packet = os.urandom(65_535 + 10)
    given.send(packet)
    way.receive()
    way.send()
    assert found.recv(1 << 18) == packet


def test_turn_reads_64_packets_and_a_full_queue_drops_more(monkeypatch):
  near, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  with near, source:
    source.setblocking(False)
    for _ in range(100):
      near.send(b"x")
    way = wire._Direction(source.fileno(), -1, wire.Delays(60.0, 0.0))
    way.receive()
    assert len(way._waiting) == 64
    monkeypatch.setattr(wire, "_MAX_PACKETS", 66)
    way.receive()
    assert len(way._waiting) == 66


_TUNGETIFF, _HAS_HEADER = 0x800454D2, 0x4000  # of linux/if_tun.h


@pytest.mark.parametrize("large", [False, True])
def test_device_hands_over_several_segments_if_it_is_asked_to(large):
  with contextlib.ExitStack() as stack:
    with unavailable.skips():
      (name,) = stack.enter_context(namespaces._create_namespaces(1))
    # A thread of its own enters the namespace.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      file = thread.submit(wire._tun, "tested", name, large).result()
    stack.callback(os.close, file)
    device, flags = struct.unpack(
      "16sH22x", fcntl.ioctl(file, _TUNGETIFF, bytes(40))
    )
    assert device.rstrip(b"\0") == b"tested"
    assert bool(flags & _HAS_HEADER) == large
    assert not os.get_blocking(file)


def test_delays_have_their_mean_deviation_and_losses():
  delays = wire.Delays(0.02, 0.002, 0.25, "seed")
  times = 0.021 * np.arange(4000)
  found = [delays.due(t) for t in times]
  kept = np.array([d - t for d, t in zip(found, times, strict=True) if d])
  assert len(kept) == pytest.approx(3000, rel=0.03)
  assert kept.mean() == pytest.approx(0.02, rel=0.01)
  assert kept.std() == pytest.approx(0.002, rel=0.05)
  # The delay of one packet is that of the next few.
  delays = wire.Delays(0.02, 0.002)
  assert len({round(delays.due(t) - t, 9) for t in np.arange(19) / 1e3}) == 1
  # No delay is negative.
  delays = wire.Delays(0.001, 0.1)
  assert min(delays.due(t) - t for t in times) == pytest.approx(0, abs=1e-9)


def test_packets_arrive_in_order_despite_jitter():
  near, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  sink, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  with near, source, sink, far:
    source.setblocking(False)
    way = wire._Direction(
      source.fileno(), sink.fileno(), wire.Delays(0.001, 0.01, 0.2, "seed")
    )
    for number in range(100):
      near.send(bytes([number]))
      way.receive()
      way.send()
    while way.send() < wire._IDLE_S:
      pass
    far.setblocking(False)
    found = []
    with contextlib.suppress(BlockingIOError):
      while True:
        found.append(far.recv(8)[0])
  assert found == sorted(found)
  assert 60 < len(found) < 100
