"""Programs of a decoder's steps, compiled in a thread while other steps run.

A step for whose sizes no program is compiled is padded to a larger program. A
request is therefore admitted once there is a program for one of its chunks
together with all running requests, at the longest context that any of them can
reach: until the request ends, no decode has to wait for the compiler. Programs
of exact sizes, which are faster, are compiled afterwards, one at a time.
"""

from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np

from caatnet.inference import batches
from caatnet.inference.batches import Sizes
from caatnet.inference.decoder import Capacity, Decoder


def empty_step_args(capacity: Capacity, sizes: Sizes) -> tuple[Any, ...]:
  """Returns arguments with which `Decoder.step` runs without sequences.

  The step applies top-k and top-p, and can return the most probable tokens.
  """
  none = np.zeros(0, np.int32)
  batch = batches.batch_of(
    sizes, capacity.page_size, np.zeros((1, sizes.pages), np.int32), none,
    none, (),
  )
  drawing = batches.SlotSampling(capacity.batch)
  return (
    batches.add_replica_dim(batch),
    batches.add_replica_dim(drawing.of(batch.sequences)), True,
    batches.add_replica_dim(drawing.asked[batch.sequences]),
  )


class Programs:
  """Compiled programs, by the sizes of their steps.

  All methods are called by the thread that submits steps.
  """

  def __init__(
    self, decoder: Decoder, factor: int, wake: Callable[[], None]
  ) -> None:
    """Starts without programs.

    Args:
      decoder: Decoder that compiles and runs the programs.
      factor: Ratio between successive bucket sizes for the number of decodes.
      wake: Called by the compiling thread after each compilation.
    """
    self._decoder, self._factor, self._wake = decoder, factor, wake
    self._compiled: set[Sizes] = set()
    self._begun: dict[Sizes, futures.Future[None]] = {}
    self._thread = futures.ThreadPoolExecutor(1, "compiling")

  def close(self) -> None:
    """Waits for the program that is being compiled, and drops the others."""
    self._thread.shutdown(cancel_futures=True)

  def ready(
    self, num_decodes: int, num_chunks: int, length: int, positions: int
  ) -> bool:
    """Returns whether a compiled program can run a step; else requests one.

    Args:
      num_decodes: Number of decodes.
      num_chunks: Number of chunks.
      length: Length of the longest chunk in tokens.
      positions: Number of positions of the longest sequence.

    Raises:
      ValueError: The compilation failed; the next call begins it again.
    """
    sizes = batches.sizes_of(
      self._decoder.capacity, np.full(num_decodes, positions),
      [(0, length)] * num_chunks, self._factor,
    )
    if self._smallest(sizes) is not None:
      return True
    begun = self._begun.get(sizes)
    if begun is None:
      # Further chunks can wait for a later step, so they need an idle compiler.
      if num_chunks == 1 or self._idle:
        self._begin(sizes)
    elif begun.done() and (error := begun.exception()) is not None:
      del self._begun[sizes]
      raise ValueError(
        f"the program for {num_decodes} decodes and {num_chunks} chunks of "
        f"{length} tokens could not be compiled: {error}"
      )
    return False

  def choose(self, sizes: Sizes) -> Sizes:
    """Returns the sizes of the program that a step runs.

    These are the step's own sizes if no compiled program can run it.
    """
    found = self._smallest(sizes)
    if found == sizes or found is None:
      return sizes
    if sizes not in self._begun and self._idle:
      self._begin(sizes)  # after an error, only `ready` tries again
    return found

  @property
  def _idle(self) -> bool:
    return all(begun.done() for begun in self._begun.values())

  def _smallest(self, sizes: Sizes) -> Sizes | None:
    """Returns the program with the least padding for a step, if any."""
    if sizes not in self._compiled and self._decoder.is_compiled(
      *empty_step_args(self._decoder.capacity, sizes)
    ):
      self._compiled.add(sizes)
    if sizes in self._compiled:
      return sizes

    def work(x: Sizes) -> tuple[int, int]:
      rows = x.decodes + x.chunks
      return x.decodes + x.chunks * x.length, rows * x.pages

    return min(
      (x for x in self._compiled if x.holds(sizes)), key=work, default=None
    )

  def _begin(self, sizes: Sizes) -> None:
    """Starts the compilation of a program in the compiling thread."""

    def work() -> None:
      self._decoder.compile(*empty_step_args(self._decoder.capacity, sizes))

    begun = self._begun[sizes] = self._thread.submit(work)
    begun.add_done_callback(lambda _: self._wake())
