"""Times the engine of `caatnet.serving` on a decoder, and its simulator.

The simulator has the scheduler and the arrivals of the engine's runs, and one
time for each size of a step's arrays: a program takes as long for whatever
stands in them.
"""

from collections.abc import Iterator
import dataclasses
import time
from typing import Any

import jax
import numpy as np
from rich.progress import track

from caatnet.build import inference
from caatnet.inference import batches
from caatnet.inference.batches import Sizes
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.requests import Request as Asked
from caatnet.inference.stops import Stops
from caatnet.serving.calibration import step_s
from caatnet.serving.device import DecoderExecutor, Drawn
from caatnet.serving.engine import Engine, replay
from caatnet.serving.executor import Executor, Step
from caatnet.serving.host import Host
from caatnet.serving.pages import Pages
from caatnet.serving.policies import registry
from caatnet.serving.requests import Request
from caatnet.serving.scheduler import Limits, Scheduler
from caatnet.serving.simulator import Simulator
from caatnet.show import tables
from caatnet.train.records import environment
from parallel.axes import Axis, make_mesh

_CHUNK = 64

# Prompts that a step reads where all arrive at once: they are to be decoded
# together before the first one ends.
_CHUNKS = 4


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns them as plain data.

  Args:
    config: A config like configs/benchmark/engine.py.
  """
  options = config.benchmark
  rates = [_rates(config, batch) for batch in options.batches]
  tables.table(
    "tokens per second: median (range) of rounds",
    ["sequences", "bare loop", "engine", "ratio", "ratio of CPU time"],
    [
      [str(r["batch"]), *(_range(r[k], "") for k in ("loop", "engine")),
       _range(r["ratio"], ".2f"), _range(r["cpu_ratio"], ".2f")]
      for r in rates
    ],
  )
  served = _served(config)
  tables.table(
    f"ms of {options.requests} requests: median (range) of {options.rounds} "
    "runs, each with its profile",
    ["", "engine", "simulated", "simulated / engine"],
    [
      [name, *(_range(np.array(found)[:, i], ",.1f") for i in range(2)),
       _range(np.divide(*np.array(found).T[::-1]), ".2f")]
      for name, found in served.items()
    ],
  )
  here = environment(make_mesh({"device": Axis("device", 1)}))
  return {"environment": here, "rates": rates, "served": served}


def _range(values: Any, spec: str) -> str:
  low, middle, high = (
    format(float(f(values)), spec or ",.0f")
    for f in (np.min, np.median, np.max)
  )
  return f"{middle} ({low} to {high})"


def _decoder(config: Any, batch: int, context: int) -> Decoder:
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.inference.batch, config.inference.context = batch, context
    config.inference.chunk = _CHUNK
    del config.benchmark
  made = inference.build(config, None, jax.devices()[:1])
  program = made.program
  return made.decoder(
    jax.jit(
      program.model.init,
      out_shardings=program.layout.shardings(program.whole_specs),
    )(jax.random.key(0))
  )


def _engine(executor: Executor, decoder: Decoder, chunks: int = 1) -> Engine:
  capacity = decoder.capacity
  pages = Pages(decoder.cache_shape.num_pages, capacity.page_size)
  limits = Limits(
    slots=capacity.batch, tokens=capacity.batch + chunks * _CHUNK, chunk=_CHUNK,
    chunks=chunks,
  )
  return Engine(
    Scheduler(
      limits, registry.make("first_come", pages), pages,
      Host(0, capacity.page_size, False), executor.costs,
    ),
    executor,
  )


def _request(
  number: int, prompt: np.ndarray, count: int, at: float = 0.0
) -> Request:
  asked = Asked(tuple(prompt.tolist()), Stops(count))
  return Request(number, prompt, count, arrival_s=at, payload=Drawn(asked))


def _rates(config: Any, batch: int) -> dict[str, Any]:
  """Times the engine and a bare loop at a batch of sequences, in turns."""
  options = config.benchmark
  decoder = _decoder(config, batch, options.prompt + options.tokens)
  prompts = np.random.default_rng(0).integers(
    config.model.vocab_size, size=(batch, options.prompt)
  )
  rounds = []
  for _ in track(
    range(options.rounds + 1), f"{batch} at a time", transient=True
  ):
    rounds.append((_loop(decoder, options), _driven(decoder, prompts, options)))
  seconds = np.array(rounds[1:])  # [rounds, 2, 2], without XLA's
  ratio, cpu_ratio = (seconds[:, 0] / seconds[:, 1]).T
  loop, engine = (batch / seconds[:, :, 0]).T
  return {
    "batch": batch, "loop": loop.tolist(), "engine": engine.tolist(),
    "ratio": ratio.tolist(), "cpu_ratio": cpu_ratio.tolist(),
  }


def _per_step(marks: list[tuple[float, float]]) -> np.ndarray:
  """Returns the seconds of a step, by the clock and of the process."""
  return (np.array(marks[-1]) - marks[0]) / (len(marks) - 1)


def _mark() -> tuple[float, float]:
  return time.perf_counter(), time.process_time()


def _driven(decoder: Decoder, prompts: np.ndarray, options: Any) -> np.ndarray:
  """Times the engine's steps in which all sequences draw."""
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
  """Times the same steps in a loop that has nothing to decide."""
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
    if len(pending) > 1:
      np.asarray(pending.pop(0)[0])
  np.asarray(pending[0][0])
  return _per_step(marks)


