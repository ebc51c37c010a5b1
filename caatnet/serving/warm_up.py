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

from caatnet.inference import buckets
from caatnet.inference.buckets import bucket
from caatnet.inference.decoder import Decoder
from caatnet.inference.requests import stacked
from caatnet.models.paged import Batch
from caatnet.serving.calibration import calibrate
from caatnet.serving.device import DecoderExecutor, of_one_replica
from caatnet.serving.engine import settle


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


def shapes(decoder: Decoder, factor: int) -> list[tuple[int, int, int]]:
  """Returns the shapes of steps with one chunk at most.

  Args:
    decoder: The model.
    factor: As the executor has it.

  Returns:
    How many decodes, the length of a chunk, 0 for none, and pages of a table.
  """
  capacity = decoder.capacity
  most_pages = capacity.pages_per_sequence
  least = min(most_pages, -(-buckets.SHORT // capacity.page_size))
  factors = buckets.MIN_CHUNK, 1 << 30, buckets.CHUNK_FACTOR
  most = bucket(capacity.chunk, *factors)
  lengths = _sizes(buckets.MIN_CHUNK, most, buckets.CHUNK_FACTOR)
  return list(itertools.product(
    _sizes(1, capacity.batch, factor), [0, *lengths],
    _sizes(least, most_pages, 2),
  ))


def warm_up(decoder: Decoder, factor: int) -> Iterator[tuple[int, int, int]]:
  """Runs a step of each of `shapes`, with filters of what is drawn.

  Yields:
    The shapes that have been compiled.
  """
  for num_decodes, length, pages in shapes(decoder, factor):
    rows, count = num_decodes + (length > 0), num_decodes + length
    positions = np.full(count, -1, np.int32)
    positions[num_decodes:] = np.arange(-length, 0)
    batch = Batch(
      np.zeros(count, np.int32), positions, np.full(count, -1, np.int32),
      np.zeros((rows, pages), np.int32), np.arange(rows, dtype=np.int32),
      np.full(rows, -1, np.int32), num_decodes,
    )
    tokens, _ = decoder.step(
      of_one_replica(batch), of_one_replica(stacked([None] * rows)), True
    )
    tokens.block_until_ready()
    yield num_decodes, length, pages
