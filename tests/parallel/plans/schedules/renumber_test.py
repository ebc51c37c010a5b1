"""Renumbered topologies: the same network, and schedules on the original."""

import itertools

import pytest

from parallel.plans.schedules import builders, renumber
from parallel.plans.schedules.check import check
from parallel.plans.topology import builders as t
from parallel.plans.topology.graph import Topology

# Different sizes, equal sizes, failed links, switches.
NETS = [
  t.mesh((3, 5)), t.torus((2, 4)), t.torus((2, 3, 4)), t.torus((4, 4)),
  t.mesh((1, 4)), t.ring(5).without((1, 0)), t.dgx(2, 4), t.fat_tree(4),
]
each_net = pytest.mark.parametrize("net", NETS, ids=lambda net: net.name)


def pairs(net: Topology, order=None):
  """Returns the links with their attributes, as a set."""
  order = order or range(net.num_nodes)
  return {
    (order[x.source], order[x.destination], x.bandwidth, x.latency_s)
    for x in net.links
  }


@each_net
def test_a_numbering_is_the_same_network(net):
  for number in (0, 1, 2, 7):
    found = renumber.renumber_topology(net, number)
    assert sorted(found.order) == list(range(net.num_nodes))
    assert sorted(found.order[: net.num_ranks]) == list(range(net.num_ranks))
    assert pairs(found.topology) == pairs(net, found.order)
  assert renumber.renumber_topology(net, 0).topology is net
  # The same number is the same numbering.
  assert renumber.renumber_topology(net, 7) == renumber.renumber_topology(
    net, 7
  )
  assert (
    renumber.renumber_topology(net, 7).order
    != renumber.renumber_topology(net, 8).order
  )


@pytest.mark.parametrize("grid", [t.mesh, t.torus])
def test_a_transposed_grid_equals_a_built_one(grid):
  """Also in the order of links, on which builders depend."""
  for shape in itertools.permutations((2, 3, 4)):
    net = grid(shape)
    numbers = renumber.numberings_to_try(net)
    found = [
      renumber.renumber_topology(net, number).topology for number in numbers
    ]
    expected = [grid(s) for s in sorted(itertools.permutations(shape))]
    assert [(x.shape, x.links) for x in found] == [
      (x.shape, x.links) for x in expected
    ]


def test_random_numberings_are_those_of_every_transposition():
  first, second = (
    renumber.renumber_topology(t.mesh(shape), 5).topology for shape in (
      (3, 5), (5, 3)
    )
  )
  assert first.links == second.links
  assert first.shape == second.shape == ()


@each_net
@pytest.mark.parametrize("collective", builders.COLLECTIVES)
@pytest.mark.parametrize("name", ["ring", "multitree", "double_tree"])
def test_schedules_are_on_the_original_topology(net, name, collective):
  plain = builders.build(name, net, collective)
  for number in (1, 9):
    schedule = builders.build(name, net, collective, numbering=number)
    check(schedule, net)
    assert schedule.owners == plain.owners
    assert schedule.num_chunks == plain.num_chunks


def test_owners_of_several_chunks_are_kept():
  """Swaps chunks, so that every rank still owns the same ones."""
  net = t.mesh((2, 3))
  whole = builders.build("multitree", net, "all_gather", numbering=1)
  assert whole.owners == tuple(range(6))
  trees = builders.build(
    "optimal", net, "reduce_scatter", numbering=1, trees="grown", weight=2
  )
  check(trees, net)
  assert trees.owners == builders.build(
    "optimal", net, "reduce_scatter", trees="grown", weight=2
  ).owners


def test_a_builder_without_a_grid_is_refused():
  net = t.mesh((2, 3))
  assert builders.build("bucket", net, numbering=1)
  for number, message in ((2, "bucket: mesh 2x3 is not"), (-1, "at least 0")):
    with pytest.raises(ValueError, match=message):
      builders.build("bucket", net, numbering=number)
