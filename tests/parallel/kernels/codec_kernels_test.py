"""Codec kernels compared with the reference, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel.kernels.codec import api, threefry
from parallel.kernels.codec.cases import CASES, Case
from parallel.kernels.codec.reference import Codec, OuterStep

KERNELS = ("tpu_interpret", "gpu_interpret")


@functools.partial(jax.jit, static_argnums=(3, 4))
def run(operands, key, weights, case, implementation):
  """Runs every operation of a case."""
  options = {"implementation": implementation}
  anchor, params, residual, momentum = operands
  codec, n = case.codec, case.shape[-1]
  plain = api.encode(params, codec, key, **options)
  delta, _ = api.encode_delta(anchor, params, codec, key, **options)
  fed, left = api.encode_delta(
    anchor, params, codec, key, residual, **options
  )
  # One vector per sender, each a different shift of the first.
  many = jax.tree.map(
    lambda x: jnp.stack(
      [jnp.roll(x, m, axis=-1) for m in range(case.senders)]
    ),
    delta,
  )
  exact = {
    "plain": plain,
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
      many, anchor.astype(jnp.float32), momentum, codec, OuterStep(0.7, 0.9),
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
@pytest.mark.parametrize("name", ["int8", "int4", "e3m0"])
def test_extreme_values(name, implementation):
  case = Case((10 * 256,), Codec(name), 2)
  (anchor, params, residual, momentum), weights = draw(case)
  values = (np.inf, -np.inf, np.nan, 2.0**126, 1e-40, 2.0**-101, -0.0)
  for block, value in enumerate(values):
    params = params.at[256 * block + 7].set(value)
  params = params.at[256 * 4 : 256 * 5].multiply(1e-38)
  params = params.at[256 * 5 : 256 * 6].set(2.0**-101)
  params = params.at[256 * 7 : 256 * 8].set(0)
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
  chosen = api.choice((4096,), codec, ("tpu", "reference"))
  assert chosen.name == "reference"
  assert reason in chosen.refused["tpu"]
  # Four float32 arrays of 128 blocks, and the codes of one sender, twice.
  widest = Codec("int8", 1920)
  assert api.choice((4096,), widest, ("tpu", "reference")).name == "tpu"
  two = api.choice((4096,), widest, ("tpu", "reference"), senders=2)
  assert "2 x 128 blocks of 1920 do not fit 8 MB" in two.refused["tpu"]
  key = jax.random.key(0, impl="rbg")
  chosen = api.choice((512,), Codec("int8"), ("tpu", "reference"), key=key)
  assert "rbg" in chosen.refused["tpu"]
