"""Bandwidth measurement of peer pairs, and ring orders chosen from it."""

import contextlib
import itertools

import numpy as np
import pytest

from parallel.peers.emulation import relay
from parallel.peers.exchange import RoundExchange
from parallel.peers.membership.messages import Reduce
from parallel.peers.ring import bandwidth
from parallel.peers.ring.bandwidth import AlgorithmSelector
from parallel.peers.ring.times import MeasuredLinks
from parallel.peers.transport.frames import HEADER_BYTES
from parallel.peers.transport.links import Links
from parallel.plans.hardware.client_links import Link
from tests.parallel.peers.worlds import (
  SECURITY,
  Relay,
  Tcp,
  around_the_ring,
  arrays,
  inside_sites,
  listeners,
  together,
  world,
)


@pytest.mark.parametrize("count", range(1, 12))
def test_each_pair_is_measured_once_and_no_peer_twice_per_round(count):
  rounds = bandwidth.round_robin_pairings(count)
  pairs = [pair for pairs in rounds for pair in pairs]
  assert sorted(pairs) == [*itertools.combinations(range(count), 2)]
  for pairs in rounds:
    ends = [end for pair in pairs for end in pair]
    assert len(set(ends)) == len(ends)


def test_all_peers_obtain_the_same_measured_rates():
  with world(3) as links:
    found = together([
      lambda x=x: bandwidth.measure(x, 5, min_s=0.005) for x in links
    ])
  for other in found:
    assert all(map(np.array_equal, found[0], other))
  assert all((matrix > 0).sum() == 6 for matrix in found[0][:2])


