"""Simulation of a real server's run, with percentiles compared with its log.

Nothing is fitted to the log. Lengths, arrivals (`queued_s`: the time at which
the server's loop takes a request), limits and memory come from the log, common
prefixes of prompts from the workload. Times come from operations that were
measured separately, times of all-reduces from a link's bandwidth and latency.
The simulation runs the scheduler of `caatnet.serving` with vLLM's rules: first
come, first served; decodes first, then prompt chunks up to a token budget. A
request is admitted if pages for all its tokens are free and the step preempts
no request. If pages run out, the last admitted request is preempted and later
recomputed. Unused pages form one queue, whether or not the prefix cache can
find them. One page is never used. A step is scheduled while the previous step
is computed.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

import numpy as np

from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.engine import Engine, replay
from caatnet.serving.engine.simulator import Simulator
from caatnet.serving.engine.times import AllReduces, Profile
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies import registry
from caatnet.serving.scheduler.scheduler import Scheduler
from caatnet.studies.serving import vllm_logs
from caatnet.studies.serving.vllm_logs import Log
from parallel.base.naming import prefix_error_keys
from parallel.plans.workload import Transformer

# vLLM's null block, a placeholder that holds no tokens.
_NULL_PAGES = 1


@dataclasses.dataclass(frozen=True)
class SimulatedRun:
  """Result of a simulated server.

  Attributes:
    requests: The requests.
    series: Time in s, running requests, waiting requests and used pages in
      percent, at the ends of n steps; float64 ``[n, 4]``.
    counts: Steps, preemptions, and pages found in the prefix cache.
  """

  requests: list[Request]
  series: np.ndarray
  counts: dict[str, int]


@dataclasses.dataclass(frozen=True)
class SimulationSetup:
  """Log, model, profile and options of a simulation.

  Attributes:
    log: The log.
    num_requests: Number of requests, from the first; None for all.
    model: Sizes of the model.
    ranks: Number of tensor ranks.
    profile: Folder of measured operations.
    all_reduces: All-reduces over the ranks; None for one rank.
    skew: See `Profile.skew`, the effect of unequal contexts; None for its fit.
    server: Section ``config.server``, in which the log's values replace 0.
    scale: Factor on all times.
    prefixes: Source of common prefixes, as for `vllm_logs.prompts`.
  """

  log: Log
  num_requests: int | None
  model: Transformer
  ranks: int
  profile: pathlib.Path
  all_reduces: AllReduces | None
  skew: float | None
  server: Mapping[str, Any]
  scale: float
  prefixes: str


def simulation_setup(config: Mapping[str, Any]) -> SimulationSetup:
  """Returns the setup that a config describes, completed from the log.

  Raises:
    ValueError: A file is missing or damaged, or the model is not known.
  """
  log = vllm_logs.load(config["log"])
  model = vllm_logs.model_of(log, config["model"])
  ranks = config["ranks"] or log.ranks
  server = dict(config["server"])
  server["slots"] = server["slots"] or log.server.max_num_seqs
  server["tokens"] = server["tokens"] or log.server.max_num_batched_tokens
  server["page_size"] = server["page_size"] or log.server.block_size
  server["reuse"] = server["reuse"] and log.server.enable_prefix_caching
  server["pages"] = server["pages"] or vllm_logs.num_pages(
    log, model, ranks, server["page_size"]
  )
  if server["pages"] <= _NULL_PAGES:
    raise ValueError(
      f"config.log={log.name!r}: of mem_size={log.server.mem_size:g} GiB, the "
      f"weights of {log.model} leave no memory for pages; set "
      "config.server.pages"
    )
  link, latency_ns = config["collectives"], log.server.link_latency
  bandwidth = link["bandwidth"] or log.server.link_bw * 1e9
  latency_s = link["latency_s"]
  if latency_s is None and latency_ns is not None:
    latency_s = latency_ns * 1e-9
  if ranks > 1 and (not bandwidth or latency_s is None):
    raise ValueError(
      f"config.log={log.name!r} has no link between its {ranks} ranks; set "
      "config.collectives.bandwidth and config.collectives.latency_s"
    )
  return SimulationSetup(
    log, config["num_requests"] or None, model, ranks,
    vllm_logs.profile_folder(log, config["profile"], ranks),
    None if ranks == 1 else AllReduces(
      ranks, model.width * model.item_bytes, bandwidth, latency_s,
      link["per_layer"],
    ),
    config["skew"], server, 1.0,
    vllm_logs.resolve_prefixes(log, config["prefixes"]),
  )


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Simulates a log's requests, also with changed pages, times and rules.

  Args:
    config: Config like configs/serving/vllm_log.py, as nested dicts.

  Returns:
    Plain data: "rows" (a statistic, simulated and in the log), "sensitivity"
    (errors after one change), "counts", "assumptions" and "series".

  Raises:
    ValueError: A file is missing or damaged, or a request does not fit.
  """
  base = simulation_setup(config)
  log, percentiles = base.log, config["percentiles"]
  found, profile = simulate(base)
  theirs = _log_statistics(log.requests[: base.num_requests], percentiles)
  ours = request_statistics(found.requests, percentiles)
  sums = base.all_reduces
  return {
    "source": vllm_logs.SOURCE,
    "log": log.name,
    "num_requests": len(found.requests),
    "tolerance": config["tolerance"],
    "assumptions": {
      "model": log.model, "ranks": base.ranks, "skew": profile.skew,
      "pages": base.server["pages"], "slots": base.server["slots"],
      "tokens": base.server["tokens"],
      "all_reduces": sums and dataclasses.asdict(sums),
      "prefixes": base.prefixes,
    },
    "rows": [
      _row(name, ours[name], theirs[name], config["tolerance"])
      for name in ours
    ],
    "sensitivity": [
      _errors_after_change(label, changed, theirs, percentiles)
      for label, changed in _changes(base, config["change"], profile.skew)
    ],
    "counts": found.counts,
    "series": found.series.tolist(),
    "log_series": {k: v.tolist() for k, v in log.series.items()},
  }


