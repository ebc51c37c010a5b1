"""Operands of different dtypes are an error in parallel/."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _strict_dtype_promotion():
  with jax.numpy_dtype_promotion("strict"):
    yield
