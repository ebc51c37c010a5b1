"""Benchmark of the planner's device orders: optimality, bounds and times."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import pathlib
import time
from typing import Any

import numpy as np

from caatnet.benchmarks.harness import scripts, timing
from caatnet.benchmarks.planner import planner_regret
from caatnet.show import tables
from caatnet.studies.planner.study import training_step
from caatnet.studies.published import models
from parallel.plans.hardware import cluster_files
from parallel.plans.hardware.devices import A100
from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.planner import device_order
from parallel.plans.planner.bound import cost_lower_bound
from parallel.plans.planner.latency import TimingAssumptions
from parallel.plans.planner.message_costs import CostTerm, Grid, Traffic, cost
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import Choices, Configuration

# Grids (stages, data, tensor), used in turn. All orders of up to 8
# devices can be searched, and CP-SAT solves up to 16; uneven clusters have 64.
_EXACT_GRIDS = tuple(itertools.starmap(Grid, (
  (4, 2, 1), (2, 2, 2), (8, 1, 1), (1, 8, 1), (2, 4, 1), (1, 4, 2), (3, 2, 1),
  (7, 1, 1),
)))
_SOLVED_GRIDS = Grid(2, 4, 2), Grid(4, 4, 1), Grid(4, 3, 1), Grid(2, 5, 1)
_UNEVEN_GRIDS = Grid(4, 2, 8), Grid(8, 1, 8), Grid(2, 4, 8), Grid(4, 4, 4)
_CP_SAT = pathlib.Path(__file__).with_name("planner_cp_sat.py")


def run(config: Any) -> dict[str, Any]:
  """Runs all parts, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/benchmark/planner.py.
  """
  parts: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "against all orders": _compare_exhaustive,
    "against CP-SAT": _compare_cp_sat,
    "certified": _measure_bound_gaps, "large": _time_large_searches,
    "uneven links": _compare_uneven_links, "regret": _regret,
  }
  found = {}
  for name, part in parts.items():
    rows = part(config)
    found[name] = rows
    if rows:
      columns = list(rows[0])
      tables.print_table(
        name, columns, [[_text(row[c]) for c in columns] for row in rows]
      )
  return {"benchmark": "planner", **found}


def _text(value: Any) -> str:
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def _problem(
  config: Any, links: LinkMatrix, grid: Grid
) -> tuple[Configuration, Problem, Traffic]:
  """Returns a parallel configuration, its planning problem, and its traffic.

  ``grid`` has the numbers of stages, data-parallel and tensor ranks.

  With execution "events", stages are not synchronised in each tick, so the time
  of a step depends on whole pipelines.
  """
  options = config.benchmark
  c = Configuration(*grid, options.microbatches)
  step = dataclasses.replace(
    training_step(config),
    batch_size=options.examples * options.microbatches * grid.data,
  )
  problem = Problem(step, links, TimingAssumptions(execution="events"))
  return c, problem, problem.traffic(c)


def draw_links(seed: int, size: int) -> LinkMatrix:
  """Draws links independently, from 1 to 20 GB/s on a logarithmic scale."""
  rng = np.random.default_rng(seed)
  rates = 1e9 * np.exp(rng.uniform(0, np.log(20), (size, size)))  # bytes/s
  return LinkMatrix(
    f"drawn {seed}", A100, tuple(range(size)), rates,
    np.full((size, size), 1e-5), "drawn by a benchmark", "drawn",
  )


def _progress(count: int, what: str) -> Iterator[int]:
  return timing.progress(range(count), what)


def _compare_exhaustive(config: Any) -> list[dict[str, Any]]:
  """Compares the search with an enumeration of all orders."""
  options, ratios, own = config.benchmark, [], []
  for seed in _progress(options.exact_clusters, "all orders"):
    grid = _EXACT_GRIDS[seed % len(_EXACT_GRIDS)]
    costs = _problem(config, draw_links(seed, grid.size), grid)[2]
    best = device_order.brute_force(costs).seconds
    ours = device_order.search(costs, exact=False)
    ratios.append(ours.seconds / best)
    own.append(device_order.default_order(costs).seconds / best)
  return [_ratio_row(ratios, own)]


def _ratio_row(
  ratios: Sequence[float], own: Sequence[float]
) -> dict[str, Any]:
  """Returns a table row on device orders' costs relative to the best order's.

  ``ratios`` are those of our orders, ``own`` those of the default order.
  """
  return {
    "clusters": len(ratios), "ours / best, worst": max(ratios),
    "within 1%": sum(ratio <= 1.01 for ratio in ratios),
    "own / best, median": float(np.median(own)),
  }


def _compare_cp_sat(config: Any) -> list[dict[str, Any]]:
  """Compares orders of up to 16 devices with CP-SAT's order and bound."""
  options, rows = config.benchmark, []
  if not options.python_path:
    print("CP-SAT is left out: config.benchmark.python_path is empty")
    return rows
  for seed in _progress(options.solved_clusters, "CP-SAT"):
    grid = _SOLVED_GRIDS[seed % len(_SOLVED_GRIDS)]
    # Seeds do not overlap with those of the other parts.
    costs = _problem(config, draw_links(1000 + seed, grid.size), grid)[2]
    ours = device_order.search(costs)
    answer = _cp_sat(costs, ours, options)
    theirs = np.inf
    if answer["order"] is not None:
      order = np.array(answer["order"]).reshape(grid)
      theirs = float(cost(costs, order))
    least = max(answer["bound"], 0.0)
    rows.append({
      "grid": str(grid), "ours / CP-SAT": ours.seconds / theirs,
      "CP-SAT's gap": 1 - least / theirs, "proven": answer["proven"],
      "its s": answer["seconds"], "ours above its bound":
      ours.seconds / least - 1 if least else np.inf,
      "above our bound": ours.seconds / cost_lower_bound(costs) - 1,
    })
  return rows