@pytest.mark.parametrize("delay_s", [0.0005, 0.001, 0.01, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("rate", [1e4, 1e5, 1e6, 4e6, 25e6, 125e6])
def test_rate_of_a_link_does_not_depend_on_its_delay(rate, delay_s):
  """Simulated messages at 80 kbit/s to 1 Gbit/s."""
  link = Tcp(rate, delay_s), lambda x: (x, x)
  delay = bandwidth.delay_of(*link)
  assert delay == pytest.approx(delay_s)
  assert bandwidth.rate_of(*link, delay) == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize("paused", range(12))
def test_one_message_that_pauses_does_not_change_the_rate(paused):
  link, number = Tcp(12.5e6, 0.01), itertools.count()

  def timed(size):
    return link(size) + (next(number) == paused)  # a second

  found = bandwidth.rate_of(timed, lambda x: (x, x), 0.01)
  assert found == pytest.approx(12.5e6, rel=0.25)


@pytest.mark.parametrize(
  "sizes", [(3,), (2, 2), (1, 4), (3, 2, 2), (1, 1, 1), (2, 1, 3, 1)], ids=str
)
def test_sites_are_found_in_any_order_of_the_peers(sizes):
  for seed in range(10):
    rng = np.random.default_rng(seed)
    hidden = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    far = rng.uniform(0.02, 0.15, (len(sizes),) * 2)
    far = np.triu(far) + np.triu(far, 1).T
    np.fill_diagonal(far, rng.uniform(1e-5, 3e-3, len(sizes)))
    m = len(hidden)
    # Each delay varies, by as much as a busy machine delays a message.
    delays = far[np.ix_(hidden, hidden)] * rng.uniform(0.8, 1.2, (m, m))
    found = bandwidth.infer_sites(delays)
    first = list(dict.fromkeys(hidden))  # sites are numbered by first peers
    assert found.tolist() == [first.index(s) for s in hidden]


def test_peers_with_unlike_delays_are_no_sites():
  """Two near peers, one of which is far from the third peer's site."""
  near, far = 0.001, 0.02
  delays = np.full((3, 3), near)
  delays[0, 2] = delays[2, 0] = far
  assert not bandwidth.infer_sites(delays).any()
  delays[1, 2] = delays[2, 1] = 5 * far  # no division has like delays
  assert len(set(bandwidth.infer_sites(delays))) in (1, 3)


def test_sum_of_concurrent_rates_is_what_a_link_shares():
  site, alone, at_once = np.array([0, 1, 0, 1, 1]), *np.zeros((2, 5, 5))
  alone[np.ix_([0, 2], [0, 2])] = alone[np.ix_([1, 3, 4], [1, 3, 4])] = 99
  for i, j, rate in ((0, 1, 8), (2, 3, 6), (0, 4, 4)):
    alone[i, j], alone[j, i] = rate, 2 * rate
  at_once[0, 1], at_once[2, 3] = 5, 5  # 10 < .75 * 14
  at_once[1, 0], at_once[3, 2] = 15, 12  # 27 of 28: no shared link
  found = bandwidth._combine_measurements(
    np.zeros((5, 5)), site, alone, at_once
  )
  assert found.shared.tolist() == [[np.inf, 10], [np.inf, np.inf]]
  # Pairs that were not measured have the smaller rate of their ends.
  assert found.rates[[2, 2, 0], [1, 4, 3]].tolist() == [6, 4, 6]
  assert found.rates[[1, 4, 3], [2, 2, 0]].tolist() == [12, 8, 12]
  assert (found.rates[alone > 0] == alone[alone > 0]).all()


def _bottleneck(rates, order):
  both = np.minimum(rates, rates.T)
  return min(both[a, b] for a, b in zip(order, [*order[1:], order[0]],
                                        strict=True))


@pytest.mark.parametrize("count", [3, 5, 7, 9, 12])
def test_ring_avoids_slow_links(count):
  """Recovers a hidden ring of fast links among slow ones."""
  rng = np.random.default_rng(count)
  hidden = rng.permutation(count)
  rates = rng.uniform(1, 2, (count, count))
  for a, b in zip(hidden, np.roll(hidden, 1), strict=True):
    rates[a, b] = rates[b, a] = 10
  order = bandwidth.ring_order(rates)
  assert sorted(order) == [*range(count)]
  assert _bottleneck(rates, order) == 10
  assert order == bandwidth.ring_order(rates.copy())


def test_exact_ring_is_at_least_as_fast_as_the_improved_one(monkeypatch):
  for seed in range(5):
    rates = np.random.default_rng(seed).uniform(1, 10, (7, 7))
    exact = _bottleneck(rates, bandwidth.ring_order(rates))
    with monkeypatch.context() as patched:
      patched.setattr(bandwidth, "EXACT", 0)
      assert _bottleneck(rates, bandwidth.ring_order(rates)) <= exact


@pytest.mark.parametrize("count", [1, 2, 3, 6, 10, 13])
def test_ring_of_equal_links_is_in_the_order_of_the_ranks(count):
  """Ties are resolved by the smallest tuple."""
  order = bandwidth.ring_order(np.full((count, count), 5.0))
  assert order == tuple(range(count))


def _times(rates, order):
  both = np.minimum(rates, rates.T)
  steps = [1 / both[a, b] for a, b in zip(order, [*order[1:], order[0]],
                                          strict=True)]
  return max(steps), sum(steps)


@pytest.mark.parametrize("count", [4, 6])
def test_exact_ring_has_the_least_slowest_link_and_then_the_least_sum(count):
  """Few distinct rates, so that many rings have equal slowest links."""
  for seed in range(10):
    rates = np.random.default_rng(seed).integers(1, 4, (count, count)) * 1.0
    order = bandwidth.ring_order(rates)
    best = min(
      (_times(rates, (0, *rest)), (0, *rest))
      for rest in itertools.permutations(range(1, count))
    )
    assert _times(rates, order) == pytest.approx(best[0])
    assert order[0] == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_reversed_segment_improves_a_ring_of_many_peers(seed):
  rates = np.random.default_rng(seed).uniform(1, 10, (11, 11))
  order = bandwidth.ring_order(rates)
  found = _times(rates, order)
  for i, j in itertools.combinations(range(1, 12), 2):
    turned = (*order[:i], *order[i:j][::-1], *order[j:])
    slowest, total = _times(rates, turned)
    assert (slowest, total + 1e-9) >= found


def test_slower_sums_in_a_row_request_a_new_measurement():
  """Three sums that take more than twice as long as the fastest one."""
  rings, ranks = AlgorithmSelector(None), ("a", "b")
  assert rings.wanted(ranks)
  with pytest.raises(KeyError):
    rings.choice(ranks, 8)
  rings._links_of = {ranks: None}
  for seconds in (5, 1, 2, 2.1, 2.1, 2, 2.1, 2.1):
    rings.took(8, seconds)
    assert not rings.wanted(ranks)
  rings.took(16, 3)  # the first one of another size
  for _ in range(2):
    rings.took(8, 3)
    assert not rings.wanted(ranks)
  rings.took(8, 3)
  assert rings.wanted(ranks)
  rings.took(8, 1)
  assert not rings.wanted(ranks)
  assert rings.wanted(("a", "c"))


def test_choice_is_made_once_per_rounded_size_and_said_if_it_changes():
  lines, ranks = [], ("x", "y", "z", "u", "v")
  rings = AlgorithmSelector(None, lines.append)
  links = MeasuredLinks(np.full((5, 5), 1e6), np.zeros((5, 5)))
  rings._links_of = {ranks: links}
  direct = rings.choice(ranks, 2**21 + 1)
  assert (direct.order, direct.ranks, direct.sites) == ("direct", ranks, ())
  said = "sums of 4.19 MB use a direct exchange: 1.68 s by the measured links"
  assert lines == [said]
  assert rings.choice(ranks, 2**23) == direct  # the same, and not said again
  # A choice of this size, up to a power of two, is not made again.
  links.rates[0, 1] = links.rates[1, 0] = 1e5
  assert rings.choice(ranks, 2**22) == direct
  assert lines == [said]
  ring = rings.choice(ranks, 2**22 + 2**23)
  assert ring.order == "ring"
  assert lines[1].startswith(f"sums of 16.8 MB use the ring {ring.ranks[0]}, ")


def test_measurement_forgets_the_times_of_earlier_sums():
  with world(2) as links:
    made, ranks = [AlgorithmSelector(x, str) for x in links], ("p0", "p1")
    for rings in made:
      for seconds in (1, 3, 3, 3):
        rings.took(8, seconds)
      assert rings.wanted(ranks)
    together([lambda x=x: x.measure(ranks, 5) for x in made])
  for rings in made:
    for seconds in (3, 5, 5, 5):
      assert not rings.wanted(ranks)
      rings.took(8, seconds)
    assert not rings.wanted(ranks)
    assert rings.measured == 1


@pytest.mark.parametrize("rate", [0.0, -1.0, np.inf, np.nan])
def test_link_without_a_rate_is_refused(rate):
  rates = np.ones((4, 4))
  rates[2, 1] = rate
  rates[1, 2] = max(rate, 1.0)
  with pytest.raises(ValueError, match="positive"):
    bandwidth.ring_order(rates)


def test_sites_that_share_a_link_are_measured_and_add_inside_first():
  """Two sites of two; 15 ms between them over one link for each direction."""
  xs, cells = arrays(4, 300_000), {}
  site_of = {"p0": 0, "p1": 1, "p2": 0, "p3": 1}
  with listeners(4) as there, contextlib.ExitStack() as stack:
    near = {name: x.address for name, x in there.items()}
    far = {}
    for name, address in near.items():
      link = Link(
        f"to {site_of[name]}", 4e6, 4e6, 0.03, 0.0, 0.0, 0.0, True, "the test"
      )
      far[name] = stack.enter_context(
        relay.Relay(address, [link], cells)
      ).addresses[0]
    links = [
      Links(n, 1, {
        p: (near if site_of[p] == site_of[n] else far)[p] for p in there
      }, SECURITY)
      for n in there
    ]
    together([lambda x=x: x.connect(there[x.me], 20) for x in links])

    def exchange(i):
      here = RoundExchange(
        links[i], Reduce(1, 1, tuple(near)), 1.0, (),
        AlgorithmSelector(links[i])
      )
      before = links[i].received_bytes({p for p in near if site_of[p] != i % 2})
      found = here.sum(xs[i], "ring")
      return here.algorithm(xs[i].nbytes), found, links[i].received_bytes(
        {p for p in near if site_of[p] != i % 2}
      ) - before

    found = together([lambda i=i: exchange(i) for i in range(4)])
    for x in links:
      x.close()
  wanted = inside_sites([xs[i] for i in (0, 2, 1, 3)], (2, 2))
  for algorithm, total, _ in found:
    assert algorithm == ("sites", ("p0", "p2", "p1", "p3"), (2, 2))
    assert total.tobytes() == wanted.tobytes()
  # Each site receives the other one's sum once, in blocks with a header.
  for i in (0, 1):
    received = found[i][2] + found[i + 2][2]
    assert received == xs[0].nbytes + 2 * HEADER_BYTES


def test_ring_is_reordered_when_another_link_becomes_slow(
  monkeypatch,
):
  """Slows relays on two links; sums keep the order of the ring."""
  monkeypatch.setattr("parallel.peers.exchange._TIMED_BYTES", 0)
  # Far slower than the pauses of a loaded machine.
  slow, fast = 1e5, 1e9
  xs = arrays(4, 10_000)
  with listeners(4) as there:
    names = [*there]
    relays = {
      pair: Relay(there[pair[1]].address, fast)
      for pair in (("p0", "p1"), ("p0", "p2"))
    }
    links = [
      Links(n, 1, {
        p: relays[n, p].address if (n, p) in relays else x.address
        for p, x in there.items()
      }, SECURITY)
      for n in names
    ]
    together([lambda x=x: x.connect(there[x.me], 20) for x in links])
    rings = [AlgorithmSelector(x) for x in links]
    number = 0

    def exchange(i):
      there = RoundExchange(
        links[i], Reduce(1, number, tuple(names)), 1.0, (), rings[i]
      )
      return there.algorithm(xs[i].nbytes), there.sum(xs[i], "ring")

    def ring():
      """Runs one sum; returns the ring, which all peers share."""
      nonlocal number
      number += 1
      found = together([lambda i=i: exchange(i) for i in range(4)])
      ((order, ranks, _),) = {there for there, _ in found}
      assert order == "ring"
      wanted = around_the_ring([xs[names.index(p)] for p in ranks])
      assert all(total.tobytes() == wanted.tobytes() for _, total in found)
      return ranks

    relays["p0", "p1"].bytes_per_s = slow
    assert ring() == ("p0", "p2", "p1", "p3")
    assert ring() == ("p0", "p2", "p1", "p3")
    assert {x.measured for x in rings} == {1}
    relays["p0", "p1"].bytes_per_s = fast
    relays["p0", "p2"].bytes_per_s = slow
    found = [ring() for _ in range(6)]
    assert found[-1] == ("p0", "p1", "p2", "p3")
    for x in links:
      x.close()
    for relay in relays.values():
      relay.close()
