"""Modelled times of sums, against a simulation of single blocks."""

import heapq
import itertools

import numpy as np
import pytest

from parallel.peers.ring import bandwidth, times
from parallel.peers.ring.link_collectives import BLOCK_BYTES
from parallel.peers.ring.times import MeasuredLinks
from tests.parallel.peers.worlds import Tcp

pytestmark = pytest.mark.quick


def _links(seed, m, low=1.0, high=20.0):
  rng = np.random.default_rng(seed)
  return MeasuredLinks(
    rng.uniform(low, high, (m, m)), rng.uniform(0, 2, (m, m))
  )


def _simulated(links, order, ranks, blocks, size, sites=()):
  """Simulates each block's way; returns the time of the last arrival.

  Queues hold (chunk, block, whether it is a final sum) in the order of
  arrival, as in the transport.
  """
  m, sites = len(ranks), sites or (len(ranks),)
  # (site, number in it) of each rank; a sum by sites has min(sites) chunks.
  place = [(s, k) for s, size_ in enumerate(sites) for k in range(size_)]
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
      added(now, me, block, "site" if place[pair[0]][0] != place[me][0] else 0)

  def added(now, me, block, what):
    """Counts a term of this rank's chunk: a contribution, or a site's sum."""
    count = len(sites) if what else sites[place[me][0]] - 1
    missing[me, block, what] = missing.get((me, block, what), count) - 1
    if missing[me, block, what] > 0:
      return
    if not what and len(sites) > 1:
      for other, there in enumerate(place):
        if there[0] != place[me][0] and there[1] == place[me][1]:
          push(now, me, other, (me, block, False))
      added(now, me, block, "site")
      return
    for other, there in enumerate(place):
      if there[0] == place[me][0] and other != me:
        push(now, me, other, (me, block, True))

  for me in range(m):
    for k in range(blocks):
      if order == "ring":
        push(0.0, me, (me - 1) % m, ((me + 1) % m, k, False))
        continue
      for other, (site, chunk) in enumerate(place):
        if site == place[me][0] and other != me and chunk < min(sites):
          push(0.0, me, other, (other, k, False))
      if sites[place[me][0]] == 1:  # there are no contributions to wait for
        added(0.0, me, k, 0)
  while events:
    now, kind, pair, item = heapq.heappop(events)
    if kind:
      end = max(end, now)
      arrived(now, pair, item)
    else:
      start(now, pair)
  return end


@pytest.mark.parametrize(
  "sites", [(2, 2), (3, 1), (1, 1), (2, 4), (1, 2, 3), (2, 2, 2)], ids=str
)
@pytest.mark.parametrize("blocks", [1, 3])
def test_time_of_a_sum_by_sites_is_that_of_a_simulation(sites, blocks):
  m = sum(sites)
  for seed in range(5):
    links = _links(seed, m)
    nbytes = 60.0 * min(sites)
    assert times.direct_seconds(
      links, nbytes, 60 // blocks, sites
    ) == pytest.approx(_simulated(
      links, "sites", tuple(range(m)), blocks, 60 / blocks, sites
    ))


@pytest.mark.parametrize("sites", [(2, 2), (3, 3), (2, 2, 1)], ids=str)
def test_shared_link_is_never_faster_and_carries_all_bytes(sites):
  """Counts the bytes of each algorithm that cross between two sites."""
  m, nbytes = sum(sites), 1000.0
  for seed in range(8):
    rng = np.random.default_rng(seed)
    site = rng.permutation(np.repeat(np.arange(len(sites)), sites))
    capacity = rng.uniform(1, 40, (len(sites),) * 2)
    np.fill_diagonal(capacity, np.inf)
    links = _links(seed, m)._replace(site=site, shared=capacity)
    alone = links._replace(shared=None)
    # In every ring: blocks that are late may pass others.
    orders = np.array([*itertools.permutations(range(m))])
    slower = times.ring_seconds(links, orders, nbytes, 100)
    assert (
      slower >= times.ring_seconds(alone, orders, nbytes, 100) - 1e-9
    ).all()
    for choice, separate in zip(*(
      times.candidate_algorithms(x, nbytes, 100) for x in (links, alone)
    ), strict=True):
      assert choice.order == separate.order
      assert choice.seconds >= separate.seconds - 1e-9
      for s, t in itertools.permutations(range(len(sites)), 2):
        a, b = (np.flatnonzero(site == x) for x in (s, t))
        ring = [site[i] for i in choice.ranks]
        steps = list(zip(ring, [*ring[1:], ring[0]], strict=True))
        crossing, flows = {
          "direct": (2 / m * len(a) * len(b), len(a) * len(b)),
          "sites": (1, min(sites)),
          "ring": ((m - 1) / m * sum({x, y} == {s, t} for x, y in steps),
                   max(steps.count((s, t)), steps.count((t, s)))),
        }[choice.order]
        # One flow alone is limited by its own rate.
        if flows > 1:
          assert choice.seconds >= crossing * nbytes / capacity[s, t] - 1e-9


def test_sum_inside_sites_is_chosen_if_sites_share_a_link():
  """Two sites of three: by separate links a direct exchange is the fastest."""
  site = np.array([0, 1, 0, 1, 1, 0])
  apart = site[:, None] != site
  links = MeasuredLinks(
    np.where(apart, 1e7, 1e9), np.where(apart, 0.06, 0.0), site,
    np.array([[np.inf, 1e7], [1e7, np.inf]]),
  )
  found = times.fastest_algorithm(links, 1e7, BLOCK_BYTES)
  assert (found.order, found.sites) == ("sites", (3, 3))
  assert found.ranks == (0, 2, 5, 1, 3, 4)
  # The whole array crosses once, at the rate of the link.
  assert found.seconds == pytest.approx(1.06, abs=0.02)


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
    found = times.fastest_algorithm(links, 1000, 100)
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
  links = MeasuredLinks(np.full((m, m), 1.0), np.zeros((m, m)))
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
  links = MeasuredLinks(rates, delays + delays.T)
  measured = MeasuredLinks(np.zeros((m, m)), np.zeros((m, m)))
  for i, j in itertools.permutations(range(m), 2):
    link = Tcp(rates[i, j], links.delays[i, j]), lambda x: (x, x)
    measured.delays[i, j] = delay = bandwidth.delay_of(*link)
    measured.rates[i, j] = bandwidth.rate_of(*link, delay)
  found = times.fastest_algorithm(
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
  links = MeasuredLinks(np.full((5, 5), 1e6), np.zeros((5, 5)))
  assert times.fastest_algorithm(links, 5_000_000, 1 << 20)[::2] == (
    "direct", pytest.approx(2.0)
  )
  links.rates[1, 2] = links.rates[2, 1] = 1e5
  found = times.fastest_algorithm(links, 5_000_000, 1 << 20)
  assert (found.order, found.seconds) == ("ring", pytest.approx(8.0))
  i, j = found.ranks.index(1), found.ranks.index(2)
  assert abs(i - j) in (2, 3)