def _cp_sat(
  costs: Traffic, known: device_order.Order, options: Any
) -> dict[str, Any]:
  """Returns CP-SAT's answer (`planner_cp_sat`) from the Python with ortools.

  ``known`` is the best known device order, from which the solver starts.
  """
  planes = costs.grid.data * costs.grid.tensor

  def sums(family: CostTerm) -> Sequence[Sequence[int]]:
    if not family.summed:
      return [[i] for i in range(len(family.source))]
    # Costs are summed over each pipeline; the largest sum counts.
    pipes = family.source % planes
    return [np.flatnonzero(pipes == i).tolist() for i in range(planes)]

  problem = {
    "size": costs.grid.size, "known": known.seconds,
    "hint": known.devices.ravel().tolist(), "limit_s": options.limit_s,
    "kinds": [
      {"seconds": f.seconds.tolist(), "source": f.source.tolist(),
       "target": f.target.tolist(), "sums": sums(f)}
      for f in costs.families()
    ],
  }
  return scripts.ask_script(
    [options.python_path, str(_CP_SAT)], problem,
    limit_s=4 * options.limit_s + 60,
  )


def _measure_bound_gaps(config: Any) -> list[dict[str, Any]]:
  """Returns how far orders exceed the bound, relative to it and to a step."""
  rows, everyone = [], []
  for entry in config.benchmark.grids:
    grid, gaps, steps = Grid(*entry), [], []
    count = config.benchmark.certified_clusters
    for seed in _progress(count, f"gaps of {grid}"):
      links = cluster_files.cluster(f"pipette-a100:{max(1, grid.size // 8)}"
                                    f",uneven={seed}")
      c, problem, costs = _problem(config, links, grid)
      ours = device_order.search(costs)
      above = ours.seconds - cost_lower_bound(costs)
      gaps.append(above / (ours.seconds - above))  # relative to the bound
      steps.append(above / problem.predict(c, ours.devices).total)
    everyone += gaps
    rows.append(_gaps(str(grid), gaps) | {
      "of a step, median": float(np.median(steps))
    })
  return [*rows, _gaps("all", everyone) | {"of a step, median": ""}]


