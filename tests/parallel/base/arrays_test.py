"""Mapped arrays larger than memory: paging hints."""

import mmap
import pathlib

import numpy as np
import pytest

from parallel.base.arrays import disable_readahead, read_npz


@pytest.mark.skipif(
  not hasattr(mmap, "MADV_RANDOM") or not pathlib.Path(
    "/proc/self/smaps"
  ).exists(), reason="the system does not report the hints of a mapping"
)
@pytest.mark.parametrize(("room", "told"), [(3999, True), (4000, False)])
def test_file_larger_than_memory_is_read_row_by_row(room, told, tmp_path):
  """Arrays count together; one that is in memory already has no hint."""
  np.save(tmp_path / "rows.npy", np.zeros((98, 10), np.float32))
  rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
  assert disable_readahead([np.zeros(10), rows], room) == told
  smaps = pathlib.Path("/proc/self/smaps").read_text()
  flags = smaps[smaps.index(f"{tmp_path}/rows.npy"):]
  line = next(x for x in flags.splitlines() if x.startswith("VmFlags"))
  assert ("rr" in line.split()) == told


def test_arrays_have_names(tmp_path):
  np.savez(tmp_path / "two.npz", a=np.arange(3), b=np.ones(2))
  assert {k: x.sum() for k, x in read_npz(tmp_path / "two.npz").items()} == {
    "a": 3, "b": 2
  }
  np.save(tmp_path / "one.npy", np.ones(2))
  with pytest.raises(ValueError, match=r"not an .npz file of named"):
    read_npz(tmp_path / "one.npy")
  (tmp_path / "cut.npz").write_bytes((tmp_path / "two.npz").read_bytes()[:-40])
  with pytest.raises(ValueError, match="zip"):
    read_npz(tmp_path / "cut.npz")
