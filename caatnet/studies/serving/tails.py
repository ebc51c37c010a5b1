"""Percentiles of latencies and their confidence intervals.

Percentiles are interpolated linearly. Times between the tokens of a request are
correlated, so the bootstrap draws requests, each with all its samples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PERCENTILES = (50.0, 95.0, 99.0, 99.9)
# Bootstrap: number of draws, and confidence level of the interval in percent.
_DRAWS, _CONFIDENCE_PERCENT = 200, 95.0
# Fractions of samples; a tail's curve has the value that each fraction exceeds.
TAIL_FRACTIONS = tuple(float(x) for x in np.logspace(0, -4, 41))


def summary(groups: Sequence[np.ndarray], seed: int = 0) -> dict[str, Any]:
  """Returns percentiles of pooled samples, each with a bootstrap interval.

  Example:
    >>> import numpy as np
    >>> found = summary([np.array([1.0, 2.0]), np.array([3.0])])
    >>> found["n"], found["requests"], found["50"][0]
    (3, 2, 2.0)

  Args:
    groups: Samples of each request, float64 ``[n]``.
    seed: Seed of the random generator.

  Returns:
    "n", the number of samples; "requests", the number of requests; for each
    percentile, as text ("99.9"), its value and the ends of its 95% interval
    (`scipy.stats.bootstrap`'s percentile method), None without samples;
    "curve", the values that fractions `TAIL_FRACTIONS` of the samples exceed.
  """
  groups = [g for g in groups if len(g)]
  if not groups:
    return {"n": 0, "requests": 0, "curve": []} | {
      f"{p:g}": [None] * 3 for p in PERCENTILES
    }
  pooled = np.concatenate(groups)
  owners = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
  order = np.argsort(pooled, kind="stable")
  pooled, owners = pooled[order], owners[order]
  rng, shares = np.random.default_rng(seed), np.array(PERCENTILES) / 100
  drawn = np.empty((_DRAWS, len(PERCENTILES)))
  for row in drawn:
    chosen = rng.integers(len(groups), size=len(groups))
    # Draws requests with replacement. The weights avoid building the sample:
    # percentiles come from cumulative weights of the sorted samples.
    weights = np.bincount(chosen, minlength=len(groups))
    up_to = np.cumsum(weights[owners])
    places = np.searchsorted(up_to, shares * up_to[-1], side="left")
    row[:] = pooled[np.minimum(places, len(pooled) - 1)]
  rest = (100 - _CONFIDENCE_PERCENT) / 2
  ends = np.percentile(drawn, (rest, 100 - rest), axis=0)
  values = np.percentile(pooled, PERCENTILES)
  found: dict[str, Any] = {
    f"{p:g}": [float(v), float(low), float(high)]
    for p, v, low, high in zip(PERCENTILES, values, *ends, strict=True)
  }
  curve = np.quantile(pooled, 1 - np.array(TAIL_FRACTIONS)).tolist()
  return found | {"n": len(pooled), "requests": len(groups), "curve": curve}


def format_percentile(found: Mapping[str, Any], percentile: str) -> str:
  """Formats a percentile and its interval as a cell of a table."""
  value, low, high = found[percentile]
  if value is None:
    return "-"
  return f"{value:.3g} ({low:.3g} to {high:.3g})"


def jain(values: np.ndarray) -> float:
  """Returns Jain's index of fairness, from 1 / n to 1 if all are equal.

  Source: Jain, Chiu and Hawe, DEC-TR-301, 1984.

  Args:
    values: Amount that each of n clients receives, ``[n]``.

  Example:
    >>> jain(np.array([2.0, 2.0])), jain(np.array([1.0, 0.0]))
    (1.0, 0.5)
  """
  if not values.any():  # all are equal
    return 1.0
  values = values / values.max()  # their squares might overflow
  return float(values.sum() ** 2 / (len(values) * (values**2).sum()))
