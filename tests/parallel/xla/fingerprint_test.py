"""A fingerprint is of what a program computes, not of where it is written."""

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

from parallel.xla import fingerprint

SOURCE = """
def kernel(x_ref, y_ref):
  y_ref[...] = x_ref[...] * {factor}

def f(x):
  y = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jnp.sin(pl.pallas_call(kernel, out_shape=y, name="k")(x))
"""


def lower(factor, lines):
  """Lowers a program with a kernel that stands behind so many empty lines."""
  scope = {"jax": jax, "jnp": jnp, "pl": pl}
  code = "\n" * lines + SOURCE.format(factor=factor)
  exec(compile(code, f"{lines}.py", "exec"), scope)
  traced = jax.jit(scope["f"]).trace(jax.ShapeDtypeStruct((8, 128), "float32"))
  return traced.lower(lowering_platforms=("tpu",))


def taken(factor, lines):
  return fingerprint.fingerprint(
    fingerprint.lowered_without_locations(lambda: lower(factor, lines))
  )


def test_a_line_above_a_kernel_changes_nothing():
  assert taken(2.0, 0) == taken(2.0, 3)
  # Without that care it would.
  there, moved = (fingerprint.fingerprint(lower(2.0, n)) for n in (1, 4))
  assert there != moved


def test_another_kernel_has_another_fingerprint():
  assert taken(2.0, 0) != taken(3.0, 0)


def test_locations_are_back_after_an_error():
  limit = jax.config.jax_traceback_in_locations_limit
  with pytest.raises(ZeroDivisionError):
    fingerprint.lowered_without_locations(lambda: 1 / 0)
  assert jax.config.jax_traceback_in_locations_limit == limit != 0
