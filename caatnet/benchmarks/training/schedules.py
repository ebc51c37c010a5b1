"""Times to build and simulate schedules, and optimal trees against a bound.

Seconds are processor time, which other programs on the machine affect less.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
import itertools
import pathlib
import platform
import random
from typing import Any

import networkx
import numpy as np

from caatnet.benchmarks.harness import scripts, timing
from caatnet.show import drawing, tables
from caatnet.studies.collectives import chosen
from parallel.base.checks import known
from parallel.base.labels import size_text
from parallel.base.plot import Axis, Figure, Line, Panel
from parallel.plans.network import simulate
from parallel.plans.network.routed import on_links
from parallel.plans.schedules import multitree
from parallel.plans.schedules.builders import build
from parallel.plans.schedules.check import check
from parallel.plans.schedules.optimal import trees
from parallel.plans.topology import builders as topologies
from parallel.plans.topology.graph import Link, Topology

# Kind of links -> function that draws a bandwidth, in bytes/s.
BANDWIDTH_SAMPLERS: dict[str, Callable[[random.Random], float]] = {
  "doubling": lambda rng: rng.choice((25e9, 50e9, 100e9, 200e9)),
  "uneven": lambda rng: rng.uniform(25e9, 200e9),
}
TIME_MODELS = ("events", "lockstep")  # time models of `chosen.fastest`

# Topologies of optimal trees, by the names in config.benchmark.optimal.
NAMED_TOPOLOGIES = {
  "torus 4x4": lambda: topologies.torus((4, 4)),
  "torus 8x8": lambda: topologies.torus((8, 8)),
  "mesh 8x8": lambda: topologies.mesh((8, 8)),
  "torus 8x8, 2 links failed": lambda: topologies.torus((8, 8)).without(
    (0, 1), (1, 0), (9, 17), (17, 9)
  ),
  "fat tree 4": lambda: topologies.fat_tree(4),
  "leaf-spine 4x4x4": lambda: topologies.leaf_spine(4, 4, 4),
  "dgx 2x8": lambda: topologies.dgx(2),
}


# Builders and topologies, by the names in config.benchmark.simulated.
SIMULATED_SCHEDULES = {
  "ring, ring 1024": ("ring", lambda: topologies.ring(1024)),
  "bucket, torus 32x32": ("bucket", lambda: topologies.torus((32, 32))),
  "multitree, torus 32x32": ("multitree", lambda: topologies.torus((32, 32))),
  "ring, ring 64": ("ring", lambda: topologies.ring(64)),
}


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns all results as plain data.

  Args:
    config: Config like configs/benchmark/schedules.py.

  Raises:
    ValueError: The config names an unknown topology or schedule, or matplotlib
      is missing for ``config.benchmark.plot``.
  """
  options = config.benchmark
  if options.plot:
    drawing.pyplot()  # fails before the work if matplotlib is missing
  for key, names in (
    ("optimal", NAMED_TOPOLOGIES), ("simulated", SIMULATED_SCHEDULES),
    ("models", TIME_MODELS)
  ):
    for name in options[key]:
      known(f"config.benchmark.{key}: ", name, names)
  scaling, simulated = _measure_scaling(options), _simulations(options)
  models, sizes = tuple(options.models), tuple(options.size_bytes)
  named = _map_in_processes(
    options, functools.partial(_measure_named, sizes=sizes, models=models),
    tuple(options.optimal), "optimal",
  )
  _show_optimal(named, models)
  drawn = {
    kind: _map_in_processes(
      options,
      functools.partial(
        _measure_random_graph, max_nodes=options.max_nodes, kind=kind,
        sizes=sizes[-1:], models=models,
      ),
      range(options.num_random), f"{kind} links",
    )
    for kind in BANDWIDTH_SAMPLERS
  }
  if options.plot:
    path = pathlib.Path(options.plot)
    drawing.write(figure(scaling, drawn["doubling"]), path)
  facts = {"python": platform.python_version(), "numpy": np.__version__}
  return {
    "environment": facts, "multitree": scaling, "simulated": simulated,
    "optimal": named, "random": drawn,
    "summary": {
      kind: _summary(kind, rows, models) for kind, rows in drawn.items()
    },
  }


