"""A training run loads the code of a run, and no experiments."""

import importlib.util
import subprocess
import sys

CODE = """
import runpy, sys
try:
  runpy.run_module("launch.train", run_name="__main__")
except SystemExit as ended:
  assert not ended.code, ended.code
print(*sys.modules)
"""
# What only other commands, runs in a swarm, and runs on graphs or with routes
# of schedules use.
ABSENT = (
  "parallel.peers", "parallel.schedules", "parallel.plans.planner",
  "parallel.plans.topology", "parallel.plans.schedules",
  "parallel.plans.network", "caatnet.data.graphs", "caatnet.models.graph",
  "caatnet.studies", "caatnet.benchmarks", "caatnet.federated",
  "caatnet.serving", "caatnet.inference", "networkx",
)


def test_training_run_loads_no_other_subject(tmp_path):
  assert all(map(importlib.util.find_spec, ABSENT))  # names of today's packages
  ran = subprocess.run(
    [sys.executable, "-c", CODE, "--config=configs/caatnet/tiny.py:test",
     "--config.train.num_steps=4", "--config.optimizer.warmup_steps=1",
     f"--workdir={tmp_path}", f"--programs={tmp_path}"],
    check=False, text=True, capture_output=True,
  )
  assert ran.returncode == 0, ran.stderr
  assert "step 4: validation" in ran.stdout
  loaded = ran.stdout.splitlines()[-1].split()
  assert "caatnet.train.loop" in loaded
  prefixes = tuple(f"{name}." for name in ABSENT)
  assert [name for name in loaded if f"{name}.".startswith(prefixes)] == []
