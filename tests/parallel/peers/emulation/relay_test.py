"""Relay: rates, delays and ends of the streams that it passes."""

import contextlib
import dataclasses
import socket
import threading
import time

import numpy as np
import pytest

from parallel.peers.emulation import relay
from parallel.plans.network import fluid
from tests.parallel.peers.emulation.stars import CELL, OWN, check_links, probe

LIMIT_S = 10.0


def test_relay_has_the_rates_and_delays_of_its_links():
  links = [OWN, dataclasses.replace(CELL, jitter_s=1e-4), CELL]
  with probe(links) as peers:
    check_links(peers)


def test_relay_passes_all_bytes_and_both_ends():
  data = np.random.default_rng(0).bytes(300_000)
  fast = dataclasses.replace(OWN, down=1e8, up=1e8)
  with socket.create_server(("127.0.0.1", 0)) as server:
    target = server.getsockname()
    with relay.Relay(target, [fast, fast]) as made:
      near = socket.create_connection(made.addresses[1], LIMIT_S)
      far, _ = server.accept()
      far.settimeout(LIMIT_S)
      with near, far:
        sender = threading.Thread(target=lambda: (
          near.sendall(data), near.shutdown(socket.SHUT_WR)
        ))
        sender.start()
        found = b""
        while piece := far.recv(1 << 16):
          found += piece
        sender.join()
        assert found == data
        far.sendall(b"back")  # the other direction is still open
        assert near.recv(8) == b"back"
        # Small messages do not wait for more; 0 for both that listen.
        assert sorted(
          bool(x.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
          for x in made._sockets
        ) == [False, False, True, True]
      near = socket.create_connection(made.addresses[0], LIMIT_S)
      far, _ = server.accept()
      far.settimeout(LIMIT_S)
    # The relay ends its connections and listens no more.
    with near, far:
      assert near.recv(8) == far.recv(8) == b""
    with pytest.raises(ConnectionError):
      socket.create_connection(made.addresses[0])
  with (
    relay.Relay(target, [fast]) as made,  # the server has ended
    socket.create_connection(made.addresses[0], LIMIT_S) as near,
  ):
    assert near.recv(8) == b""


def test_losses_limit_each_connection_of_a_relay():
  """Two clients of a fast cell receive at the rate of a lossy flow each."""
  lossy = dataclasses.replace(OWN, down=1e8, loss=0.01, shared=True)
  wanted_s = 0.3
  size = int(wanted_s * fluid.loss_limit(lossy.rtt_s, lossy.loss))
  with (
    socket.create_server(("127.0.0.1", 0)) as server,
    relay.Relay(server.getsockname(), [lossy, lossy]) as made,
    contextlib.ExitStack() as stack,
  ):
    nears = [
      stack.enter_context(socket.create_connection(address, LIMIT_S))
      for address in made.addresses
    ]
    start = time.monotonic()
    for _ in nears:
      far, _ = server.accept()
      stack.enter_context(far)
      threading.Thread(
        target=far.sendall, args=(bytes(size),), daemon=True
      ).start()
    for near in nears:
      left = size
      while left:
        left -= len(near.recv(left))
    assert 0.9 * wanted_s < time.monotonic() - start < 1.8 * wanted_s


@pytest.mark.parametrize(("rate", "size"), [
  (1e3, 256), (1e6, 2000), (1e9, 1 << 16)
])
def test_bucket_passes_pieces_of_its_rate(rate, size):
  """Two milliseconds, but no tiny nor huge pieces."""
  assert relay.TokenBucket(rate).piece == size
