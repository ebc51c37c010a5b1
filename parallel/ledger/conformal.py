"""Prediction intervals of step times by split conformal prediction.

A residual is log(measured time / predicted time) of a step that was not used to
fit the rates of the prediction. If these steps and a new one are
exchangeable, such as random configurations of one machine, the interval
contains the new step's time with at least the given probability, whatever the
distribution of the errors is. Both ends are separate quantiles, since errors of
a roofline are not symmetric. Too few residuals give an infinite interval.

The probability is a mean over such steps, and can be lower for a group of them.
So a calibration records its family: the values of some config keys in all its
programs. A program with other values gets a wider interval (`widening`).

Source: Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World",
2005; Lei et al., "Distribution-Free Predictive Inference for Regression", JASA
113, 2018, algorithm 2, here applied to each end.
"""

from collections.abc import Mapping, Sequence
import math
from typing import NamedTuple

import numpy as np

from parallel.base import checks

COVERAGE = 0.9
Value = str | float
# Config key -> its values in the programs of a calibration.
ConfigValues = Mapping[str, Sequence[Value]]


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
  predicted_s: float, residuals: Sequence[float], coverage: float = COVERAGE,
  wider: float = 0.0,
) -> Interval:
  """Returns the interval of a predicted time.

  Args:
    predicted_s: Predicted seconds.
    residuals: log(measured / predicted) of other steps, which the rates of the
      prediction were not fitted to.
    coverage: Probability that the interval contains the time, in [0, 1].
    wider: Logarithm of the factor by which both ends are moved outwards.

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
  low, middle, high = _residual_interval(residuals, coverage)
  return Interval(*(
    predicted_s * float(np.exp(x)) for x in (low - wider, middle, high + wider)
  ))


def _residual_interval(
  residuals: Sequence[float], coverage: float
) -> tuple[float, float, float]:
  """Returns low end, median and high end of an interval of residuals.

  It contains another residual with the probability ``coverage``.
  """
  checks.fraction("coverage", coverage)
  found = np.sort(np.asarray(residuals, float))
  n = len(found)
  # Of n + 1 exchangeable errors, the new one has each rank with the same
  # probability. Rounded, since (1 - 0.9) / 2 * 20 as floats is less than 1.
  outside = math.floor(round((1 - coverage) / 2 * (n + 1), 9))
  low, high = -math.inf, math.inf
  if outside:
    low, high = found[outside - 1], found[n - outside]
  return low, float(np.median(found)) if n else 0.0, high


def values_by_key(programs: Sequence[Mapping[str, Value]]) -> dict[
  str, list[Value]
]:
  """Returns the sorted values that each key has in a set of programs.

  Example:
    >>> found = values_by_key([
    ...   {"tensor": 4, "zero": "ddp"}, {"tensor": 1, "zero": "ddp"},
    ... ])
    >>> found
    {'tensor': [1, 4], 'zero': ['ddp']}
    >>> find_extrapolations(found, {"tensor": 2, "zero": "ddp"})
    []
    >>> find_extrapolations(found, {"tensor": 8, "zero": "zero3"})
    ['tensor=8 (calibration: 1 to 4)', 'zero=zero3 (calibration: ddp)']
  """
  keys = programs[0] if programs else ()
  return {
    key: sorted(
      {p[key] for p in programs}, key=lambda x: (isinstance(x, str), x)
    ) for key in keys
  }


def find_extrapolations(
  known: ConfigValues, program: Mapping[str, Value]
) -> list[str]:
  """Returns a text for each key whose value a calibration does not cover.

  A number is covered if it lies between the least and the greatest known value
  of its key, a text if it is one of them. Without keys, nothing is covered.
  """
  if not known:
    return ["the calibration names no family"]
  found = []
  for key, values in known.items():
    value = program.get(key, "none")
    if any(isinstance(x, str) for x in (value, *values)):
      is_inside, text = value in values, ", ".join(map(str, values))
    else:
      low, high = min(values), max(values)
      is_inside = low <= value <= high
      text = f"{low:g}" + f" to {high:g}" * (high > low)
    if not is_inside:
      found.append(f"{key}={value} (calibration: {text})")
  return found


def widening(
  programs: Sequence[Mapping[str, Value]], residuals: Sequence[float],
  coverage: float = COVERAGE,
) -> float:
  """Returns how much wider intervals of uncovered programs are, as a logarithm.

  All programs with one value of a key form a group; of numbers only the least
  and the greatest do. The interval of the residuals of all other programs is
  widened until it contains the fraction ``coverage`` of the group's residuals
  (all of a small group). The result is the maximum over the groups; infinite if
  no key varies, or if too few other programs remain.
  """
  needed = []
  for key, values in values_by_key(programs).items():
    is_text = isinstance(values[0], str)
    groups = values if is_text else sorted({values[0], values[-1]})
    for value in groups if len(values) > 1 else ():
      own, others = (
        [r for p, r in zip(programs, residuals, strict=True)
         if (p[key] == value) == is_own] for is_own in (True, False)
      )
      low, _, high = _residual_interval(others, coverage)
      beyond = sorted(max(low - r, r - high, 0.0) for r in own)
      rank = min(math.ceil(coverage * (len(own) + 1)), len(own))
      needed.append(float(beyond[rank - 1]) if low > -math.inf else math.inf)
  return max(needed, default=math.inf)
