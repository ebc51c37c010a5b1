"""Sum of partial blocks, add and norm: kernels compared with the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel.kernels.reduce_add_norm import api, gpu, tpu
from parallel.kernels.reduce_add_norm.cases import CASES, ReduceAddNormCase
from tests.parallel.kernels.compare import KERNELS, assert_close
from tests.parallel.kernels.limits import F2, F4, F8, assert_limit, limits

INT8 = jnp.dtype("int8")


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
      private_scale=case.private_scale, eps=0.3,
      implementation=implementation,
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
def test_extreme_values_of_a_rank_stay_in_their_rows(implementation):
  case = CASES["odd"]
  (shared, private, partial, *others), weights = draw(case)
  for row, value in enumerate((np.inf, -np.inf, np.nan, 3e38, 1e-40)):
    partial = partial.at[1, row, 2].set(value)
  operands = (shared, private, partial, *others)
  ours = outputs_and_gradients(operands, weights, case, implementation)[0]
  theirs = outputs_and_gradients(operands, weights, case, "reference")[0]
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_sum_over_ranks_is_rounded_once_before_the_add():
  """In bfloat16, 256 + 1 rounds to 256, but 257 + 2^-8 to 258."""
  partial = jnp.asarray(
    [[256.0, 1.0], [1.0, 2.0**-8], [-256.0, 0.0], [2.0**-8, 0.0]], jnp.bfloat16
  )[:, None]
  stream = jnp.asarray([[0.0, 256.0]], jnp.bfloat16)
  for implementation in (*KERNELS, "reference"):
    shared, _, _ = jax.jit(functools.partial(
      api.reduce_add_norm, implementation=implementation
    ))(stream, stream, partial, None, 0 * stream, jnp.ones(4))
    assert shared.tolist() == [[1.0, 256.0]]


def test_invalid_blocks_are_refused():
  x = jnp.zeros((2, 6))
  with pytest.raises(ValueError, match="4 scales cannot cover 6 shared"):
    api.reduce_add_norm(
      x, x, jnp.zeros((2, 2, 6), jnp.int8), jnp.ones((2, 2, 4)), x,
      jnp.ones(12),
    )
  x = jax.ShapeDtypeStruct((8, 20_000), jnp.float32)
  partial = jax.ShapeDtypeStruct((8, 8, 20_000), jnp.float32)
  chosen = api.select_kernel(x, x, partial, None, ("tpu", "gpu", "reference"))
  assert "8 x 20000 + 20000 channels" in chosen.refused["tpu"]
  # All channels must fit the backward pass.
  assert "40000 > 32768: a row must fit the registers" in chosen.refused["gpu"]


@pytest.mark.quick
@limits([
  (gpu.refusal, (1, 1, 0, F4, 64, F4, None),
   (1, 1, 0, F4, 65, F4, None), "65 ranks > 64"),
  (gpu.refusal, (1, 1, 0, F4, 1, F4, None),
   (1, 0, 1, F4, 1, F4, None), "nothing to sum"),
  (tpu.refusal, (1, 1, 0, F4, 1, F2, None), (0, 1, 0, F4, 1, F2, None),
   "nothing to sum"),
  (tpu.refusal, (1, 1, 9, F4, 1, F2, None), (1, 0, 9, F4, 1, F2, None),
   "nothing to sum"),
  (tpu.refusal, (1, 256, 0, F4, 1, INT8, 128), (1, 192, 0, F4, 1, INT8, 96),
   "96 channels per scale: a multiple of 128"),
  (tpu.refusal, (1, 128, 0, F4, 1, INT8, 128), (1, 128, 0, F4, 1, INT8, None),
   "dtype int8"),
  (tpu.refusal, (1, 8, 0, F2, 1, F4, None), (1, 8, 0, F8, 1, F4, None),
   "dtype float64"),
  # 16 rows of 1,024 + 1,024 channels: four arrays twice, three in float32, and
  # the partial sums twice.
  (tpu.refusal, (16, 1024, 1024, F2, 114, F2, None),
   (16, 1024, 1024, F2, 115, F2, None), "115 x 1024 + 1024 channels"),
  (tpu.refusal, (16, 1024, 1024, F4, 106, F2, None),
   (16, 1024, 1024, F4, 107, F2, None), "16 rows do not fit 8 MB"),
  # One row of 128 scales per rank as well.
  (tpu.refusal, (16, 1024, 1024, F2, 152, INT8, 128),
   (16, 1024, 1024, F2, 153, INT8, 128), "153 x 1024"),
])
def test_limit_separates_supported_from_refused_operands(
  refusal, supported, refused, reason
):
  assert_limit(refusal, supported, refused, reason)


@pytest.mark.quick
@pytest.mark.parametrize(("case", "forward"), [
  # Per row: three arrays, the private update, and the partial sums.
  (ReduceAddNormCase(2, 4, 6, 3), 2 * (2 * 36 + 3 * 2 * 4) + 40),
  (ReduceAddNormCase(2, 4, 6, 3, "float32"), 2 * (4 * 36 + 3 * 4 * 4) + 40),
  (ReduceAddNormCase(2, 4, 6, 3, block=2), 2 * (2 * 36 + 3 * (4 + 8)) + 40),
])
def test_minimum_bytes_of_a_sum_and_norm(case, forward):
  assert case.forward_bytes == forward
  assert case.private_scale**2 == pytest.approx(8)
