"""What the metrics of a step tell of each worker, and what users are told.

A worker that diverges does not end a run whose outer loop leaves it out of the
next exchange (`parallel.outer.health`): means are those of the other workers.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math

import numpy as np

# What outer loops tell of each worker; it is not averaged.
_TOLD = ("delta_norm", "left_out", "just_left_out")


@dataclasses.dataclass(frozen=True)
class WorkerMetrics:
  """The metrics of one step.

  Attributes:
    metrics: Arrays ``[workers]``, of which those that are not ``_TOLD`` must be
      finite.
  """

  metrics: Mapping[str, np.ndarray]

  @functools.cached_property
  def finite(self) -> np.ndarray:
    """For each worker whether its own metrics are finite, ``[workers]``."""
    own = [x for key, x in self.metrics.items() if key not in _TOLD]
    return np.all(np.isfinite(own), axis=0)

  @property
  def means(self) -> dict[str, float]:
    """The means over the workers, or over those that are finite.

    They are not finite if no worker is, or if the outer loop leaves none out.
    """
    counted = self.finite
    if "left_out" not in self.metrics or not counted.any():
      counted = np.ones_like(counted)
    return {
      key: float(np.mean(x[counted]))
      for key, x in self.metrics.items() if key not in _TOLD
    }

  @property
  def of_workers(self) -> dict[str, float | None]:
    """What is recorded of each of several workers; None if not finite."""
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
    """Names the workers that are not finite, if there are several workers."""
    bad = np.flatnonzero(~self.finite)
    if self.finite.size == 1 or not bad.size:
      return ""
    return f" (worker {', '.join(map(str, bad))} of {self.finite.size})"

  def notices(self, step: int, known: set[int]) -> Iterator[str]:
    """Says which workers have diverged, and which were left out.

    Args:
      step: The number of updates made.
      known: The workers of which it has been said that they have diverged;
        changed here.
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
        "goes on from the outer parameters"
      )
