"""Metrics per worker, and notices about diverged workers.

If the outer loop masks diverged workers out of the next exchange
(`parallel.outer.health`), a diverged worker does not end the run, and means are
computed over the other workers.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math

import numpy as np

# Metrics of outer loops, which are not averaged over workers.
_OUTER_METRICS = ("delta_norm", "left_out", "just_left_out")


@dataclasses.dataclass(frozen=True)
class WorkerMetrics:
  """Metrics of one step.

  Attributes:
    metrics: Arrays ``[workers]`` by name. A worker has diverged if one of them,
      except the outer loop's (``_OUTER_METRICS``), is not finite.

  Example:
    >>> loss = np.array([2.0, 3.0, np.nan])
    >>> metrics = WorkerMetrics({"loss": loss, "left_out": np.zeros(3)})
    >>> metrics.means, metrics.names()
    ({'loss': 2.5}, ' (worker 2 of 3)')
  """

  metrics: Mapping[str, np.ndarray]

  @functools.cached_property
  def finite(self) -> np.ndarray:
    """Mask of workers with finite metrics, bool ``[workers]``."""
    own = [x for key, x in self.metrics.items() if key not in _OUTER_METRICS]
    return np.all(np.isfinite(own), axis=0)

  @property
  def means(self) -> dict[str, float]:
    """Means over the workers with finite metrics.

    If no worker has finite metrics, or the outer loop does not mask diverged
    workers, the means are over all workers.
    """
    counted = self.finite
    if "left_out" not in self.metrics or not counted.any():
      counted = np.ones_like(counted)
    return {
      key: float(np.mean(x[counted]))
      for key, x in self.metrics.items() if key not in _OUTER_METRICS
    }

  @property
  def of_workers(self) -> dict[str, float | None]:
    """Each worker's recorded metrics, None if not finite; {} for one worker."""
    keys = ("loss", "delta_norm", "left_out")
    found = {
      f"{key}/worker_{worker}": float(value)
      for key in keys if key in self.metrics
      for worker, value in enumerate(self.metrics[key])
    }
    if self.finite.size == 1:
      return {}
    return {k: v if math.isfinite(v) else None for k, v in found.items()}

  def names(self) -> str:
    """Returns the diverged workers, as in " (worker 2 of 3)"; "" for none."""
    bad = np.flatnonzero(~self.finite)
    if self.finite.size == 1 or not bad.size:
      return ""
    return f" (worker {', '.join(map(str, bad))} of {self.finite.size})"

  def notices(self, step: int, known: set[int]) -> Iterator[str]:
    """Yields a line for each worker that diverged or was excluded in a step.

    Args:
      step: The number of updates made.
      known: Workers that have been reported as diverged; updated in place.
    """
    bad = set(np.flatnonzero(~self.finite).tolist())
    for worker in sorted(bad - known):
      yield (
        f"step {step}: worker {worker} has diverged, loss "
        f"{self.metrics['loss'][worker]}; the next exchange leaves it out"
      )
    known.intersection_update(bad)
    known |= bad
    norms = self.metrics.get("delta_norm", np.zeros(0))
    for worker in np.flatnonzero(self.metrics.get("just_left_out", [])):
      others = np.sort(np.delete(norms, worker))
      count = int(self.metrics["left_out"][worker])
      yield (
        f"step {step}: worker {worker} left out of the exchange, norm of its "
        f"difference {norms[worker]:.3g} (others "
        f"{', '.join(f'{n:.3g}' for n in others[:8])}), {count} so far; it "
        "continues from the outer parameters"
      )
