"""Skips tests that need root or namespaces, on a machine that lacks them."""

from collections.abc import Iterator
import contextlib

import pytest


@contextlib.contextmanager
def skips() -> Iterator[None]:
  """Skips the test by an error that names what cannot be done "here"."""
  try:
    yield
  except ValueError as error:
    if " here: " not in str(error):
      raise
    pytest.skip(str(error))
