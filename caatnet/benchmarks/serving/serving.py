"""Times of the scheduler of `caatnet.serving` on a full server."""

import functools
import gc
import platform
import time
from typing import Any

import numpy as np

from caatnet.benchmarks.harness import timing
from caatnet.serving import compiling
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.engine import Engine, tune_gc
from caatnet.serving.engine.simulator import CopyTimes, Simulator
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies import registry
from caatnet.serving.scheduler.priorities import Priorities
from caatnet.serving.scheduler.scheduler import Scheduler
from caatnet.show import tables
from parallel.base.checks import at_least, known

_PAGE_SIZE = 16
# Maximum number of prompt tokens per step, and simulated duration of a step.
_PROMPT_TOKENS_PER_STEP = 1024
_STEP_S = 0.03
# Tokens that end a response; the simulator generates none of them.
_STOPS = frozenset((1, 2))
# Tokens of a prompt: those shared with other prompts, and the maximum number of
# further ones; and the maximum number of tokens of a response.
_SHARED_TOKENS, _MAX_OWN_TOKENS, _MAX_ANSWER_TOKENS = 8 * _PAGE_SIZE, 900, 400
_VOCAB_SIZE = np.iinfo(np.int32).max
_COPY_TIMES = CopyTimes(2 * 2**20, 64, 1e-5, 25e9, 25e9, 1e12)


class _ConstantStepTime:
  """Model of step times: all steps take equally long."""

  def step_s(self, contexts: np.ndarray, chunks: Any) -> float:
    return _STEP_S


class _Load:
  """Source of random requests, which keep a server full."""

  def __init__(self, clients: int, seed: int) -> None:
    self._rng = np.random.default_rng(seed)
    self._clients, self._count = clients, 0
    self._systems = self._rng.integers(
      _VOCAB_SIZE, size=(50, _SHARED_TOKENS), dtype=np.int32
    )

  def request(self, priority: float, now: float) -> Request:
    rng = self._rng
    own = rng.integers(
      _VOCAB_SIZE, size=int(rng.integers(64, _MAX_OWN_TOKENS)), dtype=np.int32
    )
    system = self._systems[rng.integers(len(self._systems))]
    self._count += 1
    return Request(
      self._count, np.concatenate([system, own]),
      int(rng.integers(50, _MAX_ANSWER_TOKENS)),
      client=int(rng.integers(self._clients)),
      priority=priority, arrival_s=now, stop=_STOPS,
    )


class _Stopwatch:
  """Timer that sums wall-clock and thread time of the functions it wraps."""

  def __init__(self) -> None:
    self.spent = np.zeros(2)

  def __call__(self, function: Any) -> Any:
    def timed(*args: Any) -> Any:
      wall, cpu = time.perf_counter(), time.thread_time()
      result = function(*args)
      self.spent += time.perf_counter() - wall, time.thread_time() - cpu
      return result
    return timed

  def take(self) -> np.ndarray:
    """Returns (wall-clock, thread) time since the last call, in us."""
    spent, self.spent = 1e6 * self.spent, np.zeros(2)
    return spent


