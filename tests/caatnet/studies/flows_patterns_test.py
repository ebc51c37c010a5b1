"""Flows of traffic patterns, schedules and rings."""

import pytest

from caatnet.studies.flows import link_loads, patterns
from caatnet.studies.flows.link_loads import Flow
from parallel.plans.schedules import builders
from parallel.plans.topology import builders as topologies

NET = link_loads.fabric(topologies.leaf_spine(3, 2, 4))


def test_traffic_patterns_reach_each_host_as_often():
  n = 12
  assert patterns.shift(NET, 0) == [Flow(i, (i + 4) % n, 1) for i in range(n)]
  drawn = patterns.permutation(NET, 3)
  assert all(f.source != f.destination and f.bytes == 1 for f in drawn)
  ends = [{f.source for f in drawn}, {f.destination for f in drawn}]
  assert ends[0] == ends[1]
  assert len(drawn) == len(ends[0]) > 6
  assert drawn != patterns.permutation(NET, 4)
  everything = patterns.all_to_all(NET, 0)
  assert len(everything) == len(set(everything)) == n * (n - 4)
  assert all(f.source // 4 != f.destination // 4 for f in everything)


def test_chunks_between_two_ranks_in_a_round_are_one_flow():
  made = builders.build("ring", topologies.ring(4), "all_gather")
  size = made.num_chunks * 6
  rounds = patterns.demands(made, size)
  assert len(rounds) == len(made.rounds)
  for flows, transfers in zip(rounds, made.rounds, strict=True):
    pairs = [(f.source, f.destination) for f in flows]
    assert pairs == sorted(set(pairs))
    assert sum(f.bytes for f in flows) == 6 * len(transfers)
  for wrong in (size + 1, 0):
    with pytest.raises(ValueError, match=f"size_bytes={wrong} must be a mult"):
      patterns.demands(made, wrong)


@pytest.mark.parametrize(("kind", "steps", "each", "receivers"), [
  ("all_reduce", 4, 34, 1), ("reduce_scatter", 2, 34, 1),
  ("all_gather", 2, 100, 1), ("all_to_all", 1, 34, 2), ("permute", 1, 100, 1),
  ("broadcast", 1, 100, 1),
])
def test_ring_sends_to_the_next_rank_of_its_group(kind, steps, each, receivers):
  """Rounds a third of 100 bytes up."""
  flows, found = patterns.ring_demands(kind, [[0, 2, 4], [1, 3, 5]], 100)
  assert found == steps
  assert set(flows) == {
    Flow(group[i], group[(i + k) % 3], each)
    for group in ([0, 2, 4], [1, 3, 5]) for i in range(3)
    for k in range(1, receivers + 1)
  }
  assert len(flows) == 6 * receivers


def test_ring_of_one_rank_sends_nothing():
  assert patterns.ring_demands("all_reduce", [[0]], 100) == ((), 0)
  with pytest.raises(ValueError, match="no ring algorithm for the kind 'x'"):
    patterns.ring_demands("x", [[0, 1]], 100)
