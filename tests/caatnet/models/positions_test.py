"""Rotary positions, and the scaling of their frequencies."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.models.transformer.positions import (
  LinearScaling,
  Llama3Scaling,
  parse_scaling,
  rotate,
)


def rotated(x, base=100.0, **options):
  return np.asarray(rotate(jnp.asarray(x), base, **options))


def test_rotation_depends_on_relative_positions():
  rng = np.random.default_rng(0)
  q, k = rng.normal(size=(2, 1, 6, 2, 8)).astype("f4")
  q[:], k[:] = q[:, :1], k[:, :1]  # equal at all positions
  a, b = rotated(q), rotated(k)
  products = np.einsum("bthd,bshd->hts", a, b)
  for shift in range(1, 5):
    diagonal = np.diagonal(products, -shift, axis1=1, axis2=2)
    np.testing.assert_allclose(
      diagonal, np.broadcast_to(diagonal[:, :1], diagonal.shape), rtol=1e-4,
      atol=1e-5,
    )
  np.testing.assert_allclose(a[:, 0], q[:, 0], rtol=1e-6)
  # Channels i and i + 4 are one pair, of frequency base^(-i / 4).
  angle = 3 * 100.0 ** (-np.arange(4) / 4)
  first, second = q[:, 3, :, :4], q[:, 3, :, 4:]
  np.testing.assert_allclose(a[:, 3], np.concatenate([
    first * np.cos(angle) - second * np.sin(angle),
    second * np.cos(angle) + first * np.sin(angle),
  ], axis=-1), rtol=1e-4, atol=1e-5)


def test_given_positions_replace_those_of_the_array():
  x = np.random.default_rng(0).normal(size=(2, 3, 1, 4)).astype("f4")
  whole = rotated(np.repeat(x[:, :1], 9, axis=1))
  at = np.array([[4, 0, 8], [1, 2, 7]])
  found = rotated(np.repeat(x[:, :1], 3, axis=1), positions=jnp.asarray(at))
  np.testing.assert_allclose(
    found, np.take_along_axis(whole, at[..., None, None], axis=1), rtol=1e-5,
    atol=1e-6,
  )
  # A factor of 2 reaches half of the angles.
  half = rotated(np.repeat(x[:, :1], 9, axis=1), scaling=LinearScaling(2.0))
  np.testing.assert_allclose(half[:, 8], whole[:, 4], rtol=1e-5, atol=1e-6)


def test_long_wavelengths_are_stretched_only():
  scaling = Llama3Scaling(4.0, 1.0, 3.0, 64)
  periods = np.array([0.25, 1.0, 1.5, 2.0, 3.0, 9.0])
  frequencies = 2 * np.pi * periods / 64
  ratios = scaling(frequencies) / frequencies
  np.testing.assert_allclose(
    ratios, [0.25, 0.25, 0.4375, 0.625, 1.0, 1.0], rtol=1e-9
  )


@pytest.mark.parametrize("values", [
  ("linear", 1), ("linear", 2.5), ("llama3", 1.0, 1.0, 4.0, 1),
])
def test_smallest_scalings_are_valid(values):
  found = parse_scaling(values)
  assert dataclasses.astuple(found) == values[1:]
  assert parse_scaling(()) is None


@pytest.mark.parametrize(("values", "message"), [
  (("linear", 0.99), "'linear' needs a finite factor >= 1"),
  (("linear", float("inf")), "'linear' needs a finite factor >= 1"),
  (("llama3", 0.5, 1.0, 4.0, 8), "'llama3' needs finite numbers"),
  (("llama3", 2.0, 0.0, 4.0, 8), "0 < low < high"),
  (("llama3", 2.0, 4.0, 4.0, 8), "0 < low < high"),
  (("llama3", 2.0, 1.0, float("inf"), 8), "0 < low < high"),
  (("llama3", 2.0, 1.0, 4.0, 0), "context >= 1"),
  (("llama3", 2.0, 1.0, 4.0, float("inf")), "context >= 1"),
  (("linear",), r"must be \(\) or one of \('linear', factor\); \('llama3', "),
  (("yarn", 2.0), r"must be \(\) or one of"),
  (("linear", True), "must have numbers"),
])
def test_invalid_scaling_is_named(values, message):
  with pytest.raises(ValueError, match=rf"^rope_scaling=\(.*{message}"):
    parse_scaling(values)
