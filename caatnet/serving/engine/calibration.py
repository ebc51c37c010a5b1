"""Calibration: measures an executor's steps and copies before it serves.

Even the first choice between swapping and recomputing a request's pages is then
based on measurements of this machine. Calibration compiles and runs the same
programs as serving.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from caatnet.inference.requests import Request as Asked
from caatnet.inference.stops import Stops
from caatnet.serving.engine.device import DecoderExecutor, SamplingState
from caatnet.serving.engine.executor import Chunk, Copy, EngineStep
from caatnet.serving.requests import Request

# Number of measurements of each job, after one call that compiles.
_NUM_MEASUREMENTS = 3


Jobs = Sequence[Callable[[], None]]


def calibrate(
  executor: DecoderExecutor,
  progress: Callable[[Jobs], Iterable[Callable[[], None]]] = iter,
) -> None:
  """Measures an executor's steps and copies; its `costs` record the times.

  Overwrites the contents of the executor's pages.

  Args:
    executor: Idle executor, none of whose pages is held.
    progress: Returns an iterator over the given measurements, for example
      `rich.progress.track`, which shows the progress.
  """
  capacity = executor.decoder.capacity
  chunk, batch = min(capacity.chunk, capacity.context), capacity.batch
  # Steps without a chunk, with a quarter of the longest chunk, and with all.
  jobs = [
    lambda length=length: measure_step_s(
      executor, batch - (length if capacity.batch_invariant else length > 0),
      length,
    )
    for length in (0, -(-chunk // 4), chunk)
  ]
  for job in progress([*jobs, *_copy_jobs(executor)]):
    job()


def calibrate_copies(executor: DecoderExecutor) -> None:
  """Measures an executor's copies as `calibrate` does, without its steps."""
  for job in _copy_jobs(executor):
    job()


def _copy_jobs(executor: DecoderExecutor) -> Jobs:
  """Returns a measurement for each kind and size of copies."""
  capacity, shape = executor.decoder.capacity, executor.decoder.cache_shape
  jobs: list[Callable[[], None]] = []
  # Copies of one contiguous range of each length that has a program, and of
  # several ranges.
  longest = capacity.pages_per_sequence.bit_length()
  fitting = [
    runs for runs in [(1, 1, 1, 1), *((1 << k,) for k in range(longest))]
    if sum(runs) <= executor.host.num_pages
    and sum(runs) + len(runs) - 1 <= shape.num_pages
  ]
  if shape.paged:
    jobs += [
      lambda runs=runs: _measure_copies(executor, runs) for runs in fitting
    ]
    within = Copy(-1, "within", [0], [0], None)
    jobs.append(lambda: measure_copy_s(executor, within))
  if shape.states and executor.host_states.num_pages:
    jobs.append(lambda: _measure_copies(executor, (), state=(0, 0)))
  return jobs


def measure_step_s(
  executor: DecoderExecutor, num_decodes: int, length: int,
  times: int = _NUM_MEASUREMENTS
) -> float:
  """Runs steps and returns their median time in seconds.

  Args:
    executor: Idle executor, none of whose pages is held.
    num_decodes: Number of decodes, each in the middle of the context.
    length: Number of tokens of the step's prompt chunk; 0 for no chunk.
    times: Number of measurements, after one call that compiles.
  """
  step = example_step(executor, num_decodes, length)
  ends = []
  for number in range(1 + times):
    executor.submit(step)
    if number:  # one step runs while the next one is made, as in serving
      ends += [event.time_s for event in executor.wait(float("inf"))]
  while len(ends) <= times:
    ends += [event.time_s for event in executor.wait(float("inf"))]
  return float(np.median(np.diff(ends)))


def example_step(
  executor: DecoderExecutor, num_decodes: int, length: int
) -> EngineStep:
  """Returns a synthetic step, which an executor can run without a scheduler.

  Args:
    executor: Executor, none of whose pages is held.
    num_decodes: Number of decodes, each in the middle of the context.
    length: Number of tokens of the step's prompt chunk; 0 for no chunk.
  """
  capacity = executor.decoder.capacity
  num_pages = capacity.pages_per_sequence
  asked = Asked((0,), Stops(1))
  request = Request(-1, [0] * max(length, 1), 1, payload=SamplingState(asked))
  request.slot = num_decodes
  decodes = np.arange(num_decodes)
  chunks = (Chunk(request, 0, length, draws=True),) if length else ()
  drawing = np.arange(num_decodes + len(chunks))
  tables = np.arange(capacity.batch * num_pages, dtype=np.int32)
  # Sequences may share pages: only times matter.
  tables %= executor.decoder.cache_shape.num_pages
  return EngineStep(
    number=-1, decodes=[request] * len(decodes), slots=decodes,
    positions=np.full(len(decodes), capacity.context // 2), chunks=chunks,
    tables=tables.reshape(capacity.batch, num_pages), after=(),
    drawing=drawing, epochs=np.zeros_like(drawing),
  )


def _measure_copies(
  executor: DecoderExecutor, runs: Sequence[int],
  state: tuple[int, int] | None = None,
) -> None:
  """Measures copies to the host and back.

  Args:
    executor: Idle executor, none of whose pages is held.
    runs: Lengths in pages of the contiguous ranges of a copy.
    state: A recurrent state to copy, as in `Copy`; None for none.
  """
  pages: list[int] = []
  for length in runs:  # separated by one page, so that runs do not merge
    first = pages[-1] + 2 if pages else 0
    pages += range(first, first + length)
  places = list(range(len(pages)))
  copies = (
    Copy(-1, "out", pages, places, None, state),
    Copy(-1, "in", places, pages, None, state),
  )
  states = int(state is not None)  # a state counts as a run of one page
  for time in range(1 + _NUM_MEASUREMENTS):
    for copy in copies:
      seconds = measure_copy_s(executor, copy)
      if time:  # the first call compiles
        executor.costs.add_copy(
          copy.kind, len(runs) + states, len(pages) + states, seconds
        )


def measure_copy_s(executor: DecoderExecutor, copy: Copy) -> float:
  """Runs a copy and returns its duration in seconds."""
  begun = executor.now()
  executor.copy(copy)
  while not executor.wait(float("inf")):  # until the last part has been moved
    pass
  jax.block_until_ready(executor.decoder.cache)
  return executor.now() - begun
