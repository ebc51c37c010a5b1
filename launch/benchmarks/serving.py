"""Times the scheduler of `caatnet.serving` on a full server."""

import platform
import time
from typing import Any

import numpy as np

from caatnet.serving.engine import Engine
from caatnet.serving.host import Host
from caatnet.serving.pages import Pages
from caatnet.serving.policies import registry
from caatnet.serving.priorities import Priorities
from caatnet.serving.requests import Request
from caatnet.serving.scheduler import Limits, Scheduler
from caatnet.serving.simulator import CopyTimes, Simulator
from caatnet.show import tables

_PAGE_SIZE = 16
# Tokens of prompts in a step, its time, and pages of an 8B model.
_CHUNKS = 1024
_STEP_S = 0.03
_COPIES = CopyTimes(2 * 2**20, 64, 1e-5, 25e9, 25e9, 1e12)


class _Steady:
  """Steps that all take as long."""

  def step_s(self, contexts: np.ndarray, chunks: Any) -> float:
    return _STEP_S


class _Load:
  """Requests that keep a server full."""

  def __init__(self, clients: int, seed: int) -> None:
    self._rng = np.random.default_rng(seed)
    self._clients, self._count = clients, 0
    self._systems = self._rng.integers(
      2**31 - 1, size=(50, 8 * _PAGE_SIZE), dtype=np.int32
    )

  def request(self, priority: float, now: float) -> Request:
    rng = self._rng
    own = rng.integers(
      2**31 - 1, size=int(rng.integers(64, 900)), dtype=np.int32
    )
    system = self._systems[rng.integers(len(self._systems))]
    self._count += 1
    return Request(
      self._count, np.concatenate([system, own]), int(rng.integers(50, 400)),
      client=int(rng.integers(self._clients)), priority=priority,
      arrival_s=now,
    )


def run(config: Any) -> dict[str, Any]:
  """Measures, prints a table, and returns it as plain data.

  Args:
    config: A config like configs/benchmark/serving.py.
  """
  options = config.benchmark
  rows = [_measure(name, options) for name in options.policies]
  tables.table(
    "us that the scheduler takes for a step, its tokens' arrival included\n"
    f"{options.steps:,} steps, {platform.machine()}, Python "
    f"{platform.python_version()}",
    ["policy", "running", "waiting", "steps that preempt", "pages found",
     "median", "P99", "most"],
    [
      [r["policy"], f"{r['running']:.0f}", f"{r['waiting']:.0f}",
       f"{r['preempting']:.1%}", f"{r['found']:.1%}", f"{r['median_us']:.0f}",
       f"{r['p99_us']:.0f}", f"{r['most_us']:.0f}"]
      for r in rows
    ],
  )
  return {"benchmark": "serving", "rows": rows}


def _measure(policy: str, options: Any) -> dict[str, Any]:
  """Times one policy's steps."""
  pages = Pages(options.pages, _PAGE_SIZE)
  executor = Simulator(_Steady(), _COPIES, most=_CHUNKS + options.running)
  scheduler = Scheduler(
    Limits(
      slots=options.running, tokens=options.running + _CHUNKS, preempt="cost",
      wait_s=2e-3, growth=4,
    ),
    registry.make(policy, pages), pages, Host(4 * options.pages, _PAGE_SIZE,
                                              reserve=True), executor.costs,
  )
  engine = Engine(scheduler, executor)
  load = _Load(options.clients, seed=0)
  priorities = Priorities("markov", options.frequency)
  seconds, running, waiting, preempting = [], [], [], 0
  spent = 0.0

  def timed(function: Any) -> Any:
    def wrapped(*args: Any) -> Any:
      nonlocal spent
      start = time.perf_counter()
      result = function(*args)
      spent += time.perf_counter() - start
      return result
    return wrapped

  for name in ("step", "receive", "take_copies"):
    setattr(scheduler, name, timed(getattr(scheduler, name)))
  while len(seconds) < options.warm_up + options.steps:
    missing = options.running + options.waiting - len(scheduler.requests)
    for _ in range(missing):
      scheduler.add(load.request(priorities.first(), executor.now()))
    before = scheduler.counts.preemptions.total()
    start = time.perf_counter()
    if priorities.due():
      for request in priorities.update(scheduler.requests):
        scheduler.policy.update(request)
    update = time.perf_counter() - start
    if engine.turn() is None:
      continue
    seconds.append(spent + update)
    spent = 0.0
    if len(seconds) > options.warm_up:
      running.append(len(scheduler.running))
      waiting.append(len(scheduler.policy))
      preempting += scheduler.counts.preemptions.total() > before
  times = 1e6 * np.array(seconds[options.warm_up :])
  counts = pages.counts
  return {
    "policy": policy,
    "running": float(np.mean(running)),
    "waiting": float(np.mean(waiting)),
    "preempting": preempting / options.steps,
    "found": counts.hits / max(1, counts.hits + counts.misses),
    "median_us": float(np.median(times)),
    "p99_us": float(np.percentile(times, 99)),
    "most_us": float(times.max()),
  }
