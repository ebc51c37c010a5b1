"""Switching between experts: the engine, and its simulator.

Both have the same scheduler, slots and requests. The simulator draws times of
steps, by the sizes of their arrays, and of loads, which steps slow down, from
the runs of the engine before and after the compared one. A load is *exposed*
while it runs and no step does. Requests arrive one at a time, each after the
end of the previous one, or at random times. One at a time, hits depend on the
order of the requests only.
"""

from collections.abc import Callable, Sequence
import math
import os
from typing import Any

import numpy as np

from caatnet.benchmarks.harness import setup, timing
from caatnet.benchmarks.serving.experts import check
from caatnet.config import experts
from caatnet.inference import batches
from caatnet.inference.batches import Sizes
from caatnet.inference.decoder import Capacity
from caatnet.inference.requests import Request as Asked
from caatnet.inference.stops import Stops
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine import warm_up
from caatnet.serving.engine.device import Drawn
from caatnet.serving.engine.engine import Engine, replay
from caatnet.serving.engine.executor import Event, Executor, Load, Step
from caatnet.serving.engine.simulator import Simulator
from caatnet.serving.requests import Request, State
from caatnet.serving.scheduler.policies.experts import Experts
from caatnet.serving.scheduler.scheduler import Scheduler
from caatnet.serving.server.served import Served
from caatnet.show import tables
from caatnet.studies.serving import composition
from parallel.memory.slots import Slots
from parallel.xla import persistent

# Folder of compiled programs, as of launch.serve.
_PROGRAMS = "~/.cache/caatnet/programs"

_Seconds = dict[Sizes, list[float]]


def run(config: Any) -> dict[str, Any]:
  """Measures, simulates, prints a table, and returns it as plain data.

  Args:
    config: Config like configs/benchmark/experts.py:simulated.

  Raises:
    ValueError: There is no eviction policy, or a request exceeds the context.
  """
  given = config.benchmark
  check(config)
  persistent.keep_programs(_PROGRAMS)
  served = experts.build(setup.without_benchmark(config))
  real = served.engine.executor
  bench = _Bench(config, served)
  for _ in warm_up.warm_up(
    served.decoder, real.factor, real.weights.params(0)
  ):
    pass
  bench.serve(real, given.evictions[0], 0.0)  # reads the files
  _, closed_s = bench.serve(real, given.evictions[0], 0.0)
  rate = given.load * given.requests / closed_s
  rows = [
    bench.row(eviction, arrivals)
    for arrivals in (0.0, rate) for eviction in given.evictions
  ]
  real.close()
  _print(rows, rate)
  return {
    "environment": setup.one_device(), "rows": rows, "rate": rate,
    "load_average": os.getloadavg(),
  }


class _Watched:
  """Executor that records steps and loads of another one.

  Attributes:
    steps: Time of submission and time of the end of each step, by array sizes.
    loads: Times of begin and end of each load.
  """

  def __init__(
    self, executor: Executor, sizes_of: Callable[..., Sizes]
  ) -> None:
    self.costs, self.now, self.copy = (
      executor.costs, executor.now, executor.copy
    )
    self._executor, self._sizes_of = executor, sizes_of
    self.steps: list[tuple[Sizes, float, float]] = []
    self.loads: list[tuple[float, float]] = []
    self._begun: dict[Any, float] = {}

  def submit(self, step: Step) -> None:
    self._begun[step.number] = self.now()
    self._executor.submit(step)

  def load(self, load: Load) -> None:
    self._begun[load] = self.now()
    self._executor.load(load)

  def wait(self, until_s: float) -> list[Event]:
    events = self._executor.wait(until_s)
    for event in events:
      if event.step is not None:
        step = event.step
        sizes = self._sizes_of(
          step.positions + 1, [(c.start, c.length) for c in step.chunks]
        )
        begun = self._begun.pop(step.number)
        self.steps.append((sizes, begun, event.time_s))
      elif event.load is not None:
        assert not event.error, event.error
        begun = self._begun.pop(event.load)
        if self.loads:  # loads run one after another
          begun = max(begun, self.loads[-1][1])
        self.loads.append((begun, event.time_s))
    return events

  def step_s(self) -> _Seconds:
    """Returns step times: from the end of the previous step, if it is later."""
    found: _Seconds = {}
    last = -math.inf
    for sizes, begun, end in self.steps:
      found.setdefault(sizes, []).append(end - max(begun, last))
      last = end
    return found

  def loads_s(self) -> np.ndarray:
    """Returns total and exposed seconds of each load, ``[loads, 2]``."""
    steps = np.array([step[1:] for step in self.steps])
    # Steps under way overlap: each counts from the end of the previous one.
    steps[1:, 0] = np.maximum(steps[1:, 0], steps[:-1, 1])
    found = []
    for begin, end in self.loads:
      both = np.minimum(steps[:, 1], end) - np.maximum(steps[:, 0], begin)
      found.append((end - begin, end - begin - np.maximum(both, 0).sum()))
    return np.array(found).reshape(-1, 2)


