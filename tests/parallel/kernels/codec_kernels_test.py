"""Codec kernels compared with the reference, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel.kernels.codec import api, gpu, threefry, tpu
from parallel.kernels.codec.cases import CASES
from parallel.kernels.codec.reference import Codec, OuterOptions
from tests.parallel.kernels.compare import KERNELS
from tests.parallel.kernels.limits import assert_limit, limits


@functools.partial(jax.jit, static_argnums=(3, 4))
def run(operands, key, weights, case, implementation):
  """Runs every operation of a case: exact results, and rounded ones."""
  options = {"implementation": implementation}
  anchor, params, residual, momentum = operands
  codec, n = case.codec, case.shape[-1]
  fed, left = api.encode_delta(
    anchor, params, codec, key, residual, **options
  )
  if codec.stochastic:  # differs in encoding only
    return {"fed": fed}, {"left": left}
  delta, _ = api.encode_delta(anchor, params, codec, key, **options)
  # One vector per sender, each a different shift of the first.
  many = jax.tree.map(
    lambda x: jnp.stack(
      [jnp.roll(x, m, axis=-1) for m in range(case.senders)]
    ),
    delta,
  )
  exact = {
    "plain": api.encode(params, codec, key, **options),
    "delta": delta,
    "fed": fed,
    "mean": api.mean(many, n, codec, **options),
    "weighted": api.mean(many, n, codec, weights, **options),
    "total": api.total(many, n, codec, **options),
    "decoded": api.decode(delta, n, codec, **options),
  }
  near = {
    "left": left,
    "nesterov": api.nesterov(
      many, anchor.astype(jnp.float32), momentum, codec, OuterOptions(0.7, 0.9),
      weights, **options,
    ),
  }
  return exact, near


def draw(case):
  rng = np.random.default_rng(0)
  arrays = [
    jnp.asarray(rng.normal(size=case.shape), dtype)
    for dtype in (case.dtype, case.dtype, "float32", "float32")
  ]
  weights = rng.uniform(0.5, 2, size=case.senders).astype("f4")
  return arrays, jnp.asarray(weights)


def check(case, operands, weights, implementation):
  key = jax.random.key(3)
  ours = run(operands, key, weights, case, implementation)
  theirs = run(operands, key, weights, case, "reference")
  for name, expected in theirs[0].items():
    for a, b in zip(
      jax.tree.leaves(ours[0][name]), jax.tree.leaves(expected), strict=True
    ):
      assert a.dtype == b.dtype, name
      np.testing.assert_array_equal(a, b, err_msg=name)
  for a, b in zip(
    jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1]), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.rotated
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_and_reference_send_equal_bits(name, implementation):
  check(CASES[name], *draw(CASES[name]), implementation)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", [
  "int8, block 128", "int4, odd, 300 rows", "e3m0",
])
def test_kernels_and_reference_agree_on_extreme_values(name, implementation):
  case = CASES[name]
  (anchor, params, residual, momentum), weights = draw(case)
  block, n = case.codec.block, case.shape[-1]
  rows = np.array(params).reshape(-1, n)
  for i, value in enumerate(
    (np.inf, -np.inf, np.nan, 2.0**126, 1e-40, 2.0**-101, -0.0)
  ):
    # The first blocks of a vector, or of rows with three blocks each.
    row, start = (0, i * block) if len(rows) == 1 else (i // 3, i % 3 * block)
    here = rows[row, start : start + block]
    here *= {4: 1e-38, 6: 0.0}.get(i, 1.0)
    if i == 5:
      here[:] = value
    here[7] = value
  params = jnp.asarray(rows.reshape(case.shape), case.dtype)
  weights = weights.at[1].set(0)  # a NaN of weight zero does not contribute
  operands = (jnp.zeros_like(anchor), params, 0 * residual, momentum)
  check(case, operands, weights, implementation)


def test_random_draws_equal_those_of_jax():
  key = jax.random.key(5)
  words = jax.random.key_data(key)
  ours = threefry.uniform(*words, jnp.arange(7, dtype=jnp.uint32))
  np.testing.assert_array_equal(ours, jax.random.uniform(key, (7,)))


@pytest.mark.parametrize(
  ("codec", "reason"),
  [(Codec("fp8"), "fp8"), (Codec("int4", 64), "multiple of"),
   (Codec("int8", 1 << 20), "do not fit")],
)
def test_refusal_gives_the_reason(codec, reason):
  chosen = api.select_kernel((4096,), codec, ("tpu", "reference"))
  assert chosen.name == "reference"
  assert reason in chosen.refused["tpu"]
  # Four float32 arrays of 128 blocks, and the codes of one sender, twice.
  widest = Codec("int8", 1920)
  assert api.select_kernel((4096,), widest, ("tpu", "reference")).name == "tpu"
  two = api.select_kernel((4096,), widest, ("tpu", "reference"), senders=2)
  assert "2 x 128 blocks of 1920 do not fit 8 MB" in two.refused["tpu"]
  key = jax.random.key(0, impl="rbg")
  chosen = api.select_kernel(
    (512,), Codec("int8"), ("tpu", "reference"), key=key
  )
  assert "rbg" in chosen.refused["tpu"]


@pytest.mark.quick
@limits([
  (gpu.refusal, (Codec("int8", 16384), 1), (Codec("int8", 16386), 1),
   "block=16386 > 16384"),
  (gpu.refusal, (Codec("int8"), 1), (Codec("int8"), 0), "no elements"),
  (gpu.refusal, (Codec("int8"), 2**21 - 1), (Codec("int8"), 2**21), "31 bits"),
  (gpu.refusal, (Codec("int8"), 2**20 - 1, 8), (Codec("int8"), 2**20, 8),
   "8 x 1048576 blocks"),
  (gpu.refusal, (Codec("e3m0"), 1), (Codec("fp8"), 1), "codec fp8"),
  (tpu.refusal, (Codec("int8", 128), 1), (Codec("int8", 192), 1),
   "a multiple of 128 for 8 bits"),
  (tpu.refusal, (Codec("e3m0", 256), 1), (Codec("e3m0", 128), 1),
   "a multiple of 256 for 4 bits"),
  (tpu.refusal, (Codec("int8"), 1), (Codec("int8"), 0), "no elements"),
  # 128 blocks of float32, four arrays, and codes, all twice, in 8 MiB.
  (tpu.refusal, (Codec("int8", 1920), 1), (Codec("int8", 2048), 1),
   "1 x 128 blocks of 2048 do not fit 8 MB"),
  (tpu.refusal, (Codec("int8"), 1, 112), (Codec("int8"), 1, 113), "113 x 128"),
  (tpu.refusal, (Codec("int4"), 1, 224), (Codec("int4"), 1, 225), "225 x 128"),
])
def test_limit_separates_supported_from_refused_operands(
  refusal, supported, refused, reason
):
  assert_limit(refusal, supported, refused, reason)


@pytest.mark.quick
def test_random_numbers_have_limits():
  key = jax.random.key(0)
  assert threefry.refusal(key, 2**32 - 1) is None
  assert threefry.refusal(jax.random.key_data(key), 1) is None
  assert "fewer than 2^32" in threefry.refusal(key, 2**32)
  assert "threefry only" in threefry.refusal(jax.random.key(0, impl="rbg"), 1)
  with jax.threefry_partitionable(False):
    assert "partitionable is off" in threefry.refusal(key, 1)


@pytest.mark.quick
@pytest.mark.parametrize(("codec", "blocks", "rows", "warps"), [
  # 512 elements per warp, and 4,096 per program at most.
  (Codec("int8"), 1, 1, 1), (Codec("int8"), 100, 16, 8),
  (Codec("int8"), 3, 4, 2), (Codec("int4"), 100, 16, 8),
  (Codec("int8", 200), 100, 16, 8), (Codec("int8", 4096), 9, 1, 8),
  (Codec("int8", 16384), 9, 1, 32), (Codec("int8", 2), 1, 1, 1),
])
def test_programs_of_the_codec_hold_whole_blocks(codec, blocks, rows, warps):
  tile = gpu._Tile(codec, blocks)
  assert tile.rows == rows
  assert tile.grid == (-(-blocks // rows),)
  assert tile.parts * tile.width == codec.block
  params = tile.params(interpret=False)
  assert params["compiler_params"].num_warps == warps
  assert params["interpret"] is False


@pytest.mark.quick
@pytest.mark.parametrize(("rows", "arrays", "groups"), [
  (1, 4, 1), (128, 4, 1), (129, 4, 2), (300, 4, 2), (385, 4, 4),
  (10**6, 4, 4), (10**6, 1, 8),
])
def test_grid_steps_of_the_codec_have_a_power_of_two_of_groups(
  rows, arrays, groups
):
  """In 8 MiB, 256 channels: 4 arrays of 128 rows, twice, take 1.1 MB."""
  assert tpu._groups_per_step(Codec("int8"), rows, 1, arrays) == groups
