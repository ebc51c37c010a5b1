"""Files larger than memory: memory limits and paging hints."""

import mmap
import os
import pathlib

import numpy as np
import pytest

from caatnet.data.graphs import paging

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(("groups", "limits", "expected"), [
  ("4:memory:/a/b\n1:cpu:/c\n", {"memory/a/b/memory.limit_in_bytes": 7}, 7),
  ("4:memory:/a/b\n", {"memory/a/memory.limit_in_bytes": 5}, 5),
  ("0::/a\n", {"a/memory.max": 9, "memory.max": 8}, 8),
  ("0::/\n", {"memory.max": 3}, 3),
  ("0::/a:b\n", {"a:b/memory.max": 6}, 6),
  ("0::/a\n", {"a/memory.max": "max"}, MACHINE),
  ("2:cpu:/a\n", {"a/memory.max": 1}, MACHINE),
  ("", {}, MACHINE),
])
def test_smallest_memory_limit_of_the_process_applies(
  groups, limits, expected, tmp_path
):
  for name, limit in limits.items():
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{limit}\n")
  (tmp_path / "groups").write_text(groups)
  assert paging.memory_bytes(tmp_path / "groups", tmp_path) == expected
  assert paging.memory_bytes(tmp_path / "none", tmp_path) == MACHINE


@pytest.mark.skipif(
  not hasattr(mmap, "MADV_RANDOM") or not pathlib.Path(
    "/proc/self/smaps"
  ).exists(), reason="the system does not report the hints of a mapping"
)
@pytest.mark.parametrize(("room", "told"), [(3999, True), (4000, False)])
def test_file_larger_than_memory_is_read_row_by_row(room, told, tmp_path):
  np.save(tmp_path / "rows.npy", np.zeros((100, 10), np.float32))
  rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
  assert paging.expect_no_order([rows, np.zeros(0)], room) == told
  smaps = pathlib.Path("/proc/self/smaps").read_text()
  flags = smaps[smaps.index(f"{tmp_path}/rows.npy"):]
  line = next(x for x in flags.splitlines() if x.startswith("VmFlags"))
  assert ("rr" in line.split()) == told
