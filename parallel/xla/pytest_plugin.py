"""Fixture of pytest, for projects that have this package installed."""

from collections.abc import Callable

import pytest


@pytest.fixture(name="assert_sends")
def _assert_sends() -> Callable:
  """Function `parallel.xla.expectations.assert_sends`."""
  from parallel.xla import expectations  # imports jax

  return expectations.assert_sends
