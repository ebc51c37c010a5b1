"""Trees grown in time: shallow for small messages, wide on uneven links."""

import collections
import dataclasses
import itertools

import networkx
import pytest

from parallel.plans.network import simulate
from parallel.plans.network.routed import on_links
from parallel.plans.schedules import growth
from parallel.plans.schedules.builders import build
from parallel.plans.schedules.check import check
from parallel.plans.schedules.optimal.cut_bound import cut_bound
from parallel.plans.schedules.schedule import Transfer
from parallel.plans.topology import builders as t
from parallel.plans.topology.graph import Link, Topology
from tests.parallel.plans.schedules.optimal_test import SMALL

MIB = 2**20


def seconds(schedule, topology, size_bytes):
  routed = on_links(schedule, topology)
  return simulate.events(routed, size_bytes).finish_ns / 1e9


@pytest.mark.parametrize("topology", SMALL, ids=lambda x: x.name)
def test_each_chunk_descends_its_tree(topology):
  n = topology.num_ranks
  messages = growth.grow(topology, 3, MIB)
  edges = collections.defaultdict(list)
  for chunk, path in messages:
    assert all(node >= n for node in path[1:-1])  # only switches just forward
    edges[chunk].append((path[0], path[-1]))
  assert sorted(edges) == list(range(3 * n))
  for chunk, pairs in edges.items():
    tree = networkx.DiGraph(pairs)
    assert networkx.is_arborescence(tree)
    assert len(tree) == n
    assert next(networkx.topological_sort(tree)) == chunk // 3
  for collective in ("all_reduce", "reduce_scatter"):
    schedule = build("optimal", topology, collective, trees="grown", weight=3)
    check(schedule, topology)


@pytest.mark.parametrize(
  "topology", [t.torus((4, 4)), t.mesh((3, 4)), t.leaf_spine(2, 2, 4)],
  ids=lambda x: x.name,
)
def test_small_messages_take_the_fewest_links(topology):
  """For one byte, only latency counts: each rank is at its distance."""
  far = {chunk: {chunk: 0} for chunk in range(topology.num_ranks)}
  for chunk, path in growth.grow(topology, 1, topology.num_ranks):
    far[chunk][path[-1]] = far[chunk][path[0]] + len(path) - 1
  for root, hops in far.items():
    assert hops == {
      rank: topology.hops(root, rank) for rank in range(topology.num_ranks)
    }


def test_simulated_time_equals_the_growth_estimate():
  """Links send one message at a time; switches store and forward."""
  net = t.leaf_spine(2, 2, 2, bandwidth=16e9, latency_s=64e-9)
  schedule = build(
    "optimal", net, "all_gather", trees="grown", size_bytes=4 * 1600
  )
  # A rank's only link delivers three chunks, 100 ns apart. The first one has
  # also passed its sender's link; the spines have spare bandwidth.
  assert seconds(schedule, net, 4 * 1600) >= (64 + 100 + 3 * 100 + 64) * 1e-9
  assert seconds(schedule, net, 4 * 1600) <= (4 * 64 + 6 * 100) * 1e-9


def with_slow_link(topology, pair, factor):
  return dataclasses.replace(topology, links=tuple(
    dataclasses.replace(x, bandwidth=x.bandwidth / factor)
    if (x.source, x.destination) in (pair, pair[::-1]) else x
    for x in topology.links
  ))


@pytest.mark.parametrize(
  ("topology", "pair"),
  [(t.torus((4, 4)), (0, 1)), (t.torus((3, 5)), (6, 7)),
   (t.mesh((4, 4)), (5, 6)), (t.leaf_spine(4, 4, 4), (16, 20))],
  ids=lambda x: getattr(x, "name", ""),
)
@pytest.mark.parametrize("factor", [8, 50])
def test_slow_link_costs_little_in_grown_trees(
  topology, pair, factor
):
  """Covers both models of time, with whole chunks of 4 MiB."""
  slow = with_slow_link(topology, pair, factor)
  schedule = build("multitree", slow, "all_gather")
  check(schedule, slow)
  size = 4 * MIB * topology.num_ranks
  bound = cut_bound(slow).seconds_per_byte * size
  without = topology.without(pair, pair[::-1])
  rival = seconds(build("multitree", without, "all_gather"), without, size)
  assert seconds(schedule, slow, size) <= 1.1 * max(rival, 1.7 * bound)
  routed = on_links(schedule, slow)
  assert simulate.lockstep(routed, size) <= 1.4 * bound


def test_rounds_on_uneven_links_do_not_wait_for_the_slowest():
  """One chunk uses a link of 1 byte/s; the others do not wait for it."""
  slow = with_slow_link(t.torus((4, 4), bandwidth=50.0), (0, 1), 50)
  messages = growth.grow(slow, 1)
  schedule = growth.schedule("grown", slow, messages)
  check(schedule, slow)
  assert growth.seconds(schedule.rounds, slow) <= 1.4 * (
    cut_bound(slow).seconds_per_byte * 16
  )


