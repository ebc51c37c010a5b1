"""Simulation of a real server's run, with percentiles compared with its log.

Nothing is fitted to the log. Lengths, arrivals (`queued_s`: the time at which
the server's loop takes a request) and the number of pages come from the log.
All times come from operations that were measured separately, and common
prefixes of prompts from the workload. The rules are vLLM's, as values of
`caatnet.serving`: first come, first served; decodes first, then chunks up to a
budget. A request is admitted if pages for all its tokens are free, and not in a
step with a preemption. The request that was admitted last is preempted and
recomputed. Unused pages form one queue, with or without a block hash. One page
is never used. A step is scheduled while the previous one is computed.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from caatnet.checks import naming
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.engine import Engine, replay
from caatnet.serving.engine.simulator import Simulator
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies import registry
from caatnet.serving.scheduler.scheduler import Scheduler
from caatnet.studies.serving import measured

# vLLM's null block, a placeholder that holds no tokens.
_NULL_PAGES = 1
_SHARED = (
  "pages that prompts share, which vLLM finds by their tokens (config.prefixes)"
)


@dataclasses.dataclass(frozen=True)
class Run:
  """Run of a simulated server.

  Attributes:
    requests: The requests.
    series: Times in s, running and waiting requests, and the used fraction of
      pages in percent, at each end of a step; float64 ``[n, 4]``.
    counts: Steps, preemptions, and pages found in the prefix cache.
  """

  requests: list[Request]
  series: np.ndarray
  counts: dict[str, int]


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Simulates the log, and its sensitivity to pages, times and rules.

  Args:
    config: Config like configs/serving/vllm_log.py, as nested dicts.

  Returns:
    Plain data: "rows", "sensitivity", "counts" and "series".
  """
  rows = measured.requests()[: config["num_requests"] or None]
  prompts = measured.prompts(rows, config["prefixes"])
  server, percentiles = config["server"], config["percentiles"]
  base = simulate(rows, prompts, server)
  theirs = _of_log(rows, percentiles)
  ours = of_requests(base.requests, percentiles)
  suspected = _SHARED if config["prefixes"] == "none" else "not known"
  if config["num_requests"]:
    suspected = "requests that come later are left out (config.num_requests)"
  return {
    "source": measured.SOURCE,
    "num_requests": len(rows),
    "tolerance": config["tolerance"],
    "rows": [
      _row(name, ours[name], theirs[name], config["tolerance"], suspected)
      for name in ours
    ],
    "sensitivity": [
      _changed(label, rows, measured.prompts(rows, prefixes), server | change,
               scale, theirs, percentiles)
      for label, change, scale, prefixes in _changes(
        server, config["change"], config["prefixes"]
      )
    ],
    "counts": base.counts,
    "series": base.series.tolist(),
    "log_series": {k: v.tolist() for k, v in measured.series().items()},
  }


def simulate(
  rows: Sequence[Mapping[str, float]], prompts: Sequence[np.ndarray],
  server: Mapping[str, Any], scale: float = 1.0,
) -> Run:
  """Serves the requests of a log on a simulated clock.

  Args:
    rows: Requests, from `measured.requests`.
    prompts: Prompts of the requests.
    server: Section ``config.server``.
    scale: Factor on all times.
  """
  pages = Pages(
    server["pages"] - _NULL_PAGES, server["page_size"], server["reuse"],
    in_turn=True,
  )
  with naming("config.server", server):
    # vLLM's rules as options of our scheduler.
    limits = Limits(
      slots=server["slots"], tokens=server["tokens"],
      whole_prompt=server["whole_prompt"], copy_on_write=False,
    )
  simulator = Simulator(measured.profile(scale), most=server["tokens"],
                        draw=_own_token)
  scheduler = Scheduler(
    limits, registry.make(server["policy"], pages), pages,
    # No host cache: preempted requests are recomputed.
    HostCache(0, server["page_size"], reserve=False), simulator.costs,
  )
  requests = [
    Request(
      i, prompt, int(row["output_tokens"]), arrival_s=row["queued_s"]
    )
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
  ]
  series = []

  def watch(engine: Engine, step: object) -> None:
    if step is None:
      series.append((
        simulator.now(), len(scheduler.running), len(scheduler.policy),
        100 * pages.num_used / pages.num_pages,
      ))

  replay(Engine(scheduler, simulator, server["steps_ahead"]), requests, watch)
  pages.check()
  counts = {
    "steps": scheduler.counts.steps,
    "preemptions": scheduler.counts.preemptions.total(),
    "found_pages": pages.counts.hits,
    "shared_pages": sum(r.num_hits for r in requests) // pages.page_size,
  }
  return Run(requests, np.array(series), counts)


