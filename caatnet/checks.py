"""Errors that name what is wrong and what would do.

Numbers are checked by `parallel.checks`.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import re

# What activations and operands of reductions may be.
DTYPES = ("float32", "bfloat16", "float16")


def one_of(key: str, value: str | None, allowed: Sequence[str]) -> None:
  """Refuses what is not in a list."""
  if value not in allowed:
    names = ", ".join(repr(a) for a in allowed)
    raise ValueError(f"{key}={value!r} must be one of {names}")


@contextlib.contextmanager
def naming(prefix: str, keys: Iterable[str]) -> Iterator[None]:
  """Adds a section to the keys in the message of a ``ValueError``.

  With the prefix "config.outer", ``pieces=3 must be ...`` becomes
  ``config.outer.pieces=3 must be ...``.
  """
  try:
    yield
  except ValueError as error:
    names = "|".join(map(re.escape, keys))
    if not names:
      raise
    text = re.sub(
      rf"(?<![\w.])({names})(?==)", rf"{prefix}.\1", str(error)
    )
    raise ValueError(text) from error
