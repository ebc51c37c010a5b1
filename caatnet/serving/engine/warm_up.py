"""Compilation of a server's programs before it accepts requests.

Each shape of a step is a program. The sizes of a step are bucketed, so that all
shapes can be compiled at the start: while the weights are read
(`compile_in_background`), or by running steps without sequences (`warm_up`).
Such steps write nothing, and the tokens that they draw are discarded. Without
warm-up, programs are compiled while others run
(`caatnet.serving.engine.programs`).
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
from caatnet.serving.engine.calibration import calibrate, calibrate_copies
from caatnet.serving.engine.device import DecoderExecutor
from caatnet.serving.engine.engine import Engine, tune_gc
from caatnet.serving.engine.programs import Programs, empty_step_args

# Consumes an iterator over steps; the second argument is their number.
Progress = Callable[[Iterator[Any], int], None]


def prepare(engine: Engine, progress: Progress | None) -> None:
  """Compiles and measures the programs that a server needs.

  Args:
    engine: Idle engine of a `DecoderExecutor`, whose programs apply filters and
      can return the most probable tokens; with several experts, weight slot 0
      is loaded.
    progress: Consumes an iterator over compiled steps. If it is None, a thread
      compiles programs only when requests need them (`Programs`).
  """
  executor = engine.executor
  assert isinstance(executor, DecoderExecutor)
  sizes = executor.decoder, executor.factor
  if progress is None:
    # Else copies would cost nothing to the choice between swap and recompute.
    calibrate_copies(executor)
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
  """Returns all bucketed step sizes, with chunks as in `buckets.chunk_sizes`.

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
    yield sizes, empty_step_args(decoder.capacity, sizes)


@contextlib.contextmanager
def compile_in_background(
  decoder: Decoder, factor: int, progress: Progress
) -> Iterator[None]:
  """Compiles the programs of all `shapes` while the with block reads weights.

  Leaving the block waits until all programs are compiled. If the block or this
  wait raises, only the current compilation is finished. Errors of the
  compilation are raised at the end of the block.

  Args:
    decoder: Decoder that has shapes instead of weights.
    factor: Ratio between successive bucket sizes for the number of decodes.
    progress: Consumes an iterator over compiled steps, in a separate thread.
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
  """Runs one step of each size in `shapes`, as the executor of a server does.

  Args:
    decoder: The model and its cache.
    factor: Ratio between successive bucket sizes for the number of decodes.
    params: Parameters of an expert; None for those of the decoder. Other
      experts run the same programs.

  Yields:
    The sizes of each program after its compilation.
  """
  for sizes, arguments in _steps(decoder, factor):
    tokens, *_ = decoder.step(*arguments, params)
    tokens.block_until_ready()
    yield sizes
