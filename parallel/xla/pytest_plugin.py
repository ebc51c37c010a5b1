"""Fixture of pytest, for projects that have this package installed.

A conftest.py loads it: ``pytest_plugins = ["parallel.xla.pytest_plugin"]``.
It is no entry point, since pytest would then rewrite the assertions of this
whole distribution, which numba cannot compile.
"""

from collections.abc import Callable

import pytest


@pytest.fixture(name="assert_sends")
def _assert_sends() -> Callable:
  """Function `parallel.xla.expectations.assert_sends`."""
  from parallel.xla import expectations  # imports jax

  return expectations.assert_sends