def _own_token(request: Request, position: int) -> int:
  """Returns a token that is unique to the request at this position."""
  return (request.number * 2**20 + position) % (2**31 - 1)


def _statistics(
  name: str, values: np.ndarray, percentiles: Sequence[int]
) -> dict[str, float]:
  """Returns the mean, and percentiles with linear interpolation."""
  found = {f"{name} mean": float(values.mean())}
  for p in percentiles:
    found[f"{name} P{p}"] = float(np.percentile(values, p))
  return found


def of_requests(
  requests: Sequence[Request], percentiles: Sequence[int]
) -> dict[str, float]:
  """Returns statistics of served requests, in seconds."""
  ttft = np.array([r.ttft_s for r in requests])
  tpot = np.array([r.tpot_s for r in requests])
  return _statistics("TTFT", ttft, percentiles) | _statistics(
    "TPOT", tpot, percentiles
  )


def _of_log(
  rows: Sequence[Mapping[str, float]], percentiles: Sequence[int]
) -> dict[str, float]:
  ttft = np.array([r["first_token_s"] - r["queued_s"] for r in rows])
  tpot = np.array([
    # Time per output token excludes the first one.
    (r["last_token_s"] - r["first_token_s"]) / (r["output_tokens"] - 1)
    for r in rows
  ])
  return _statistics("TTFT", ttft, percentiles) | _statistics(
    "TPOT", tpot, percentiles
  )


def _row(
  name: str, ours: float, theirs: float, tolerance: float, suspected: str
) -> dict[str, Any]:
  error = ours / theirs - 1
  missed = abs(error) > tolerance
  return {
    "name": name, "ours_s": ours, "log_s": theirs, "error": error,
    "suspected": suspected if missed else "",
  }


def _changes(
  server: Mapping[str, Any], change: float, prefixes: str
) -> list[tuple[str, dict[str, Any], float, str]]:
  """Returns other runs: change, config keys, factor on times, prefixes."""
  if not change:
    return []
  pages = server["pages"]
  more, less = round(pages * (1 + change)), round(pages * (1 - change))
  changed = [
    (f"{change:.0%} more pages ({more:,})", {"pages": more}, 1.0),
    (f"{change:.0%} fewer pages ({less:,})", {"pages": less}, 1.0),
    (f"steps take {change:.0%} longer", {}, 1 + change),
    (f"steps take {change:.0%} less", {}, 1 - change),
    ("each step waits for the one before", {"steps_ahead": 1}, 1.0),
    ("the first chunk must fit, no more", {"whole_prompt": False}, 1.0),
    ("no page is found", {"reuse": False}, 1.0),
  ]
  return [(*row, prefixes) for row in changed] + [
    ("no prompts begin alike", {}, 1.0, "none")
  ]


def _changed(
  label: str, rows: Sequence[Mapping[str, float]],
  prompts: Sequence[np.ndarray], server: Mapping[str, Any], scale: float,
  theirs: Mapping[str, float], percentiles: Sequence[int],
) -> dict[str, Any]:
  found = simulate(rows, prompts, server, scale)
  ours = of_requests(found.requests, percentiles)
  return {
    "changed": label,
    "errors": {name: ours[name] / theirs[name] - 1 for name in ours},
  }
