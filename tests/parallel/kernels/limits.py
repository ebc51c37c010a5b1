"""Limits of kernels: the last operands supported, and the first refused."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import pytest

F2, F4, F8 = (jnp.dtype(x) for x in ("bfloat16", "float32", "float64"))


def limits(rows: Sequence[tuple]) -> pytest.MarkDecorator:
  """Parametrizes a test by the rows ``refusal, supported, refused, reason``."""
  return pytest.mark.parametrize(
    ("refusal", "supported", "refused", "reason"), rows,
    ids=[row[-1] for row in rows],
  )


def assert_limit(
  refusal: Callable[..., str | None], supported: Any, refused: Any, reason: str
) -> None:
  """Asserts that operands are supported, and that others are refused.

  Args:
    refusal: The function that gives reasons.
    supported: Its last arguments that are supported; keywords if a dict.
    refused: The first ones that are not.
    reason: Part of the reason.
  """
  def of(arguments):
    if isinstance(arguments, dict):
      return refusal(**arguments)
    return refusal(*arguments)

  assert of(supported) is None
  assert reason in of(refused)
