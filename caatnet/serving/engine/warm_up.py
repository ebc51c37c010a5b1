"""Compiles a server's programs before anyone waits for them.

Each shape of a step is a program. Shapes come in few sizes, so all that a
server needs can be run once at its start, with steps that stand for no
sequence: they write nothing and draw nothing that is kept.
"""

from collections.abc import Callable, Iterator
import itertools
import os
import pathlib
from typing import Any

import jax
import numpy as np

from caatnet.inference import batches, buckets
from caatnet.inference.batches import Sizes
from caatnet.inference.buckets import bucket
from caatnet.inference.decoder import Decoder
from caatnet.serving.engine.calibration import calibrate
from caatnet.serving.engine.device import DecoderExecutor, of_one_replica
from caatnet.serving.engine.engine import settle


def keep_programs(folder: str) -> None:
  """Lets jax keep compiled programs, unless the environment says where.

  Args:
    folder: Where; "" for nowhere.
  """
  if folder and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    path = pathlib.Path(folder).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(path))


def prepare(
  executor: DecoderExecutor, progress: Callable[[Iterator[Any], int], None]
) -> None:
  """Compiles and measures what a server needs.

  Args:
    executor: It has nothing to do.
    progress: Goes through steps, of which it is told the number.
  """
  sizes = executor.decoder, executor.factor
  progress(warm_up(*sizes), len(shapes(*sizes)))
  calibrate(executor)
  settle()


def _sizes(smallest: int, largest: int, factor: int) -> list[int]:
  """Returns all that `bucket` returns for sizes from 1 to the largest."""
  found = [bucket(1, smallest, largest, factor)]
  while found[-1] < largest:
    found.append(bucket(found[-1] + 1, smallest, largest, factor))
  return found


def shapes(decoder: Decoder, factor: int) -> list[Sizes]:
  """Returns the sizes of all steps whose chunks are of `buckets.chunk_sizes`.

  Args:
    decoder: The model.
    factor: As the executor has it.
  """
  capacity = decoder.capacity
  most_pages = capacity.pages_per_sequence
  least = min(most_pages, -(-buckets.SHORT // capacity.page_size))
  factors = buckets.MIN_CHUNK, 1 << 30, buckets.CHUNK_FACTOR
  chunks = [(0, 0)] + [
    (count, length)
    for count, most in buckets.chunk_sizes(capacity.chunk, capacity.batch)
    for length in _sizes(
      buckets.MIN_CHUNK, bucket(most, *factors), buckets.CHUNK_FACTOR
    )
  ]
  return [
    Sizes(num_decodes, *chunk, pages)
    for num_decodes, chunk, pages in itertools.product(
      _sizes(1, capacity.batch, factor), chunks, _sizes(least, most_pages, 2)
    )
  ]


def warm_up(decoder: Decoder, factor: int) -> Iterator[Sizes]:
  """Runs a step of each of `shapes`, with filters of what is drawn.

  Yields:
    The sizes for which a program has been compiled.
  """
  capacity, none = decoder.capacity, np.zeros(0, np.int32)
  for sizes in shapes(decoder, factor):
    batch = batches.batch_of(
      sizes, capacity.page_size, np.zeros((1, sizes.pages), np.int32), none,
      none, (),
    )
    drawing = batches.Drawing(capacity.batch).of(batch.sequences)
    tokens, _ = decoder.step(
      of_one_replica(batch), of_one_replica(drawing), True
    )
    tokens.block_until_ready()
    yield sizes
