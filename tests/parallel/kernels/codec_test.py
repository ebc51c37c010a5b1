"""Block codecs: error bounds, exact values, and the wire format."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import numpy as np
import pytest

from parallel.kernels.codec import reference
from parallel.kernels.codec.reference import Codec, Encoded

N, BLOCK = 100, 16  # padded to 112
CODECS = [
  Codec(name, BLOCK, stochastic)
  for name in reference.NAMES
  for stochastic in (False, True)
]
NEAREST = [c for c in CODECS if not c.stochastic]

# Values of all codes, written independently of the implementation.
POSITIVE = {
  "int8": np.arange(128),
  "int4": np.arange(8),
  "e3m0": np.array([0, *(2.0**e for e in range(-6, 1))]),
  "fp8": np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 3) for e in range(-6, 9) for m in range(8)]
  )[:-1],  # the last code is NaN
}


@functools.cache
def _programs(codec):
  encode = jax.jit(lambda x, key: reference.encode(x, codec, key))
  decode = jax.jit(lambda e: reference.decode(e, N, codec))
  return encode, decode


def encode(x, codec, seed=0):
  return _programs(codec)[0](np.asarray(x, "f4"), jax.random.key(seed))


def roundtrip(x, codec, seed=0):
  return np.asarray(_programs(codec)[1](encode(x, codec, seed)))


def largest(x):
  """Returns the largest magnitude of each element's block."""
  padded = np.zeros(-(-N // BLOCK) * BLOCK, "f4")
  padded[:N] = np.abs(x)
  return np.repeat(padded.reshape(-1, BLOCK).max(1), BLOCK)[:N]


def draw(seed=0, shape=(N,)):
  rng = np.random.default_rng(seed)
  return (rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape))).astype(
    "f4"
  )


VECTORS = hnp.arrays(
  np.float32,
  N,
  elements=st.one_of(
    st.floats(-1, 1, width=32),
    st.floats(-(2.0**125), 2.0**125, width=32),
    st.sampled_from([0.0, 2.0**-99, -3.0, 1e30, 2.0**-149]),
  ),
)


@pytest.mark.quick
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_error_is_within_the_bound(codec):
  @settings(max_examples=60, derandomize=True)
  @given(VECTORS)
  def check(x):
    x = np.where(np.abs(x) < 2.0**-126, 0, x)  # hardware flushes subnormals
    m = largest(x).astype("f8")
    bound = np.where(m < 2.0**-100, m, reference.max_error(codec) * m)
    error = np.abs(roundtrip(x, codec).astype("f8") - x)
    assert (error <= bound).all(), (error / np.maximum(m, 1e-45)).max()

  check()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_error_bound_is_tight(codec):
  """Takes the midpoint of the widest gap, or just below it if stochastic."""
  top = POSITIVE[codec.name][-1]
  gap = top - POSITIVE[codec.name][-2]
  x = np.zeros(N)
  x[0], x[1:16] = top, top - gap * (0.999 if codec.stochastic else 0.5)
  errors = [np.abs(roundtrip(x, codec, s) - x).max() for s in range(200)]
  assert max(errors) / top > 0.99 * reference.max_error(codec)


