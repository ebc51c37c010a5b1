"""Operands of different dtypes are an error in parallel/."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_dtype_promotion(request):
  """Makes promotion an error, but for tests of optax, which needs it."""
  marked = request.node.get_closest_marker("mixed_dtypes")
  with jax.numpy_dtype_promotion("standard" if marked else "strict"):
    yield