def _measure_scaling(options: Any) -> list[dict[str, Any]]:
  """Times MultiTree on grids, and prints a table."""
  grids = [topologies.torus((d, d)) for d in options.tori]
  grids += [topologies.mesh((d, d)) for d in options.meshes]
  rows = [_time_multitree(x) for x in timing.progress(grids, "MultiTree")]
  tables.print_table(
    "MultiTree, one phase",
    "topology | ranks | steps | bound | seconds:.2f=s", rows,
  )
  return rows


def _simulations(options: Any) -> list[dict[str, Any]]:
  """Times simulations of all-gathers, and prints a table."""
  rows = [
    _time_simulation(x) for x in timing.progress(
      options.simulated, "simulation"
    )
  ]
  tables.print_table(
    "all-gathers, event by event",
    "schedule | traversals=link traversals | seconds:.2f=s | "
    "rate:,.0f=traversals / s",
    [row | {"rate": row["traversals"] / row["seconds"]} for row in rows],
  )
  return rows


def _show_optimal(
  named: list[dict[str, Any]], models: Sequence[str]
) -> None:
  """Prints times of packed trees and all-gathers, divided by lower bounds.

  Rows ``named`` are of named topologies; ``models`` are time models.
  """
  tables.print_table(
    "packed trees of all-gathers: busiest link over the cut bound",
    "topology | trees_per_rank=k | ratio:.4f=over bound | "
    "rounds_ratio:.3f=rounds / bound | cut=tight cut | seconds:.2f=s | "
    "multitree_seconds:.2f=MultiTree s",
    [row | {"cut": _describe_cut(row)} for row in named],
  )
  tables.print_table(
    "all-gathers chosen for a size: time over the bound (of the tightest cut, "
    "or of latencies)",
    ["topology", "size", "bound us",
     *(text for model in models for text in (model, "with"))],
    [
      [r["topology"], size_text(x["size_bytes"]),
       f"{x['bound_us']:,.2f}",
       *(text for model in models for text in (
         f"{x[model]['ratio']:.3f}", x[model]["trees"]
       ))]
      for r in named for x in r["times"]
    ],
  )


def _map_in_processes(
  options: Any,
  measure: Callable[[Any], dict[str, Any]],
  items: Sequence[Any],
  what: str,
) -> list[dict[str, Any]]:
  """Returns ``measure(item)`` for each item, computed by several processes."""
  found = scripts.map_in_processes(measure, items, options.processes)
  return list(timing.progress(found, what, len(items)))


def _measure_named(
  name: str, sizes: Sequence[int], models: Sequence[str]
) -> dict[str, Any]:
  return _measure_optimal_trees(NAMED_TOPOLOGIES[name](), name, sizes, models)


def _measure_random_graph(
  seed: int,
  max_nodes: int,
  kind: str,
  sizes: Sequence[int],
  models: Sequence[str],
) -> dict[str, Any]:
  net = random_graph(seed, max_nodes, kind)
  return _measure_optimal_trees(net, f"random {seed}", sizes, models)


def _summary(
  kind: str, drawn: list[dict[str, Any]], models: Sequence[str]
) -> dict[str, Any]:
  """Prints and returns a summary of random graphs with links of one kind.

  ``drawn`` has a row per graph; ``models`` are time models.
  """
  ratios = np.array([r["ratio"] for r in drawn])
  seconds = np.array([r["seconds"] for r in drawn])
  worst = max(drawn, key=lambda r: r["ratio"])
  found = {
    "within_5_percent": float(np.mean(ratios <= 1.05)),
    "within_1_percent": float(np.mean(ratios <= 1.01)),
    "worst": float(ratios.max()),
    "median_rounds_ratio": float(np.median([r["rounds_ratio"] for r in drawn])),
    "median_seconds": float(np.median(seconds)),
    "most_seconds": float(seconds.max()),
    "most_multitree_seconds": max(r["multitree_seconds"] for r in drawn),
  }
  print(
    f"{len(drawn)} random graphs of {min(r['nodes'] for r in drawn)} to "
    f"{max(r['nodes'] for r in drawn)} nodes, {kind} links.\n"
    f"Busiest link of packed trees: {found['within_5_percent']:.1%} "
    f"within 5% of the cut bound, {found['within_1_percent']:.1%} within 1%, "
    f"worst {found['worst']:.4f} ({worst['topology']}, tight cut "
    f"{_describe_cut(worst)}); median {found['median_seconds']:.1f} s, longest "
    f"{found['most_seconds']:.1f} s; MultiTree at most "
    f"{found['most_multitree_seconds']:.2f} s"
  )
  for model in models:
    times = np.array([r["times"][-1][model]["ratio"] for r in drawn])
    found[model] = {
      "within_5_percent": float(np.mean(times <= 1.05)),
      "within_10_percent": float(np.mean(times <= 1.1)),
      "median": float(np.median(times)),
      "worst": float(times.max()),
    }
    size = size_text(drawn[0]["times"][-1]["size_bytes"])
    print(
      f"Time of the schedule at {size}, {model}: "
      f"{found[model]['within_5_percent']:.1%} within 5% of the bound, "
      f"{found[model]['within_10_percent']:.1%} within 10%, median "
      f"{found[model]['median']:.3f}, worst {found[model]['worst']:.3f}"
    )
  return found


