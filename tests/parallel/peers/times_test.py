"""Modelled times of sums, against a simulation of single blocks."""

import heapq
import itertools

import numpy as np
import pytest

from parallel.peers.ring import bandwidth, times
from parallel.peers.ring.link_collectives import BLOCK_BYTES
from parallel.peers.ring.times import Matrix
from tests.parallel.peers.worlds import Tcp

pytestmark = pytest.mark.quick


def _links(seed, m, low=1.0, high=20.0):
  rng = np.random.default_rng(seed)
  return Matrix(rng.uniform(low, high, (m, m)), rng.uniform(0, 2, (m, m)))


def _simulated(links, order, ranks, blocks, size):
  """Simulates each block's way; returns the time of the last arrival.

  Queues hold (chunk, block, whether it is a final sum) in the order of
  arrival, as in the transport.
  """
  m = len(ranks)
  queues = {pair: [] for pair in itertools.permutations(range(m), 2)}
  free, missing, events, end = dict.fromkeys(queues, 0.0), {}, [], 0.0

  def push(now, source, target, item):
    queues[source, target].append(item)
    start(now, (source, target))

  def start(now, pair):
    if queues[pair] and free[pair] <= now:
      a, b = (ranks[i] for i in pair)
      free[pair] = now + size / links.rates[a, b]
      item = queues[pair].pop(0)
      heapq.heappush(events, (free[pair], 0, pair, item))
      heapq.heappush(
        events, (free[pair] + links.delays[a, b], 1, pair, item)
      )

  def arrived(now, pair, item):
    chunk, block, final = item
    me = pair[1]
    if order == "ring":
      if not final and chunk != me:
        push(now, me, (me - 1) % m, item)
      elif chunk != (me + 1) % m:
        push(now, me, (me + 1) % m, (chunk, block, True))
    elif not final:
      left = missing[me, block] = missing.get((me, block), m - 1) - 1
      if not left:
        for other in set(range(m)) - {me}:
          push(now, me, other, (me, block, True))

  for me in range(m):
    for k in range(blocks):
      if order == "ring":
        push(0.0, me, (me - 1) % m, ((me + 1) % m, k, False))
      else:
        for other in set(range(m)) - {me}:
          push(0.0, me, other, (other, k, False))
  while events:
    now, kind, pair, item = heapq.heappop(events)
    if kind:
      end = max(end, now)
      arrived(now, pair, item)
    else:
      start(now, pair)
  return end


@pytest.mark.parametrize("m", [3, 4, 5, 6])
# Of 60 bytes: 1.5 blocks of 40 bytes are modelled as two of 30.
@pytest.mark.parametrize(("block", "blocks"), [(60, 1), (20, 3), (40, 2)])
def test_time_is_that_of_a_simulation_of_single_blocks(m, block, blocks):
  for seed in range(5):
    links = _links(seed, m)
    rng = np.random.default_rng(seed)
    orders = np.array([rng.permutation(m) for _ in range(3)])
    nbytes, size = 60.0 * m, 60 / blocks
    assert times.direct_seconds(links, nbytes, block) == pytest.approx(
      _simulated(links, "direct", tuple(range(m)), blocks, size)
    )
    found = times.ring_seconds(links, orders, nbytes, block)
    for order, seconds in zip(orders, found, strict=True):
      assert seconds == pytest.approx(
        _simulated(links, "ring", tuple(order), blocks, size)
      )


@pytest.mark.parametrize("m", [1, 2, 3, 4, 6])
def test_choice_is_as_fast_as_every_ring_and_as_a_direct_exchange(m):
  for seed in range(5):
    links = _links(seed, m)
    found = times.fastest(links, 1000, 100)
    orders = np.array([
      (0, *rest) for rest in itertools.permutations(range(1, m))
    ])
    seconds = times.ring_seconds(links, orders, 1000, 100)
    direct = times.direct_seconds(links, 1000, 100)
    assert sorted(found.ranks) == [*range(m)]
    # A ring and its reverse are one candidate.
    assert found.seconds <= 1.1 * min([*seconds, direct]) + 1e-9
    assert found.seconds <= direct or m == 2
    same = (orders == found.ranks).all(axis=1)
    if found.order == "ring":
      assert seconds[same] == pytest.approx([found.seconds])


def test_search_of_many_ranks_finds_a_ring_without_slow_links():
  rng = np.random.default_rng(0)
  m = times.EXACT + 3
  hidden = rng.permutation(m)
  links = Matrix(np.full((m, m), 1.0), np.zeros((m, m)))
  for a, b in zip(hidden, np.roll(hidden, 1), strict=True):
    links.rates[a, b] = links.rates[b, a] = 100.0
  start = tuple(hidden[: m // 2]) + tuple(hidden[m // 2 :][::-1])
  order, seconds = times.fastest_ring(links, 1000, 10, start)
  assert seconds == times.ring_seconds(links, hidden[None], 1000, 10)[0]
  assert sorted(order) == [*range(m)]
  assert order[0] == start[0]


@pytest.mark.parametrize("mbit", [(10, 200), (200, 1000)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_choice_by_measured_links_is_nearly_the_fastest(mbit, seed):
  """5 peers; links are measured and sums of 4 MB run in simulated time."""
  m, nbytes = 5, 4_000_000
  rng = np.random.default_rng(seed)
  rates = np.exp(rng.uniform(*np.log(mbit), (m, m))) * 1e6 / 8
  delays = np.triu(rng.choice([0.001, 0.02, 0.1], (m, m)), 1)
  links = Matrix(rates, delays + delays.T)
  measured = Matrix(np.zeros((m, m)), np.zeros((m, m)))
  for i, j in itertools.permutations(range(m), 2):
    link = Tcp(rates[i, j], links.delays[i, j]), lambda x: (x, x)
    measured.delays[i, j] = delay = bandwidth.delay_of(*link)
    measured.rates[i, j] = bandwidth.rate_of(*link, delay)
  found = times.fastest(
    measured, nbytes, BLOCK_BYTES, bandwidth.ring_order(measured.rates)
  )
  blocks = -(-nbytes // m // BLOCK_BYTES)

  def seconds(order, ranks):
    return _simulated(links, order, ranks, blocks, nbytes / m / blocks)

  rings = [(0, *rest) for rest in itertools.permutations(range(1, m))]
  fastest = min(
    seconds("direct", tuple(range(m))), *(seconds("ring", x) for x in rings)
  )
  assert seconds(found.order, found.ranks) <= 1.1 * fastest


def test_slow_pair_decides_between_ring_and_direct_exchange():
  """Five ranks with equal links; then one pair is 10 times slower."""
  links = Matrix(np.full((5, 5), 1e6), np.zeros((5, 5)))
  assert times.fastest(links, 5_000_000, 1 << 20)[::2] == (
    "direct", pytest.approx(2.0)
  )
  links.rates[1, 2] = links.rates[2, 1] = 1e5
  found = times.fastest(links, 5_000_000, 1 << 20)
  assert (found.order, found.seconds) == ("ring", pytest.approx(8.0))
  i, j = found.ranks.index(1), found.ranks.index(2)
  assert abs(i - j) in (2, 3)
