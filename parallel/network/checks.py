"""Errors of numbers that models of time cannot take."""

import math


def positive(key: str, value: float) -> None:
  """Refuses what is not above 0, or not finite."""
  if not 0 < value < math.inf:
    raise ValueError(f"{key}={value:g} must be positive")
