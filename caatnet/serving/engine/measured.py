"""Costs estimated from the measured times of recent steps and copies."""

import collections
from collections.abc import Iterable

import numpy as np

from caatnet.serving.engine.executor import CopyKind

# Number of recent steps, and of recent copies per kind, that estimates use.
_WINDOW = 64


class MeasuredCosts:
  """Cost estimates (`executor.Costs`) from recent measurements; 0 without any.

  A copy of pages takes a * num_runs + b * num_pages seconds, with num_runs
  contiguous ranges of pages; a and b are fitted by least squares. A prompt
  chunk lengthens a step by seconds per token: the median, over steps with
  chunks, of (time - median time of steps without chunks) / tokens of chunks.
  """

  def __init__(self) -> None:
    """Starts without measurements."""
    self._decodes: collections.deque[float] = collections.deque(maxlen=_WINDOW)
    self._chunks: collections.deque[tuple[float, int]] = collections.deque(
      maxlen=_WINDOW
    )
    self._copies: dict[CopyKind, collections.deque[tuple[int, int, float]]] = (
      collections.defaultdict(lambda: collections.deque(maxlen=_WINDOW))
    )

  def add_step(self, seconds: float, num_read: int) -> None:
    """Adds a measured step.

    Args:
      seconds: Time from the end of the previous step to the end of this one.
      num_read: Number of tokens of its chunks.
    """
    if num_read:
      self._chunks.append((seconds, num_read))
    else:
      self._decodes.append(seconds)

  def add_copy(
    self, kind: CopyKind, num_runs: int, num_pages: int, seconds: float
  ) -> None:
    """Adds a measured copy; see `copy_s` for its arguments."""
    self._copies[kind].append((num_runs, num_pages, seconds))

  def prefill_s(self, start: int, length: int) -> float:
    """Returns the seconds that a chunk of `length` tokens adds to its steps."""
    del start  # attention costs little compared with the matrix products
    rest = _median(self._decodes)
    per_token = _median(
      max(0.0, seconds - rest) / count for seconds, count in self._chunks
    )
    return per_token * length

  def copy_s(self, kind: CopyKind, num_runs: int, num_pages: int) -> float:
    """Returns the estimated seconds of a copy of `num_runs` page ranges."""
    seen = np.array(self._copies[kind], float).reshape(-1, 3)
    if not len(seen):
      return 0.0
    # Seconds per run and per page.
    times, *_ = np.linalg.lstsq(seen[:, :2], seen[:, 2], rcond=None)
    if min(times) < 0:  # ill-conditioned: attribute all time to pages
      times = np.array([0.0, seen[:, 2].sum() / seen[:, 1].sum()])
    return float(times @ [num_runs, num_pages])


def _median(values: Iterable[float]) -> float:
  found = list(values)
  return float(np.median(found)) if found else 0.0
