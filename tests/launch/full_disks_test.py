"""Full disks: each script ends with one line that names path and free space.

Disks are real: a small tmpfs for root, else a limit of the size of files.
"""

import contextlib
import errno
import os
import pathlib
import re
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.train.checkpoint import export
from configs.caatnet import tiny
from launch import full_disks
from parallel.memory import measured_tiers
from tests.caatnet.train.loop_test import facts

ROOT = pathlib.Path(__file__).parents[2]
LINE = re.compile(
  r"error: (/\S+) cannot be written: (No space left on device|File too large) "
  r"\([\d,]+ kB free\)"
)


@contextlib.contextmanager
def small_disk(folder, size_kb):
  """Mounts a tmpfs, or yields a limit of the bytes of a file."""
  folder.mkdir()
  mounted = not subprocess.run(
    ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", folder],
    capture_output=True, check=False,
  ).returncode if os.geteuid() == 0 else False
  try:
    yield None if mounted else size_kb * 100  # a tenth: of one file
  finally:
    if mounted:
      subprocess.run(["umount", "-l", folder], check=True)


def run(*command, limit=None):
  """Runs a script; returns its exit code and the lines of its stderr."""
  argv = [sys.executable, "-m", *map(str, command)]
  if limit is not None:  # in blocks of 512 bytes; Python would have to fork
    argv = ["sh", "-c", f'ulimit -f {limit // 512}; exec "$@"', "sh", *argv]
  done = subprocess.run(
    argv, cwd=ROOT, text=True, capture_output=True, check=False, timeout=300,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"},
  )
  return done.returncode, done.stderr.splitlines()


def expect(folder, found):
  code, lines = found
  assert code == 1, lines
  assert not any("Traceback" in line for line in lines), lines
  match = LINE.fullmatch(lines[-1])
  assert match is not None, lines
  assert match[1].startswith(str(folder))


def outcome(workdir):
  """Returns a run's metrics without times, and its newest parameters."""
  config = override(tiny.get_config("test"), "parallel.tensor=2")
  params, step = export.read_params(experiments.build(config), workdir)
  return facts(workdir), step, jax.tree.map(np.asarray, params)


def test_run_on_a_full_disk_ends_with_one_line_and_resumes(tmp_path):
  """TensorStore is writing several arrays when the disk is full.

  With space the same command resumes, with the bits of an undisturbed run.
  """
  disk = tmp_path / "disk"
  command = [
    "launch.train", "--config=configs/caatnet/tiny.py:test", "--cpu_devices=2",
    "--config.parallel.tensor=2", "--config.train.checkpoint_every=2",
  ]
  with small_disk(disk, 1200) as limit:
    workdir = disk / "run"
    expect(disk, run(*command, f"--workdir={workdir}", limit=limit))
    if limit is None:  # one complete checkpoint fits, which is kept
      assert (workdir / "checkpoints/2").is_dir()
      subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    code, lines = run(*command, f"--workdir={workdir}")
    assert code == 0, lines
    resumed = outcome(workdir)
  code, lines = run(*command, f"--workdir={tmp_path}/whole")
  assert code == 0, lines
  chex.assert_trees_all_equal(resumed, outcome(tmp_path / "whole"))
  assert resumed[1] == 12


@pytest.mark.parametrize(("command", "flag"), [
  ("launch.simulate --config=configs/diloco/utilisation.py", "output=x.json"),
  ("launch.simulate --config=configs/diloco/utilisation.py", "report=x.html"),
  ("launch.place --config=configs/memory/12b_32k.py", "output=x.json"),
])
def test_results_on_a_full_disk_end_with_one_line(command, flag, tmp_path):
  disk = tmp_path / "disk"
  name, _, file = flag.partition("=")
  with small_disk(disk, 4) as limit:
    expect(disk, run(
      *command.split(), f"--{name}={disk}/{file}", limit=limit
    ))
    assert not list(disk.iterdir())


def test_a_file_tier_on_a_full_disk_ends_with_one_line(tmp_path):
  disk = tmp_path / "disk"
  with small_disk(disk, 400) as limit:
    code, lines = run(
      "launch.measure", "memory", f"--file={disk}/tier",
      f"--output={tmp_path}/tiers.json",
      f"--sizes={2 * measured_tiers.cache_bytes() + 4e6}", limit=limit,
    )
    assert code in (1, 2)
    assert "Traceback" not in "".join(lines)
    assert re.search(
      rf"error: --file={disk}/tier: [\d.]+ GB do not fit into the 0.0 GB"
      if limit is None else LINE, lines[-1]
    )
    assert not list(disk.iterdir())


@pytest.mark.parametrize("number", [
  errno.ENOSPC, errno.EDQUOT, errno.EFBIG
])
def test_full_disk_is_found_in_the_chain_of_an_error(number, tmp_path):
  path = tmp_path / "run"
  text = os.strerror(number)
  for inner in (
    OSError(number, text, str(path)),
    ValueError(f'RESOURCE_EXHAUSTED: writing "{path}": {text} [code=1]'),
    RuntimeError(f"RESOURCE_EXHAUSTED: {path}; {text}"),
  ):
    outer = ValueError("cannot be saved")
    outer.__cause__ = inner
    assert full_disks.describe_full_disk(outer).startswith(
      f"{path} cannot be written: {text} ("
    )
  for other in (
    OSError(errno.EACCES, os.strerror(errno.EACCES), str(path)),
    RuntimeError("RESOURCE_EXHAUSTED: out of device memory"),
  ):
    assert full_disks.describe_full_disk(other) is None


def test_output_on_a_full_disk_ends_with_one_line():
  """The message has no path: it names the working folder."""
  if not os.path.exists("/dev/full"):
    pytest.skip("no /dev/full")
  with open("/dev/full", "w") as full:
    done = subprocess.run(
      [sys.executable, "-m", "launch.train", "--help"], cwd=ROOT, text=True,
      stdout=full, stderr=subprocess.PIPE, check=False, timeout=300,
    )
  lines = done.stderr.splitlines()
  assert (done.returncode, len(lines)) == (1, 1), lines
  assert "No space left on device" in lines[0]
