"""Benchmark of schedules: rows of topologies, their bounds and summaries."""

import functools
import types

import pytest

from caatnet.benchmarks.training import schedules
from caatnet.show import drawing
from configs.benchmark import schedules as config_of
from parallel.plans.topology import builders
from tests.caatnet.benchmarks.printed import rows_of

SIZES, MODELS = (2**15, 2**26), ("events", "lockstep")


def _drawn(seed, kind="doubling"):
  return schedules._measure_random_graph(
    seed, max_nodes=7, kind=kind, sizes=SIZES, models=MODELS
  )


def test_graphs_are_measured_in_processes_in_their_order(capsys):
  options = types.SimpleNamespace(processes=1)
  measure = functools.partial(
    schedules._measure_random_graph, max_nodes=7, kind="uneven",
    sizes=SIZES[:1], models=()
  )
  found = schedules._map_in_processes(options, measure, range(2), "graphs")
  assert [row["topology"] for row in found] == ["random 0", "random 1"]


def test_no_schedule_is_faster_than_the_bound_of_its_topology():
  row = schedules._measure_named("torus 4x4", SIZES, MODELS)
  assert (row["topology"], row["nodes"], row["ranks"], row["links"]) == (
    "torus 4x4", 16, 16, 64
  )
  # A cut around one rank: 15 chunks enter over four links of 50 GB/s.
  assert row["ratio"] == 1
  assert (row["cut"], row["cut_ranks"]) in (("0-14", 15), ("1-15", 15))
  assert row["leaving_bytes_per_second"] == 4 * 50e9
  assert row["rounds_ratio"] >= 1
  assert [x["size_bytes"] for x in row["times"]] == list(SIZES)
  small, large = row["times"]
  net = builders.torus((4, 4))
  # Four hops between the ranks that are farthest apart; bytes of 15 chunks.
  assert small["bound_us"] == pytest.approx(4e6 * net.links[0].latency_s)
  assert large["bound_us"] == pytest.approx(2**26 * 15 / 16 / 200e9 * 1e6)
  for times in row["times"]:
    for model in MODELS:
      assert 1 <= times[model]["ratio"] < 2
      assert times[model]["chunks_per_rank"] >= 1


