"""Links are measured in pairs, and rings are chosen by them."""

import itertools

import numpy as np
import pytest

from parallel.elastic import bandwidth
from tests.parallel.elastic.worlds import together, world


@pytest.mark.parametrize("count", range(1, 12))
def test_each_pair_is_measured_once_and_no_peer_twice_in_a_round(count):
  rounds = bandwidth.rounds(count)
  pairs = [pair for pairs in rounds for pair in pairs]
  assert sorted(pairs) == [*itertools.combinations(range(count), 2)]
  for pairs in rounds:
    ends = [end for pair in pairs for end in pair]
    assert len(set(ends)) == len(ends)


def test_all_peers_have_the_same_measured_rates():
  with world(3) as links:
    found = together([
      lambda x=x: bandwidth.measure(x, 5, least_s=0.005) for x in links
    ])
  assert all(np.array_equal(found[0], other) for other in found)
  assert (found[0] > 0).sum() == 6


def _bottleneck(rates, order):
  both = np.minimum(rates, rates.T)
  return min(both[a, b] for a, b in zip(order, [*order[1:], order[0]],
                                        strict=True))


@pytest.mark.parametrize("count", [3, 5, 7, 9, 12])
def test_a_ring_avoids_slow_links(count):
  """On a hidden ring all links are fast, and slow elsewhere."""
  rng = np.random.default_rng(count)
  hidden = rng.permutation(count)
  rates = rng.uniform(1, 2, (count, count))
  for a, b in zip(hidden, np.roll(hidden, 1), strict=True):
    rates[a, b] = rates[b, a] = 10
  order = bandwidth.ring_order(rates)
  assert sorted(order) == [*range(count)]
  assert _bottleneck(rates, order) == 10
  assert order == bandwidth.ring_order(rates.copy())


def test_the_exact_ring_is_never_worse_than_the_improved_one(monkeypatch):
  for seed in range(5):
    rates = np.random.default_rng(seed).uniform(1, 10, (7, 7))
    exact = _bottleneck(rates, bandwidth.ring_order(rates))
    with monkeypatch.context() as patched:
      patched.setattr(bandwidth, "EXACT", 0)
      assert _bottleneck(rates, bandwidth.ring_order(rates)) <= exact


def test_a_link_without_a_rate_is_refused():
  with pytest.raises(ValueError, match="positive"):
    bandwidth.ring_order(np.zeros((4, 4)))
