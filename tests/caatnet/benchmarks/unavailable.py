"""Skips tests of what a machine may lack, such as root or namespaces."""

import pytest


def skip(error: ValueError) -> None:
  """Skips the test if the machine lacks something; raises other errors.

  Args:
    error: Error of `caatnet.benchmarks.harness`, which says what cannot be
      done "here".
  """
  if " here: " not in str(error):
    raise error
  pytest.skip(str(error))