def _gaps(name: str, gaps: Sequence[float]) -> dict[str, Any]:
  return {
    "grid": name, "clusters": len(gaps), "gap, median": float(np.median(gaps)),
    "least": min(gaps), "most": max(gaps),
  }


def _time_large_searches(config: Any) -> list[dict[str, Any]]:
  """Times the search on many devices."""
  rows = []
  for entry in config.benchmark.large:
    grid = Grid(*entry)
    links = cluster_files.cluster(f"a100:{grid.size // 8},uneven=0")
    costs = _problem(config, links, grid)[2]
    clocks = time.perf_counter(), time.process_time()
    ours = device_order.search(costs)
    passed, used = (
      time.perf_counter() - clocks[0], time.process_time() - clocks[1]
    )
    least = cost_lower_bound(costs)
    rows.append({
      "grid": str(grid), "s": passed, "s of processors": used,
      "own / ours": device_order.default_order(costs).seconds / ours.seconds,
      "gap": ours.seconds / least - 1,  # upper bound of the regret
    })
  return rows


def _compare_uneven_links(config: Any) -> list[dict[str, Any]]:
  """Compares predicted step times of three device orders on uneven links."""
  options = config.benchmark
  ratios: dict[str, list[float]] = {"own": [], "pipette": []}
  for seed in _progress(options.premise_clusters, "uneven links"):
    grid = _UNEVEN_GRIDS[seed % len(_UNEVEN_GRIDS)]
    links = cluster_files.cluster(f"pipette-a100:8,uneven={1000 + seed}")
    c, problem, costs = _problem(config, links, grid)
    seconds: Mapping[str, float] = {
      name: problem.predict(c, order).total for name, order in (
        ("ours", device_order.search(costs, kicks=0).devices),
        ("own", device_order.default_order(costs).devices),
        ("pipette", models.pipette_order(
          c, problem, steps=options.steps, seed=seed
        )),
      )
    }
    for name, found in ratios.items():
      found.append(seconds[name] / seconds["ours"])
  return [_percentile_row(name, found) for name, found in ratios.items()]


def _percentile_row(name: str, ratios: Sequence[float]) -> dict[str, Any]:
  """Returns a row: percentiles of an order's step time, divided by ours."""
  return {
    "order": name, "clusters": len(ratios), **{
      f"{q}%": float(np.percentile(ratios, q))
      for q in (0, 5, 25, 50, 75, 95, 100)
    }, "slower than ours": sum(ratio > 1 + 1e-9 for ratio in ratios),
  }


def _regret(config: Any) -> list[dict[str, Any]]:
  """Compares plans with an exhaustive search of configurations and orders."""
  options, rows = config.benchmark, []
  choices = Choices(
    tuple(options.schedules), schemes=("ddp", "zero1"),
    remats=("none",), offload=False,
  )
  for seed in _progress(options.regret_clusters, "regret"):
    turn, which = divmod(seed, len(options.sizes))
    round_, execution = divmod(turn, len(options.executions))
    step = training_step(config)
    step = dataclasses.replace(
      step, batch_size=options.batch_size,
      model=dataclasses.replace(step.model, num_layers=options.layers),
      seq_len=options.positions[round_ % len(options.positions)],
    )
    problem = Problem(
      step, draw_links(2000 + seed, options.sizes[which]),
      TimingAssumptions(execution=options.executions[execution]),
    )
    rows.append(planner_regret.regret(problem, choices))
  if rows:
    found = [row["regret"] for row in rows]
    print(
      f"regret of {len(rows)} clusters: median {np.median(found):.2%}, most "
      f"{max(found):.2%}; below 2% in {sum(x < 0.02 for x in found)}"
    )
  return rows
