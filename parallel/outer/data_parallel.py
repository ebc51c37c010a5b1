"""Data parallelism over the worker axis: averages the gradients in every step.

This is the baseline of all other outer loops. It excludes no diverged worker:
all workers hold one model, so there are no outer parameters that a diverged
worker could restart from.
"""

import dataclasses
from typing import ClassVar

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
  """All-reduces the gradients in every step, so that workers stay equal."""

  equal: ClassVar[bool] = True

  def gradients(self, grads: Params, state: State) -> Params:
    if self.worker.size == 1:  # avoids an all-reduce of one rank in the program
      return grads
    return to_workers(mean_over_workers(grads, self.worker), self.worker)

  def export_params(self, params: Params, state: State) -> Params:
    # All workers are equal; taking their mean would round.
    return of_first(params, self.worker)

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    return float32_bytes(shapes, self.worker)
