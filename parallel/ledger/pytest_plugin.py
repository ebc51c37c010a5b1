"""Fixture of pytest, for projects that have this package installed.

A conftest.py loads it: ``pytest_plugins = ["parallel.ledger.pytest_plugin"]``.
It is not registered as an entry point: pytest would then rewrite assertions in
this whole distribution, which numba cannot compile.
"""

from collections.abc import Callable

import pytest


@pytest.fixture(name="assert_sends")
def _assert_sends() -> Callable:
  """Function `parallel.ledger.expectations.assert_sends`."""
  from parallel.ledger import expectations  # imports jax

  return expectations.assert_sends
