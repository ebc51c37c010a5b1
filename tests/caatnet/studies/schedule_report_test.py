"""Report of a schedule: its numbers by hand, and places in its drawing."""

import numpy as np
import pytest

from caatnet.studies.schedule import report as schedule
from caatnet.studies.schedule import study
from configs.collectives import schedule as config_file
from parallel.plans.topology import builders as topologies


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


@pytest.mark.parametrize(("topology", "algorithm", "expected", "links"), [
  # Each rank sends two chunks over its uplink; the second one waits.
  ("switch:3", "direct", {
    "events_us": 32, "barrier_us": 32, "lockstep_us": 22, "lower_bound_us": 22,
    "num_rounds": 1, "bound_us": 20,
  }, {(rank, 3): (20 / 32, 10, 1) for rank in range(3)} | {
    (3, rank): (20 / 32, 0, 0) for rank in range(3)
  }),
  # A line: the ring closes over two links. Chunk 1 arrives at rank 2 after 11
  # us, and from there at rank 0 after 22 us more; round 2 begins after 22 us.
  ("mesh:3", "ring", {
    "events_us": 33, "barrier_us": 44, "lockstep_us": 24, "num_rounds": 2,
    "bound_us": 20,
  }, {pair: (20 / 33, 0, 0) for pair in ((0, 1), (1, 2), (2, 1), (1, 0))}),
])
def test_numbers_of_an_all_gather_by_hand(topology, algorithm, expected, links):
  """Chunks of 10 us, and 1 us of latency."""
  config = config_file.get_config("test").to_dict() | {
    "topology": topology, "algorithm": algorithm, "collective": "all_gather",
    "bandwidth": "1e9", "latency_s": "1e-6", "size_bytes": 30_000,
    "picture_round": 0, "pieces": 1,
  }
  found = study.run(config)
  timeline = schedule._figure(config).panels[1]
  assert f"by events: {expected['events_us']}.0 us," in timeline.title
  assert timeline.x.limits == (0, expected["events_us"])
  assert {*timeline.marks[0].lengths} == {10}
  assert {key: found[key] for key in expected} == pytest.approx(expected)
  assert found["num_transfers"] == 6
  picture = schedule._figure(config).panels[0].title
  made = schedule.report(found)
  times, busiest = (table.cells() for table in made.tables)
  assert [float(us) for _, us in times] == pytest.approx([
    found[f"{key}_us"]
    for key in ("events", "barrier", "lockstep", "lower_bound", "bound")
  ])
  far = expected["events_us"] / 20
  assert f": events take {far:.2f} times the lower bound of" in made.parts[1]
  count = expected["num_rounds"]
  assert picture == (
    f"round 1 of {count}: {len(links)} of {len(links)} links, at most "
    f"{2 if count == 1 else 1} chunks on one"
  )
  assert sorted(busiest, key=lambda row: -float(row[3])) == busiest
  for link, size, share, waiting, queue in busiest:
    pair = tuple(map(int, link.split(" -> ")))
    assert (size, float(share[:-1]) / 100, float(waiting), int(queue)) == (
      "20,000", pytest.approx(links[pair][0], abs=6e-4), *links[pair][1:]
    )
  shares = [share for share, _, _ in links.values()]
  assert found["mean_utilisation"] == pytest.approx(sum(shares) / len(shares))
  for row in found["links"]:
    pair = row["source"], row["destination"]
    assert (
      row["utilisation"], row["waiting_us"], row["longest_queue"]
    ) == pytest.approx(links[pair])
    assert row["bytes"] == 20_000
