"""Validation errors: invalid value, config key, and allowed values.

The keys of configs and their ranges are declared in `caatnet.config.schema`.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import re

# Allowed dtypes of activations and of reductions.
DTYPES = ("float32", "bfloat16", "float16")


def one_of(key: str, value: str | None, allowed: Sequence[str]) -> None:
  """Raises an error unless a value is in a list.

  Args:
    key: Name of the value in messages.
    value: The value.
    allowed: The list.

  Raises:
    ValueError: The value is not in the list.

  Example:
    >>> one_of("dtype", "int8", DTYPES)
    Traceback (most recent call last):
    ValueError: dtype='int8' must be one of 'float32', 'bfloat16', 'float16'
  """
  if value not in allowed:
    names = ", ".join(repr(a) for a in allowed)
    raise ValueError(f"{key}={value!r} must be one of {names}")


@contextlib.contextmanager
def naming(
  prefix: str, keys: Iterable[str], joint: str = "."
) -> Iterator[None]:
  """Prepends a section's name to the keys in the message of a ``ValueError``.

  With the prefix "section", ``pieces=3 must be ...`` becomes
  ``section.pieces=3 must be ...``.

  Args:
    prefix: Name of the section.
    keys: Keys of the section.
    joint: Separator of both; "" for flags, whose prefix is "--".
  """
  try:
    yield
  except ValueError as error:
    names = "|".join(map(re.escape, keys))
    if not names:
      raise
    # A key is followed by "=" and is not part of a longer word or dotted name.
    text = re.sub(
      rf"(?<![\w.])({names})(?==)", rf"{prefix}{joint}\1", str(error)
    )
    raise ValueError(text) from error
