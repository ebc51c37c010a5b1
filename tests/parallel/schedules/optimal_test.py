"""Optimal trees: as fast as the tightest cut allows, on various graphs."""

import dataclasses
from fractions import Fraction
import itertools
import random

import networkx
import numpy as np
import pytest

from parallel.schedules.builders import build
from parallel.schedules.check import check
from parallel.schedules.optimal import splitting, trees
from parallel.schedules.optimal.cut_bound import (
  SourceFlow,
  cut_bound,
  integer_capacities,
  tightest_cut,
)
from parallel.topology import builders as t
from parallel.topology import files
from parallel.topology.graph import BANDWIDTH, Link, Topology


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
  with pytest.raises(ValueError, match="nothing to send"):
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
