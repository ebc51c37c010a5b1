"""Errors that name the wrong value, its config key, and what is allowed.

The keys of configs are declared in `caatnet.config.schema`, with their ranges.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import re

# What the dtypes of activations and of reductions may be.
DTYPES = ("float32", "bfloat16", "float16")


def one_of(key: str, value: str | None, allowed: Sequence[str]) -> None:
  """Refuses a value that is not in a list.

  Args:
    key: What messages call the value.
    value: The value.
    allowed: The list.

  Raises:
    ValueError: The value is not in the list.
  """
  if value not in allowed:
    names = ", ".join(repr(a) for a in allowed)
    raise ValueError(f"{key}={value!r} must be one of {names}")


@contextlib.contextmanager
def naming(
  prefix: str, keys: Iterable[str], joint: str = "."
) -> Iterator[None]:
  """Puts a section's name before the keys in the message of a ``ValueError``.

  With the prefix "config.outer", ``pieces=3 must be ...`` becomes
  ``config.outer.pieces=3 must be ...``.

  Args:
    prefix: The name of the section.
    keys: The section's keys.
    joint: What stands between both; "" for flags, whose prefix is "--".
  """
  try:
    yield
  except ValueError as error:
    names = "|".join(map(re.escape, keys))
    if not names:
      raise
    # A key is followed by "=" and is no part of a longer word or dotted name.
    text = re.sub(
      rf"(?<![\w.])({names})(?==)", rf"{prefix}{joint}\1", str(error)
    )
    raise ValueError(text) from error
