"""Prediction intervals of step times by split conformal prediction.

A residual is the logarithm of a measured over a predicted time, of a step that
the rates of the prediction were not fitted to. If these steps and a new one are
exchangeable, such as random configurations of one machine, the interval
contains the new step's time with at least the given probability, whatever the
distribution of the errors is. Both ends are separate quantiles, since errors of
a roofline are not symmetric. Too few residuals give an infinite interval.

Source: Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World",
2005; Lei et al., "Distribution-Free Predictive Inference for Regression", JASA
113, 2018, algorithm 2, here with two ends.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

from parallel.base import checks

COVERAGE = 0.9


class Interval(NamedTuple):
  """Predicted time, in seconds.

  Attributes:
    low: Lower end; 0 with too few residuals.
    median: Prediction, corrected by the median residual.
    high: Upper end; infinite with too few residuals.
  """

  low: float
  median: float
  high: float

  def __contains__(self, seconds: object) -> bool:
    return self.low <= seconds <= self.high


def interval(
  predicted_s: float, residuals: Sequence[float], coverage: float = COVERAGE
) -> Interval:
  """Returns the interval of a predicted time.

  Args:
    predicted_s: Predicted seconds.
    residuals: log(measured / predicted) of other steps, which the rates of the
      prediction were not fitted to.
    coverage: Probability that the interval contains the time, in [0, 1].

  Raises:
    ValueError: ``coverage`` is not in [0, 1].

  Example:
    With 19 residuals, the interval of 90% extends from the least to the
    greatest one.

    >>> residuals = np.log(np.linspace(0.91, 1.09, 19))
    >>> low, median, high = interval(2.0, residuals)
    >>> round(low, 2), round(median, 2), round(high, 2)
    (1.82, 2.0, 2.18)
    >>> interval(2.0, residuals[:18]).high
    inf
  """
  checks.fraction("coverage", coverage)
  found = np.sort(np.asarray(residuals, float))
  n = len(found)
  # Of n + 1 exchangeable errors, the new one has each rank with the same
  # probability. Rounded, since (1 - 0.9) / 2 * 20 is slightly less than 1.
  outside = math.floor(round((1 - coverage) / 2 * (n + 1), 9))
  low, high = -math.inf, math.inf
  if outside:
    low, high = found[outside - 1], found[n - outside]
  middle = float(np.median(found)) if n else 0.0
  return Interval(*(
    predicted_s * float(np.exp(x)) for x in (low, middle, high)
  ))
