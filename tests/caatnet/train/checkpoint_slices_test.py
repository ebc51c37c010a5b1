"""Checkpoints that are written and read in slices."""

import threading

import numpy as np

from caatnet.train.checkpoint import slices


def test_sliced_checkpoint_is_read_by_rows_and_places(tmp_path):
  values = np.arange(24.0, dtype="f4").reshape(1, 3, 2, 4)
  for name, chunk in (
    ("by_row", (1, 1, 1, 4)), ("two_rows", (1, 2, 2, 4)),
    ("whole", (1, 3, 2, 4)),
  ):
    sliced = slices.SlicedArray(
      values.shape, values.dtype, chunk,
      lambda: (((0, row), values[0, row]) for row in range(3)),
    )
    (tmp_path / name).mkdir()
    slices.write_params(tmp_path / name, 4, {"x": sliced})
    found = slices.open_params(tmp_path / name, 4, {"x": 0})["x"]
    assert (found.shape, found.dtype) == (values.shape, values.dtype)
    np.testing.assert_array_equal(list(found.rows((0,))), values[0])
    np.testing.assert_array_equal(found.at((0, 2)), values[0, 2])


def test_array_in_memory_is_read_by_rows_and_places():
  values = np.arange(24.0).reshape(2, 3, 4)
  found = slices.InMemoryArray(values)
  assert found.shape == (2, 3, 4)
  np.testing.assert_array_equal(list(found.rows((1,))), values[1])
  np.testing.assert_array_equal(found.at((1, 2)), values[1, 2])


def test_interrupted_write_is_waited_for():
  handler = slices._Handler()
  handler._idle.clear()  # a slice is being written
  waiting = threading.Thread(target=handler.stop)
  waiting.start()
  assert handler._stopping.wait(60)
  waiting.join(0.1)
  assert waiting.is_alive()
  handler._idle.set()
  waiting.join(60)
  assert not waiting.is_alive()
