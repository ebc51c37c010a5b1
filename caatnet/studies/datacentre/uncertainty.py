"""Uncertainty of a datacentre's results: random draws and a tornado diagram.

Knobs that are not decisions are drawn independently, each from a triangular
distribution over its range with the mode at its value. The widths of the ranges
are judgements, and so are the resulting quantiles. The tornado diagram shows
the effect of one knob at a time, also of knobs that are decisions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from caatnet.studies.datacentre import closed_forms, knobs
from parallel.base import checks


class TornadoBar(NamedTuple):
  """Effect of one knob on a result, with all other knobs fixed.

  Attributes:
    knob: Name of the knob.
    decided: Whether the knob is a decision.
    low: Result at the low end of the knob's range.
    high: Result at the high end.
  """

  knob: str
  decided: bool
  low: float
  high: float


def ranges(
  values: Mapping[str, float], given: str = "budget"
) -> dict[str, tuple[float, float, float]]:
  """Returns (low, value, high) of each knob of a plan that has a range.

  Args:
    values: Knobs that differ from ``KNOBS``; their ranges scale with them.
    given: Argument of `closed_forms.plan`.
  """
  found = {}
  for key in closed_forms.knobs_of(given):
    value = values.get(key, knobs.KNOBS[key].value)
    low, high = knobs.scaled_range(key, value)
    if low < high and key != given:  # the given quantity is fixed
      found[key] = low, value, high
  return found


def draws(
  values: Mapping[str, float], given: str = "budget", *,
  num_draws: int = 10_000, seed: int = 0,
) -> dict[str, np.ndarray]:
  """Computes plans with randomly drawn knobs.

  Args:
    values: Knobs, as for `ranges`.
    given: Argument of `closed_forms.plan`.
    num_draws: Number of draws.
    seed: Seed of the random generator.

  Returns:
    Knobs and results by their names, float64 ``[n]`` for n valid draws. Invalid
    ones, such as a budget below the price of a rack, are excluded.

  Raises:
    ValueError: No draw is a valid plan.
  """
  checks.at_least("num_draws", num_draws)
  rng = np.random.default_rng(seed)
  found = {
    key: np.full(num_draws, float(value)) for key, value in values.items()
  } | {
    key: rng.triangular(*of, size=num_draws)
    for key, of in ranges(values, given).items()
    if key not in knobs.DECISIONS
  }
  there = closed_forms.is_feasible(found, given)  # bool [num_draws]
  if not there.any():
    raise ValueError(
      f"none of num_draws={num_draws} draws is a feasible plan; use more "
      "draws, or a larger budget"
    )
  plans = closed_forms.plan(
    {key: value[there] for key, value in found.items()}, given
  )
  return {
    key: np.broadcast_to(np.asarray(value, float), (int(there.sum()),))
    for key, value in plans.items()
  }


def quantiles(
  drawn: Mapping[str, np.ndarray], keys: Sequence[str]
) -> dict[str, list[float]]:
  """Returns the 5%, 50% and 95% quantiles of results."""
  levels = 0.05, 0.5, 0.95
  return {key: np.quantile(drawn[key], levels).tolist() for key in keys}


def tornado(
  target: str, values: Mapping[str, float], given: str = "budget"
) -> list[TornadoBar]:
  """Returns the effect of each knob on a result, the largest first.

  Args:
    target: Name of the result.
    values: Knobs, as for `ranges`.
    given: Argument of `closed_forms.plan`.

  Raises:
    ValueError: The result is unknown.
  """
  checks.known("target=", target, closed_forms.result_specs(given))
  bars = []
  for key, (low, _, high) in ranges(values, given).items():
    if knobs.KNOBS[key].whole:
      low, high = max(1.0, np.floor(low)), np.ceil(high)  # integers
    ends: list[Any] = [
      closed_forms.plan({**values, key: end}, given)[target]
      if closed_forms.is_feasible({**values, key: end}, given) else np.nan
      for end in (low, high)
    ]
    if ends[0] != ends[1] and not np.isnan(ends).any():
      bars.append(TornadoBar(key, key in knobs.DECISIONS, *map(float, ends)))
  return sorted(bars, key=lambda bar: -abs(bar.high - bar.low))
