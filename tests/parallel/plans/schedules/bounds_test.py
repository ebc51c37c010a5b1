"""Lower bounds of collectives by hand, and below the times of schedules."""

import dataclasses

import pytest

from parallel.plans.network import simulate
from parallel.plans.network.routed import on_links
from parallel.plans.schedules import builders
from parallel.plans.schedules.bounds import lower_bound
from parallel.plans.schedules.schedule import COLLECTIVES
from parallel.plans.topology import builders as t
from parallel.plans.topology.graph import Link, Topology


def linked(name, num_ranks, *links):
  """Returns a topology of links in both directions, in bytes/s."""
  both = [x for a, b, rate in links for x in ((a, b, rate), (b, a, rate))]
  return Topology(name, num_ranks, 0, tuple(Link(*x, 0.0) for x in both))


# Links of rates 1 and 7 in turn: four pairs of ranks, linked by slow links.
PAIRS = linked("pairs", 8, *((i, (i + 1) % 8, 1 + i % 2 * 6) for i in range(8)))
# Two rings of four ranks and one link between them.
RINGS = linked(
  "rings", 8, *((i, (i + 1) % 4, 1) for i in range(4)),
  *((4 + i, 4 + (i + 1) % 4, 1) for i in range(4)), (0, 4, 1),
)
# Rank 0 has one link to others, and three from them.
ONE_OUT = t.fully_connected(4, bandwidth=1, latency_s=0).without(
  (0, 1), (0, 2)
)


@pytest.mark.parametrize(("net", "collective", "seconds"), [
  # Four pairs send 2 x 3 buffers over 8 slow links; their ranks' links have
  # more bandwidth.
  (PAIRS, "all_reduce", 6 / 8), (PAIRS, "all_gather", 6 / 8 / 2),
  # The link between both rings carries the buffer, or one ring's slices.
  (RINGS, "all_reduce", 1), (RINGS, "all_gather", 1 / 2),
  # Ranks 1 and 2 receive three slices over two links. Rank 0 sends the summands
  # of three slices over one.
  (ONE_OUT, "all_gather", 3 / 4 / 2), (ONE_OUT, "reduce_scatter", 3 / 4),
  # 4 of 8 ranks are four links of 3 s away.
  (t.ring(8, bandwidth=1e9, latency_s=3), "all_gather", 12),
])
def test_bound_by_hand(net, collective, seconds):
  assert lower_bound(net, collective, 1) == pytest.approx(seconds)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("net", [PAIRS, RINGS, ONE_OUT, t.leaf_spine(2, 1, 3)])
def test_no_schedule_beats_the_bound(net, collective):
  size, rate = 2**20, min(link.bandwidth for link in net.links)
  # Times are rounded to ns; so a byte takes at least 1 us.
  net = dataclasses.replace(net, links=tuple(
    dataclasses.replace(x, bandwidth=x.bandwidth / rate * 1e6)
    for x in net.links
  ))
  bound = lower_bound(net, collective, size)
  for name in ("ring", "double_tree", "direct", "multitree", "optimal"):
    schedule = builders.build(name, net, collective, pieces=4)
    timeline = simulate.events(on_links(schedule, net), size)
    assert timeline.finish_ns / 1e9 >= bound * (1 - 1e-6)