def test_messages_are_in_a_causal_order():
  held = {(chunk, chunk // 2) for chunk in range(32)}
  for chunk, path in growth.grow(t.torus((4, 4)), 2, MIB):
    assert (chunk, path[0]) in held
    assert all(a != b for a, b in itertools.pairwise(path))
    held.add((chunk, path[-1]))
  assert len(held) == 32 * 16


def on_latency(topology, latency_s):
  return dataclasses.replace(topology, links=tuple(
    dataclasses.replace(x, latency_s=latency_s) for x in topology.links
  ))


@pytest.mark.parametrize("topology", SMALL, ids=lambda x: x.name)
def test_latency_counts_only_for_a_given_size(topology):
  messages = growth.grow(on_latency(topology, 1.0), 2)
  assert messages == growth.grow(on_latency(topology, 0.0), 2, 1.0)


@pytest.mark.parametrize(
  "topology",
  [x for x in (*SMALL, t.torus((4, 4))) if x.num_switches == 0],
  ids=lambda x: x.name,
)
@pytest.mark.parametrize("size_bytes", [1.0, 1e4, 1e7])
def test_messages_are_ordered_by_the_time_at_which_they_start(
  topology, size_bytes
):
  """A link sends one message at a time; its latency delays the arrival."""
  n, links = topology.num_ranks, topology.links_by_pair
  free, starts = collections.Counter(), []
  has = {(chunk, chunk // 2): 0.0 for chunk in range(2 * n)}
  for chunk, path in growth.grow(topology, 2, size_bytes):
    start = max(has[chunk, path[0]], free[path])
    free[path] = start + size_bytes / (2 * n) / links[path].bandwidth
    has[chunk, path[-1]] = free[path] + links[path].latency_s
    starts.append(start)
  assert starts == pytest.approx(sorted(starts))


def test_grown_trees_take_the_path_that_arrives_first():
  """The direct link is fast, but its latency is that of ten other links."""
  far = Link(0, 2, 100.0, 1.0)
  links = [Link(a, b, 1.0, 0.1) for a, b in ((0, 1), (1, 2), (2, 1), (1, 0))]
  net = Topology("detour", 3, 0, (*links, far, dataclasses.replace(
    far, source=2, destination=0
  )))
  for size_bytes, path in ((0.3, (1, 2)), (30.0, (0, 2))):
    into = [p for c, p in growth.grow(net, 1, size_bytes) if (c, p[-1]) == (
      0, 2
    )]
    assert into == [path]


def test_round_lengths_are_those_of_four_bandwidths():
  net = Topology("chain", 7, 0, tuple(
    Link(*ends, float(1 + i)) for i in range(6)
    for ends in ((i, i + 1), (i + 1, i))
  ))
  assert growth.sample_bandwidths(net) == [1, 2, 4, 6]
  assert growth.sample_bandwidths(t.ring(3, bandwidth=5.0)) == [5]
  assert growth.sample_bandwidths(t.ring(1)) == [1]
  first, second = (Transfer(i, i + 1, 0, "copy", (i, i + 1)) for i in range(2))
  rounds = (first,), (first, second), (second, second)
  assert growth.seconds(rounds, net) == 1 + 1 + 2 / 2


@pytest.mark.parametrize("link_capacity", [1, 2, 3])
def test_rounds_use_the_capacity_of_links(link_capacity):
  net = t.torus((3, 4))
  found = growth.schedule("grown", net, growth.grow(net, 6), link_capacity)
  assert found.link_capacity == link_capacity
  check(found, net)
  one = growth.schedule("grown", net, growth.grow(net, 6))
  assert len(found.rounds) <= 1.3 * len(one.rounds) / link_capacity


def test_options_of_a_builder_are_those_of_grown_trees():
  net = on_latency(with_slow_link(t.torus((3, 4)), (0, 1), 2), 1e-6)
  found = [
    build("optimal", net, "all_gather", trees="grown", **options).rounds
    for options in (
      {}, {"weight": 2}, {"weight": 2, "size_bytes": 1e5},
      {"weight": 2, "size_bytes": 1e5, "link_capacity": 3},
    )
  ]
  assert found == [
    growth.schedule("optimal", net, growth.grow(net, *grown), capacity).rounds
    for *grown, capacity in (
      (1, None, 1), (2, None, 1), (2, 1e5, 1), (2, 1e5, 3)
    )
  ]
  assert len({*found}) == 4


def test_trees_use_a_link_that_is_slower_but_saves_time():
  """Without it, two slices cross each of the others."""
  net = with_slow_link(t.ring(3, bandwidth=3.0), (0, 1), 1.5)
  schedule = build("multitree", net, "all_gather")
  assert growth.seconds(schedule.rounds, net) == pytest.approx(1 / 2)
