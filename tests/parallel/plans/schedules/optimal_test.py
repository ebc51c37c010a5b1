"""Optimal trees: as fast as the tightest cut allows, on various graphs."""

import dataclasses
from fractions import Fraction
import itertools
import math
import random

import networkx
import numpy as np
import pytest

from parallel.plans.schedules.builders import build
from parallel.plans.schedules.check import check
from parallel.plans.schedules.optimal import splitting, trees
from parallel.plans.schedules.optimal.cut_bound import (
  SourceFlow,
  cut_bound,
  integer_capacities,
  tightest_cut,
)
from parallel.plans.schedules.schedule import link_loads
from parallel.plans.topology import builders as t
from parallel.plans.topology import files
from parallel.plans.topology.graph import BANDWIDTH, Link, Topology


def brute_force(topology):
  """Returns max |S and ranks| / B+(S) over all sets S of nodes."""
  n, nodes = topology.num_ranks, range(topology.num_nodes)
  best = 0.0
  for size in range(1, topology.num_nodes):
    for inside in map(set, itertools.combinations(nodes, size)):
      ranks = sum(node < n for node in inside)
      if ranks < n:
        leaving = sum(
          x.bandwidth for x in topology.links
          if x.source in inside and x.destination not in inside
        )
        best = max(best, ranks / leaving if ranks else 0.0)
  return best / n


def drawn(seed):
  """Returns a random graph with unequal links, some of them one-way."""
  rng = random.Random(seed)
  n = rng.randrange(3, 7)
  graph = networkx.gnp_random_graph(n, 0.5, seed, directed=True)
  graph.add_edges_from((i, (i + 1) % n) for i in range(n))
  for edge in graph.edges:
    graph.edges[edge]["bandwidth"] = rng.choice([1e9, 2e9, 2.5e9, 7e9])
  return files.from_networkx(graph, name=f"drawn {seed}")


SMALL = [
  *(drawn(seed) for seed in range(6)),
  t.mesh((2, 3)), t.switch(4), t.leaf_spine(2, 2, 2, uplink_bandwidth=1e10),
  t.dgx(2, 2), t.ring(4).without((0, 1)),
]


@pytest.mark.parametrize("topology", SMALL, ids=lambda x: x.name)
def test_bound_is_the_tightest_of_all_cuts(topology):
  bound = cut_bound(topology)
  assert bound.seconds_per_byte == pytest.approx(brute_force(topology), 1e-9)
  assert bound.cut == tuple(sorted(set(bound.cut)))
  assert bound.leaving == pytest.approx(sum(
    x.bandwidth for x in topology.links
    if x.source in bound.cut and x.destination not in bound.cut
  ))
  # A flow slightly below the bound's rate reaches every rank; above, not.
  y, _ = tightest_cut(topology)
  capacities, n = integer_capacities(topology), topology.num_ranks
  for scale, fits in ((1, True), (Fraction(1001, 1000), False)):
    rate = y * scale * 1000
    assert fits == SourceFlow(
      capacities * 1000 * rate.denominator, n, rate.numerator
    ).reaches(n * rate.numerator)


# n T* B / M: (n - 1) / 4 on tori, (n - 1) / 2 at the corners of meshes.
UNIT = [(t.torus, 4, 3.75), (t.torus, 6, 8.75), (t.torus, 8, 15.75),
        (t.mesh, 4, 7.5), (t.mesh, 6, 17.5), (t.mesh, 8, 31.5)]


@pytest.mark.parametrize(("builder", "d", "expected"), UNIT)
def test_bounds_of_grids(builder, d, expected):
  bound = cut_bound(builder((d, d), bandwidth=1.0))
  assert bound.seconds_per_byte * d * d == pytest.approx(expected, 1e-12)


@pytest.mark.parametrize(
  "topology",
  [
    *SMALL, t.torus((4, 4)), t.mesh((4, 4)), t.torus((3, 3, 2)), t.fat_tree(4),
    t.bigraph(2, 4), t.torus((4, 4)).without((0, 1), (1, 0)),
    t.leaf_spine(4, 2, 2, uplink_bandwidth=25e9),
  ],
  ids=lambda x: x.name,
)
def test_load_of_the_busiest_link_equals_the_bound(topology):
  forest = trees.forest(topology)
  assert 1 - 1e-9 <= forest.ratio <= 1.05
  for chunk, paths in enumerate(forest.trees):
    tree = networkx.DiGraph((path[0], path[-1]) for path in paths)
    assert networkx.is_arborescence(tree)
    assert len(tree) == topology.num_ranks
    assert next(networkx.topological_sort(tree)) == chunk // forest.weight


def test_rounds_add_little_to_the_busiest_link():
  topology = t.torus((4, 4))
  schedule = build("optimal", topology, "all_gather")
  check(schedule, topology)
  least = cut_bound(topology).seconds_per_byte * BANDWIDTH
  assert least <= len(schedule.rounds) / schedule.num_chunks <= 1.1 * least


