"""Fits the factors of the planner's memory to what a compiler says.

Few programs leave factors near 1, since least squares of relative errors are
drawn there.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

from parallel.planner.memory import Fit

# How strongly factors are drawn to 1.
_RIDGE = 0.01


def fit(
  programs: Sequence[tuple[Mapping[str, float], float]], margin: float = 0.02
) -> Fit:
  """Fits factors, which are not negative.

  The upper bound holds for all programs that are fitted, with a margin.

  Args:
    programs: What `parallel.planner.memory.terms` returned, and the bytes that
      the compiler has in all.
    margin: What is added to the largest ratio.
  """
  keys = [key for key in programs[0][0] if key != "stored"]
  totals = np.array([total for _, total in programs])
  exact = np.array([found["stored"] for found, _ in programs])
  rows = np.array([[found[key] for key in keys] for found, _ in programs])
  towards = np.sqrt(_RIDGE) * np.eye(len(keys))
  factors, _ = optimize.nnls(
    np.concatenate([rows / totals[:, None], towards]),
    np.concatenate([1 - exact / totals, towards.sum(0)]),
  )
  ratios = totals / (exact + rows @ factors)
  return Fit(
    dict(zip(keys, factors.tolist(), strict=True)),
    float(max(1.0, ratios.max())) + margin,
  )
