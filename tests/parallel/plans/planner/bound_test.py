"""Lower bound of orders: its conditions, and problems where it is exact."""

import itertools

import numpy as np
import pytest

from parallel.plans.planner import bound
from parallel.plans.planner.message_costs import Grid, Traffic, cost


def graph(n, *links, ways=1):
  """Returns which of n devices are linked, bool ``[n, n]``."""
  found = np.zeros((n, n), bool)
  for a, b in links:
    found[a, b] = True
    if ways == 2:
      found[b, a] = True
  return found


def seconds(allowed, fast=1.0, slow=9.0):
  return np.where(allowed, fast, slow)


TRIANGLES = (0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)
CHAINS = (0, 1), (1, 2), (3, 4), (4, 5)


def test_every_device_of_a_ring_has_two_neighbours():
  triangles = graph(6, *TRIANGLES, ways=2)
  assert bound._has_two_matching(triangles)
  hexagon = graph(6, *((i, (i + 1) % 6) for i in range(6)), ways=2)
  assert bound._has_two_matching(hexagon)
  for links in (CHAINS, TRIANGLES[:-1], ((0, i) for i in range(1, 6))):
    assert not bound._has_two_matching(graph(6, *links, ways=2))
  assert bound._has_two_matching(~np.eye(3, dtype=bool))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_bisection_finds_the_first_index_that_fits(count):
  for first in range(count):
    assert bound._first(count, lambda i, first=first: i >= first) == first


def test_hops_need_as_many_successors_as_pipelines_have():
  chains = graph(6, *CHAINS)
  assert bound._can_form_pipelines(seconds(chains), 3, 1.0)
  assert bound._can_form_pipelines(seconds(chains, 2.0), 3, 2.0)
  assert not bound._can_form_pipelines(seconds(chains, 2.0), 3, 1.9)
  for link in CHAINS:
    fewer = graph(6, *(x for x in CHAINS if x != link))
    assert not bound._can_form_pipelines(seconds(fewer), 3, 1.0)
  # Two devices with the same predecessor: components fit, successors do not.
  fork = graph(6, (0, 1), (0, 2), (3, 4), (4, 5))
  assert not bound._can_form_pipelines(seconds(fork), 3, 1.0)
  # Four of six devices have successors, but components have four and two.
  uneven = graph(6, (0, 1), (1, 2), (2, 3), (4, 5))
  assert not bound._can_form_pipelines(seconds(uneven), 3, 1.0)
  assert bound._can_form_pipelines(seconds(uneven), 2, 1.0)


def test_rings_need_a_successor_and_two_neighbours_of_each_device():
  triangles = graph(6, *TRIANGLES)
  assert bound._can_form_rings(seconds(triangles), 3, 1.0)
  for link in TRIANGLES:
    fewer = graph(6, *(x for x in TRIANGLES if x != link))
    assert not bound._can_form_rings(seconds(fewer), 3, 1.0)
  turned = graph(6, (0, 1), (1, 2), (0, 2), *TRIANGLES[3:])
  assert not bound._can_form_rings(seconds(turned), 3, 1.0)
  # Two pairs joined by one link: successors exist, second neighbours do not.
  pairs = graph(4, (0, 1), (1, 0), (2, 3), (3, 2), (1, 2))
  assert not bound._can_form_rings(seconds(pairs), 4, 1.0)
  # In rings of two, both directions are used.
  pairs = ((0, 1), (2, 3))
  assert bound._can_form_rings(seconds(graph(4, *pairs, ways=2)), 2, 1.0)
  assert not bound._can_form_rings(seconds(graph(4, *pairs)), 2, 1.0)
  # A component of three devices has no ring of two.
  assert not bound._can_form_rings(
    seconds(graph(6, *TRIANGLES, ways=2)), 2, 1.0
  )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_ranges_cover_all_times_that_may_be_the_slowest(axis, seed):
  rng = np.random.default_rng(seed)
  matrix = rng.uniform(1, 9, (12, 12))
  found = list(bound._link_time_ranges(matrix, 3, axis))
  lows = [low for low, _ in found]
  assert lows == sorted(set(lows))
  fits = bound._can_form_pipelines if axis == 0 else bound._can_form_rings
  values = np.unique(matrix[~np.eye(12, dtype=bool)])
  first = next(x for x in values if fits(matrix, 3, x))
  assert lows[0] == first
  for low, sets in found:
    assert (np.bincount(sets) % 3 == 0).all()
    # They are the same for all values of a range.
    alone = bound._components((matrix <= low) & ~np.eye(12, dtype=bool))
    assert len({*zip(sets, alone, strict=True)}) == len(set(alone))
    assert len(set(alone)) == len(set(sets))
  assert (found[-1][1] == 0).all()


def test_axis_of_one_coordinate_costs_nothing():
  (low, sets), = bound._link_time_ranges(np.ones((4, 4)), 1, 1)
  assert (low, sets.tolist()) == (0, [0, 1, 2, 3])


def test_partitions_are_joined():
  joined = bound._merge_partitions([
    np.array([0, 0, 1, 1, 2, 3]), np.array([0, 1, 1, 2, 3, 3])
  ])
  assert len(set(joined[:4])) == 1
  assert len(set(joined[4:])) == 1
  assert joined[0] != joined[4]


