"""Top-k encoding: kept elements, extreme values and limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel.kernels.codec import top_k

CHUNK, K = 64, 8


def draw(rows):
  return np.random.default_rng(6).normal(size=(rows, 150)).astype("f4")


@functools.cache
def _top_k():
  return (
    jax.jit(lambda x: top_k.encode_top_k(x, CHUNK, K)),
    jax.jit(lambda e: top_k.decode_top_k(e, 150, CHUNK)),
  )


@pytest.mark.quick
def test_top_k_keeps_the_largest_of_each_chunk():
  encode, decode = _top_k()
  x = draw(2)  # three chunks, the last with 22 elements
  e = encode(x)
  assert [(p.shape, str(p.dtype)) for p in e] == [
    ((2, 3, K), "uint16"), ((2, 3, K // 4), "uint8"), ((2, 3, 2), "float32")
  ]
  out = np.asarray(decode(e))
  for row in range(2):
    for c in range(3):
      part = slice(c * CHUNK, min((c + 1) * CHUNK, 150))
      ours, theirs = out[row, part], x[row, part]
      order = np.argsort(-np.abs(theirs))
      np.testing.assert_array_equal(e.indices[row, c], np.sort(order[:K]))
      expected = np.zeros_like(theirs)
      for half in (order[: K // 2], order[K // 2 : K]):
        expected[half] = np.sign(theirs[half]) * np.abs(theirs[half]).mean()
      np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_top_k_of_zeros_and_non_finite_values():
  encode, decode = _top_k()
  x = draw(1)
  x[0, :CHUNK] = 0
  for bad in (np.nan, np.inf):
    x[0, CHUNK + 3] = bad
    out = np.asarray(decode(encode(x)))[0]
    assert not out[:CHUNK].any()
    assert np.isnan(out[CHUNK : 2 * CHUNK]).sum() == K
    assert np.isfinite(out[2 * CHUNK :]).all()


def test_top_k_reaches_the_last_position_of_the_longest_chunk():
  x = np.zeros((1, 65536), "f4")
  x[0, [0, 7, 65534, 65535]] = [3, -5, 1, -1]
  e = top_k.encode_top_k(x, 65536, 4)
  np.testing.assert_array_equal(e.indices[0, 0], [0, 7, 65534, 65535])
  out = np.asarray(top_k.decode_top_k(e, 65536, 65536))
  np.testing.assert_array_equal(out[0, [0, 7, 65534, 65535]], [4, -4, 1, -1])


@pytest.mark.quick
def test_all_elements_of_a_chunk_may_be_kept():
  x = np.array([3, -3, 1, -1], np.float32)
  encode = jax.jit(lambda x: top_k.encode_top_k(x, 4, 4))
  decode = jax.jit(lambda encoded: top_k.decode_top_k(encoded, 4, 4))
  np.testing.assert_array_equal(decode(encode(x)), x)


@pytest.mark.quick
@pytest.mark.parametrize(("chunk", "k", "message"), [
  (0, 4, r"chunk=0 must lie in \[1, 65536\]"), (65537, 4, "chunk=65537"),
  (8, 0, "k=0"), (8, 6, "multiple of 4"), (8, 12, r"in \[4, chunk=8\]"),
])
def test_top_k_names_its_limits(chunk, k, message):
  with pytest.raises(ValueError, match=message):
    top_k.encode_top_k(jnp.ones(8), chunk, k)