class _Profile:
  """Step times of the engine by array sizes, drawn at random."""

  def __init__(
    self, seconds: _Seconds, sizes_of: Callable[..., Sizes], seed: int
  ) -> None:
    self._seconds, self._sizes_of = seconds, sizes_of
    self._rng = np.random.default_rng(seed)

  def step_s(self, contexts: np.ndarray, chunks: Any) -> float:
    """Returns the seconds of a step; of other sizes, of the nearest ones."""
    sizes = self._sizes_of(contexts, chunks)
    if sizes not in self._seconds:
      sizes = min(self._seconds, key=lambda x: _distance(x, sizes))
    return float(self._rng.choice(self._seconds[sizes]))


def _distance(a: Sizes, b: Sizes) -> int:
  """Returns how much the numbers of tokens of two steps differ."""
  one, other = (x.decodes + x.chunks * x.length for x in (a, b))
  return abs(one - other)


class _Bench:
  """Requests for the experts of a server, and engines that serve them."""

  def __init__(self, config: Any, served: Served) -> None:
    given, self._config, self._served = config.benchmark, config, served
    self._capacity: Capacity = served.decoder.capacity
    rng = np.random.default_rng(given.seed)
    names = served.models.library.names
    order = composition.zipf(rng, given.requests, {
      "experts": {"number": len(names)}, "stream": {"exponent": given.exponent},
    })
    self._keys = [served.models.key(names[number]) for number in order]
    self._gaps = rng.exponential(size=given.requests)
    self._prompts = rng.integers(256, size=(given.requests, given.prompt))
    self._switch_s = 0.0

  def sizes_of(self, contexts: np.ndarray, chunks: Any) -> Sizes:
    factor = self._served.engine.executor.factor
    return batches.sizes_of(self._capacity, contexts, chunks, factor)

  def _engine(self, executor: Executor, slots: Slots) -> Engine:
    """Returns an engine with empty slots and an empty cache."""
    options, like = self._config.experts, self._served.engine.scheduler
    pages = Pages(like.pages.num_pages, like.pages.page_size)
    policy = Experts(
      slots, self._switch_s, options.deadline_s, options.prefetch,
      options.patience,
    )
    host = HostCache(0, pages.page_size, reserve=False)
    return Engine(
      Scheduler(like.limits, policy, pages, host, executor.costs), executor
    )

  def serve(
    self, executor: Executor, eviction: str, rate: float
  ) -> tuple[tuple[_Watched, Slots], float]:
    """Serves all requests from empty slots.

    Args:
      executor: Idle executor.
      eviction: A key of `parallel.memory.evictions.EVICTIONS`.
      rate: Arrivals per second; 0 for one request at a time.

    Returns:
      The recorded steps and loads, the slots, and the seconds that it took.
    """
    watched = _Watched(executor, self.sizes_of)
    slots = Slots(self._config.experts.slots, eviction)
    engine, begun = self._engine(watched, slots), executor.now()
    times = begun + (self._gaps / rate if rate else 0 * self._gaps).cumsum()
    tokens = self._config.benchmark.tokens
    requests = [
      Request(
        i, prompt, tokens, expert=key, arrival_s=float(time),
        payload=Drawn(Asked(tuple(prompt.tolist()), Stops(tokens))),
      )
      for i, (prompt, key, time) in enumerate(
        zip(self._prompts, self._keys, times, strict=True)
      )
    ]
    for group in [requests] if rate else [[request] for request in requests]:
      replay(engine, group)
    assert all(request.state is State.FINISHED for request in requests)
    return (watched, slots), executor.now() - begun

  def row(self, eviction: str, rate: float) -> dict[str, Any]:
    """Compares runs of the engine with simulations."""
    given, real = self._config.benchmark, self._served.engine.executor
    found: dict[str, list[tuple[_Watched, Slots]]] = {
      "engine": [], "simulated": []
    }
    before, _ = self.serve(real, eviction, rate)
    self._switch_s = float(np.median(_loads([before[0]])[:, 0]))
    label = f"{eviction}, {_arrivals(rate)}"
    for number in timing.progress(range(given.rounds), label):
      found["engine"].append(self.serve(real, eviction, rate)[0])
      after, _ = self.serve(real, eviction, rate)
      around = before[0], after[0]
      simulator = _simulator(
        around, self.sizes_of, self._capacity.chunk, number
      )
      found["simulated"].append(self.serve(simulator, eviction, rate)[0])
      before = after
    return {
      "arrivals": _arrivals(rate), "eviction": eviction,
      "requests": given.requests, **{
        name: _summary(runs) for name, runs in found.items()
      },
    }