def _time_multitree(topology: Topology) -> dict[str, Any]:
  """Times MultiTree on a topology; returns a row with a bound on its steps.

  The lower bound: each of n ranks must receive n - 1 chunks, at most one per
  port and step.
  """
  steps, seconds = timing.cpu_seconds(lambda: multitree.grow(topology))
  n = topology.num_ranks
  # The rank with the fewest ports determines the bound.
  ports = min(len(topology.neighbours(rank)) for rank in range(n))
  return {
    "topology": topology.name, "ranks": n, "steps": len(steps),
    "bound": -(-(n - 1) // ports), "seconds": seconds,
  }


def _time_simulation(name: str) -> dict[str, Any]:
  """Times the simulation of a schedule with 64 KiB per chunk."""
  builder, topology = SIMULATED_SCHEDULES[name]
  net = topology()
  routed = on_links(build(builder, net, "all_gather"), net)
  timeline, seconds = timing.cpu_seconds(
    lambda: simulate.events(routed, routed.num_chunks * 2**16)
  )
  return {
    "schedule": name, "ranks": net.num_ranks,
    "traversals": len(routed.hop_links), "finish_us": timeline.finish_ns / 1e3,
    "seconds": seconds,
  }


def _measure_optimal_trees(
  topology: Topology, name: str, sizes: Sequence[int], models: Sequence[str]
) -> dict[str, Any]:
  """Times optimal trees, checks their schedules, and compares with bounds.

  All-gathers of ``sizes`` bytes are timed by the time models ``models``.
  """
  forest, seconds = timing.cpu_seconds(lambda: trees.forest(topology))
  schedule = trees.schedule(topology, forest)
  check(schedule, topology)  # proves the link capacity, too
  _, multitree_seconds = timing.cpu_seconds(
    lambda: build("multitree", topology, "all_gather")
  )
  bound = forest.bound
  slowest = min(link.bandwidth for link in topology.links)
  # Seconds per byte if every round lasts as long as the slowest link takes for
  # a chunk.
  rounds_s = len(schedule.rounds) / schedule.num_chunks / slowest
  return {
    "topology": name,
    "nodes": topology.num_nodes,
    "ranks": topology.num_ranks,
    "links": len(topology.links),
    "trees_per_rank": forest.weight,
    "ratio": forest.ratio,
    "rounds_ratio": rounds_s / bound.seconds_per_byte,
    "cut": _ranges(bound.cut),
    "cut_ranks": sum(node < topology.num_ranks for node in bound.cut),
    "leaving_bytes_per_second": bound.leaving,
    "seconds": seconds,
    "multitree_seconds": multitree_seconds,
    "times": [
      _compare_with_bound(
        topology, bound.seconds_per_byte, x, models
      ) for x in sizes
    ],
  }


def _compare_with_bound(
  topology: Topology,
  seconds_per_byte: float,
  size_bytes: int,
  models: Sequence[str],
) -> dict[str, Any]:
  """Compares the fastest schedule in each time model with a lower bound.

  No all-gather is faster than the tightest cut allows, nor than the latencies
  of a shortest path between the two ranks that are farthest apart.
  """
  latency_s = min(link.latency_s for link in topology.links)
  ranks = range(topology.num_ranks)
  # Diameter: the largest distance between two ranks, in links.
  far = max(topology.hops(a, b) for a in ranks for b in ranks)
  bound_s = max(seconds_per_byte * size_bytes, far * latency_s)
  found: dict[str, Any] = {"size_bytes": size_bytes, "bound_us": bound_s * 1e6}
  for model in models:
    best = chosen.fastest(
      "optimal", topology, "all_gather", size_bytes, model=model
    )
    kind = best.options.get("trees", best.builder)
    found[model] = {
      "ratio": best.seconds / bound_s,
      "trees": {"optimal": "packed"}.get(kind, kind),
      "chunks_per_rank": best.schedule.num_chunks // topology.num_ranks,
      "num_rounds": len(best.schedule.rounds),
    }
  return found


def _ranges(nodes: Iterable[int]) -> str:
  """Formats numbers as ranges: ``(0, 1, 2, 5)`` is "0-2 5"."""
  runs = []
  numbered = enumerate(sorted(nodes))
  for _, run in itertools.groupby(numbered, lambda x: x[1] - x[0]):
    members = [node for _, node in run]
    ends = dict.fromkeys((members[0], members[-1]))
    runs.append("-".join(map(str, ends)))
  return " ".join(runs)


def _describe_cut(row: dict[str, Any]) -> str:
  """Describes a tight cut: its ranks, and the bandwidth of links out of it."""
  return (
    f"{row['cut_ranks']} ranks / {row['leaving_bytes_per_second'] / 1e9:g} GB/s"
  )


def random_graph(
  seed: int, max_nodes: int, kind: str = "doubling"
) -> Topology:
  """Draws a connected graph of links in both directions, of several speeds.

  Of all seeds, a third give graphs with switches, and a third give graphs with
  links that failed in one direction or in both.

  Args:
    seed: Seed of the graph.
    max_nodes: Largest number of nodes.
    kind: Key of ``BANDWIDTH_SAMPLERS``.
  """
  rng = random.Random(seed)
  nodes = rng.randint(6, max_nodes)
  num_switches = rng.randint(1, nodes // 4) if seed % 3 == 1 else 0
  n = nodes - num_switches
  order = list(range(nodes))
  rng.shuffle(order)
  graph = networkx.gnp_random_graph(nodes, rng.uniform(2, 6) / nodes, seed)
  networkx.add_cycle(graph, order)
  found = []
  for u, v in sorted(graph.edges):
    bandwidth = BANDWIDTH_SAMPLERS[kind](rng)
    found += [Link(u, v, bandwidth), Link(v, u, bandwidth)]
  topology = Topology(f"random {seed}", n, num_switches, tuple(found))
  if seed % 3 == 2:
    for u, v in rng.sample(sorted(graph.edges), 3):
      pairs = [(u, v), (v, u)] if rng.random() < 0.5 else [(u, v)]
      try:
        topology = topology.without(*pairs)
      except ValueError:  # would disconnect a rank
        continue
  return topology


def figure(
  scaling: Sequence[dict[str, Any]], drawn: Sequence[dict[str, Any]]
) -> Figure:
  """Returns plots of seconds by size: MultiTree on grids, trees on graphs.

  Args:
    scaling: Rows of MultiTree on square grids.
    drawn: Rows of optimal trees on random graphs.
  """
  def line(rows: list[dict[str, Any]], size: str, **options: Any) -> Line:
    return Line(
      [r[size] for r in rows], [r["seconds"] for r in rows], **options
    )

  grids = [
    line(
      [r for r in scaling if r["topology"].startswith(kind)], "ranks",
      label=kind, marker="o",
    )
    for kind in ("torus", "mesh")
  ]
  graphs = [
    line(
      [r for r in drawn if (r["nodes"] > r["ranks"]) == switched], "nodes",
      label=label, style="", marker=".",
    )
    for switched, label in ((False, "ranks only"), (True, "with switches"))
  ]
  ranks = sorted({r["ranks"] for r in scaling})
  return Figure((
    Panel(
      grids, "MultiTree on square grids",
      Axis("ranks", "log", ticks=[(n, f"{n:,}") for n in ranks]),
      Axis("s", "log"), "best", grid=True,
    ),
    Panel(
      graphs, "optimal trees on random graphs", "nodes", Axis("s", "log"),
      "best", grid=True,
    ),
  ), size=(8, 3.5), columns=2)
