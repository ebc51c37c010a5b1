"""Data parallelism over the worker axis: gradients averaged in every step.

The baseline of every other outer loop.
"""

import dataclasses

from parallel.outer.base import (
  OuterLoop,
  Params,
  State,
  float32_bytes,
  mean_over_workers,
  of_first,
  to_workers,
)


@dataclasses.dataclass(frozen=True)
class DataParallel(OuterLoop):
  """One all-reduce of the gradients per step; workers stay equal."""

  def gradients(self, grads: Params, state: State) -> Params:
    if self.worker.size == 1:
      return grads
    return to_workers(mean_over_workers(grads, self.worker), self.worker)

  def evaluated(self, params: Params, state: State) -> Params:
    return of_first(params, self.worker)

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    return float32_bytes(shapes, self.worker)
