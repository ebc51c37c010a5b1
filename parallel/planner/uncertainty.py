"""What ranges of knobs make of a datacentre's results: draws, and a tornado.

Knobs that nobody decides are drawn independently, each from the triangle over
its range whose peak is its value. That ranges are wide or narrow is somebody's
judgement; so is what comes out. The tornado has decisions, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallel import checks
from parallel.planner import datacentre, knobs


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
    values: Knobs that are not as in ``KNOBS``. One that is outside of its
      range widens it.
    given: As for `datacentre.plan`.
  """
  found = {}
  for key in datacentre.knobs_of(given):
    knob = knobs.KNOBS[key]
    value = values.get(key, knob.value)
    if key == given:  # what is given is known
      continue
    low, high = min(knob.low, value), max(knob.high, value)
    if low < high:
      found[key] = low, value, high
  return found


def draws(
  values: Mapping[str, float], given: str = "budget", *,
  num_draws: int = 10_000, seed: int = 0,
) -> dict[str, np.ndarray]:
  """Computes plans of drawn knobs.

  Args:
    values: As for `ranges`.
    given: As for `datacentre.plan`.
    num_draws: How many plans.
    seed: Of the draws.

  Returns:
    Knobs and results by their names, float64 ``[num_draws]``.
  """
  checks.at_least("num_draws", num_draws)
  rng = np.random.default_rng(seed)
  fixed = {
    key: np.full(num_draws, float(value)) for key, value in values.items()
  }
  drawn = {
    key: rng.triangular(*of, size=num_draws)
    for key, of in ranges(values, given).items()
    if key not in knobs.DECISIONS
  }
  found = datacentre.plan(fixed | drawn, given)
  return {
    key: np.broadcast_to(np.asarray(value, float), (num_draws,))
    for key, value in found.items()
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
    given: As for `datacentre.plan`.

  Raises:
    ValueError: There is no such result.
  """
  checks.known("target=", target, datacentre.results(given))
  bars = []
  for key, (low, _, high) in ranges(values, given).items():
    ends: list[Any] = [
      datacentre.plan({**values, key: end}, given)[target]
      for end in (low, high)
    ]
    if ends[0] != ends[1]:
      bars.append(Bar(key, key in knobs.DECISIONS, *map(float, ends)))
  return sorted(bars, key=lambda bar: -abs(bar.high - bar.low))
