"""Memory limits: files of a group, in an ordinary folder, and no limit."""

import subprocess

from caatnet.benchmarks.harness import cgroups, memory_limits


def test_limit_and_processes_are_written_and_the_peak_is_read(
  monkeypatch, tmp_path
):
  monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
  (tmp_path / "memory").mkdir()
  with subprocess.Popen(["sleep", "60"]) as process:
    with memory_limits.limited(1 << 26) as group:
      (folder,) = (tmp_path / "memory").iterdir()
      assert group.limit_bytes == 1 << 26
      group.add(process.pid)
      assert (folder / "cgroup.procs").read_text() == str(process.pid)
      (folder / "memory.max_usage_in_bytes").write_text("1234\n")
      assert group.peak_bytes() == 1234
    process.kill()
  assert not folder.exists()


def test_no_limit_is_set_where_none_can_be(monkeypatch, tmp_path):
  monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "nowhere")
  for size_bytes in (0, 1 << 26):
    with memory_limits.limited(size_bytes) as group:
      assert group.limit_bytes == group.peak_bytes() == 0
      group.add(1)
