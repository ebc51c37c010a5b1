"""Skips tests that need root or namespaces, on a machine that lacks them."""

import pytest


def skip(error: ValueError) -> None:
  """Skips the test if the machine lacks something; raises other errors.

  Args:
    error: Error of `caatnet.benchmarks.harness`; it names what cannot be
      done "here".
  """
  if " here: " not in str(error):
    raise error
  pytest.skip(str(error))