NODES, PAIRS = np.arange(12) // 4, np.arange(12) // 2


@pytest.mark.parametrize(("axes", "sets"), [
  ((2,), PAIRS), ((1,), PAIRS), ((1, 2), NODES), ((0,), np.arange(12) % 4),
  ((0, 2), np.arange(12) % 2),
], ids=str)
def test_links_between_units_are_the_fastest_of_each_device(axes, sets):
  grid = Grid(3, 2, 2)
  rng = np.random.default_rng(0)
  traffic = Traffic(grid, *rng.uniform(1, 9, (4, 12, 12)))
  found = bound._contract_components(traffic, axes, sets)
  count = len(set(sets))
  members = [np.flatnonzero(sets == unit) for unit in range(count)]
  assert found.grid == tuple(
    1 if axis in axes else size for axis, size in enumerate(grid)
  )

  def between(matrix, of_devices):
    return [[
      max(of_devices(matrix[np.ix_(a, b)].min(1)),
          of_devices(matrix[np.ix_(a, b)].min(0)))
      for b in members
    ] for a in members]

  none = np.zeros((count, count))
  for axis, name, of_devices in (
    (0, "chain", np.mean), (0, "hop", np.max), (1, "ring", np.max),
    (2, "reduce", np.max),
  ):
    expected = none
    if axis not in axes:
      expected = between(getattr(traffic, name), of_devices)
    np.testing.assert_allclose(getattr(found, name), expected)


def test_groups_of_several_axes_are_ordered_as_units():
  """Tensor pairs within nodes, data pairs across them, stages of all nodes."""
  grid = Grid(3, 2, 2)
  traffic = Traffic(grid, *np.random.default_rng(0).uniform(1, 9, (4, 12, 12)))
  data = np.array([0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5])
  box = (1.0, np.zeros(12, int)), (2.0, data), (4.0, PAIRS)
  known = {}
  least = bound._bound_in_box(traffic, box, 7.0, known)
  lows = {(1,): 2.0, (2,): 4.0, (1, 2): 6.0}
  assert {axes for axes, _ in known} == set(lows)
  assert least == max(7.0, *(lows[axes] + x for (axes, _), x in known.items()))
  assert bound._bound_in_box(traffic, box, 99.0, known) == 99
  # A component of three devices holds no data pairs.
  box = box[0], (2.0, np.arange(12) // 3), box[2]
  assert bound._bound_in_box(traffic, box, 7.0, known) == np.inf


def hidden(grid, seed, decoys):
  """Returns traffic of a hidden order, and that order's cost.

  Its links cost 1, all others 2 to 9, except those out of a few devices: they
  are fast, but too few to replace the links of the order.
  """
  rng = np.random.default_rng(seed)
  order = rng.permutation(grid.size)
  traffic = Traffic(grid, *rng.uniform(2, 9, (4, grid.size, grid.size)))
  for matrix in (traffic.chain, traffic.hop, traffic.ring, traffic.reduce):
    matrix[rng.permutation(grid.size)[:decoys]] = 0.1
  for family in traffic.families():
    family.seconds[order[family.source], order[family.target]] = 1
  return traffic, float(cost(traffic, order.reshape(grid)))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("grid", "decoys"), [
  (Grid(3, 3, 1), 0), (Grid(1, 3, 4), 0), (Grid(2, 2, 3), 0),
  (Grid(1, 9, 1), 2), (Grid(1, 1, 9), 2), (Grid(1, 3, 4), 2),
], ids=str)
def test_bound_is_the_cost_of_a_hidden_order(grid, decoys, seed):
  traffic, expected = hidden(grid, seed, decoys)
  assert bound.cost_lower_bound(traffic) == pytest.approx(expected)


@pytest.mark.parametrize("slow", range(12))
def test_pipeline_of_a_distant_device_counts(slow):
  """The device is best at an end of its pipeline of three."""
  chain, none = np.ones((12, 12)), np.zeros((12, 12))
  chain[slow], chain[:, slow] = 10.0, 10.0
  np.fill_diagonal(chain, 0.0)  # a device sends nothing to itself
  traffic = Traffic(Grid(3, 4, 1), chain, none, none, none)
  assert bound.cost_lower_bound(traffic) == 11
  one_way = chain.copy()
  one_way[:, slow] = 5.0
  np.fill_diagonal(one_way, 0.0)
  assert bound.cost_lower_bound(
    Traffic(Grid(3, 4, 1), one_way, none, none, none)
  ) == 6


def test_mean_of_pipelines_is_that_of_the_cheapest_distinct_successors():
  """Two pipelines of two devices have two links between distinct ends."""
  chain = np.random.default_rng(0).uniform(1, 9, (4, 4))
  np.fill_diagonal(chain, np.inf)
  pairs = [*itertools.permutations(range(4), 2)]
  expected = min(
    chain[a, b] + chain[c, d] for a, b in pairs for c, d in pairs
    if a != c and b != d
  ) / 2
  assert bound._mean_pipeline_s(chain, 2) == pytest.approx(expected)
