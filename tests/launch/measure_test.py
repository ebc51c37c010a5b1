"""`launch.measure memory`, as users run it."""

import os
import pathlib
import shutil
import tempfile

import pytest

from parallel.memory import host_memory, measured_tiers
from parallel.plans.hardware import tiers

SIZE = int(2 * measured_tiers.cache_bytes() + 4e6)
SMALL = f"--sizes={SIZE}"


@pytest.fixture
def quick():
  """A folder in memory, where the system has one: a disk takes seconds."""
  memory = pathlib.Path("/dev/shm")
  if not os.access(memory, os.W_OK) or (
    shutil.disk_usage(memory).free < 8 * SIZE
  ):
    memory = None
  with tempfile.TemporaryDirectory(dir=memory) as folder:
    yield pathlib.Path(folder)


def test_measured_tiers_are_a_file_that_plans_read(launch, tmp_path, quick):
  path, there = tmp_path / "tiers.json", quick / "tier"
  ended = launch(
    "measure", "memory", f"--output={path}", SMALL, f"--file={there}"
  )
  assert ended.returncode == 0, ended.stderr
  host = tiers.read(path)
  *nodes, file = host.tiers
  assert nodes
  assert file.kind == "file"
  assert not there.exists()
  for tier in nodes:
    assert tier.latency_s.value > 0
  for tier in host.tiers:  # four arrays of float32, read
    (found,) = tier.passes
    assert found.size_bytes == 4 * (SIZE // 4 * 4)
    assert min(found.read_s, found.write_s) > 0
  assert os.listdir(tmp_path) == ["tiers.json"]
  assert not list(quick.iterdir())
  assert "copies in memory, since the device is a CPU" in (
    host.device_link.read.source
  )


def test_an_existing_file_is_kept(launch, tmp_path):
  there = tmp_path / "notes"
  there.write_text("important")
  ended = launch(
    "measure", "memory", f"--output={tmp_path / 'x'}", SMALL, f"--file={there}"
  )
  assert ended.returncode == 2
  assert "File exists" in ended.stderr
  assert there.read_text() == "important"


@pytest.mark.parametrize(("flags", "message"), [
  (["--sizes=big"], "--sizes=big must be numbers of bytes"),
  (["--sizes=1e5"], "--sizes=1e5 must lie in"),
  (["--sizes=2e6"], "the largest array must exceed"),
  (["--sizes=9e12"], "GB of free memory, and three arrays of 9000.0 GB"),
  ([SMALL, "--file=/nowhere/tier"], "--file=/nowhere/tier must be in an"),
  ([SMALL, "--numa_nodes=0,63"], "node=63 does not exist; the nodes of this "
   f"machine are {', '.join(map(str, host_memory.nodes()))}"),
  ([SMALL, "--numa_nodes=first"], "--numa_nodes=first must be numbers of"),
])
def test_bad_input_is_one_line(launch, tmp_path, flags, message):
  ended = launch(
    "measure", "memory", f"--output={tmp_path / 'x.json'}", *flags
  )
  assert ended.returncode in (1, 2)
  assert message in ended.stderr
  assert "Traceback" not in ended.stderr
  assert os.listdir(tmp_path) == []
