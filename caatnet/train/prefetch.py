"""Prefetching iterator of training batches on the mesh.

A thread draws batches and prepares their transfer while the devices execute the
current step. Only the caller's thread dispatches work to devices, so that all
processes dispatch programs with collectives in the same order.
"""

import collections
from collections.abc import Callable
from concurrent import futures
import time
from typing import Any

from caatnet.program import Layout
from caatnet.train.evaluate import prepare_batch


class PrefetchIterator:
  """Endless iterator over batches on the mesh.

  Attributes:
    waited_s: Seconds that the caller has waited for batches, in total.
    worked_s: Seconds spent on drawing and preparing batches, in total.
  """

  def __init__(self, layout: Layout, batches: Any, ahead: int = 0) -> None:
    """Creates the iterator; drawing begins with the first ``next``.

    Args:
      layout: Mesh, workers and data-parallel ranks.
      batches: An iterator, see `caatnet.data.protocol.Dataset.batches`.
      ahead: Number of batches that are prefetched; 0 for none, without a
        thread.
    """
    self._layout, self._batches, self._ahead = layout, batches, ahead
    self._thread = futures.ThreadPoolExecutor(1) if ahead else None
    self._coming: collections.deque[futures.Future] = collections.deque()
    self._state = batches.get_state()
    self.waited_s = self.worked_s = 0.0

  def __iter__(self) -> "PrefetchIterator":
    return self

  def __next__(self) -> Any:
    start = time.perf_counter()
    if self._thread is None:
      put, self._state, worked_s = self._draw()
    else:
      while len(self._coming) <= self._ahead:
        self._coming.append(self._thread.submit(self._draw))
      put, self._state, worked_s = self._coming.popleft().result()
    self.waited_s += time.perf_counter() - start
    self.worked_s += worked_s
    return put()

  def _draw(self) -> tuple[Callable[[], Any], Any, float]:
    """Draws a batch.

    Returns:
      A function that transfers the batch to the devices, the data position
      after the batch, and the seconds that this call took.
    """
    start = time.perf_counter()
    put = prepare_batch(self._layout, next(self._batches))
    return put, self._batches.get_state(), time.perf_counter() - start

  def get_state(self) -> Any:
    """Returns the data position after the last batch that ``next`` returned."""
    return self._state

  def set_state(self, state: Any) -> None:
    """Continues at a data position; prefetched batches are dropped."""
    while self._coming:
      self._coming.popleft().result()
    self._batches.set_state(state)
    self._state = state

  def close(self) -> None:
    """Ends the thread after the batch that it is drawing."""
    if self._thread is not None:
      self._thread.shutdown(cancel_futures=True)
