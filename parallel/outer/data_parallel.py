"""Data parallelism over the worker axis: averages the gradients in every step.

The other outer loops are compared with this one. It excludes no diverged
worker: all workers hold the same model, so there are no separate outer
parameters from which a diverged worker could restart.
"""

from collections.abc import Hashable
import dataclasses
from typing import ClassVar

from parallel.outer.base import (
  OuterLoop,
  Params,
  State,
  broadcast_first,
  float32_sum_bytes,
  mean_over_workers,
  to_workers,
)


@dataclasses.dataclass(frozen=True)
class DataParallel(OuterLoop):
  """Outer loop that all-reduces gradients, so that all workers stay equal."""

  equal: ClassVar[bool] = True

  def averages_state(self, variant: Hashable) -> bool:
    return True

  def gradients(self, grads: Params, state: State) -> Params:
    if self.worker.size == 1:  # avoids an all-reduce of one rank in the program
      return grads
    return to_workers(mean_over_workers(grads, self.worker), self.worker)

  def export_params(self, params: Params, state: State) -> Params:
    # All workers are equal; taking their mean would round.
    return broadcast_first(params, self.worker)

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    return float32_sum_bytes(shapes, self.worker)
