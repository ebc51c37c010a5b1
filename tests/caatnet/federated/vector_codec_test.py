"""Codecs of updates, and the arithmetic of the server."""

import jax
import numpy as np
import optax
import pytest

from caatnet.federated import arithmetic, vector_codec

KEY = jax.random.key(0)
N = 5000  # no multiple of a block or chunk
X = np.random.RandomState(0).standard_normal(N).astype(np.float32)


@pytest.mark.parametrize(
  ("name", "num_bytes", "error"),
  [
    ("none", 4 * N, 0.0),
    ("int8", 5120 + 4 * 20, 0.01),
    ("int4", 2560 + 4 * 20, 0.15),
    ("e3m0", 2560 + 4 * 20, 0.25),
    ("sparse", 2 * (2 * 64 + 64 // 4 + 8), 0.95),
  ],
)
def test_code_has_its_size_and_error(name, num_bytes, error):
  codec = vector_codec.make(name)
  data = codec.encode(X, KEY)
  assert len(data) == num_bytes
  found = codec.decode(data, N)
  assert found.dtype == np.float32
  relative = np.linalg.norm(found - X) / np.linalg.norm(X)
  assert relative <= error
  assert relative > error / 4 or name == "none"
  for damaged in (data[:-1], data + b"\0", b""):
    with pytest.raises(ValueError, match="bytes; it must"):
      codec.decode(damaged, N)


@pytest.mark.parametrize("name", vector_codec.NAMES)
def test_diverged_update_stays_detectable(name):
  codec = vector_codec.make(name)
  poisoned = X.copy()
  poisoned[70] = np.nan
  assert not np.isfinite(
    np.linalg.norm(codec.decode(codec.encode(poisoned, KEY), N))
  )


def test_stochastic_rounding_is_unbiased():
  codec = vector_codec.make("int4", stochastic=True)
  found = [
    codec.decode(codec.encode(X, jax.random.key(k)), N) for k in range(50)
  ]
  once = np.abs(found[0] - X).mean()
  assert np.abs(np.mean(found, axis=0) - X).mean() < once / 4


def test_positions_of_a_chunk_have_16_bits():
  vector_codec.Sparse(2**16, 4)
  for chunk, k in ((2**16 + 4, 4), (4, 8), (8, 6), (8, 0)):
    with pytest.raises(ValueError, match="multiple of 4 in"):
      vector_codec.Sparse(chunk, k)


def test_position_outside_of_a_chunk_is_refused():
  codec = vector_codec.make("sparse")
  data = bytearray(codec.encode(X, KEY))
  data[:2] = (codec.chunk - 1).to_bytes(2, "little")
  codec.decode(bytes(data), N)
  for position in (codec.chunk, 2**16 - 1):
    data[:2] = position.to_bytes(2, "little")
    with pytest.raises(ValueError, match="position"):
      codec.decode(bytes(data), N)


@pytest.mark.parametrize("name", arithmetic.OPTIMIZERS)
def test_optimizers_move_with_the_mean(name):
  """In the first step: the mean, the mean, and its signs."""
  made = arithmetic.VectorArithmetic(
    arithmetic.optimizer(name, 0.5, 0.9, 0.99, 1e-8), vector_codec.Plain()
  )
  params = np.float32([1, 1, 1])
  mean = np.float32([0.5, -2.0, 4.0])
  state = made.init(params)
  first, state = made.update(mean, state, params)
  step = np.sign(mean) if name == "fedadam" else mean
  np.testing.assert_allclose(first - params, 0.5 * step, rtol=1e-5)
  second, state = made.update(mean, state, first)
  factor = 1.9 if name == "fedavgm" else 1.0
  np.testing.assert_allclose(second - first, 0.5 * factor * step, rtol=1e-5)
  assert all(isinstance(x, np.ndarray) for x in state)


def test_outliers_are_found_by_the_median():
  made = arithmetic.VectorArithmetic(
    optax.sgd(1.0), vector_codec.Plain(), outlier_factor=10.0
  )
  assert made.healthy([1.0, 2.0, 19.0, 1e300, 3.0]) == [
    True, True, True, False, True
  ]
  assert made.healthy([1.0, 2.0, 50.0]) == [True, True, False]
  assert made.healthy([]) == []
  any_norm = arithmetic.VectorArithmetic(optax.sgd(1.0), vector_codec.Plain())
  assert any_norm.healthy([1.0, 2.0, 1e30]) == [True, True, True]


def test_published_differences_are_coded():
  made = arithmetic.VectorArithmetic(
    optax.sgd(1.0), vector_codec.make("int8")
  )
  data, decoded = made.publish(X)
  np.testing.assert_array_equal(
    decoded, vector_codec.make("int8").decode(data, N)
  )
  plain = arithmetic.VectorArithmetic(optax.sgd(1.0), vector_codec.Plain())
  assert plain.publish(X) is None
