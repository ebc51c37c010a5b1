"""Compilation of a server's programs before it accepts requests.

Each shape of a step is a program. The sizes of a step are bucketed, so that all
shapes can be compiled at the start: while the weights are read (`compiling`),
or by running steps without sequences (`warm_up`). Such steps write nothing, and
the tokens that they draw are dropped. Without warm-up, programs are compiled
while others run (`caatnet.serving.engine.programs`).
"""

from collections.abc import Callable, Iterator
from concurrent import futures
import contextlib
import itertools
import threading
from typing import Any

from caatnet.inference import buckets
from caatnet.inference.batches import Sizes
from caatnet.inference.buckets import bucket
from caatnet.inference.decoder import Decoder
from caatnet.serving.engine.calibration import calibrate
from caatnet.serving.engine.device import DecoderExecutor
from caatnet.serving.engine.engine import Engine, tune_gc
from caatnet.serving.engine.programs import Programs, idle_step

# Iterates over steps; the second argument is their number.
Progress = Callable[[Iterator[Any], int], None]


def prepare(engine: Engine, progress: Progress | None) -> None:
  """Compiles and measures the programs that a server needs.

  Args:
    engine: Idle engine of a `DecoderExecutor`, whose programs apply filters and
      can return the most probable tokens; with several experts, slot 0 has
      weights.
    progress: Iterates over the compiled steps. None to compile none: a thread
      then compiles programs when requests need them (`Programs`).
  """
  executor = engine.executor
  assert isinstance(executor, DecoderExecutor)
  sizes = executor.decoder, executor.factor
  if progress is None:
    executor.programs = Programs(*sizes, executor.wake)
    engine.scheduler.has_program = executor.programs.ready
  else:
    params = executor.weights and executor.weights.params(0)
    progress(warm_up(*sizes, params), len(shapes(*sizes)))
    calibrate(executor)
  tune_gc()


def _sizes(smallest: int, largest: int, factor: int) -> list[int]:
  """Returns all buckets for sizes from 1 to the largest."""
  found = [bucket(1, smallest, largest, factor)]
  while found[-1] < largest:
    found.append(bucket(found[-1] + 1, smallest, largest, factor))
  return found


def shapes(decoder: Decoder, factor: int) -> list[Sizes]:
  """Returns the sizes of all steps whose chunks are in `buckets.chunk_sizes`.

  Args:
    decoder: The model and its cache.
    factor: Ratio of successive buckets of the number of decodes, equal to that
      of the executor.
  """
  capacity = decoder.capacity
  max_pages = capacity.pages_per_sequence
  if capacity.batch_invariant:
    return [Sizes(capacity.batch, 0, 0, max_pages)]
  least = min(max_pages, -(-buckets.SHORT // capacity.page_size))
  # Arguments of `bucket` for chunk lengths, without an upper bound.
  factors = buckets.MIN_CHUNK, 1 << 30, buckets.CHUNK_FACTOR
  chunks = [(0, 0)] + [
    (count, length)
    for count, most in buckets.chunk_sizes(capacity.chunk, capacity.batch)
    for length in _sizes(
      buckets.MIN_CHUNK, bucket(most, *factors), buckets.CHUNK_FACTOR
    )
  ]
  # Product of the buckets of decodes, chunks and page table widths.
  return [
    Sizes(num_decodes, *chunk, pages)
    for num_decodes, chunk, pages in itertools.product(
      _sizes(1, capacity.batch, factor), chunks, _sizes(least, max_pages, 2)
    )
  ]


def _steps(
  decoder: Decoder, factor: int
) -> Iterator[tuple[Sizes, tuple[Any, ...]]]:
  """Yields each of `shapes` with arguments of a step without sequences.

  Steps apply top-k and top-p, and can return the most probable tokens.
  """
  for sizes in shapes(decoder, factor):
    yield sizes, idle_step(decoder.capacity, sizes)


@contextlib.contextmanager
def compiling(
  decoder: Decoder, factor: int, progress: Progress
) -> Iterator[None]:
  """Compiles the programs of all `shapes` while the body reads weights.

  Leaving the body waits until all programs are compiled. If the body or this
  wait raises, only the program that is being compiled is finished. Errors of
  the compilation are raised at the end of the body.

  Args:
    decoder: Decoder whose weights are shapes.
    factor: Ratio of each bucket of the number of decodes to the previous one.
    progress: Iterates over the compiled steps, in a thread of its own.
  """
  ended = threading.Event()

  def steps():
    for sizes, arguments in _steps(decoder, factor):
      if ended.is_set():
        return
      decoder.compile(*arguments)
      yield sizes

  with futures.ThreadPoolExecutor(1, "compiling") as pool:
    done = pool.submit(progress, steps(), len(shapes(decoder, factor)))
    try:
      yield
      done.result()
    finally:
      ended.set()


def warm_up(
  decoder: Decoder, factor: int, params: Any = None
) -> Iterator[Sizes]:
  """Runs a step of each of `shapes`, as an executor of a server does.

  Args:
    decoder: The model and its cache.
    factor: Ratio of each bucket of the number of decodes to the previous one.
    params: Parameters of an expert; None for those of the decoder. Other
      experts run the same programs.

  Yields:
    The sizes of each program after its compilation.
  """
  for sizes, arguments in _steps(decoder, factor):
    tokens, *_ = decoder.step(*arguments, params)
    tokens.block_until_ready()
    yield sizes
