"""Times of the engine of `caatnet.serving` on a decoder, and its simulator.

The simulator uses the scheduler and the arrivals of the engine's runs, and step
times measured in rehearsals, by the sizes of the arrays: a program's time does
not depend on their values. An isolated step, while no next one is prepared,
takes less.
"""

from collections.abc import Iterator, Mapping
import os
import time
from typing import Any

import jax
import numpy as np

from caatnet.benchmarks.harness import setup, timing
from caatnet.benchmarks.serving import decoders
from caatnet.inference import batches
from caatnet.inference.batches import Sizes
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.requests import Request as Asked
from caatnet.inference.stops import Stops
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.device import DecoderExecutor, Drawn
from caatnet.serving.engine.engine import Engine, replay
from caatnet.serving.engine.executor import Event, Executor, Step
from caatnet.serving.engine.simulator import Simulator
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies import registry
from caatnet.serving.scheduler.scheduler import Scheduler
from caatnet.show import tables
from parallel.checks import at_least

_CHUNK = 64

# Prompts read per step if all arrive at once, so that all are decoded together
# before the first one ends.
_CHUNKS = 4


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/benchmark/engine.py.
  """
  options = config.benchmark
  at_least("config.benchmark.tokens", options.tokens, 4)
  rates = [_rates(config, batch) for batch in options.batches]
  tables.table(
    "tokens per second: median (range) of rounds",
    ["sequences", "bare loop", "engine", "ratio", "ratio of CPU time"],
    [
      [str(r["batch"]), *(timing.range_text(r[k]) for k in ("loop", "engine")),
       *(timing.range_text(r[k], ".2f") for k in ("ratio", "cpu_ratio"))]
      for r in rates
    ],
  )
  served = _served(config)
  load = os.getloadavg()
  _show_served(served, options, timing.load())
  return {
    "environment": setup.one_device(), "rates": rates, "served": served,
    "load_average": load,
  }


def _show_served(
  served: Mapping[str, list[tuple[float, float]]], options: Any, load: float
) -> None:
  """Prints the metrics of `_served`.

  Args:
    served: Pairs of ms by metric.
    options: Section ``config.benchmark``.
    load: Jobs that want a processor, see `timing.load`.
  """
  tables.table(
    f"ms of {options.requests} requests: median (range) of {options.rounds} "
    "runs, each with its profile,\nand what a run of the engine has of the one "
    f"before it; {load:.1f} jobs wanted the {os.cpu_count()} processors",
    ["", "engine", "simulated", "simulated / engine", "engine / engine"],
    [
      [name, *(timing.range_text(x, ",.1f") for x in (real, simulated)),
       timing.range_text(simulated / real, ".2f"),
       timing.range_text(real[1:] / real[:-1], ".2f") if len(real) > 1
       else "-"]
      for name, found in served.items()
      for real, simulated in [np.array(found).T]
    ],
  )


def _decoder(config: Any, batch: int, context: int) -> Decoder:
  return decoders.decoder(decoders.built(
    config, batch=batch, context=context, chunk=_CHUNK
  ))


def _engine(executor: Executor, decoder: Decoder, chunks: int = 1) -> Engine:
  capacity = decoder.capacity
  pages = Pages(decoder.cache_shape.num_pages, capacity.page_size)
  limits = Limits(
    slots=capacity.batch, tokens=capacity.batch + chunks * _CHUNK,
    chunks=((chunks, _CHUNK),),
  )
  return Engine(
    Scheduler(
      limits, registry.make("first_come", pages), pages,
      HostCache(0, capacity.page_size, False), executor.costs,
    ),
    executor,
  )


def _request(
  number: int, prompt: np.ndarray, count: int, at: float = 0.0
) -> Request:
  asked = Asked(tuple(prompt.tolist()), Stops(count))
  return Request(number, prompt, count, arrival_s=at, payload=Drawn(asked))


def _rates(config: Any, batch: int) -> dict[str, Any]:
  """Times the engine and a bare loop at a batch size, in alternation."""
  options = config.benchmark
  decoder = _decoder(config, batch, options.prompt + options.tokens)
  prompts = np.random.default_rng(0).integers(
    config.model.vocab_size, size=(batch, options.prompt)
  )
  found = timing.in_turns({
    "loop": lambda: _loop(decoder, options),
    "engine": lambda: driven(decoder, prompts, options),
  }, options.rounds, label=f"{batch} at a time")
  seconds = np.array(list(found.values()))  # [2, rounds, 2]
  ratio, cpu_ratio = (seconds[0] / seconds[1]).T
  loop, engine = batch / seconds[:, :, 0]  # tokens/s; [rounds]
  return {
    "batch": batch, "loop": loop.tolist(), "engine": engine.tolist(),
    "ratio": ratio.tolist(), "cpu_ratio": cpu_ratio.tolist(),
  }


def _per_step(marks: list[tuple[float, float]]) -> np.ndarray:
  """Returns the seconds of a step, in wall-clock and in processor time.

  Two steps are in flight. Until the second mark, the wait is for the previous
  step: in the engine one that reads prompts, in the loop none.
  """
  # [2]: wall-clock and processor seconds, without the first two marks.
  return (np.array(marks[-1]) - marks[1]) / (len(marks) - 2)


def _mark() -> tuple[float, float]:
  return time.perf_counter(), time.process_time()


def driven(decoder: Decoder, prompts: np.ndarray, options: Any) -> np.ndarray:
  """Times the engine's steps in which all sequences generate tokens."""
  marks = []

  def watch(engine: Engine, step: Step | None) -> None:
    if step is not None and len(step.decodes) == len(prompts):
      marks.append(_mark())

  executor = DecoderExecutor(decoder, 0)
  replay(
    _engine(executor, decoder, _CHUNKS),
    [_request(i, p, options.tokens) for i, p in enumerate(prompts)], watch,
  )
  executor.close()
  return _per_step(marks)


