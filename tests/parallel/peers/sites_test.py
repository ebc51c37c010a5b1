"""Sums inside sites first: order, bytes between sites, and refusals."""

import itertools

import numpy as np
import pytest

from parallel.peers.ring import link_collectives
from parallel.peers.transport.frames import HEADER_BYTES
from parallel.peers.transport.links import Options
from parallel.peers.transport.transfers import Lost
from tests.parallel.peers.worlds import (
  ORDERS,
  PATIENCE_S,
  arrays,
  inside_sites,
  world,
)

BLOCK = 4096  # bytes; small arrays have many blocks
SITES = [(1,), (3,), (1, 1), (2, 2), (3, 1), (2, 4), (1, 1, 1), (2, 1, 3)]


def all_reduce(links, xs, sites, tag=0):
  operations = [
    link_collectives.all_reduce(
      x_links, tag, x, order="sites", block_bytes=BLOCK, sites=sites
    )
    for x_links, x in zip(links, xs, strict=True)
  ]
  return [operation.result(PATIENCE_S) for operation in operations]


@pytest.mark.parametrize("sites", SITES, ids=str)
def test_sums_follow_their_stated_order_bit_for_bit(sites):
  count = sum(sites)
  with world(count, Options(num_connections=2, checked=True)) as links:
    for tag, size in enumerate((0, 1, count - 1, 17, 4099, 30011)):
      xs = arrays(count, size)
      kept = [x.copy() for x in xs]
      wanted = inside_sites(xs, sites)
      for found in all_reduce(links, xs, sites, tag):
        assert found.tobytes() == wanted.tobytes(), size
      assert np.array_equal(xs, kept)
      whole = [np.round(100 * x) for x in xs]  # integers: any order is exact
      for found in all_reduce(links, whole, sites, tag):
        assert np.array_equal(found, ORDERS["direct"](whole))


@pytest.mark.parametrize("sites", SITES, ids=str)
def test_sent_bytes_equal_the_formula_and_each_sum_crosses_once(sites):
  size, count = 20011, sum(sites)
  ends = np.cumsum(sites).tolist()
  with world(count) as links:
    all_reduce(links, arrays(count, size), sites)
    for rank, x in enumerate(links):
      sent = x.traffic.sent
      assert (sent.payload, sent.framing) == link_collectives.sum_bytes(
        "sites", size, count, rank, BLOCK, sites
      )
    names = [
      {f"p{i}" for i in range(end - n, end)}
      for n, end in zip(sites, ends, strict=True)
    ]
    chunk = -(-size // min(sites))
    blocks = sum(
      -(-4 * min(chunk, size - c * chunk) // BLOCK) for c in range(min(sites))
    )
    for a, b in itertools.permutations(names, 2):
      crossed = sum(x.socket_bytes(a) for x in links if x.me in b)
      assert crossed == 4 * size + HEADER_BYTES * blocks


@pytest.mark.parametrize("sites", [(), (2,), (4, -1), (3, 0), (2, 2)], ids=str)
def test_sites_that_do_not_divide_the_ranks_are_refused(sites):
  with world(3) as links, pytest.raises(ValueError, match="with the sum 3"):
    link_collectives.all_reduce(
      links[0], 0, np.zeros(4, np.float32), order="sites", sites=sites
    )


def test_peers_with_different_sites_are_reported():
  with world(3) as links:
    operations = [
      link_collectives.all_reduce(
        x, 0, np.zeros(40, np.float32), order="sites", sites=sites
      )
      for x, sites in zip(links, [(2, 1), (2, 1), (1, 2)], strict=True)
    ]
    for operation in operations:
      with pytest.raises(Lost, match="another operation"):
        operation.result(PATIENCE_S)
