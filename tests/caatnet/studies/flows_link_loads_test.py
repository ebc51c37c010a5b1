"""Loads of links, and the time of a step over them."""

from fractions import Fraction

from caatnet.studies.flows import link_loads
from caatnet.studies.flows.link_loads import Flow, SpineShare
from parallel.plans.topology import builders as topologies

NET = link_loads.fabric(topologies.leaf_spine(3, 2, 4))


def test_loads_count_links_of_hosts_and_spines():
  flows = [Flow(0, 1, 5), Flow(0, 4, 6), Flow(2, 2, 7)]
  leaf, other = NET.leaf_of[0], NET.leaf_of[4]
  first, second = NET.spines
  routes = [(), (SpineShare(first, 1, 3), SpineShare(second, 2, 3)), ()]
  assert link_loads.num_sent(routes) == 2
  found = link_loads.loads(NET, flows, routes)
  assert found == {
    (0, leaf): 11, (leaf, 1): 5, (other, 4): 6,
    (leaf, first): 2, (first, other): 2, (leaf, second): 4, (second, other): 4,
  }
  assert link_loads.max_spine_link_load(NET, found) == 4
  assert link_loads.max_spine_link_load(NET, {(0, leaf): Fraction(9)}) == 0
  # 6 bytes cross one of two uplinks.
  assert link_loads.max_load_lower_bound(NET, flows) == 3
  assert link_loads.max_load_lower_bound(NET, flows[:1]) == 0


def test_step_takes_the_slowest_link_and_two_or_four_latencies():
  net = link_loads.fabric(
    topologies.leaf_spine(3, 2, 4, bandwidth=10.0, latency_s=0.5)
  )
  leaf = net.leaf_of[0]
  below = {(0, leaf): Fraction(3), (leaf, 1): Fraction(5)}
  assert link_loads.step_seconds(net, below) == 5 / 10 + 2 * 0.5
  assert link_loads.step_seconds(net, below, 4) == 20 / 10 + 2 * 0.5
  above = below | {(leaf, net.spines[0]): Fraction(7)}
  assert link_loads.step_seconds(net, above) == 7 / 10 + 4 * 0.5
  assert link_loads.step_seconds(net, {}) == 0