def _loop(decoder: Decoder, options: Any) -> np.ndarray:
  """Times the same steps in a loop without scheduling decisions."""
  capacity = decoder.capacity
  slots = np.arange(capacity.batch)
  width = capacity.pages_per_sequence
  own = np.arange(capacity.batch * width).reshape(-1, width)
  steps = []
  for position in range(options.prompt, options.prompt + options.tokens - 1):
    positions = np.full(capacity.batch, position)
    batch = batches.batch_of(
      batches.sizes_of(capacity, positions + 1, ()), capacity.page_size, own,
      slots, positions, (),
    )
    arrays = batch, batches.Drawing(capacity.batch).of(batch.sequences)
    steps.append(jax.tree.map(lambda x: x[None], arrays))
  marks, pending = [], []
  for step in steps:
    pending.append(decoder.step(*step, False))
    marks.append(_mark())
    # One step ahead, like the engine: waits for the previous step.
    if len(pending) > 1:
      np.asarray(pending.pop(0)[0])
  np.asarray(pending[0][0])
  return _per_step(marks)


class _Timed(DecoderExecutor):
  """Executor that records step times, by the sizes of their arrays.

  Attributes:
    seconds: Time from the end of the previous step, or from submission if that
      was later, to the step's end.
  """

  def __init__(self, decoder: Decoder) -> None:
    super().__init__(decoder, 0)
    self.seconds: dict[Sizes, list[float]] = {}
    self._begun: dict[int, float] = {}
    self._ended_s = 0.0

  def submit(self, step: Step) -> None:
    self._begun[id(step)] = self.now()
    super().submit(step)

  def wait(self, until_s: float) -> list[Event]:
    events = super().wait(until_s)
    for event in events:
      if event.step is not None:
        step, before = event.step, self._ended_s
        self._ended_s = event.time_s
        # Steps overlap with the previous one's execution: count from its end.
        begun = max(before, self._begun.pop(id(step)))
        sizes = batches.sizes_of(
          self.decoder.capacity, step.positions + 1,
          [(chunk.start, chunk.length) for chunk in step.chunks],
        )
        self.seconds.setdefault(sizes, []).append(event.time_s - begun)
    return events


