"""Loss of a step as a mean over all elements of all microbatches and ranks.

If all examples have equally many elements, it is the mean of means, whose
factors are known at compile time. With a `WeightedScore`, sums of losses and of
counts are reduced separately and divided at the end of the step.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from caatnet.models.protocol import Score, WeightedScore
from caatnet.program import Program, SplitParams


class Objective(NamedTuple):
  """Value to differentiate, and the number of its elements.

  Attributes:
    loss: float32 ``[]``: a mean, or with a count a sum.
    count: float32 ``[]``; None for a mean.
  """

  loss: jax.Array
  count: jax.Array | None

  def divisor(self, num: int, last: bool = False) -> Any:
    """Returns the number by which sums of objectives and gradients are divided.

    Args:
      num: Number of the summands, microbatches or ranks.
      last: Whether this is the last sum of the step.

    Returns:
      ``num`` for means. Sums with a count are divided after the last summand
      only, by the count; before, the result is None.
    """
    if self.count is None:
      return num
    return jnp.where(self.count > 0, self.count, 1.0) if last else None

  def divided(self, divisor: Any) -> "Objective":
    """Returns the objective with the loss divided by a `divisor`."""
    loss = self.loss if divisor is None else self.loss / divisor
    return self._replace(loss=loss)


def objective(score: Score, num_lead: int = 0) -> Objective:
  """Returns the objective of the losses of this device's examples.

  Args:
    score: The losses, ``[B, ...]``, or ``[D, B, ...]`` for D data-parallel
      ranks, whose means are added.
    num_lead: Number of dims before B, 0 or 1.
  """
  if isinstance(score, WeightedScore):
    # Counts do not depend on the parameters.
    return Objective(
      jnp.sum(score.total), lax.stop_gradient(jnp.sum(score.count))
    )
  if not num_lead:
    return Objective(score.mean(), None)
  return Objective(jnp.sum(score.mean(axis=tuple(range(1, score.ndim)))), None)


def divided(program: Program, grads: Any, divisor: Any) -> Any:
  """Divides gradients by an `Objective.divisor`; statistics remain sums."""
  if divisor is None:
    return grads
  trained, statistics = program.split(grads)
  trained = jax.tree.map(lambda x: x / divisor, trained)
  return SplitParams(trained, statistics).join()