def funnel(into, out):
  """Returns three ranks at a switch, with a bandwidth per direction."""
  found = [Link(rank, 3, bandwidth) for rank, bandwidth in enumerate(into)]
  found += [Link(3, rank, bandwidth) for rank, bandwidth in enumerate(out)]
  return Topology("funnel", 3, 1, tuple(found))


def test_asymmetric_switch_is_refused_if_a_rank_depends_on_it():
  assert trees.forest(funnel((1e9, 4e9, 4e9), (4e9, 2e9, 2e9))).ratio < 1.01
  with pytest.raises(ValueError, match="in and out differ in bandwidth"):
    trees.forest(funnel((2e9, 2e9, 2e9), (4e9, 4e9, 4e9)))


def test_one_rank_has_no_bound():
  with pytest.raises(ValueError, match="a collective needs at least two"):
    cut_bound(t.ring(1))
  assert build("optimal", t.ring(1)).rounds == ()
  assert np.all(integer_capacities(t.ring(3)).sum(0) == 2)


def test_paths_visit_no_node_twice():
  """Splitting off switches may create loops, which are removed."""
  assert splitting._without_loops((0, 4, 5, 4, 1)) == (0, 4, 1)
  for topology in (t.fat_tree(4), t.leaf_spine(4, 2, 2)):
    for paths in trees.forest(topology).trees:
      assert all(len(set(path)) == len(path) for path in paths)


def test_capacities_of_many_ranks_fit_32_bits():
  """The search for the bound multiplies them by up to n - 1."""
  n = 3000
  whole = t.ring(n)
  net = dataclasses.replace(whole, links=tuple(
    dataclasses.replace(x, bandwidth=x.bandwidth * (1 + 0.7**i))
    for i, x in enumerate(whole.links)
  ))
  largest = int(integer_capacities(net).max())
  assert 2**30 < largest * (n - 1) < 2**31


@pytest.mark.parametrize(("speeds", "capacities"), [
  ((1e9, 2e9, 2.5e9, 7e9), (2, 4, 5, 14)),
  ((3.0, 1.0, 1 / 3, 1.0), (9, 3, 1, 3)),
  ((1.0, math.pi, 1.0, 1e-9), (318_309, 1_000_000, 318_309, 1)),
  ((1.0, 2e6, 1.0, 1.0), (1, 1_000_000, 1, 1)),
])
def test_capacities_are_ratios_or_millionths(speeds, capacities):
  net = Topology("ring", 4, 0, tuple(
    Link(i, (i + 1) % 4, speed) for i, speed in enumerate(speeds)
  ))
  found = integer_capacities(net)
  assert found.sum() == sum(capacities)
  assert tuple(found[i, (i + 1) % 4] for i in range(4)) == capacities


@pytest.mark.parametrize("topology", SMALL, ids=lambda x: x.name)
@pytest.mark.parametrize("weight", [1, 3])
def test_scale_of_capacities_is_the_smallest(topology, weight):
  n, capacities = topology.num_ranks, integer_capacities(topology)
  y, _ = tightest_cut(topology)
  least = weight / y
  values = set(capacities[capacities > 0].tolist())
  tried = sorted({least} | {
    Fraction(i, c) for c in values
    for i in range(int(least * c) + 1, int((least + 1) * c) + 1)
  })

  def fits(scale):
    scaled = capacities * scale.numerator // scale.denominator
    return SourceFlow(scaled, n, weight).reaches(n * weight)

  expected = next(scale for scale in tried if fits(scale)) / least
  arguments = capacities, n, weight, y
  assert trees._smallest_scale(*arguments, None) == expected
  assert trees._smallest_scale(*arguments, expected + 1) == expected
  assert trees._smallest_scale(*arguments, expected) is None


def test_options_choose_the_number_of_trees():
  """On a ring of four, one tree per rank loads links 4 / 3 of the bound."""
  net = t.ring(4)
  one = trees.forest(net, max_weight=1)
  assert (one.weight, one.ratio) == (1, pytest.approx(4 / 3))
  assert trees.forest(net, tolerance=0.34).weight == 1
  assert trees.forest(net, tolerance=0.33).weight == 2
  assert trees.forest(net, weight=3).weight == 3
  assert len(trees.forest(net, weight=3).trees) == 12


@pytest.mark.parametrize("topology", SMALL, ids=lambda x: x.name)
def test_number_of_trees_is_the_smallest_of_the_best_ones(topology):
  y, _ = tightest_cut(topology)
  ratios = {
    k: trees._smallest_scale(
      integer_capacities(topology), topology.num_ranks, k, y, None
    ) for k in range(1, 6)
  }
  found = trees.forest(topology, tolerance=0.0, max_weight=5)
  assert found.weight == min(ratios, key=lambda k: ratios[k])
  assert found.ratio <= ratios[found.weight] * (1 + 1e-9)


