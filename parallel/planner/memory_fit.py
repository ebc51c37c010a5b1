"""Factors of the planner's memory, fitted to what a compiler says.

How much of a layer, or how many copies of gradients a compiler keeps alive at a
time is in no formula. So each cause of `parallel.planner.memory` has a factor,
but for those that are exact, and an estimate has an upper bound: it times the
largest ratio that the fit has seen, and a margin.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np
from scipy import optimize

from parallel.planner.memory import Memory

# What is stored between steps is as large as the formulas say.
_EXACT = ("optimizer",)
# What no compiler sees.
_UNSEEN = ("buffers",)
CAUSES = tuple(
  field.name for field in dataclasses.fields(Memory)
  if field.name not in _UNSEEN
)


@dataclasses.dataclass(frozen=True)
class Fit:
  """How often a compiler has each cause, and how far an estimate may be off.

  Attributes:
    factors: Cause -> factor, of `CAUSES`.
    upper: The upper bound of what a compiler shows is its estimate times this.
    source: What was fitted to what.
  """

  factors: Mapping[str, float]
  upper: float
  source: str = ""

  def estimate(self, memory: Memory) -> float:
    """Returns the bytes that a compiler is expected to show."""
    return sum(
      self.factors[cause] * getattr(memory, cause) for cause in CAUSES
    )

  def bound(self, memory: Memory) -> float:
    """Returns the upper bound of it."""
    return self.upper * self.estimate(memory)


def fit(
  programs: Sequence[tuple[Memory, float]], margin: float = 0.02
) -> Fit:
  """Fits factors to what a compiler says, by least squares of relative errors.

  Factors are not negative. The upper bound holds for all programs that are
  fitted, with a margin.

  Args:
    programs: Formulas, and the bytes that the compiler has in all.
    margin: What is added to the largest ratio.
  """
  free = [cause for cause in CAUSES if cause not in _EXACT]
  totals = np.array([total for _, total in programs])
  exact = np.array([sum(getattr(x, c) for c in _EXACT) for x, _ in programs])
  rows = np.array([[getattr(x, c) for c in free] for x, _ in programs])
  factors, _ = optimize.nnls(rows / totals[:, None], 1 - exact / totals)
  ratios = totals / (exact + rows @ factors)
  return Fit(
    dict.fromkeys(_EXACT, 1.0) | dict(zip(free, factors.tolist(), strict=True)),
    float(max(1.0, ratios.max())) + margin,
  )


# Before anything is fitted: the formulas as they are.
PRIOR = Fit(dict.fromkeys(CAUSES, 1.0), 1.5, "a guess")
