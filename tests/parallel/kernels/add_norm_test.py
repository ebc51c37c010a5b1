"""Fused residual add and norm: kernels compared with the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel.kernels.add_norm import api, reference
from parallel.kernels.add_norm.cases import CASES, Case
from tests.parallel.kernels.compare import assert_close

KERNELS = ("tpu_interpret", "gpu_interpret")


def draw(case, seed=0):
  rng = np.random.default_rng(seed)
  dtype = jnp.dtype(case.dtype)

  def normal(width):
    return jnp.asarray(rng.normal(size=(case.rows, width)), dtype)

  stream = normal(case.shared), normal(case.private)
  update = (None, None)
  if case.update:
    update = normal(case.shared), normal(case.private)
  width = case.shared + case.private
  gain = jnp.asarray(rng.normal(size=width), jnp.float32)
  weights = normal(case.shared), normal(case.private), normal(width)
  return (*stream, *update, gain), weights


@functools.partial(jax.jit, static_argnums=(2, 3))
def outputs_and_gradients(operands, weights, case, implementation):
  def run(operands):
    return api.add_norm(
      *operands, private_scale=case.private_scale,
      implementation=implementation,
    )

  out, transpose = jax.vjp(run, operands)
  return out, transpose(tuple(weights))[0]


@pytest.mark.rotated
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_reference(name, implementation):
  case = CASES[name]
  operands, weights = draw(case)
  ours = outputs_and_gradients(operands, weights, case, implementation)
  theirs = outputs_and_gradients(operands, weights, case, "reference")
  assert_close(ours[0], theirs[0], case.dtype)
  # Autodiff rounds each of the terms that the kernels sum in float32.
  assert_close(ours[1], theirs[1], case.dtype, rounds=4)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_values(dtype, implementation):
  """Puts each value into one row; the other rows keep their results."""
  case = Case(9, 12, 9, dtype, 3**0.5)
  operands, weights = draw(case)
  shared, private, *others = operands
  for row, value in enumerate((np.inf, -np.inf, np.nan, 3e38, 1e-40, 1e-20)):
    private = private.at[row, 3].set(value)
  shared, private = shared.at[6].set(0), private.at[6].set(0)
  d_shared, d_private, gain = others
  d_shared, d_private = d_shared.at[6].set(0), d_private.at[6].set(0)
  operands = (shared, private, d_shared, d_private, gain)
  ours = outputs_and_gradients(operands, weights, case, implementation)
  theirs = outputs_and_gradients(operands, weights, case, "reference")
  for a, b in zip(ours[0], theirs[0], strict=True):
    a, b = np.asarray(a, "f4"), np.asarray(b, "f4")
    extreme = ~(np.isfinite(a) & np.isfinite(b))
    np.testing.assert_array_equal(a[extreme], b[extreme])
  assert_close(ours[0], theirs[0], dtype)
  *ours, d_gain = ours[1]
  *theirs, d_gain_theirs = theirs[1]
  # A row whose squares overflow has no derivative to compare.
  kept = np.array([4, 5, 6, 7, 8])
  pick = functools.partial(jax.tree.map, lambda x: x[kept])
  assert_close(pick(ours), pick(theirs), dtype, rounds=4)
  for row in range(3):
    assert np.isnan(np.asarray(ours[1], "f4")[row]).any()
  assert np.isnan(d_gain).any() == np.isnan(d_gain_theirs).any()


def test_sum_is_rounded_before_the_norm():
  """1 + 2^-9 rounds to 1 in bfloat16, in both the stream and its norm."""
  ones = jnp.ones((1, 2), jnp.bfloat16)
  small = jnp.full((1, 2), 2.0**-9, jnp.bfloat16)
  for implementation in (*KERNELS, "reference"):
    shared, private, normed = jax.jit(
      lambda a, b, i=implementation: api.add_norm(
        a, a, b, -b, jnp.ones(4), eps=0.0, implementation=i
      )
    )(ones, small)
    for x in (shared, private, normed):
      np.testing.assert_array_equal(np.asarray(x, "f4"), 1.0)


def test_refusal_gives_the_reason():
  x = jax.ShapeDtypeStruct((8, 1 << 22), jnp.float32)
  empty = jax.ShapeDtypeStruct((8, 0), jnp.float32)
  chosen = api.choice(x, empty, ("tpu", "gpu", "reference"))
  assert chosen.name == "reference"
  assert "do not fit" in chosen.refused["tpu"]
  assert "registers" in chosen.refused["gpu"]
  with pytest.raises(ValueError, match=r"left \(gpu: .* registers"):
    api.choice(x, empty, "gpu")
  with pytest.raises(ValueError, match="'cuda' must be 'auto' or"):
    api.choice(x, empty, "cuda")
  assert api.choice(x, empty).name == "reference"  # on a CPU


def test_reference_equals_the_textbook_formula():
  (shared, private, d_shared, d_private, gain), _ = draw(CASES["odd"])
  new_shared, new_private, normed = reference.add_norm(
    shared, private, d_shared, d_private, gain, private_scale=2.0
  )
  x = np.concatenate(
    [shared + d_shared, private + 2 * d_private], -1, dtype="f8"
  )
  rms = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
  expected = x / rms * np.asarray(gain)
  np.testing.assert_allclose(normed, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
    np.concatenate([new_shared, new_private], -1), x, rtol=1e-6, atol=1e-6
  )


@pytest.mark.parametrize("implementation", KERNELS)
def test_private_scale_applies_to_private_channels_only(implementation):
  """Includes a stream without private channels."""
  case = Case(8, 16, 0, "float32", 2.0)
  operands, weights = draw(case)
  ours = outputs_and_gradients(operands, weights, case, implementation)
  theirs = outputs_and_gradients(operands, weights, case, "reference")
  assert_close(ours, theirs, case.dtype, rounds=4)


@pytest.mark.parametrize("implementation", KERNELS)
def test_kernel_supports_vmap_over_lanes(implementation):
  """Models with more ranks than devices map kernels over lanes."""
  case = CASES["odd"]
  (x, p, d_x, d_p, gain), _ = draw(case)
  lanes = [jnp.stack([y, -y, 2 * y]) for y in (x, p, d_x, d_p)]

  @functools.partial(jax.jit, static_argnums=0)
  def run(implementation, *lanes):
    return jax.vmap(
      lambda *parts: api.add_norm(
        *parts, gain, implementation=implementation
      )
    )(*lanes)

  assert_close(
    run(implementation, *lanes), run("reference", *lanes), case.dtype
  )