class _Profile:
  """Measured step times by the sizes of their arrays, sampled at random.

  So the simulator has the same variance as this machine.
  """

  def __init__(self, capacity: Capacity, seconds: dict[Sizes, list[float]]):
    self._capacity, self._seconds = capacity, seconds
    self._rng = np.random.default_rng(0)

  def _of(self, contexts: np.ndarray, chunks: Any) -> list[float]:
    return self._seconds[batches.sizes_of(self._capacity, contexts, chunks)]

  def step_s(self, contexts: np.ndarray, chunks: Any) -> float:
    return self._rng.choice(self._of(contexts, chunks))

  def mean_s(self, contexts: np.ndarray, chunks: Any) -> float:
    return float(np.mean(self._of(contexts, chunks)))


def _rehearse(executor: _Timed, times: int) -> dict[Sizes, list[float]]:
  """Drives an engine through steps of all sizes, and returns their times.

  Some requests decode permanently, while others one after another read their
  prompt, a chunk, and end. It uses the engine that is to be simulated, since
  its work for a step shares the machine with the previous step.
  """
  executor.seconds = {}
  batch = executor.decoder.capacity.batch
  for num in sorted({0, 1, min(4, batch), batch}):
    for length in (0, 16, _CHUNK):
      count = min(num, batch - 1) if length else num
      lengths = [1] * count + [length] * times * (length > 0)
      replay(_engine(executor, executor.decoder), [
        _request(i, np.full(n, i), 1 if i >= count else times + count)
        for i, n in enumerate(lengths)
      ])
  return executor.seconds


def _arrivals(config: Any, rate: float) -> Iterator[Request]:
  rng, now = np.random.default_rng(0), 0.0
  for number in range(config.benchmark.requests):
    now += rng.exponential(1 / rate)
    prompt = rng.integers(
      config.model.vocab_size, size=int(rng.integers(1, 2 * _CHUNK))
    )
    yield _request(number, prompt, int(rng.integers(8, _CHUNK)), now)


def _served(config: Any) -> dict[str, list[tuple[float, float]]]:
  """Serves requests and simulates the same; returns pairs of ms by metric."""
  options = config.benchmark
  decoder = _decoder(config, options.slots, 3 * _CHUNK)
  found: dict[str, list[tuple[float, float]]] = {}
  executor = _Timed(decoder)
  _rehearse(executor, 1)  # compiles
  before = _rehearse(executor, options.steps)
  rate = _rate(_Profile(decoder.capacity, before), options)
  for _ in timing.progress(range(options.rounds), "engine and simulator"):
    real = _replayed(_engine(executor, decoder), config, rate)
    # Half of the profile is from before the run, half from after it, because
    # the load on the machine changes.
    after = _rehearse(executor, options.steps)
    profile = _Profile(
      decoder.capacity, {size: before[size] + after[size] for size in after}
    )
    where = Simulator(profile, most=options.slots + _CHUNK)
    simulated = _replayed(_engine(where, decoder), config, rate)
    for name in real:
      found.setdefault(name, []).append((real[name], simulated[name]))
    before = after
  executor.close()
  return found


def _replayed(engine: Engine, config: Any, rate: float) -> dict[str, float]:
  """Serves the requests, and returns the metrics."""
  requests = list(_arrivals(config, rate))
  start = engine.executor.now()
  for request in requests:
    request.arrival_s += start
  replay(engine, requests)
  return _looked_at(requests)


def _rate(profile: _Profile, options: Any) -> float:
  """Returns requests per second at a fraction of a full batch's throughput."""
  full = profile.mean_s(np.ones(options.slots), ())
  others = np.ones(options.slots - 1)
  read = profile.mean_s(others, [(0, _CHUNK)]) - full
  # On average (8 + `_CHUNK`) / 2 tokens are generated, and `_CHUNK` are read.
  return options.load / ((8 + _CHUNK) / 2 * full / options.slots + 1.5 * read)


def _looked_at(requests: list[Request]) -> dict[str, float]:
  values = {
    "TTFT": np.array([1e3 * r.ttft_s for r in requests]),
    "TPOT": np.array([1e3 * r.tpot_s for r in requests]),
  }
  return {
    f"{name} {what}": float(f(x)) for name, x in values.items()
    for what, f in (
      ("mean", np.mean), ("P50", np.median),
      ("P90", lambda x: np.percentile(x, 90)),
    )
  }
