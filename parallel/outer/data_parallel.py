"""Data parallelism over the worker axis: gradients are averaged in every step.

It is the baseline of all other outer loops. No worker is left out: they are one
model, and a worker that diverges has nothing to go back to.
"""

import dataclasses
from typing import ClassVar

import jax

from parallel.outer.base import (
  OuterLoop,
  Params,
  State,
  float32_bytes,
  mean_over_workers,
  of_first,
  of_joined,
  to_workers,
)


@dataclasses.dataclass(frozen=True)
class DataParallel(OuterLoop):
  """All-reduces the gradients in every step, so that workers stay equal."""

  equal: ClassVar[bool] = True

  def gradients(self, grads: Params, state: State) -> Params:
    if self.worker.size == 1:  # or a step would hold an all-reduce of one rank
      return grads
    return to_workers(mean_over_workers(grads, self.worker), self.worker)

  def joined(
    self, params: Params, state: State, first: int
  ) -> tuple[Params, State]:
    return of_joined(params, jax.tree.map(lambda x: x[0], params), first), state

  def evaluated(self, params: Params, state: State) -> Params:
    # Workers are equal already; a mean of them would round.
    return of_first(params, self.worker)

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    return float32_bytes(shapes, self.worker)
