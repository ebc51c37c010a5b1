"""Fingerprints: depend on what a program computes, not on source locations."""

import importlib.metadata

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

from parallel.ledger import fingerprint

SOURCE = """
def kernel(x_ref, y_ref):
  y_ref[...] = x_ref[...] * {factor}

def f(x):
  y = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return jnp.sin(pl.pallas_call(kernel, out_shape=y, name="k")(x))
"""


def lower(factor, lines):
  """Lowers a program whose kernel follows that many empty lines."""
  scope = {"jax": jax, "jnp": jnp, "pl": pl}
  code = "\n" * lines + SOURCE.format(factor=factor)
  exec(compile(code, f"{lines}.py", "exec"), scope)
  traced = jax.jit(scope["f"]).trace(jax.ShapeDtypeStruct((8, 128), "float32"))
  return traced.lower(lowering_platforms=("tpu",))


def taken(factor, lines):
  return fingerprint.fingerprint(
    fingerprint.lowered_without_locations(lambda: lower(factor, lines))
  )


def test_line_above_a_kernel_does_not_change_the_fingerprint():
  assert taken(2.0, 0) == taken(2.0, 3)
  # The fingerprint of an ordinary lowering does depend on it.
  there, moved = (fingerprint.fingerprint(lower(2.0, n)) for n in (1, 4))
  assert there != moved


def test_another_kernel_has_another_fingerprint():
  assert taken(2.0, 0) != taken(3.0, 0)


def named(name, inner, operation):
  """Returns the fingerprint of a function that calls a private function."""

  def private(x):
    return operation(x)

  private.__name__ = inner

  def f(x):
    return jax.jit(private)(x) + jax.jit(private)(2 * x)

  f.__name__ = name
  lowered = fingerprint.lowered_without_locations(
    lambda: jax.jit(f).lower(jax.ShapeDtypeStruct((8,), "float32"))
  )
  assert f"func.func private @{inner}" in lowered.as_text()
  return fingerprint.fingerprint(lowered)


def test_function_names_do_not_matter():
  first = named("step", "layer", jnp.sin)
  assert named("train_step", "block", jnp.sin) == first
  assert named("step", "layer", jnp.cos) != first


def test_callees_matter_and_strings_are_kept():
  text = """module @jit_f {
  func.func public @main() { call @a() call @b() custom_call @a_kernel() }
  func.func private @a() { x = "say @a, \\"@b\\"" }
  func.func private @b() { }
}"""
  renamed = fingerprint.without_names(text)
  assert renamed == fingerprint.without_names(
    text.replace("@a(", "@layer(").replace("jit_f", "jit_g")
  )
  assert 'x = "say @a, \\"@b\\""' in renamed
  assert "@main" in renamed
  assert "@a_kernel" in renamed
  swapped = text.replace("call @a() call @b()", "call @b() call @a()")
  # Functions are numbered by their bodies, so the calls differ.
  assert fingerprint.without_names(swapped) != renamed


def test_location_settings_are_restored_after_an_error():
  limit = jax.config.jax_traceback_in_locations_limit
  with pytest.raises(ZeroDivisionError):
    fingerprint.lowered_without_locations(lambda: 1 / 0)
  assert jax.config.jax_traceback_in_locations_limit == limit != 0


@pytest.mark.parametrize(("platform", "packages"), [
  ("cpu", ["jax", "jaxlib"]), ("tpu", ["jax", "jaxlib", "libtpu"]),
  ("gpu", ["jax", "jaxlib", "jax-cuda12-plugin"]),
])
def test_versions_include_the_compiler_of_the_platform(
  monkeypatch, platform, packages
):
  """The plugins of other platforms need not be installed here."""
  monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1-{name}")
  found = fingerprint.versions(platform)
  assert found == {name: f"1-{name}" for name in packages}
