"""Simulations ("cells") of a server; results are stored as they finish.

A long study is a list of simulations (cells). A stored result is reused if all
inputs of its cell are the same, including the files in ``_CODE``. So an
interrupted study resumes with the first missing cell.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
import pathlib
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from caatnet.serving import traces
from caatnet.serving.traces import Arrival
from caatnet.studies.serving import server, tails
from caatnet.studies.serving.server import Machine, Outcome
from parallel.base.kept import ResultCache
from parallel.plans.network import inference

# Code of the simulator and of its cost model. A change to these files
# invalidates stored cells.
_CODE = (
  *pathlib.Path(traces.__file__).parent.rglob("*.py"),
  *(pathlib.Path(m.__file__) for m in (server, tails, inference)),
  pathlib.Path(__file__),
)


@dataclasses.dataclass(frozen=True)
class SimulationCell:
  """Inputs of one simulation of a server.

  Attributes:
    where: Columns that identify the simulation in tables, such as "load".
    machine: Device and host.
    arm: Preemption method (rules for pages), an entry of ``config.arms``.
    arrivals: Requests with their arrival times.
    limits: Limits of a step.
    priorities: Arguments of `Priorities`.
    policy: Name of the scheduling policy.
  """

  where: Mapping[str, Any]
  machine: Machine
  arm: Mapping[str, Any]
  arrivals: Sequence[Arrival]
  limits: Mapping[str, Any]
  priorities: Mapping[str, Any]
  policy: str = "strict_priority"

  @property
  def inputs(self) -> list[str]:
    """All inputs as texts, with a hash of the source files in ``_CODE``."""
    names = (repr(getattr(self, f.name)) for f in dataclasses.fields(self))
    return [_code_hash(), *names]

  def simulate(self) -> dict[str, Any]:
    """Simulates the server; returns ``where`` and the `run_statistics`."""
    outcome = server.serve(
      self.machine, self.arm, self.arrivals, self.limits, self.priorities,
      self.policy,
    )
    return dict(self.where) | run_statistics(outcome, self.arm)


@functools.cache
def _code_hash() -> str:
  digest = hashlib.blake2b(digest_size=16)
  for file in sorted(_CODE):
    digest.update(file.read_bytes())
  return digest.hexdigest()


def run(cells: Sequence[SimulationCell], path: str) -> list[dict[str, Any]]:
  """Returns the results of cells; simulates those that the file lacks.

  Args:
    cells: Simulations, in this order.
    path: File of JSON lines, created or extended; "" for none.
  """
  kept = ResultCache(path)
  return [
    kept.get(cell.inputs, cell.simulate)
    for cell in track(
      cells, "simulating", transient=True, console=Console(stderr=True)
    )
  ]


def run_statistics(outcome: Outcome, arm: Mapping[str, Any]) -> dict[str, Any]:
  """Returns statistics of a simulation: latencies, throughput and copies.

  Copies are those to and from the host. "ranges" counts copied byte ranges, for
  each layer, for keys and for values: one per range of pages that is contiguous
  on both device and host or, with ``arm["single"]``, one per page. "calls" is
  the number of calls of copy programs, each of which copies a power of two of
  pages.
  """
  counts, served = outcome.scheduler.counts, outcome.served
  per_run = outcome.copies.ranges_per_run
  pages = counts.pages["out"] + counts.pages["in"]
  runs = {
    length: counts.runs["out"][length] + counts.runs["in"][length]
    for length in {*counts.runs["out"], *counts.runs["in"]}
  }
  num_runs = sum(runs.values())
  able = [d for d in counts.decisions if d.able]
  # Number of decisions in which the chosen option was the cheaper one.
  cheaper = sum(d.swapped == (d.swap_s < d.recompute_s) for d in able)
  drawn = sum(len(r.tokens) for r in served)
  return {
    "requests": len(served),
    "refused": len(outcome.requests) - len(served),
    "seconds": outcome.seconds,
    # Requests per second until 90% have finished: later the server is not full.
    "capacity": 0.9 * len(served) / float(
      np.quantile([r.end_s for r in served], 0.9)
    ),
    "throughput": drawn / outcome.seconds,
    "ttft": tails.summary([np.array([r.ttft_s]) for r in served]),
    "tbt": tails.summary([r.gaps_s for r in served]),
    "pages": pages,
    "bytes": pages * outcome.copies.page_bytes,
    "ranges": (pages if arm["single"] else num_runs) * per_run,
    "single_ranges": pages * per_run,
    "run_length": pages / num_runs if num_runs else 0.0,
    "calls": sum(k.bit_count() * n for k, n in runs.items()),
    "preemptions": len(counts.decisions),
    "able": len(able),
    "swapped": sum(d.swapped for d in counts.decisions),
    "cheaper": cheaper,
    "stalled": max(0.0, outcome.present_s - outcome.busy_s) / outcome.seconds,
    "busy": outcome.busy_s / outcome.seconds,
    "padding": 1 - outcome.filled / outcome.held if outcome.held else 0.0,
    "large_free": outcome.large / outcome.free if outcome.free else 0.0,
    "in_system": outcome.in_system / outcome.seconds,
    "mean_latency": sum(
      r.end_s - r.arrival_s for r in outcome.requests
    ) / len(outcome.requests),
  }
