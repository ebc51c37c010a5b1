"""What steps and copies have taken, as a scheduler asks for it."""

import collections
from collections.abc import Iterable

import numpy as np

from caatnet.serving.engine.executor import Kind

# Of how many of the last steps, and of the last copies of each kind.
_WINDOW = 64


class MeasuredCosts:
  """Estimates from the last steps and copies; 0 for what was never done.

  A copy takes a time for each call and one for each page, fitted by least
  squares. A chunk makes a step longer by a time for each token: the median over
  steps that read chunks, less the median step that reads none.
  """

  def __init__(self) -> None:
    """Knows nothing yet."""
    self._decodes: collections.deque[float] = collections.deque(maxlen=_WINDOW)
    self._chunks: collections.deque[tuple[float, int]] = collections.deque(
      maxlen=_WINDOW
    )
    self._copies: dict[Kind, collections.deque[tuple[int, int, float]]] = (
      collections.defaultdict(lambda: collections.deque(maxlen=_WINDOW))
    )

  def add_step(self, seconds: float, num_read: int) -> None:
    """Notes a step.

    Args:
      seconds: What it took after the step before it.
      num_read: Tokens of its chunks.
    """
    if num_read:
      self._chunks.append((seconds, num_read))
    else:
      self._decodes.append(seconds)

  def add_copy(
    self, kind: Kind, num_runs: int, num_pages: int, seconds: float
  ) -> None:
    """Notes a copy."""
    self._copies[kind].append((num_runs, num_pages, seconds))

  def prefill_s(self, start: int, length: int) -> float:
    """Returns how much longer steps take that also read a chunk."""
    del start  # what a token attends to costs little beside its products
    rest = _median(self._decodes)
    per_token = _median(
      max(0.0, seconds - rest) / count for seconds, count in self._chunks
    )
    return per_token * length

  def copy_s(self, kind: Kind, num_runs: int, num_pages: int) -> float:
    """Returns how long a copy takes alone."""
    seen = np.array(self._copies[kind], float).reshape(-1, 3)
    if not len(seen):
      return 0.0
    times, *_ = np.linalg.lstsq(seen[:, :2], seen[:, 2], rcond=None)
    if min(times) < 0:  # too alike to tell one from the other
      times = np.array([0.0, seen[:, 2].sum() / seen[:, 1].sum()])
    return float(times @ [num_runs, num_pages])


def _median(values: Iterable[float]) -> float:
  found = list(values)
  return float(np.median(found)) if found else 0.0