def run(config: Any) -> dict[str, Any]:
  """Measures, prints a table, and returns it as plain data.

  Args:
    config: Config like configs/benchmark/serving.py.
  """
  options = config.benchmark
  for name in options.policies:
    known("config.benchmark.policies: ", name, options.pages)
    at_least(
      f"config.benchmark.pages.{name}", options.pages[name],
      -(-(_SHARED_TOKENS + _MAX_OWN_TOKENS + _MAX_ANSWER_TOKENS) // _PAGE_SIZE),
    )
  found = timing.in_turns({
    name: functools.partial(_measure, name, options)
    for name in options.policies
  }, options.rounds, warm_up=0)
  rows = [_merge_rounds(rounds) for rounds in found.values()]
  tables.print_table(
    "us of a processor that the scheduler takes for a step, its tokens' "
    "arrival included\n(in brackets by the clock), and for the arrival of a "
    f"request\n{options.steps:,} steps in each of {options.rounds} rounds, "
    f"{platform.machine()}, Python {platform.python_version()}, "
    f"{rows[0]['implementation']}",
    "policy | running:.0f | waiting:.0f | preempting:.1%=steps that preempt | "
    "found:.1%=pages found | {cpu_us[median]:.0f} ({clock_us[median]:.0f})="
    "median | medians_us:.0f=medians of rounds | "
    "{cpu_us[p99]:.0f} ({clock_us[p99]:.0f})=P99 | "
    "{cpu_us[most]:.0f} ({clock_us[most]:.0f})=most | arrival_us:.0f=arrival",
    rows,
  )
  return {"benchmark": "serving", "rows": rows}


def _measure(policy: str, options: Any) -> dict[str, Any]:
  """Returns the times of one scheduling policy's steps, and its counts."""
  num_pages = options.pages[policy]
  pages = Pages(num_pages, _PAGE_SIZE)
  limits = Limits(
    slots=options.running, tokens=options.running + _PROMPT_TOKENS_PER_STEP,
    preempt="cost", wait_s=2e-3, growth=4,
  )
  executor = Simulator(_ConstantStepTime(), _COPY_TIMES, most=limits.tokens)
  scheduler = Scheduler(
    limits, registry.make(policy, pages), pages,
    HostCache(4 * num_pages, _PAGE_SIZE, reserve=True), executor.costs,
  )
  engine = Engine(scheduler, executor)
  load = _Load(options.clients, seed=0)
  priorities = Priorities("markov", options.frequency, stay=options.stay)
  steps, arrivals = _Stopwatch(), _Stopwatch()
  # Wraps the scheduler's methods with timers; the simulator is excluded.
  for name in ("step", "receive", "take_copies"):
    setattr(scheduler, name, steps(getattr(scheduler, name)))
  update, add = steps(scheduler.update), arrivals(scheduler.add)
  spent, running, waiting = [], [], []
  preempting = arrived = 0
  often = gc.get_threshold()
  while len(spent) < options.warm_up + options.steps:
    if len(spent) == options.warm_up:
      tune_gc()
    for _ in range(
      options.running + options.waiting - len(scheduler.requests)
    ):
      add(load.request(priorities.first(), executor.now()))
      arrived += 1
    before = scheduler.counts.preemptions.total()
    if priorities.due():
      for request in priorities.update(scheduler.requests):
        update(request)
    if engine.step() is None:
      continue
    spent.append(steps.take())
    if len(spent) > options.warm_up:
      running.append(len(scheduler.running))
      waiting.append(len(scheduler.policy))
      preempting += (
        scheduler.counts.preemptions.total() > before
      )
  # Undoes `tune_gc`, so that later rounds start equal.
  gc.unfreeze()
  gc.set_threshold(*often)
  counts = pages.counts
  return {
    "policy": policy,
    "implementation": "compiled" if compiling.COMPILES else "python",
    "running": float(np.mean(running)),
    "waiting": float(np.mean(waiting)),
    "preempting": preempting / options.steps,
    "found": counts.hits / max(1, counts.hits + counts.misses),
    "spent_us": np.array(spent[options.warm_up :]),
    "arrival_us": float(arrivals.take()[1]) / arrived,
  }


def _merge_rounds(rows: list[dict[str, Any]]) -> dict[str, Any]:
  """Merges the rows of a policy's rounds, which make the same decisions."""
  spent = np.array([row.pop("spent_us") for row in rows])
  arrival = float(np.mean([row.pop("arrival_us") for row in rows]))
  assert all(row == rows[0] for row in rows), "the rounds differ"
  clock, cpu = np.concatenate(spent).T  # us per step
  return rows[0] | {
    "clock_us": _summarize_times(clock), "cpu_us": _summarize_times(cpu),
    "arrival_us": arrival,
    "medians_us": np.median(spent[:, :, 1], axis=1).tolist(),
  }


def _summarize_times(times: np.ndarray) -> dict[str, float]:
  return {
    "median": float(np.median(times)),
    "p99": float(np.percentile(times, 99)),
    "most": float(times.max()),
  }