def test_steps_of_multitree_are_at_least_the_bound_of_ports():
  """A rank of a torus has four ports, a corner of a mesh two."""
  for net, bound in (
    (builders.torus((4, 4)), -(-15 // 4)), (builders.mesh((4, 4)), 15 // 2 + 1)
  ):
    row = schedules._time_multitree(net)
    assert (row["topology"], row["ranks"]) == (net.name, 16)
    assert bound == row["bound"] <= row["steps"] <= 2 * bound
    assert row["seconds"] > 0


def test_simulated_ring_takes_the_time_of_its_chunks():
  """63 rounds, in each of which a link passes 64 KiB."""
  row = schedules._time_simulation("ring, ring 64")
  link = builders.ring(64).links[0]
  assert (row["ranks"], row["traversals"]) == (64, 64 * 63)
  assert row["finish_us"] == pytest.approx(
    63e6 * (2**16 / link.bandwidth + link.latency_s), rel=0.01
  )


def test_summary_counts_ratios(capsys):
  rows = [
    {
      "topology": f"random {i}", "nodes": 6 + i, "ranks": 6, "ratio": ratio,
      "rounds_ratio": 1.5 + i, "seconds": 1.0 + i, "multitree_seconds": 0.5,
      "cut_ranks": 3, "leaving_bytes_per_second": 75e9,
      "times": [
        *2 * [{"size_bytes": 2**20, "events": {"ratio": 9.0}}],
        {"size_bytes": 2**26, "events": {"ratio": ratio + 0.04}},
      ],
    } for i, ratio in enumerate((1.0, 1.01, 1.05, 1.2))
  ]
  found = schedules._summary("uneven", rows, ("events",))
  assert found == {
    "within_5_percent": 0.75, "within_1_percent": 0.5, "worst": 1.2,
    "median_rounds_ratio": 3.0, "median_seconds": 2.5, "most_seconds": 4.0,
    "most_multitree_seconds": 0.5, "events": {
      "within_5_percent": 0.5, "within_10_percent": 0.75,
      "median": pytest.approx(1.07), "worst": pytest.approx(1.24),
    },
  }
  printed = capsys.readouterr().out
  assert "4 random graphs of 6 to 9 nodes, uneven links" in printed
  assert "worst 1.2000 (random 3, tight cut 3 ranks / 75 GB/s)" in printed
  assert "at 64 MiB, events: 50.0% within 5% of the bound, 75.0%" in printed


def test_tables_and_picture_have_all_rows(capsys):
  options = config_of.get_config("test").benchmark
  options.tori, options.meshes = (4,), (3,)
  scaling = schedules._measure_scaling(options)
  assert [row["topology"] for row in scaling] == ["torus 4x4", "mesh 3x3"]
  (simulated,) = schedules._simulations(options)
  drawn = [_drawn(1), _drawn(2)]
  assert drawn[0]["nodes"] > drawn[0]["ranks"]  # a switch
  schedules._show_optimal(drawn, MODELS)
  printed = capsys.readouterr().out
  table = rows_of(printed)
  for row in scaling:
    assert [
      row["topology"], str(row["ranks"]), str(row["steps"]), str(row["bound"]),
      f"{row['seconds']:.2f}",
    ] in table
  assert [
    simulated["schedule"], f"{simulated['traversals']:,}",
    f"{simulated['seconds']:.2f}",
    f"{simulated['traversals'] / simulated['seconds']:,.0f}",
  ] in table
  for row in drawn:
    assert [
      row["topology"], str(row["trees_per_rank"]), f"{row['ratio']:.4f}",
      f"{row['rounds_ratio']:.3f}", schedules._describe_cut(row),
      f"{row['seconds']:.2f}", f"{row['multitree_seconds']:.2f}",
    ] in table
    for size, times in zip(("32 KiB", "64 MiB"), row["times"], strict=True):
      assert [
        row["topology"], size, f"{times['bound_us']:,.2f}", *(
          text for model in MODELS for text in (
            f"{times[model]['ratio']:.3f}", times[model]["trees"]
          )
        ),
      ] in table
  picture = drawing.render_figure(schedules.figure(scaling, drawn))
  assert picture.startswith(b"\x89PNG")


def test_figure_has_a_line_per_kind_of_grid_and_of_graph():
  scaling = [
    {"topology": f"{kind} {n}x{n}", "ranks": n * n, "seconds": n * factor}
    for kind, factor in (("torus", 1e-3), ("mesh", 2e-3)) for n in (4, 32)
  ]
  drawn = [
    {"nodes": 6, "ranks": 6, "seconds": 0.5},
    {"nodes": 9, "ranks": 7, "seconds": 0.25},
  ]
  figure = schedules.figure(scaling, drawn)
  grids, graphs = figure.panels
  assert {m.label: (m.x, m.y) for m in grids.marks} == {
    "torus": ([16, 1024], [0.004, 0.032]), "mesh": ([16, 1024], [0.008, 0.064])
  }
  assert grids.x.ticks == [(16, "16"), (1024, "1,024")]
  assert {m.label: (m.x, m.y) for m in graphs.marks} == {
    "ranks only": ([6], [0.5]), "with switches": ([9], [0.25])
  }
  assert drawing.render_figure(figure).startswith(b"\x89PNG")


def test_numbers_are_printed_as_ranges():
  assert schedules._ranges((5, 2, 0, 1, 8, 7)) == "0-2 5 7-8"
  assert schedules._ranges([4]) == "4"


def test_unknown_topology_is_named():
  config = config_of.get_config("test")
  config.benchmark.optimal = ("torus 4x5",)
  with pytest.raises(ValueError, match=r"benchmark\.optimal: 'torus 4x5' must"):
    schedules.run(config)


def test_topologies_are_those_of_their_names():
  failed = "torus 8x8, 2 links failed"
  nets = {name: make() for name, make in schedules.NAMED_TOPOLOGIES.items()}
  links = {name: len(net.links) for name, net in nets.items()}
  assert links[failed] == links["torus 8x8"] - 4
  pairs = {(x.source, x.destination) for x in nets[failed].links}
  assert pairs == {pair[::-1] for pair in pairs}  # in both directions
  assert nets.pop(failed).num_ranks == 64
  nets |= {
    name: make() for name, (_, make) in schedules.SIMULATED_SCHEDULES.items()
  }
  for name, net in nets.items():
    assert net.name == name.rpartition(", ")[2]
  for name, (builder, _) in schedules.SIMULATED_SCHEDULES.items():
    assert name.startswith(f"{builder}, ")


def test_bound_of_latencies_is_that_of_the_ranks_that_are_farthest_apart():
  """The ends of a line of five ranks."""
  net = builders.mesh((5,))
  found = schedules._compare_with_bound(net, 0.0, 1, ())
  assert found["bound_us"] == pytest.approx(4e6 * net.links[0].latency_s)


@pytest.mark.parametrize("kind", schedules.BANDWIDTH_SAMPLERS)
def test_random_graphs_have_switches_and_failed_links_by_their_seed(kind):
  failed = set()
  for seed in range(24):
    net = schedules.random_graph(seed, 9, kind)
    assert 6 <= net.num_nodes <= 9
    assert (net.num_nodes > net.num_ranks) == (seed % 3 == 1)
    assert net.num_nodes - net.num_ranks <= net.num_nodes // 4
    speeds = {(x.source, x.destination): x.bandwidth for x in net.links}
    for (a, b), speed in speeds.items():
      assert speeds.get((b, a), speed) == speed
      if (b, a) not in speeds:
        failed.add(seed % 3)
    if kind == "doubling":
      assert {*speeds.values()} <= {25e9, 50e9, 100e9, 200e9}
    else:
      assert min(speeds.values()) >= 25e9
      assert max(speeds.values()) <= 200e9
      assert len({*speeds.values()}) > 4
    assert schedules.random_graph(seed, 9, kind) == net
  assert failed == {2}
