"""Allowed dtypes, and names of config sections in validation errors.

The keys of configs and their ranges are declared in `caatnet.schema`.
"""

from collections.abc import Iterable, Iterator
import contextlib
import re

# Allowed dtypes of activations and of reductions.
DTYPES = ("float32", "bfloat16", "float16")


@contextlib.contextmanager
def prefix_error_keys(
  prefix: str, keys: Iterable[str], joint: str = "."
) -> Iterator[None]:
  """Context manager that adds a section's name to keys in a ``ValueError``.

  With the prefix "section", ``pieces=3 must be ...`` becomes
  ``section.pieces=3 must be ...``.

  Args:
    prefix: Name of the section.
    keys: Keys of the section.
    joint: Separator between prefix and key; "" for flags, with the prefix "--".
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
