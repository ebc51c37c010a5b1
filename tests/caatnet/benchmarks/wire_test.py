"""Delay line: errors of namespaces, and packets that are due."""

import concurrent.futures
import contextlib
import fcntl
import os
import socket
import struct
import time

import pytest

from caatnet.benchmarks.harness import namespaces, wire
from tests.caatnet.benchmarks import unavailable


def test_file_that_is_no_namespace_is_an_error_with_the_kernels_reason(
  tmp_path
):
  path = tmp_path / "file"
  path.touch()
  with pytest.raises(OSError, match=f"namespace {path}") as error:
    wire.enter(str(path))
  assert error.value.errno


def test_packets_of_one_direction_are_written_in_order_when_due():
  ends = os.pipe(), os.pipe()
  (source, given), (found, target) = ends
  os.set_blocking(source, False)
  delay_s, start = 0.05, time.monotonic()
  way = wire._Way(source, target, wire.Delays(delay_s, 0.0))
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
    way = wire._Way(source.fileno(), target.fileno(), wire.Delays(0.0, 0.0))
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
    way = wire._Way(source.fileno(), -1, wire.Delays(60.0, 0.0))
    way.receive()
    assert len(way._waiting) == 64
    monkeypatch.setattr(wire, "_MAX_PACKETS", 66)
    way.receive()
    assert len(way._waiting) == 66


_TUNGETIFF, _HAS_HEADER = 0x800454D2, 0x4000  # of linux/if_tun.h


@pytest.mark.parametrize("large", [False, True])
def test_device_hands_over_several_segments_if_it_is_asked_to(large):
  with contextlib.ExitStack() as stack:
    try:
      (name,) = stack.enter_context(namespaces._made(1))
    except ValueError as error:
      unavailable.skip(error)
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
