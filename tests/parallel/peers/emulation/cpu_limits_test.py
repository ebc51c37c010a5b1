"""Limits of processor time, and their control groups."""

import os
import subprocess
import sys

from parallel.peers.emulation import cpu_limits


def test_quota_is_of_a_short_period_unless_the_kernel_needs_a_longer_one():
  """A quota of less than 1 ms is refused by the kernel."""
  found = [
    cpu_limits._in_us(quota) for quota in (1.0, 0.2, 0.05, 0.04996, 0.03)
  ]
  assert found == [
    (20_000, 20_000), (20_000, 4000), (20_000, 1000), (100_000, 4996),
    (100_000, 3000),
  ]


def test_quota_limits_each_client(quotas):
  with cpu_limits.limited_groups(0.2, 2) as groups:
    for group in groups:
      assert 0 < group.measured <= 0.25
    done = subprocess.run(
      [*groups[1].prefix, sys.executable, "-S", "-c", "print('text')", "x y"],
      capture_output=True, text=True, check=True,
    )
    assert done.stdout == "text\n"
    folder = groups[0].prefix[-1].rpartition("/")[0]
    assert os.path.exists(folder)
  assert not os.path.exists(folder)


def test_groups_are_removed_also_with_their_files(monkeypatch, tmp_path):
  monkeypatch.setattr(cpu_limits, "_ROOT", tmp_path)
  (tmp_path / "cpu").mkdir()
  with cpu_limits._control_group() as folder:
    (folder / "cpu.cfs_quota_us").touch()  # an ordinary file system
  assert not folder.exists()
