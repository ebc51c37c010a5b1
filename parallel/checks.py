"""Errors of numbers that nothing can be computed from.

The names of arguments are in the messages; whoever read them from a config
adds its section (`caatnet.build.sections`).
"""

import math


def positive(key: str, value: float) -> None:
  """Refuses what is not above 0, or not finite."""
  if not 0 < value < math.inf:
    raise ValueError(f"{key}={value:g} must be positive")


def at_least(key: str, value: float, least: int = 1) -> None:
  """Refuses counts below ``least``, and what is no whole number."""
  if not math.isfinite(value) or value != int(value):
    raise ValueError(f"{key}={value:g} must be an integer, at least {least}")
  if value < least:
    raise ValueError(f"{key}={value:g} must be at least {least}")


def fraction(key: str, value: float) -> None:
  """Refuses what does not lie in [0, 1]."""
  if not 0 <= value <= 1:
    raise ValueError(f"{key}={value:g} must lie in [0, 1]")
