"""Fused residual add and norm: kernels compared with the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel.kernels import calls
from parallel.kernels.add_norm import api, gpu, reference, tpu
from parallel.kernels.add_norm.cases import CASES, AddNormCase
from tests.parallel.kernels.compare import KERNELS, assert_close
from tests.parallel.kernels.limits import F2, F4, F8, assert_limit, limits


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
      *operands, private_scale=case.private_scale, eps=0.3,
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
@pytest.mark.parametrize("name", ["odd", "odd, bf16"])
def test_extreme_values_stay_in_their_rows(name, implementation):
  case = CASES[name]
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
  assert_close(ours[0], theirs[0], case.dtype)
  *ours, d_gain = ours[1]
  *theirs, d_gain_theirs = theirs[1]
  # A row whose squares overflow has no derivative to compare.
  kept = np.arange(4, case.rows)
  pick = functools.partial(jax.tree.map, lambda x: x[kept])
  assert_close(pick(ours), pick(theirs), case.dtype, rounds=4)
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
  chosen = api.select_kernel(x, empty, ("tpu", "gpu", "reference"))
  assert chosen.name == "reference"
  assert "do not fit" in chosen.refused["tpu"]
  assert "registers" in chosen.refused["gpu"]
  with pytest.raises(ValueError, match=r"can be used \(gpu: .* registers"):
    api.select_kernel(x, empty, "gpu")
  with pytest.raises(ValueError, match="'cuda' must be 'auto' or"):
    api.select_kernel(x, empty, "cuda")
  assert api.select_kernel(x, empty).name == "reference"  # on a CPU
  half = jax.ShapeDtypeStruct((8, 20_000), jnp.float32)
  with pytest.raises(ValueError, match="width 40000 > 32768"):
    api.select_kernel(half, half, "gpu")


def test_reference_equals_the_textbook_formula():
  (shared, private, d_shared, d_private, gain), _ = draw(CASES["odd"])
  new_shared, new_private, normed = reference.add_norm(
    shared, private, d_shared, d_private, gain, private_scale=2.0, eps=0.3
  )
  x = np.concatenate(
    [shared + d_shared, private + 2 * d_private], -1, dtype="f8"
  )
  rms = np.sqrt((x * x).mean(-1, keepdims=True) + 0.3)
  expected = x / rms * np.asarray(gain)
  np.testing.assert_allclose(normed, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
    np.concatenate([new_shared, new_private], -1), x, rtol=1e-6, atol=1e-6
  )


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


@pytest.mark.quick
@limits([
  (gpu.refusal, (1, 32768, F4), (1, 32769, F4), "width 32769 > 32768"),
  (gpu.refusal, (1, 8, F2), (0, 8, F2), "no rows"),
  (gpu.refusal, (1, 8, jnp.float16), (1, 8, F8), "dtype float64"),
  # 16 rows: five arrays twice, and three in float32, in 8 MiB.
  (tpu.refusal, (16, 2**19 // 52, F4), (16, 2**19 // 52 + 1, F4),
   "16 rows do not fit 8 MB"),
  (tpu.refusal, (99, 2**19 // 32, F2), (99, 2**19 // 32 + 1, F2),
   "width 16385"),
  (tpu.refusal, (1, 2**23 // 52, F4), (1, 2**23 // 52 + 1, F4), "fit"),
  (tpu.refusal, (1, 8, F4), (0, 8, F4), "no rows"),
  (tpu.refusal, (1, 8, F2), (1, 8, jnp.float16), "dtype"),
])
def test_limit_separates_supported_from_refused_operands(
  refusal, supported, refused, reason
):
  assert_limit(refusal, supported, refused, reason)


@pytest.mark.quick
@pytest.mark.parametrize(("widths", "warps"), [
  ([1], 1), ([512], 1), ([513], 2), ([2048, 2048], 8), ([2049, 2048], 16),
  ([32768], 32), ([32768, 1], 32),
])
def test_programs_of_the_norm_have_512_channels_per_warp(widths, warps):
  parts = calls.spans([np.zeros((1, w)) for w in widths])
  assert parts == [(0, widths[0]), (widths[0], widths[-1])][: len(widths)]
  params = gpu.pallas_options(parts, interpret=True)
  assert params["compiler_params"].num_warps == warps
  assert params["interpret"] is True


@pytest.mark.quick
@pytest.mark.parametrize(("widths", "warps"), [
  ([16384], 32), ([8192, 1024, 2048, 1024], 16), ([8192], 16), ([20], 1),
])
def test_long_rows_have_fewer_warps(widths, warps):
  spans = calls.spans([np.zeros((1, w)) for w in widths])
  params = gpu.pallas_options(spans, interpret=True, fewer=True)
  assert params["compiler_params"].num_warps == warps


@pytest.mark.quick
@pytest.mark.parametrize(("case", "forward", "backward"), [
  # float32: 4 and 4 elements per channel; the gain, and its cotangent.
  (AddNormCase(2, 3, 5), 4 * 4 * 16 + 32, 4 * 4 * 16 + 64),
  (AddNormCase(2, 3, 5, private_scale=2.0), 288, 320 + 4 * 2 * 5),
  (AddNormCase(2, 3, 5, "bfloat16"), 2 * 64 + 32, 2 * 64 + 64),
  (AddNormCase(2, 3, 5, update=False), 2 * 4 * 16 + 32, 320),
  (AddNormCase(2, 3, 5, private_scale=2.0, update=False), 160, 320),
])
def test_minimum_bytes_of_a_norm(case, forward, backward):
  assert case.forward_bytes == forward
  assert case.backward_bytes == backward
