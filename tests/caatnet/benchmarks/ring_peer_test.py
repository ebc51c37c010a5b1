"""Peers of the benchmark of sums: their sums, streams and additions."""

import socket

import numpy as np
import pytest

from caatnet.benchmarks.elastic import ring_peer

SIZE, COUNT, BLOCK = 1000, 3, 256


@pytest.fixture(scope="module")
def peers(pool):
  """Connected peers in threads, each with other values."""
  made = [ring_peer.RingPeer(f"p{i}", "127.0.0.1") for i in range(COUNT)]
  links, raw = (
    {peer.me: address for peer, address in zip(made, addresses, strict=True)}
    for addresses in zip(*(peer.addresses() for peer in made), strict=True)
  )
  options = {"num_connections": 1, "send_buffer": 0}
  list(pool.map(lambda peer: peer.connect(1, links, raw, options), made))
  draw = np.random.default_rng(0)
  for peer in made:
    peer.arrays(SIZE)
    assert peer.x.dtype == peer.out.dtype == np.float32
    peer.x[:] = draw.normal(size=SIZE)
  yield made
  for peer in made:
    for opened in (
      peer.links, peer.listener, peer.server, *peer.outward.values(),
      *peer.inward.values(),
    ):
      opened.close()


@pytest.fixture
def total(peers):
  for peer in peers:
    peer.out.fill(np.nan)
  return sum(peer.x.astype(np.float64) for peer in peers)


@pytest.mark.parametrize("order", ["ring", "direct"])
def test_sums_and_their_bytes(peers, pool, total, order):
  found = list(pool.map(lambda peer: peer.sum(order, BLOCK), peers))
  for peer, sent in zip(peers, found, strict=True):
    np.testing.assert_allclose(peer.out, total, rtol=1e-4, atol=1e-5)
    # Each peer sends 2 (n - 1) / n of its array, up to an element of a chunk.
    assert sent["payload"] == pytest.approx(4 * SIZE * 4 / 3, abs=16)
  # The kernel counts what all have sent.
  assert sum(sent["kernel"] for sent in found) == sum(
    sent["payload"] + sent["framing"] for sent in found
  )


def test_several_sums_at_once_are_those_of_their_parts(peers, pool, total):
  list(pool.map(lambda peer: peer.several(4, BLOCK), peers))
  for peer in peers:
    np.testing.assert_allclose(peer.out, total, rtol=1e-4, atol=1e-5)


def test_raw_streams_receive_what_is_sent(peers, pool, total):
  """Each peer's array is cut into the streams to the others, in order."""
  size = 4 * SIZE // 2
  plans = [
    {other.me: size for other in peers if other is not peer} for peer in peers
  ]
  list(pool.map(lambda peer, plan: peer.raw(plan), peers, plans))
  halves = [np.split(peer.x, 2) for peer in peers]
  for i, peer in enumerate(peers):
    others = [j for j in range(COUNT) if j != i]
    expected = [
      halves[j][[k for k in range(COUNT) if k != j].index(i)] for j in others
    ]
    np.testing.assert_array_equal(peer.out, np.concatenate(expected))


def test_additions_are_of_all_blocks(peers, total):
  peer, step = peers[0], BLOCK // 4
  peer.add(SIZE - 10, BLOCK)
  first = np.resize(peer.x[:step], SIZE - 10)
  np.testing.assert_array_equal(peer.out[:-10], first + peer.x[:-10])
  assert np.isnan(peer.out[-10:]).all()


def test_part_beyond_the_end_is_shifted():
  view = memoryview(bytes(range(10)))
  assert bytes(ring_peer._part(view, slice(2, 5))) == bytes([2, 3, 4])
  assert bytes(ring_peer._part(view, slice(8, 12))) == bytes([6, 7, 8, 9])


def test_raw_connections_do_not_wait_for_more_to_send(peers):
  for peer in peers:
    for sock in (*peer.outward.values(), *peer.inward.values()):
      assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
      assert sock.gettimeout() is None
