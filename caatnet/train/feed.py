"""Training batches on their way to the devices, some of them ahead of time.

A thread draws batches and does the host's part of laying them out while the
devices work on the present step. What is dispatched to devices comes from the
caller's thread, so that programs that communicate come in one order.
"""

import collections
from collections.abc import Callable
from concurrent import futures
import time
from typing import Any

from caatnet.program import Layout
from caatnet.train.evaluate import prepare_batch


class Feed:
  """An endless iterator over batches on the mesh.

  Attributes:
    waited_s: Seconds that the caller has waited for batches.
    worked_s: Seconds that the host has drawn and prepared batches.
  """

  def __init__(self, layout: Layout, batches: Any, ahead: int = 0) -> None:
    """Makes an iterator; nothing is drawn before the first batch is taken.

    Args:
      layout: Mesh, workers and data-parallel ranks.
      batches: An iterator as of `caatnet.data.protocol.Dataset.batches`.
      ahead: How many batches are drawn before they are taken; 0 draws each when
        it is taken.
    """
    self._layout, self._batches, self._ahead = layout, batches, ahead
    self._thread = futures.ThreadPoolExecutor(1) if ahead else None
    self._coming: collections.deque[futures.Future] = collections.deque()
    self._state = batches.get_state()
    self.waited_s = self.worked_s = 0.0

  def __iter__(self) -> "Feed":
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
    """Draws a batch; returns what puts it, the position after it, seconds."""
    start = time.perf_counter()
    put = prepare_batch(self._layout, next(self._batches))
    return put, self._batches.get_state(), time.perf_counter() - start

  def get_state(self) -> Any:
    """Returns the position after the last batch that was taken."""
    return self._state

  def set_state(self, state: Any) -> None:
    """Goes on at a position; what was drawn ahead is dropped."""
    while self._coming:
      self._coming.popleft().result()
    self._batches.set_state(state)
    self._state = state

  def close(self) -> None:
    """Ends the thread; what it is drawing is finished first."""
    if self._thread is not None:
      self._thread.shutdown(cancel_futures=True)
