"""Times builders of schedules; compares the optimal ones with the cut bound."""

import platform
import random
import time
from typing import Any

import networkx
import numpy as np
from rich.progress import track

from caatnet import report
from parallel import topologies
from parallel.schedules import multitree, optimal
from parallel.schedules.builders import build
from parallel.schedules.check import check
from parallel.topology import Link, Topology

BANDWIDTHS = (25e9, 50e9, 100e9, 200e9)

NAMED = {
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


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns all as plain data."""
  options = config.benchmark
  unknown = sorted(set(options.optimal) - NAMED.keys())
  if unknown:
    raise ValueError(
      f"config.benchmark.optimal: {unknown[0]!r} must be one of "
      f"{', '.join(NAMED)}"
    )
  grids = [topologies.torus((d, d)) for d in options.tori]
  grids += [topologies.mesh((d, d)) for d in options.meshes]
  scaling = [_multitree(x) for x in track(grids, "MultiTree", transient=True)]
  report.table(
    "MultiTree, one phase",
    ["topology", "ranks", "steps", "bound", "s"],
    [[r["topology"], str(r["ranks"]), str(r["steps"]), str(r["bound"]),
      f"{r['seconds']:.2f}"] for r in scaling],
  )
  named = [
    _optimal(NAMED[name](), name)
    for name in track(options.optimal, "optimal", transient=True)
  ]
  report.table(
    "optimal all-gathers: busiest link over the cut bound",
    ["topology", "k", "over bound", "rounds / bound", "tight cut", "s",
     "MultiTree s"],
    [[r["topology"], str(r["trees_per_rank"]), f"{r['ratio']:.4f}",
      f"{r['rounds_ratio']:.3f}", _cut(r), f"{r['seconds']:.2f}",
      f"{r['multitree_seconds']:.2f}"] for r in named],
  )
  drawn = [
    _optimal(random_graph(seed, options.max_nodes), f"random {seed}")
    for seed in track(range(options.num_random), "random", transient=True)
  ]
  ratios = np.array([r["ratio"] for r in drawn])
  near = float(np.mean(ratios <= 1.05))
  worst = max(drawn, key=lambda r: r["ratio"])
  print(
    f"{len(drawn)} random graphs of up to {options.max_nodes} nodes: "
    f"{near:.1%} within 5% of the cut bound, median {np.median(ratios):.4f}, "
    f"worst {worst['ratio']:.4f} ({worst['topology']}, tight cut {_cut(worst)})"
    f", {sum(r['seconds'] for r in drawn):.0f} s in all"
  )
  if options.plot:
    _plot(scaling, options.plot)
  facts = {"python": platform.python_version(), "numpy": np.__version__}
  return {
    "environment": facts, "multitree": scaling, "optimal": named,
    "random": drawn, "within_5_percent": near,
  }


def _multitree(topology: Topology) -> dict[str, Any]:
  start = time.perf_counter()
  steps = multitree.grow(topology)
  seconds = time.perf_counter() - start
  n = topology.num_ranks
  ports = min(len(topology.neighbours(rank)) for rank in range(n))
  return {
    "topology": topology.name, "ranks": n, "steps": len(steps),
    "bound": -(-(n - 1) // ports), "seconds": seconds,
  }


def _optimal(topology: Topology, name: str) -> dict[str, Any]:
  """A row; the schedule is proven on the topology."""
  start = time.perf_counter()
  forest = optimal.forest(topology)
  seconds = time.perf_counter() - start
  schedule = optimal.schedule(topology, forest)
  check(schedule, topology)
  start = time.perf_counter()
  build("multitree", topology, "all_gather")
  multitree_seconds = time.perf_counter() - start
  bound = forest.bound
  slowest = min(link.bandwidth for link in topology.links)
  rounds_s = len(schedule.rounds) / schedule.num_chunks / slowest
  return {
    "topology": name,
    "ranks": topology.num_ranks,
    "switches": topology.num_switches,
    "links": len(topology.links),
    "trees_per_rank": forest.weight,
    "ratio": forest.ratio,
    "rounds_ratio": rounds_s / bound.seconds_per_byte,
    "cut": list(bound.cut),
    "leaving_bytes_per_second": bound.leaving,
    "seconds": seconds,
    "multitree_seconds": multitree_seconds,
  }


def _cut(row: dict[str, Any]) -> str:
  ranks = sum(node < row["ranks"] for node in row["cut"])
  return f"{ranks} ranks / {row['leaving_bytes_per_second'] / 1e9:g} GB/s"


def random_graph(seed: int, max_nodes: int) -> Topology:
  """A connected graph of both-way links of several speeds.

  A third of them has switches, a third has links that failed in one or both
  directions (at switches in both).
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
    bandwidth = rng.choice(BANDWIDTHS)
    found += [Link(u, v, bandwidth), Link(v, u, bandwidth)]
  topology = Topology(f"random {seed}", n, num_switches, tuple(found))
  if seed % 3 == 2:
    for u, v in rng.sample(sorted(graph.edges), 3):
      pairs = [(u, v), (v, u)] if rng.random() < 0.5 else [(u, v)]
      try:
        topology = topology.without(*pairs)
      except ValueError:  # would cut a rank off
        continue
  return topology


def _plot(scaling: list[dict[str, Any]], path: str) -> None:
  from matplotlib.figure import Figure

  figure = Figure(figsize=(5, 3.5), layout="constrained")
  axes = figure.subplots()
  for kind in ("torus", "mesh"):
    rows = [r for r in scaling if r["topology"].startswith(kind)]
    axes.loglog([r["ranks"] for r in rows], [r["seconds"] for r in rows],
                "o-", label=kind)
  axes.set_xlabel("ranks")
  axes.set_ylabel("MultiTree's construction, s")
  axes.legend()
  figure.savefig(path, dpi=150)