def simulate(base: SimulationSetup) -> tuple[SimulatedRun, Profile]:
  """Serves the requests of a log on a simulated clock.

  Returns:
    The simulated run, and the profile that it used.

  Raises:
    ValueError: A file is damaged, or a request does not fit in the cache.
  """
  server = base.server
  pages = Pages(
    server["pages"] - _NULL_PAGES, server["page_size"], server["reuse"],
    in_turn=True,
  )
  with prefix_error_keys("config.server", server):
    # vLLM's rules, expressed as options of our scheduler.
    limits = Limits(
      slots=server["slots"], tokens=server["tokens"],
      whole_prompt=server["whole_prompt"], copy_on_write=False,
    )
  profile = vllm_logs.read_profile(
    base.profile, base.model, base.ranks, base.all_reduces, base.skew,
    base.scale,
  )
  simulator = Simulator(profile, most=server["tokens"], draw=_own_token)
  scheduler = Scheduler(
    limits, registry.make(server["policy"], pages), pages,
    # No host cache: preempted requests are recomputed.
    HostCache(0, server["page_size"], reserve=False), simulator.costs,
  )
  rows = base.log.requests[: base.num_requests]
  prompts = vllm_logs.prompts(base.log, base.prefixes, base.num_requests)
  requests = [
    Request(
      i, prompt, int(row["output_tokens"]), arrival_s=row["queued_s"]
    )
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
  ]
  _check_pages(requests, server)
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
  return SimulatedRun(requests, np.array(series), counts), profile


def _check_pages(
  requests: Sequence[Request], server: Mapping[str, Any]
) -> None:
  """Raises ValueError if the longest request does not fit in the cache."""
  largest = max(r.longest for r in requests)
  needed = -(-largest // server["page_size"]) + _NULL_PAGES
  if needed > server["pages"]:
    raise ValueError(
      f"config.server.pages={server['pages']} must be at least {needed}, since "
      f"the longest request of the log has {largest} tokens"
    )


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


def request_statistics(
  requests: Sequence[Request], percentiles: Sequence[int]
) -> dict[str, float]:
  """Returns statistics of TTFT and TPOT of served requests, in seconds."""
  ttft = np.array([r.ttft_s for r in requests])
  tpot = np.array([r.tpot_s for r in requests])
  return _statistics("TTFT", ttft, percentiles) | _statistics(
    "TPOT", tpot, percentiles
  )


def _log_statistics(
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
  name: str, ours: float, theirs: float, tolerance: float
) -> dict[str, Any]:
  error = ours / theirs - 1
  return {
    "name": name, "ours_s": ours, "log_s": theirs, "error": error,
    "missed": f"by more than {tolerance:.1%}" if abs(error) > tolerance else "",
  }


def _changes(
  base: SimulationSetup, change: float, skew: float
) -> list[tuple[str, SimulationSetup]]:
  """Returns (label, setup) with one change each; [] if ``change`` is 0.

  `change` is the relative change of pages and times, `skew` the profile's.
  """
  if not change:
    return []

  def server(label: str, **keys: Any) -> tuple[str, SimulationSetup]:
    changed = dataclasses.replace(base, server={**base.server, **keys})
    return label, changed

  def other(label: str, **fields: Any) -> tuple[str, SimulationSetup]:
    return label, dataclasses.replace(base, **fields)

  pages = base.server["pages"]
  more, less = round(pages * (1 + change)), round(pages * (1 - change))
  found = [
    server(f"{change:.0%} more pages ({more:,})", pages=more),
    server(f"{change:.0%} fewer pages ({less:,})", pages=less),
    other(f"steps take {change:.0%} longer", scale=1 + change),
    other(f"steps take {change:.0%} less", scale=1 - change),
    server("each step waits for the one before", steps_ahead=1),
    server("the first chunk must fit, no more", whole_prompt=False),
    server("no page is found", reuse=False),
    other("no prompts begin alike", prefixes="none"),
  ]
  if skew:
    found.append(other("attention by the mean context", skew=0.0))
  if base.all_reduces is not None:
    found.append(other("all-reduces take no time", all_reduces=None))
  return found


def _errors_after_change(
  label: str, changed: SimulationSetup, theirs: Mapping[str, float],
  percentiles: Sequence[int],
) -> dict[str, Any]:
  ours = request_statistics(simulate(changed)[0].requests, percentiles)
  return {
    "changed": label,
    "errors": {name: ours[name] / theirs[name] - 1 for name in ours},
  }
