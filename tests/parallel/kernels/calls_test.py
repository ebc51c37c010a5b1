"""What the kernels share."""

import pytest

from parallel.kernels import calls


@pytest.mark.parametrize("fitting", [*range(1, 40), 1000])
def test_blocks_are_whole_tiles_or_all_rows(fitting):
  """Mosaic takes no others, and a tile of bfloat16 has 16 rows."""
  row_bytes = calls.VMEM_BYTES // fitting
  for num_rows in (1, 5, 8, 13, 15, 16, 20, 33, 64, 2000):
    rows = calls.rows_per_block(num_rows, row_bytes)
    assert rows in (0, num_rows) or rows % 16 == 0
    assert rows * row_bytes <= calls.VMEM_BYTES
    assert bool(rows) == (fitting >= min(16, num_rows))
