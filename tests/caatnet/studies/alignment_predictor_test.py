"""Predicted cache lines and sectors, against a count over addresses."""

import numpy as np
import pytest

from caatnet.studies.alignment import predictor


def enumerated(starts, row_bytes, size, shifted):
  """Counts the blocks that each row requests, by byte addresses, ``[n]``.

  Each byte of a row belongs to one request of a warp. A request loads each
  block that contains one of its bytes.
  """
  number = np.arange(row_bytes)
  address = starts[:, None] + number
  # Warps are aligned to lines if shifted, and to the start of the row if not.
  request = address // 128 if shifted else number // 128 + 0 * address
  pairs = request * 2**40 + address // size
  return 1 + (np.diff(pairs, axis=1) != 0).sum(axis=1)


@pytest.mark.parametrize("shifted", [True, False])
def test_counts_equal_those_over_addresses(shifted):
  """Covers 10,000 random rows of 100 sizes at arbitrary byte offsets."""
  rng = np.random.default_rng(0)
  for row_bytes in rng.integers(1, 1500, 100).tolist():
    starts = rng.integers(0, 2**30, 100)
    for size in (128, 32):
      np.testing.assert_array_equal(
        predictor.count_blocks(starts, row_bytes, size, shifted=shifted),
        enumerated(starts, row_bytes, size, shifted),
      )


def test_gather_touches_the_sum_of_its_rows():
  """Reads rows that are listed twice twice."""
  rng = np.random.default_rng(1)
  for _ in range(50):
    row_bytes, offset = rng.integers(1, 3000), rng.integers(0, 500)
    ids = rng.integers(0, 10_000, 40)
    for shifted in (True, False):
      starts = offset + ids * row_bytes
      assert predictor.count_requests(
        ids, row_bytes, offset, shifted=shifted
      ) == (
        enumerated(starts, row_bytes, 128, shifted).sum(),
        enumerated(starts, row_bytes, 32, shifted).sum(),
      )


def test_shift_never_costs_and_saves_nothing_for_whole_lines():
  starts = np.arange(128)
  for row_bytes in range(4, 2000, 4):
    plain, shifted = (
      predictor.count_blocks(starts, row_bytes, 128, shifted=shift)
      for shift in (False, True)
    )
    assert (shifted <= plain).all()
    assert shifted[0] == plain[0]
    assert (shifted >= -(-row_bytes // 128)).all()


@pytest.mark.parametrize(
  ("features", "plain", "shifted"),
  [(100, 6.625, 4.0), (602, 36.625, 19.75), (128, 4.0, 4.0), (768, 24, 24)],
)
def test_mean_blocks_of_common_feature_widths(features, plain, shifted):
  """Packed rows; expected values by hand in the notes on the paper."""
  size = 4 * features
  assert predictor.mean_blocks(size, 128, shifted=False) == plain
  assert predictor.mean_blocks(size, 128, shifted=True) == shifted


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("num_bytes", [4, 60, 128, 200, 256, 300])
def test_mean_blocks_are_those_of_packed_rows(num_bytes, shifted):
  """Starts of packed rows repeat modulo a line after at most 128 rows."""
  starts = np.arange(128) * num_bytes
  for size in (predictor.LINE_BYTES, predictor.SECTOR_BYTES):
    assert predictor.mean_blocks(num_bytes, size, shifted=shifted) == (
      enumerated(starts, num_bytes, size, shifted).mean()
    )


def test_rows_of_no_or_partial_elements_are_refused():
  with pytest.raises(ValueError, match="row_bytes=0 must be at least 1"):
    predictor.count_requests(np.arange(3), 0, shifted=True)
  assert predictor.count_blocks(np.zeros(1, int), 1, 128, shifted=True) == [1]
  with pytest.raises(ValueError, match="row_bytes=6 must be a multiple of 4"):
    predictor.mean_blocks(6, 128, shifted=True)
  assert predictor.mean_blocks(6, 128, 2, shifted=True) > 1