def test_many_trees_are_tried_on_few_ranks():
  """Three ranks may have 42 trees each, which makes 126 chunks.

  Only multiples of 101 trees would load both links into rank 0 fully.
  """
  pairs = [(0, 1), (0, 2), (1, 2), (2, 1)]
  net = Topology("uneven", 3, 0, (
    Link(1, 0, 50.0), Link(2, 0, 51.0), *(Link(*pair, 200.0) for pair in pairs)
  ))
  y, _ = tightest_cut(net)
  assert y == Fraction(101, 2)
  ratios = {
    k: trees._smallest_scale(integer_capacities(net), 3, k, y, None)
    for k in range(1, 86)
  }
  best = min(range(1, 43), key=lambda k: ratios[k])
  assert min(ratios, key=lambda k: ratios[k]) > 42
  assert trees.forest(net, tolerance=0.0).weight == best


SWITCHED = [
  t.switch(4), t.leaf_spine(2, 2, 2), t.leaf_spine(2, 2, 3), t.dgx(2, 2),
  t.leaf_spine(2, 1, 2, uplink_bandwidth=3e10), t.fat_tree(4),
]


def bottleneck(topology):
  """Returns capacities and units per rank that just fit into them."""
  y, _ = tightest_cut(topology)
  return integer_capacities(topology) * y.denominator, y.numerator


@pytest.mark.parametrize("topology", SWITCHED, ids=lambda x: x.name)
@pytest.mark.parametrize("way", ["ranks first", "evenly", "pair by pair"])
def test_split_of_a_switch_preserves_its_units(topology, way):
  n, (capacities, weight) = topology.num_ranks, bottleneck(topology)
  switch = n
  if way == "pair by pair":
    left, moves = splitting._split_pair_by_pair(capacities, switch, n, weight)
    assert splitting._flows_suffice(left, n, weight)
  else:
    left, moves = splitting._split_evenly(
      capacities, switch, n, way == "ranks first"
    )
    for side, ends in enumerate((capacities[:, switch], capacities[switch])):
      units = np.zeros(len(left), int)
      np.add.at(units, [m[side] for m in moves], [m[2] for m in moves])
      np.testing.assert_array_equal(units, ends)
  expected = capacities.copy()
  expected[switch] = expected[:, switch] = 0
  for source, there, units in moves:
    assert 0 < units <= min(capacities[source, switch],
                            capacities[switch, there])
    if source != there:
      expected[source, there] += units
  np.testing.assert_array_equal(left, expected)


@pytest.mark.parametrize("topology", SWITCHED, ids=lambda x: x.name)
def test_pool_has_the_paths_of_all_capacity_between_ranks(topology):
  n, (capacities, weight) = topology.num_ranks, bottleneck(topology)
  left, pool = splitting.split_switches(capacities, n, weight)
  assert left.shape == (n, n)
  assert splitting._flows_suffice(left, n, weight)
  used = np.zeros_like(capacities)
  for pair in zip(*map(np.ndarray.tolist, np.nonzero(left)), strict=True):
    paths = pool.take(pair, int(left[pair]))
    assert len(paths) == left[pair]
    assert paths == sorted(paths, key=lambda path: (len(path), path))
    for path in paths:
      assert (path[0], path[-1]) == pair
      assert min(path[1:-1], default=n) >= n
      for link in itertools.pairwise(path):
        used[link] += 1
    with pytest.raises((AssertionError, KeyError)):
      pool.take(pair, 1)
  assert (used <= capacities).all()


def test_even_split_gives_each_pair_the_same_capacity():
  """Three units per rank, one for each of the others."""
  capacities = integer_capacities(t.switch(4)) * 3
  for prefer_ranks in (True, False):
    left, moves = splitting._split_evenly(capacities, 4, 4, prefer_ranks)
    np.testing.assert_array_equal(left[:4, :4], 1 - np.eye(4))
    assert len(moves) == 12
  # Units of ranks go to the other switches first, not to ranks.
  leaves = t.leaf_spine(2, 2, 2)
  capacities, _ = bottleneck(leaves)
  _, moves = splitting._split_evenly(capacities, 4, 4, True)
  assert {there for source, there, _ in moves if source < 4} == {6, 7}


@pytest.mark.parametrize(
  "topology", [t.torus((4, 4)), t.mesh((3, 4)), *SWITCHED[:5]],
  ids=lambda x: x.name,
)
def test_transfers_are_as_early_as_their_links_are_free(topology):
  """Each one waits for its chunk, or for a link that is full."""
  schedule = build("optimal", topology, "all_gather")
  check(schedule, topology)
  arrived = {(rank, chunk): 0 for chunk, rank in enumerate(schedule.owners)}
  full = set()
  for number, transfers in enumerate(schedule.rounds):
    for x in transfers:
      ready = arrived[x.source, x.chunk]
      assert ready == number or full & set(itertools.pairwise(x.path))
    loads = link_loads(transfers)
    full = {
      p for p, load in loads.items() if load == topology.relative_bandwidths[p]
    }
    arrived |= {(x.destination, x.chunk): number + 1 for x in transfers}


def test_both_halves_have_the_larger_number_of_trees():
  net = t.fully_connected(4).without((0, 1), (0, 2))
  weights = [trees.forest(x).weight for x in (net, net.reversed())]
  assert weights == [2, 1]
  for x in (net, net.reversed()):
    schedule = build("optimal", x, "all_reduce")
    assert schedule.num_chunks == 2 * 4
    check(schedule, x)