def _simulator(
  runs: Sequence[_Watched], sizes_of: Callable[..., Sizes], most: int,
  seed: int,
) -> Simulator:
  """Returns a simulator that draws the times of steps and loads from runs.

  Args:
    runs: Recorded runs of the engine.
    sizes_of: Returns the array sizes of a step.
    most: Maximum number of tokens of a step.
    seed: Seed of the draws.
  """
  load_s, exposed_s = _loads(runs).T
  rate = _rate_during_steps(load_s, exposed_s)
  alone_s = exposed_s + rate * (load_s - exposed_s)
  rng = np.random.default_rng(seed)

  def drawn(_: Load) -> tuple[float, float]:  # experts have equal sizes
    seconds = float(rng.choice(alone_s))
    return seconds, seconds

  return Simulator(
    _Profile(_joined(runs), sizes_of, seed), most=most, load_s=drawn,
    load_rate=rate, steps_first=True,
  )


def _rate_during_steps(load_s: np.ndarray, exposed_s: np.ndarray) -> float:
  """Returns the speed of loads while steps run, relative to that without.

  Loads of equal size take equally long on average without steps, whether steps
  ran most of the time or not: the mean of `exposed_s + rate * overlap_s` is
  that of both groups.

  Args:
    load_s: Seconds of each load.
    exposed_s: Seconds of each load without steps.
  """
  overlap_s = load_s - exposed_s
  during = overlap_s > load_s / 2
  if during.all() or not during.any():
    return 1.0
  more = exposed_s[~during].mean() - exposed_s[during].mean()
  rate = more / (overlap_s[during].mean() - overlap_s[~during].mean())
  return float(np.clip(rate, 0.01, 1.0))


def _arrivals(rate: float) -> str:
  return "random" if rate else "one at a time"


def _loads(runs: Sequence[_Watched]) -> np.ndarray:
  """Returns total and exposed seconds of all loads, ``[loads, 2]``."""
  return np.concatenate([run.loads_s() for run in runs])


def _joined(runs: Sequence[_Watched]) -> _Seconds:
  """Returns the step times of several runs."""
  found: _Seconds = {}
  for each in runs:
    for sizes, seconds in each.step_s().items():
      found.setdefault(sizes, []).extend(seconds)
  return found


def _summary(runs: Sequence[tuple[_Watched, Slots]]) -> dict[str, Any]:
  """Returns hits of each run, and the exposed seconds of all loads."""
  load_s, exposed_s = _loads([watched for watched, _ in runs]).T
  return {
    "hits": [slots.counts.hits for _, slots in runs],
    "misses": [slots.counts.misses for _, slots in runs],
    "loads": [slots.counts.loads for _, slots in runs],
    "load_s": float(load_s.mean()),
    "exposed_mean_s": float(exposed_s.mean()),
    "exposed_p99_s": float(np.percentile(exposed_s, 99)),
  }


def _print(rows: Sequence[dict[str, Any]], rate: float) -> None:
  def pair(row: dict[str, Any], key: str) -> list[str]:
    real, simulated = row["engine"][key], row["simulated"][key]
    return [
      f"{1e3 * real:.2f}", f"{1e3 * simulated:.2f}", f"{simulated / real:.3f}"
    ]

  def numbers(row: dict[str, Any], key: str) -> list[str]:
    return [
      " ".join(map(str, row[side][key])) for side in ("engine", "simulated")
    ]

  tables.table(
    f"{rows[0]['requests']} requests of each run, random ones "
    f"{rate:.1f} per second; hits and loads of each run; exposed ms of a load",
    ["arrivals", "eviction", "hits", "simulated", "loads", "simulated",
     "mean", "simulated", "ratio", "P99", "simulated", "ratio"],
    [
      [
        row["arrivals"], row["eviction"], *numbers(row, "hits"),
        *numbers(row, "loads"), *pair(row, "exposed_mean_s"),
        *pair(row, "exposed_p99_s"),
      ]
      for row in rows
    ],
  )
