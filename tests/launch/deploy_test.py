"""Deployment files of docs/elastic.md and launch/cluster, executed."""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

from absl import flags
import pytest

from launch import coordinator

ROOT = pathlib.Path(__file__).parents[2]
TEXTS = {
  name: (ROOT / name).read_text() for name in (
    "docs/elastic.md", "launch/cluster/coordinator.service",
    "launch/cluster/swarm.sbatch",
  )
}
# A user's program: a peer that participates in three rounds.
PEER = r"""
import os
import numpy as np
from parallel.peers.transport import handshake
from parallel.peers.swarm import Swarm
host, port = os.environ["COORDINATOR"].split(":")
x = {"x": np.zeros(3, np.float32)}
with Swarm((host, int(port)), handshake.read_security(), x) as swarm:
  while swarm.revision < 3:
    swarm.give(np.ones(3, np.float32), lambda exchange, state, part: {
      "x": state["x"] + exchange.mean(part)})
os.write(1, f"x is {swarm.state['x'][0]}\n".encode())
"""


@pytest.mark.parametrize("name", TEXTS)
def test_flags_of_the_coordinator_exist(name):
  assert coordinator.FLAGS is flags.FLAGS
  commands = re.findall(
    r"-m launch\.coordinator((?:[^\n]|\\\n)*)", TEXTS[name]
  )
  assert commands
  for command in commands:
    for flag in re.findall(r"--(\w+)", command):
      assert flag in flags.FLAGS, flag


@pytest.mark.skipif(
  not shutil.which("systemd-analyze"), reason="needs systemd-analyze"
)
def test_service_file_is_valid(tmp_path):
  text = TEXTS["launch/cluster/coordinator.service"]
  text = text.replace("/opt/caatnet/.venv/bin/python", sys.executable)
  there = tmp_path / "coordinator.service"
  there.write_text(text.replace("User=elastic", "User=root"))
  result = subprocess.run(
    ["systemd-analyze", "verify", there], capture_output=True, text=True
  )
  ours = [x for x in result.stderr.splitlines() if "coordinator.service" in x]
  assert ours == []


def _stub(folder, name, text):
  path = folder / name
  path.write_text(f"#!/bin/bash\n{text}\n")
  path.chmod(0o755)


def test_batch_job_runs_a_coordinator_and_peers(tmp_path):
  """Two nodes that are both this machine, and stubs of SLURM's commands."""
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  _stub(tmp_path, "scontrol", "echo 127.0.0.1; echo 127.0.0.1")
  # Skips options; one task if requested, else one per node.
  _stub(tmp_path, "srun", """
    tasks=$SLURM_NNODES
    while [[ $1 == --* ]]; do
      [[ $1 == --ntasks=1 ]] && tasks=1
      shift
    done
    [[ $tasks == 1 ]] && exec "$@"
    for task in $(seq $tasks); do "$@" & done
    wait""")
  _stub(tmp_path, "python", f'exec "{sys.executable}" "$@"')
  (tmp_path / "peer.py").write_text(PEER)
  result = subprocess.run(
    ["bash", ROOT / "launch/cluster/swarm.sbatch", "python", "peer.py"],
    cwd=tmp_path, capture_output=True, text=True, timeout=60,
    env={
      **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}",
      "PYTHONPATH": str(ROOT), "PORT": str(port), "SLURM_NNODES": "2",
      "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]",
    },
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.count("x is 3.0") == 2
  assert (tmp_path / "runs/coordinator-7-0/journal").exists()
  with socket.socket() as gone, pytest.raises(ConnectionRefusedError):
    gone.connect(("127.0.0.1", port))
