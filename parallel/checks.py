"""Errors of numbers that nothing can be computed from, and of options.

The names of arguments are in the messages; whoever read them from a config
adds its section (`caatnet.config.sections`).
"""

import ast
from collections.abc import Iterable
import difflib
import math
import re
from typing import Any


def positive(key: str, value: float) -> None:
  """Refuses what is not above 0, or not finite."""
  if not 0 < value < math.inf:
    raise ValueError(f"{key}={value:g} must be positive")


def not_negative(key: str, value: float) -> None:
  """Refuses what is below 0, or not finite."""
  if not 0 <= value < math.inf:
    raise ValueError(f"{key}={value:g} must be at least 0")


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


def known(what: str, name: str, names: Iterable[str]) -> None:
  """Refuses a name that is not in a list, and names the nearest one.

  Args:
    what: What messages say before the name, as in "schedule " or "link=".
    name: The name.
    names: The list.

  Raises:
    ValueError: The name is not in the list.
  """
  names = list(names)
  if name not in names:
    near = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(
      f"{what}{name!r} must be "
      + (f"one of {', '.join(names)}{hint}" if names else "left out")
    )


def options(text: str) -> tuple[str, dict[str, Any]]:
  """Reads ``"dgx:2x8,bandwidth=4e11"`` as a name and its options.

  Args:
    text: A name, then options as ``,OPTION=VALUE``. A value is a number, True,
      False or None as Python writes them, or else text.

  Raises:
    ValueError: An option is given twice.
  """
  name, *parts = re.split(r",\s*(?=[a-z_]+=)", text)
  found = {}
  for part in parts:
    option, _, value = part.partition("=")
    if option in found:
      raise ValueError(f"{text!r} has the option {option} twice")
    try:
      found[option] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      found[option] = value
  return name, found
