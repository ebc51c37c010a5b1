"""Available memory: limits of control groups, and caches of files."""

import os

import pytest

from parallel.base import available

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(("groups", "limits", "expected"), [
  ("4:memory:/a/b\n1:cpu:/c\n", {"memory/a/b/memory.limit_in_bytes": 7}, 7),
  ("4:memory:/a/b\n", {"memory/a/memory.limit_in_bytes": 5}, 5),
  ("0::/a\n", {"a/memory.max": 9, "memory.max": 8}, 8),
  ("0::/\n", {"memory.max": 3}, 3),
  ("4:memory:/a\n0::/b\n",
   {"memory/a/memory.limit_in_bytes": 9, "b/memory.max": 5}, 5),
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
  assert available.limit_bytes(tmp_path / "groups", tmp_path) == expected
  assert available.limit_bytes(tmp_path / "none", tmp_path) == MACHINE


def test_caches_of_files_are_available(tmp_path):
  meminfo = tmp_path / "meminfo"
  meminfo.write_text("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable: 5 kB\n")
  assert available.available_bytes(meminfo) == 5 * 1024
  # A limit of the process is smaller than what the machine has.
  meminfo.write_text(f"MemAvailable: {10**15} kB\n")
  assert available.available_bytes(meminfo) == available.limit_bytes()
  assert available.available_bytes(tmp_path / "none") == available.limit_bytes()
