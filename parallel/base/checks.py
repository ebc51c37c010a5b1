"""Validation of numbers, names and option strings; failures are ValueErrors.

Each message starts with the name of the invalid argument, to which
`caatnet.config.sections` adds the config section.
"""

import ast
from collections.abc import Iterable
import difflib
import math
import re
from typing import Any


def divisors(n: int) -> list[int]:
  """Returns the positive divisors of ``n`` in ascending order."""
  small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
  return sorted({*small, *(n // d for d in small)})


def positive(key: str, value: float) -> None:
  """Raises ValueError unless ``value`` is finite and greater than 0."""
  if not 0 < value < math.inf:
    raise ValueError(f"{key}={_format_number(value)} must be positive")


def not_negative(key: str, value: float) -> None:
  """Raises ValueError unless ``value`` is finite and at least 0."""
  if not 0 <= value < math.inf:
    raise ValueError(f"{key}={_format_number(value)} must be at least 0")


def at_least(key: str, value: float, least: int = 1) -> None:
  """Raises ValueError unless ``value`` is an integer of at least ``least``."""
  # Infinities and NaN are tested first, since `int` fails for them. An integer
  # that is too small gets the second, shorter message.
  if not -math.inf < value < math.inf or value != int(value):
    raise ValueError(
      f"{key}={_format_number(value)} must be an integer, at least {least}"
    )
  if value < least:
    raise ValueError(f"{key}={_format_number(value)} must be at least {least}")


def fraction(key: str, value: float) -> None:
  """Raises ValueError unless ``value`` lies in [0, 1]; NaN does not."""
  if not 0 <= value <= 1:
    raise ValueError(f"{key}={_format_number(value)} must lie in [0, 1]")


def _format_number(value: float) -> str:
  """Formats a number with 6 digits; integers too large for float64 as "inf"."""
  try:
    return f"{value:g}"
  except OverflowError:
    return "-inf" if value < 0 else "inf"


def known(what: str, name: str | None, names: Iterable[str]) -> None:
  """Checks that a name is in a list; the error suggests the nearest entry.

  Args:
    what: Prefix of the name in messages, such as "schedule " or "link=".
    name: The name.
    names: The allowed names.

  Raises:
    ValueError: ``name`` is not in ``names``.

  Example:
    >>> known("link=", "ehternet", ["ethernet", "nvlink"])
    Traceback (most recent call last):
    ValueError: link='ehternet' must be one of ...; did you mean ethernet?
  """
  names = list(names)
  if name not in names:
    near = difflib.get_close_matches(str(name), names, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    shown = ", ".join(name or "''" for name in names)
    raise ValueError(
      f"{what}{name!r} must be "
      + (f"one of {shown}{hint}" if names else "left out")
    )


def parse_options(text: str) -> tuple[str, dict[str, Any]]:
  """Parses a name with options, such as ``"dgx:2x8,bandwidth=4e11"``.

  Args:
    text: A name, then options as ``,OPTION=VALUE``. A value is a Python literal
      (a number, True, False, None, a tuple); all other values are strings.

  Returns:
    The name, and a dict of the options by their names.

  Raises:
    ValueError: An option is given twice.

  Example:
    >>> parse_options("dgx:2x8,bandwidth=4e11,rail=True")
    ('dgx:2x8', {'bandwidth': 400000000000.0, 'rail': True})
  """
  # Only commas before ``option=`` separate options: values may contain commas.
  name, *parts = re.split(r",\s*(?=[a-z_]+=)", text)
  found = {}
  for part in parts:
    option, _, value = part.partition("=")
    if option in found:
      raise ValueError(f"{text!r} sets the option {option} twice; set it once")
    try:
      found[option] = ast.literal_eval(value)
    # The errors that the documentation of `literal_eval` lists.
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
      found[option] = value
  return name, found