@pytest.mark.quick
@pytest.mark.parametrize("codec", NEAREST, ids=str)
def test_every_value_of_the_format_is_exact(codec):
  """Puts the largest value into the block, with power-of-two scales."""
  numbers = POSITIVE[codec.name]
  numbers = np.concatenate([numbers, -numbers])
  for scale in (1.0, 2.0**40, 2.0**-70):
    rows = np.resize(numbers, (-(-len(numbers) // 15), 15))
    rows = np.column_stack([np.full(len(rows), numbers.max()), rows]) * scale
    for row in rows:
      x = np.zeros(N, "f4")
      x[:16] = row
      np.testing.assert_array_equal(roundtrip(x, codec), x)


@pytest.mark.quick
@pytest.mark.parametrize("codec", NEAREST, ids=str)
def test_rounds_to_the_nearest_value(codec):
  numbers = np.concatenate(
    [-POSITIVE[codec.name][::-1], POSITIVE[codec.name]]
  )
  x = draw(1)
  scales = np.repeat(np.asarray(encode(x, codec).scales, "f8"), BLOCK)[:N]
  ours = np.abs(roundtrip(x, codec) - x.astype("f8"))
  best = np.abs(scales[:, None] * numbers - x[:, None].astype("f8")).min(1)
  # A near tie may fall on either side, by the rounding of a division.
  np.testing.assert_allclose(ours, best, rtol=1e-5, atol=0)


def test_powers_of_two_are_exact_in_e3m0():
  x = np.array([2.0**-e for e in range(7)] * 2)
  x[7:] *= -1
  x = np.resize(x, N)
  np.testing.assert_array_equal(roundtrip(x, Codec("e3m0", BLOCK)), x)


def test_codes_of_e3m0():
  """Values below 2^-7 of the largest become zero, others the nearest code."""
  values = [1, 0.76, 0.74, 0.5, 2.0**-6, 1.01 * 2.0**-7, 0.99 * 2.0**-7, 0]
  x = np.array([*values, *(-v for v in values)])
  payload = np.asarray(encode(np.resize(x, N), Codec("e3m0", 16)).payload)
  assert [int(b & 15) for b in payload[:8]] == [7, 7, 6, 6, 1, 1, 0, 0]
  assert [int(b >> 4) for b in payload[:8]] == [15, 15, 14, 14, 9, 9, 0, 0]


@pytest.mark.quick
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_block_of_zeros_stays_zero_among_other_blocks(codec):
  x = draw(2)
  x[BLOCK : 2 * BLOCK] = 0
  x[BLOCK + 1] = -0.0
  x[2 * BLOCK : 3 * BLOCK] = 2.0**-101  # documented: flushed to zero
  out = roundtrip(x, codec)
  assert not out[BLOCK : 3 * BLOCK].view("u4").any()
  assert out[:BLOCK].any()
  assert out[3 * BLOCK :].any()


@pytest.mark.quick
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**126])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_non_finite_values_are_propagated(codec, bad):
  x = draw(3)
  healthy = roundtrip(x, codec)
  x[BLOCK + 5] = bad
  out = roundtrip(x, codec)
  assert np.isnan(out[BLOCK : 2 * BLOCK]).all()
  for part in (slice(BLOCK), slice(2 * BLOCK, None)):
    np.testing.assert_array_equal(out[part], healthy[part])


@pytest.mark.parametrize("block", [2, 16, 256])
@pytest.mark.parametrize("name", reference.NAMES)
def test_wire_format_is_packed(name, block):
  codec = Codec(name, block)
  padded = -(-N // block) * block
  e = jax.eval_shape(
    lambda x: reference.encode(x, codec), jax.ShapeDtypeStruct((3, N), "f4")
  )
  half = name in ("int4", "e3m0")
  assert e.payload.shape == (3, padded // 2 if half else padded)
  assert e.payload.shape[1] == codec.payload_bytes(N)
  assert e.scales.shape == (3, padded // block) == (3, codec.num_scales(N))
  assert (e.payload.dtype, e.scales.dtype) == (np.uint8, np.float32)


@pytest.mark.parametrize("codec", NEAREST, ids=str)
def test_encoding_is_idempotent(codec):
  for seed in range(20):
    first = encode(draw(seed), codec)
    again = encode(_programs(codec)[1](first), codec)
    for a, b in zip(first, again, strict=True):
      np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_products_of_scale_and_code_are_exact(codec):
  """Fused multiply-adds therefore cannot change sums of decoded values."""
  e = encode(draw(4), codec)
  bits = np.asarray(e.scales).view("u4")
  assert not (bits & 0xFF).any()
  assert bits.any()
  # Equal to the float64 products, so float32 did not round.
  ones = Encoded(e.payload, np.ones_like(e.scales))
  numbers = np.asarray(_programs(codec)[1](ones), "f8")
  scales = np.repeat(np.asarray(e.scales, "f8"), BLOCK)[:N]
  np.testing.assert_array_equal(
    numbers * scales, roundtrip(draw(4), codec).astype("f8")
  )


@pytest.mark.parametrize("codec", NEAREST, ids=str)
def test_scale_covers_the_largest_element(codec):
  """Stochastic rounding would otherwise be biased for that element."""
  for seed in range(20):
    scales = np.asarray(encode(draw(seed), codec).scales, "f8")
    needed = largest(draw(seed))[::BLOCK] / POSITIVE[codec.name][-1]
    excess = scales / needed - 1
    assert (excess > -(2.0**-20)).all()
    assert (excess < 2.0**-15).all()


@pytest.mark.parametrize("name", reference.NAMES)
def test_stochastic_rounding_is_unbiased(name):
  codec = Codec(name, BLOCK, stochastic=True)
  x = draw(5)
  draws = 4000
  mean = jax.jit(
    lambda keys: jax.vmap(
      lambda k: reference.decode(reference.encode(x, codec, k), N, codec)
    )(keys)
  )(jax.random.split(jax.random.key(0), draws))
  mean = np.asarray(mean, "f8")
  # Six standard errors of the largest deviation, s / 2 for spacing s.
  spread = reference.max_error(codec) * largest(x) / 2
  assert (np.abs(mean.mean(0) - x) <= 6 * spread / np.sqrt(draws)).all()
  moved = np.abs(mean - mean[0]).max(0) > 0
  assert moved.sum() > N / 3
  nearest = roundtrip(x, Codec(name, BLOCK))
  assert np.abs(mean.mean(0) - x).sum() < 0.2 * np.abs(nearest - x).sum()


def test_stochastic_rounding_needs_a_key():
  with pytest.raises(ValueError, match="needs a random key"):
    reference.encode(np.ones(4, "f4"), Codec("int8", 4, stochastic=True))


@pytest.mark.parametrize(
  ("values", "message"),
  [(("int3",), "int8, int4, e3m0, fp8"), (("int4", 5), "even"),
   (("int8", 0), "even")],
)
def test_invalid_codecs_are_refused(values, message):
  with pytest.raises(ValueError, match=message):
    Codec(*values)


@pytest.mark.quick
def test_smallest_blocks_of_the_codec():
  for name in reference.NAMES:
    assert Codec(name, 2).padded(3) == 4
    assert Codec(name, 2).num_scales(3) == 2
  assert Codec("int8").block == 256
  assert not Codec("int8").stochastic
  assert [Codec(name).bits for name in reference.NAMES] == [8, 4, 4, 8]
  with pytest.raises(ValueError, match="block=1 \\(elements per scale\\) must"):
    Codec("int8", 1)


@pytest.mark.quick
def test_floats_are_rounded_to_even_at_23_bits():
  """Equals ``reduce_precision``; ties have the last bit set."""
  bits = np.arange(0x3F800000, 0x3F800010, dtype="u4")
  x = np.concatenate([bits, bits | 1 << 31]).view("f4")
  wanted = jax.jit(lambda x: jax.lax.reduce_precision(x, 8, 22))(x)
  np.testing.assert_array_equal(jax.jit(reference.round_to_23_bits)(x), wanted)
  assert len({*np.asarray(wanted).tolist()}) == 16 + 2


def test_rounding_to_23_bits_keeps_nan():
  """Includes the NaN of all ones, which GPUs produce."""
  bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F7FFFFF], "u4")
  found = np.asarray(reference.round_to_23_bits(bits.view("f4")))
  assert np.isnan(found[:3]).all()
  assert found[3] == np.inf
