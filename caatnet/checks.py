"""Errors that name the config's key and what would do."""

from collections.abc import Sequence


def positive(key: str, value: int) -> None:
  """Refuses numbers below 1."""
  if value < 1:
    raise ValueError(f"{key}={value} must be at least 1")


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
  """Refuses what is not in a list."""
  if value not in allowed:
    names = ", ".join(repr(a) for a in allowed)
    raise ValueError(f"{key}={value!r} must be one of {names}")
