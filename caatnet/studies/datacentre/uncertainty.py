"""What ranges of knobs make of a datacentre's results: draws, and a tornado.

Knobs that nobody decides are drawn independently, each from the triangle over
its range whose peak is its value. That ranges are wide or narrow is somebody's
judgement; so is what comes out. The tornado has decisions, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from caatnet.studies.datacentre import closed_forms, knobs
from parallel import checks


class Bar(NamedTuple):
  """What one knob does to a result, all others being as they are.

  Attributes:
    knob: The knob.
    decided: Whether somebody decides it.
    low: The result at the low end of the knob's range.
    high: The result at the high end.
  """

  knob: str
  decided: bool
  low: float
  high: float


def ranges(
  values: Mapping[str, float], given: str = "budget"
) -> dict[str, tuple[float, float, float]]:
  """Returns low, value and high of the knobs that a plan reads and that vary.

  Args:
    values: Knobs that are not as in ``KNOBS``; ranges go with them.
    given: Argument of `closed_forms.plan`.
  """
  found = {}
  for key in closed_forms.knobs_of(given):
    value = values.get(key, knobs.KNOBS[key].value)
    low, high = knobs.around(key, value)
    if low < high and key != given:  # what is given is known
      found[key] = low, value, high
  return found


def draws(
  values: Mapping[str, float], given: str = "budget", *,
  num_draws: int = 10_000, seed: int = 0,
) -> dict[str, np.ndarray]:
  """Computes plans of drawn knobs.

  Args:
    values: As for `ranges`.
    given: Argument of `closed_forms.plan`.
    num_draws: How many are drawn.
    seed: Of the draws.

  Returns:
    Knobs and results by their names, float64 ``[n]``. Draws that are no plan,
    such as of a budget that buys no rack, are left out.

  Raises:
    ValueError: None is a plan.
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
  there = closed_forms.possible(found, given)
  if not there.any():
    raise ValueError(f"num_draws={num_draws}: none of the draws is a plan")
  plans = closed_forms.plan(
    {key: value[there] for key, value in found.items()}, given
  )
  return {
    key: np.broadcast_to(np.asarray(value, float), (int(there.sum()),))
    for key, value in plans.items()
  }


def quantiles(
  drawn: Mapping[str, np.ndarray], keys: Sequence[str],
  levels: Sequence[float] = (0.05, 0.5, 0.95),
) -> dict[str, list[float]]:
  """Returns quantiles of results, in the order of the levels."""
  return {key: np.quantile(drawn[key], levels).tolist() for key in keys}


def tornado(
  target: str, values: Mapping[str, float], given: str = "budget"
) -> list[Bar]:
  """Returns what each knob does to a result, that which does most first.

  Args:
    target: The result.
    values: As for `ranges`.
    given: Argument of `closed_forms.plan`.

  Raises:
    ValueError: There is no such result.
  """
  checks.known("target=", target, closed_forms.results(given))
  bars = []
  for key, (low, _, high) in ranges(values, given).items():
    if knobs.KNOBS[key].whole:
      low, high = max(1.0, np.floor(low)), np.ceil(high)
    ends: list[Any] = [
      closed_forms.plan({**values, key: end}, given)[target]
      if closed_forms.possible({**values, key: end}, given) else np.nan
      for end in (low, high)
    ]
    if ends[0] != ends[1] and not np.isnan(ends).any():
      bars.append(Bar(key, key in knobs.DECISIONS, *map(float, ends)))
  return sorted(bars, key=lambda bar: -abs(bar.high - bar.low))
