"""Sum of partial blocks, add and norm: kernels compared with the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel.kernels.reduce_add_norm import api
from parallel.kernels.reduce_add_norm.cases import CASES, Case
from tests.parallel.kernels.compare import assert_close

KERNELS = ("tpu_interpret", "gpu_interpret")


def draw(case):
  rng = np.random.default_rng(0)

  def normal(*shape, dtype=case.dtype):
    return jnp.asarray(rng.normal(size=shape), dtype)

  n, k, p = case.rows, case.shared, case.private
  scales = None
  partial = normal(case.ranks, n, k)
  if case.block:
    partial = jnp.asarray(
      rng.integers(-127, 128, (case.ranks, n, k)), jnp.int8
    )
    shape = case.ranks, n, k // case.block
    scales = jnp.asarray(rng.uniform(0.01, 0.1, shape), jnp.float32)
  operands = (
    normal(n, k), normal(n, p), partial, scales, normal(n, p),
    normal(k + p, dtype="float32"),
  )
  return operands, (normal(n, k), normal(n, p), normal(n, k + p))


@functools.partial(jax.jit, static_argnums=(2, 3))
def outputs_and_gradients(operands, weights, case, implementation):
  shared, private, partial, scales, d_private, gain = operands

  def run(shared, private, d_private, gain, partial=partial):
    return api.reduce_add_norm(
      shared, private, partial, scales, d_private, gain,
      private_scale=case.private_scale, implementation=implementation,
    )

  inputs = shared, private, d_private, gain
  if not case.block:
    inputs += (partial,)
  out, transpose = jax.vjp(run, *inputs)
  return out, transpose(tuple(weights))


@pytest.mark.rotated
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_reference(name, implementation):
  case = CASES[name]
  operands, weights = draw(case)
  ours = outputs_and_gradients(operands, weights, case, implementation)
  theirs = outputs_and_gradients(operands, weights, case, "reference")
  assert_close(ours, theirs, case.dtype, rounds=4)


@pytest.mark.parametrize("implementation", KERNELS)
def test_extreme_values(implementation):
  """Puts each value of one rank into a separate row."""
  case = Case(8, 16, 8, 3, "float32")
  (shared, private, partial, *others), weights = draw(case)
  for row, value in enumerate((np.inf, -np.inf, np.nan, 3e38, 1e-40)):
    partial = partial.at[1, row, 2].set(value)
  operands = (shared, private, partial, *others)
  ours = outputs_and_gradients(operands, weights, case, implementation)[0]
  theirs = outputs_and_gradients(operands, weights, case, "reference")[0]
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_partial_blocks_are_summed_in_float32():
  """256 + 1 rounds to 256 in bfloat16."""
  ones = [256.0, 1.0, -256.0, 2.0**-8]
  partial = jnp.asarray(ones, jnp.bfloat16)[:, None, None]
  zero = jnp.zeros((1, 1), jnp.bfloat16)
  for implementation in (*KERNELS, "reference"):
    shared, _, _ = api.reduce_add_norm(
      zero, zero, partial, None, zero, jnp.ones(2),
      implementation=implementation,
    )
    assert float(shared[0, 0]) == float(jnp.bfloat16(1 + 2.0**-8))


def test_invalid_blocks_are_refused():
  x = jnp.zeros((2, 6))
  with pytest.raises(ValueError, match="4 scales for 6 shared"):
    api.reduce_add_norm(
      x, x, jnp.zeros((2, 2, 6), jnp.int8), jnp.ones((2, 2, 4)), x,
      jnp.ones(12),
    )
  x = jax.ShapeDtypeStruct((8, 1 << 18), jnp.float32)
  partial = jax.ShapeDtypeStruct((8, 8, 1 << 18), jnp.float32)
  chosen = api.choice(x, x, partial, None, ("tpu", "gpu", "reference"))
  assert "do not fit" in chosen.refused["tpu"]
  assert "registers" in chosen.refused["gpu"]


def test_sum_over_ranks_is_rounded_before_the_add():
  """In bfloat16, 1 + 2^-8 rounds to 1, and 256 + 1 to 256: not 258."""
  partial = jnp.asarray([1.0, 2.0**-8], jnp.bfloat16)[:, None, None]
  stream = jnp.full((1, 1), 256.0, jnp.bfloat16)
  for implementation in (*KERNELS, "reference"):
    shared, _, _ = api.reduce_add_norm(
      stream, stream, partial, None, 0 * stream, jnp.ones(2),
      implementation=implementation,
    )
    assert float(shared[0, 0]) == 256.0
