"""Files of tiers that are invalid, or that describe this machine."""

import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys

import pytest

from parallel.memory import host_memory
from parallel.plans.hardware import tiers

ROOT = pathlib.Path(__file__).parents[2]
PLACE = "--config=configs/memory/12b_32k.py:7b"
SCRIPTS = {
  "place": [PLACE, "--config.placement.longest=2048"],
  "plan": ["--config=configs/planner/gpt_11b.py:test"],
}
# A model with a state of a few GB, and a device that cannot hold all of it.
SMALL = [
  PLACE, "--config.placement.longest=4096", "--config.data.seq_len=4096",
  "--config.model.width=512", "--config.model.num_heads=8",
  "--config.model.num_kv_heads=8", "--config.model.ffn_width=1376",
  "--config.model.vocab_size=1000", "--config.placement.fill=0.004",
  "--config.model.num_layers=64",
]


def write(path, host, place=(), **changed):
  """Writes a file in which the object at a place has other entries."""
  content = json.loads(tiers.to_json(host))
  part = content
  for key in place:
    part = part[key]
  part.update(changed)
  for key, value in changed.items():
    if value is None:
      del part[key]
  path.write_text(json.dumps(content))
  return f"--tiers={path}"


def here(**entries):
  """Returns a host of one tier that describes this machine."""
  host = tiers.HOSTS["large-dram"]
  return host.model_copy(update={
    "name": platform.node(),
    "tiers": (host.tiers[0].model_copy(update=entries),),
  })


@pytest.mark.rotated
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("place", "changed", "message"), [
  (["read"], {"value": 0, "low": 0}, "tiers[1].read: low=0 must be positive"),
  (["write"], {"value": -5.0}, "tiers[1].write.value=-5.0 must be greater"),
  (["read"], {"value": float("nan")}, "tiers[1].read.value=NaN must be a "
   "finite number"),
  (["read"], {"high": float("inf")}, "read.high=Infinity must be a finite"),
  (["write"], {"value": None}, "tiers[1].write.value is missing; keys are"),
  ([], {"read": None}, "tiers[1].read is missing; keys are"),
  ([], {"link": "switch"}, "tiers[1].link='switch' must be"),
  ([], {"node": -1}, "tiers[1].node=-1 must be greater than or equal to 0"),
])
def test_an_invalid_file_is_one_line(
  launch, tmp_path, script, place, changed, message
):
  flag = write(
    tmp_path / "tiers.json", tiers.HOSTS["two-cxl"], ["tiers", 1, *place],
    **changed,
  )
  ended = launch(script, *SCRIPTS[script], flag)
  assert ended.returncode == 2
  assert message in ended.stderr
  assert len(ended.stderr.strip().splitlines()) == 1


def test_an_unknown_link_suggests_the_nearest(launch, tmp_path):
  host = tiers.HOSTS["two-cxl"]
  switch = host.device_link.model_copy(update={"name": "switch"})
  flag = write(
    tmp_path / "tiers.json", host.model_copy(update={"links": (switch,)}),
    ["tiers", 1], link="swicth",
  )
  ended = launch("place", *SCRIPTS["place"], flag)
  assert ended.returncode == 2
  assert "link='swicth' must be one of switch; did you mean switch?" in (
    ended.stderr
  )


def test_tiers_that_are_too_small_say_what_would_fit(launch, tmp_path):
  host = tiers.HOSTS["large-dram"]
  flag = write(
    tmp_path / "tiers.json", host, ["tiers", 0, "capacity_bytes"],
    value=20e9, low=20e9, high=20e9,
  )
  ended = launch(
    "place", PLACE, "--config.placement.fill=0.15", flag,
    "--config.placement.policies=('optimum',)",
    f"--output={tmp_path / 'out.json'}",
  )
  assert ended.returncode == 0, ended.stderr
  row = json.loads((tmp_path / "out.json").read_text())["policies"][-1]
  line = next(
    line for line in ended.stdout.splitlines() if line.startswith("optimum: ")
  )
  billions = row["largest"] / 1e9
  assert "the state does not fit: device lacks" in line
  assert line.endswith(
    f"GB; what would fit: a model of {billions:.1f}B parameters"
  )
  assert row["longest"] == "none"


def test_a_node_that_this_machine_lacks_is_an_error(launch, tmp_path):
  flag = write(tmp_path / "tiers.json", here(node=63))
  ended = launch("place", *SMALL, flag)
  assert ended.returncode == 2
  nodes = ", ".join(map(str, host_memory.nodes()))
  assert ended.stderr == (
    "error: tier 'dram': node=63 does not exist; the nodes of this machine are "
    f"{nodes}\n"
  )
  # Another machine's file may have any node.
  flag = write(
    tmp_path / "other.json", here(node=63), name=f"not {platform.node()}"
  )
  assert launch("place", *SMALL, flag).returncode == 0


def test_more_memory_than_this_machine_has_is_an_error(launch, tmp_path):
  total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  flag = write(
    tmp_path / "tiers.json", here(), ["tiers", 0, "capacity_bytes"],
    value=1e15, high=1e15,
  )
  layers = 64 * (1 + total // 10**9)  # over 3 GB of state for each GB
  ended = launch(
    "place", *SMALL[:-1], f"--config.model.num_layers={layers}", flag
  )
  assert ended.returncode == 2
  assert f"and this machine has {total / 1e9:.1f} GB" in ended.stderr
  assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("capable", [False, True])
def test_memory_that_cannot_be_locked_is_a_warning(tmp_path, capable):
  """The limit is 64 kB; the capability CAP_IPC_LOCK lifts it."""
  drop = []
  if capable and os.geteuid() != 0:
    pytest.skip("only root has CAP_IPC_LOCK")
  if not capable and os.geteuid() == 0:
    if not shutil.which("setpriv"):
      pytest.skip("no setpriv to drop CAP_IPC_LOCK")
    drop = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
  flag = write(tmp_path / "tiers.json", here(node=host_memory.nodes()[0]))
  done = subprocess.run(
    ["sh", "-c", 'ulimit -l 64; exec "$@"', "sh", *drop,
     sys.executable, "-m", "launch.place", *SMALL, flag],
    cwd=ROOT, text=True, capture_output=True, check=False, timeout=300,
  )
  assert done.returncode == 0, done.stderr
  text = " ".join(done.stdout.split())
  warned = (
    "GB are locked for copies, and this process may lock 0.1 MB: raise "
    "RLIMIT_MEMLOCK (ulimit -l) or grant CAP_IPC_LOCK"
  ) in text
  assert warned != capable
