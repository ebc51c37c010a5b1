"""Drawing of a schedule: places of ranks and switches."""

import numpy as np
import pytest

from caatnet.studies.schedule import report as schedule
from parallel.topology import builders as topologies


@pytest.mark.parametrize(("net", "near"), [
  (topologies.leaf_spine(3, 2, 4), None),
  (topologies.torus((2, 3)), 1.0), (topologies.ring(5), None),
  (topologies.bigraph(2, 4), None),
])
def test_nodes_have_places_of_their_own(net, near):
  """Nodes of a grid are one apart; layers of switches have one height."""
  places = schedule._places(net, net.graph())
  assert set(places) == set(range(net.num_nodes))
  points = [tuple(np.round(p, 9)) for p in places.values()]
  assert len(set(points)) == net.num_nodes
  if near:
    columns, rows = zip(*points, strict=True)
    assert (set(columns), set(rows)) == ({0, 1, 2}, {0, -1})
  if net.num_switches and not net.shape:
    layers = {}
    for v, (_, y) in places.items():
      layers.setdefault(y, []).append(v)
    assert {y: len(nodes) for y, nodes in layers.items()} == {0: 12, 1: 3, 2: 2}
    assert sorted(places[v][0] for v in layers[2]) == pytest.approx(
      [1 / 3, 2 / 3]
    )


def test_bigraph_has_its_switches_between_their_ranks():
  places = schedule._bigraph_places(2, 4)
  assert {v: places[v] for v in range(8, 12)} == {
    8: (0.0, 1.0), 9: (1.0, 1.0), 10: (0.0, 0.0), 11: (1.0, 0.0)
  }
  assert [places[v] for v in (0, 1, 2, 4, 7)] == [
    (-0.25, 2.0), (0.25, 2.0), (0.75, 2.0), (-0.25, -1.0), (1.25, -1.0)
  ]
