"""Measures an executor's steps and copies before it serves.

So the first choice between copying a request's pages and reading its tokens
again is made by numbers of this machine. The programs that are compiled for it
are those that serving runs.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from caatnet.inference.requests import Request as Asked
from caatnet.inference.stops import Stops
from caatnet.serving.engine.device import DecoderExecutor, Drawn
from caatnet.serving.engine.executor import Chunk, Copy, Step
from caatnet.serving.requests import Request

# How often each is measured, after once for the compiler.
_TIMES = 3


Jobs = Sequence[Callable[[], None]]


def calibrate(
  executor: DecoderExecutor,
  progress: Callable[[Jobs], Iterable[Callable[[], None]]] = iter,
) -> None:
  """Notes in an executor's costs what it takes for steps and copies.

  Its pages are overwritten.

  Args:
    executor: It has nothing to do, and none of its pages is held.
    progress: Hands out what is done one after another, as `rich.progress.track`
      does to show how far it is.
  """
  capacity = executor.decoder.capacity
  chunk, batch = min(capacity.chunk, capacity.context), capacity.batch
  jobs = [
    lambda length=length: step_s(executor, batch - (length > 0), length)
    for length in (0, -(-chunk // 4), chunk)
  ]
  shape = executor.decoder.cache_shape
  # Copies of each length for which there are programs, and of several runs.
  longest = capacity.pages_per_sequence.bit_length()
  fitting = [
    runs for runs in [(1, 1, 1, 1), *((1 << k,) for k in range(longest))]
    if sum(runs) <= executor.host.num_pages
    and sum(runs) + len(runs) - 1 <= shape.num_pages
  ]
  if shape.paged:
    jobs += [lambda runs=runs: _copies(executor, runs) for runs in fitting]
    jobs.append(lambda: _await(executor, Copy(-1, "within", [0], [0], None)))
  if shape.states and executor.host_states.num_pages:
    jobs.append(lambda: _copies(executor, (), state=(0, 0)))
  for job in progress(jobs):
    job()


def step_s(
  executor: DecoderExecutor, num_decodes: int, length: int, times: int = _TIMES
) -> float:
  """Computes steps, and returns the median of the seconds that they take.

  Args:
    executor: It has nothing to do, and none of its pages is held.
    num_decodes: Decodes of a step, in the middle of the context.
    length: Tokens of its chunk; 0 for none.
    times: How many are measured, after one for the compiler.
  """
  capacity = executor.decoder.capacity
  num_pages = capacity.pages_per_sequence
  asked = Asked((0,), Stops(1))
  request = Request(-1, [0] * max(length, 1), 1, payload=Drawn(asked))
  request.slot = num_decodes
  decodes = np.arange(num_decodes)
  chunks = (Chunk(request, 0, length, draws=True),) if length else ()
  drawing = np.arange(num_decodes + len(chunks))
  tables = np.arange(capacity.batch * num_pages, dtype=np.int32)
  tables %= executor.decoder.cache_shape.num_pages
  step = Step(
    number=-1, decodes=[request] * len(decodes), slots=decodes,
    positions=np.full(len(decodes), capacity.context // 2), chunks=chunks,
    tables=tables.reshape(capacity.batch, num_pages), after=(),
    drawing=drawing, epochs=np.zeros_like(drawing),
  )
  ends = []
  for number in range(1 + times):
    executor.submit(step)
    if number:  # one is under way while the next one is made, as in serving
      ends += [event.time_s for event in executor.wait(float("inf"))]
  while len(ends) <= times:
    ends += [event.time_s for event in executor.wait(float("inf"))]
  return float(np.median(np.diff(ends)))


def _copies(
  executor: DecoderExecutor, runs: Sequence[int],
  state: tuple[int, int] | None = None,
) -> None:
  """Copies runs of pages, or a state, out and back; no step is computed."""
  pages: list[int] = []
  for length in runs:  # a page between them, so that each is a run
    first = pages[-1] + 2 if pages else 0
    pages += range(first, first + length)
  places = list(range(len(pages)))
  copies = (
    Copy(-1, "out", pages, places, None, state),
    Copy(-1, "in", places, pages, None, state),
  )
  states = int(state is not None)  # as a run of one page
  for time in range(1 + _TIMES):
    for copy in copies:
      seconds = _await(executor, copy)
      if time:  # the first is the compiler's
        executor.costs.add_copy(
          copy.kind, len(runs) + states, len(pages) + states, seconds
        )


def _await(executor: DecoderExecutor, copy: Copy) -> float:
  """Makes a copy, and returns the seconds that it takes."""
  begun = executor.now()
  executor.copy(copy)
  executor.wait(float("inf"))
  jax.block_until_ready(executor.decoder.cache)
  return executor.now() - begun
