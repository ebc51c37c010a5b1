"""Data parallelism over the worker axis: gradients are averaged in every step.

It is the baseline of all other outer loops.
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
  """All-reduces the gradients in every step, so that workers stay equal."""

  def gradients(self, grads: Params, state: State) -> Params:
    if self.worker.size == 1:  # or a step would hold an all-reduce of one rank
      return grads
    return to_workers(mean_over_workers(grads, self.worker), self.worker)

  def evaluated(self, params: Params, state: State) -> Params:
    # Workers are equal already; a mean of them would round.
    return of_first(params, self.worker)

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    return float32_bytes(shapes, self.worker)
