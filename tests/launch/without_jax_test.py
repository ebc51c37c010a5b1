"""Commands that need no accelerator do not load jax, which takes a second."""

import subprocess
import sys

import pytest

from caatnet.studies import registry

CODE = """
import runpy, sys
name, sys.argv = sys.argv[1], sys.argv[1:]
try:
  runpy.run_module(f"launch.{name}", run_name="__main__")
except SystemExit as ended:
  assert not ended.code, ended.code
print("jax" in sys.modules)
"""
STUDIES = {
  "alignment": "graphs/alignment.py",
  "collectives": "collectives/multitree.py:test",
  "datacentre": "datacentre/hundred_billion.py:test",
  "federated": "federated/links.py:test",
  "flows": "collectives/spraying.py:test",
  "inference": "inference/decode.py",
  "partitions": "zero/frontier.py",
  "pipeline": "pipeline/schedules.py:test",
  "placement": "memory/12b_32k.py",
  "planner": "planner/gpt_11b.py:test",
  "published": "planner/published.py:test",
  "schedule": "collectives/schedule.py:test",
  "serving": "serving/vllm_log.py:test",
  "utilisation": "diloco/utilisation.py",
}
NAMES = {"placement": "place", "planner": "plan"}
COMMANDS = {
  study: [NAMES.get(study, "simulate"), f"--config=configs/{config}"]
  for study, config in STUDIES.items()
} | {
  "coordinator": ["coordinator", "--help"],
  "measure": ["measure", "links", "--num_processes=2",
              "--output={tmp}/links.json"],
}


@pytest.mark.rotated
@pytest.mark.parametrize("case", COMMANDS)
def test_command_does_not_load_jax(case, tmp_path):
  arguments = [x.format(tmp=tmp_path) for x in COMMANDS[case]]
  ran = subprocess.run(
    [sys.executable, "-c", CODE, *arguments], check=False, text=True,
    capture_output=True,
  )
  assert ran.returncode == 0, ran.stderr
  assert ran.stdout.splitlines()[-1] == "False"


def test_every_study_is_tried():
  assert {*STUDIES} == {*registry.STUDY_NAMES}