@dataclasses.dataclass
class _Profile:
  """What steps take, by the sizes of their arrays.

  Attributes:
    capacity: The decoder's.
    seconds: Times by size.
  """

  capacity: Capacity
  seconds: dict[Sizes, float]

  def step_s(self, contexts: np.ndarray, chunks: Any) -> float:
    return self.seconds[batches.sizes_of(self.capacity, contexts, chunks)]


def _profile(executor: DecoderExecutor, times: int) -> _Profile:
  """Measures steps of all sizes."""
  capacity = executor.decoder.capacity
  seconds = {}
  for num in sorted({0, 1, min(4, capacity.batch), capacity.batch}):
    for length in (0, 16, _CHUNK):
      if num or length:
        # The chunk of the last slot's request has a slot of its own.
        count = min(num, capacity.batch - (length > 0))
        sizes = batches.sizes_of(
          capacity, np.ones(num), [(0, length)] * (length > 0)
        )
        seconds[sizes] = step_s(executor, count, length, times)
  return _Profile(capacity, seconds)


def _arrivals(config: Any, rate: float) -> Iterator[Request]:
  rng, now = np.random.default_rng(0), 0.0
  for number in range(config.benchmark.requests):
    now += rng.exponential(1 / rate)
    prompt = rng.integers(
      config.model.vocab_size, size=int(rng.integers(1, 2 * _CHUNK))
    )
    yield _request(number, prompt, int(rng.integers(8, _CHUNK)), now)


def _served(config: Any) -> dict[str, list[tuple[float, float]]]:
  """Serves requests, and simulates it: pairs of ms by what is looked at."""
  options = config.benchmark
  decoder = _decoder(config, options.slots, 3 * _CHUNK)
  found: dict[str, list[tuple[float, float]]] = {}
  executor = DecoderExecutor(decoder, 0)
  _profile(executor, 1)  # the compiler's
  rate = 0.0
  for _ in track(range(options.rounds), "engine and simulator", transient=True):
    profile = _profile(executor, options.steps)
    rate = rate or _rate(profile, options)
    times = []
    for where in (executor, Simulator(profile, most=options.slots + _CHUNK)):
      requests = list(_arrivals(config, rate))
      start = where.now()
      for request in requests:
        request.arrival_s += start
      replay(_engine(where, decoder), requests)
      times.append(_looked_at(requests))
    for name, *pair in zip(times[0], times[0].values(), times[1].values(),
                           strict=True):
      found.setdefault(name, []).append(tuple(pair))
  executor.close()
  return found


def _rate(profile: _Profile, options: Any) -> float:
  """Returns requests per second at a share of what a full batch would do."""
  full = profile.step_s(np.ones(options.slots), ())
  read = profile.step_s(np.ones(options.slots), [(0, _CHUNK)]) - full
  # On average half of `_CHUNK` and 8 tokens are drawn, and `_CHUNK` are read.
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
