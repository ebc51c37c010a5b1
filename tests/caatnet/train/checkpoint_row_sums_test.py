"""Checksums of arrays: independent of parts, and changed by every change."""

from hypothesis import given
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest

from caatnet.train.checkpoint import row_sums

DTYPES = ("float32", "int8", "float64", ml_dtypes.bfloat16, "bool")


def draw(shape, dtype="float32", seed=0):
  return (99 * np.random.default_rng(seed).random(shape)).astype(dtype)


@given(
  shape=st.lists(st.integers(1, 7), max_size=4), dtype=st.sampled_from(DTYPES),
  seed=st.integers(0, 99),
)
def test_parts_add_up_to_the_whole_and_one_changed_byte_is_seen(
  shape, dtype, seed
):
  x, rng = draw(shape, dtype, seed), np.random.default_rng(seed)
  whole = row_sums.checksum_part(x)
  found = np.zeros_like(whole)
  # Along each dim, the array is cut at a random place.
  cuts = [(0, int(rng.integers(n + 1)), n) for n in shape]
  for side in np.ndindex(*[2] * x.ndim):
    bounds = [cut[i : i + 2] for cut, i in zip(cuts, side, strict=True)]
    place = tuple(slice(*b) for b in bounds)
    found += row_sums.checksum_part(x[place], [a for a, _ in bounds], shape)
  np.testing.assert_array_equal(found, whole)
  data = bytearray(x.tobytes())
  place = int(rng.integers(len(data)))
  data[place] ^= int(rng.integers(1, 256))
  other = row_sums.checksum_part(np.frombuffer(data, x.dtype).reshape(shape))
  assert (other != whole).sum() == 1
  assert len(whole) == row_sums.num_rows(shape)


@pytest.mark.parametrize(("size", "rows"), [(1, 1), (1024, 1024), (1025, 1)])
def test_more_than_1024_rows_count_as_one(size, rows):
  x = draw((size, 3))
  assert row_sums.num_rows(x.shape) == len(row_sums.checksum_part(x)) == rows
  assert row_sums.num_rows(()) == 1


@pytest.mark.parametrize("shape", [(1025,), (2, 70_000), (1, 9, 9), (3, 4)])
def test_changed_signs_exchanged_elements_and_zeros_are_seen(shape):
  """Sums of bits, or weights with common factors, would not see them."""
  x, rng = draw(shape), np.random.default_rng(1)
  whole = row_sums.checksum_part(x)
  for _ in range(20):
    i, j = rng.choice(x.size, 2, replace=False)
    signs, exchanged, zeros = x.ravel().copy(), x.ravel().copy(), x.copy()
    signs[[i, j]] *= -1
    exchanged[[i, j]] = exchanged[[j, i]]
    zeros.ravel()[i:] = 0
    for y in (signs, exchanged, zeros):
      assert (row_sums.checksum_part(y.reshape(shape)) != whole).any()
  assert not row_sums.checksum_part(np.zeros(shape)).any()
