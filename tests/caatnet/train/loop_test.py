"""Properties of runs: stopping, resuming and other devices change no result."""

import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.train import loop
from caatnet.train.records import read_metrics
from configs.caatnet import tiny
from parallel.ledger.sends import foreign

ROOT = pathlib.Path(__file__).parents[3]
OVERRIDES = "sync.p=0.5 parallel.data=2 parallel.tensor=4"
# Measures of wall time.
TIMES = ("tokens_per_second", "model_flops_per_second",
         "fraction_of_matmul_rate")


def facts(workdir):
  return [
    {k: v for k, v in record.items() if k not in TIMES}
    for record in read_metrics(workdir)
  ]


def train(workdir, mesh, overrides=""):
  config = override(
    tiny.get_config("test"), f"{OVERRIDES} {overrides}"
  )
  return loop.train(experiments.build(config, mesh), workdir, quiet=True)


def launch(workdir, *args, num_steps=60):
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  command = [
    sys.executable, "-m", "launch.train",
    "--config=configs/caatnet/tiny.py:test", f"--workdir={workdir}",
    f"--config.train.num_steps={num_steps}", *args,
  ]
  return subprocess.Popen(
    command + [f"--config.{o}" for o in OVERRIDES.split()],
    cwd=ROOT, env=environment, stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT, text=True,
  )


def send_at_random_step(process, workdir, number, first, last):
  target = random.SystemRandom().randint(first, last)
  path = workdir / "metrics.jsonl"
  while process.poll() is None:
    if path.exists() and len(path.read_text().splitlines()) >= target:
      process.send_signal(number)
      break
    time.sleep(0.005)
  return process.communicate(timeout=120)[0]


def assert_resumes(folder, before, after, whole=None, num_steps=24):
  """Kills a run, resumes it with other keys, and compares all records.

  The killed run is a process; the others run in this one, on as many devices.
  The uninterrupted run has the keys ``whole``, by default those of ``after``.
  """
  again = folder / "again"
  killed = launch(
    again, "--cpu_devices=4", *(f"--config.{key}" for key in before.split()),
    num_steps=num_steps,
  )
  send_at_random_step(killed, again, signal.SIGKILL, 6, num_steps // 2)
  assert killed.returncode == -signal.SIGKILL
  for name, keys in (("again", after), ("whole", whole or after)):
    train(folder / name, {"tensor": 4}, f"train.num_steps={num_steps} {keys}")
  assert facts(again) == facts(folder / "whole")


def test_killed_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
  whole = launch(tmp_path / "whole", "--cpu_devices=4")
  again = [tmp_path / "again", "--cpu_devices=4"]
  killed = launch(*again)
  send_at_random_step(killed, again[0], signal.SIGKILL, 8, 24)
  assert killed.returncode == -signal.SIGKILL
  stopped = launch(*again)
  output = send_at_random_step(stopped, again[0], signal.SIGTERM, 30, 45)
  assert stopped.returncode == 128 + signal.SIGTERM, output
  assert "the same command resumes" in output
  for run in (whole, launch(*again)):
    output = run.communicate(timeout=120)[0]
    assert run.returncode == 0, output
  whole = facts(tmp_path / "whole")
  assert [r["step"] for r in whole if "loss" in r] == list(range(1, 61))
  assert facts(again[0]) == whole


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A run of 12 steps on 8 devices, with checkpoints at 4, 8 and 12."""
  workdir = tmp_path_factory.mktemp("finished") / "run"
  result = train(workdir, None, "train.keep_checkpoints=9")
  return workdir, result


def test_run_writes_its_records(finished):
  workdir, result = finished
  assert result.finished
  assert json.loads((workdir / "config.json").read_text())["sync"]["p"] == 0.5
  environment = json.loads((workdir / "environment.json").read_text())
  assert environment["mesh"] == {"worker": 1, "data": 2, "tensor": 4}
  assert len(environment["data"]["sha256"]) == 64
  assert list((workdir / "tensorboard").iterdir())
  steps = sorted(p.name for p in (workdir / "checkpoints").iterdir())
  assert steps == ["12", "4", "8"]
  last = [r for r in read_metrics(workdir) if "validation_loss" in r][-1]
  assert last["validation_loss"] == result.evaluation.loss


@pytest.mark.rotated(2)
@pytest.mark.parametrize("mesh", [{}, {"data": 2, "tensor": 2}])
def test_run_resumes_on_other_devices(finished, mesh, tmp_path):
  workdir, result = finished
  shutil.copytree(workdir, tmp_path / "run")
  for step in ("8", "12"):
    shutil.rmtree(tmp_path / "run" / "checkpoints" / step)
  resumed = train(tmp_path / "run", mesh, "train.keep_checkpoints=9")
  for ours, theirs in zip(
    facts(tmp_path / "run"), facts(workdir), strict=True
  ):
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
      np.testing.assert_allclose(value, theirs[key], rtol=5e-4)
  np.testing.assert_allclose(
    resumed.evaluation.per_place["loss"],
    result.evaluation.per_place["loss"],
    rtol=1e-3,
  )


def test_profile_holds_its_steps_and_ends(tmp_path):
  config = override(
    tiny.get_config("test"), "train.num_steps=4 parallel.worker=2 "
    "outer.algorithm=diloco outer.sync_every=2",
  )
  experiment = experiments.build(config, {"tensor": 2})
  result = loop.train(
    experiment, tmp_path / "run", profile=(1, 3), quiet=True
  )
  (trace,) = (tmp_path / "run/profile").rglob("*.xplane.pb")
  assert trace.stat().st_size
  with pytest.raises(RuntimeError, match="No profile started"):
    jax.profiler.stop_trace()
  assert len(result.profiled) == 2  # a step with an exchange, and one without
  *tables, _ = foreign.report_of_trace(
    result.profiled, experiment.program.layout.mesh, tmp_path / "run/profile"
  ).tables
  assert len(tables) == 6
  for sent, measured in zip(tables[::3], tables[2::3], strict=True):
    lines = {row["source"] for row in measured.rows}
    assert lines == {row["source"] for row in sent.rows}
    assert all(row["transfer_s"] > 0 for row in measured.rows)


def test_run_does_not_resume_with_another_text(finished, tmp_path):
  workdir, _ = finished
  shutil.copytree(workdir, tmp_path / "run")
  path = tmp_path / "run" / "environment.json"
  changed = json.loads(path.read_text())
  changed["data"]["sha256"] = "0" * 64
  path.write_text(json.dumps(changed))
  with pytest.raises(ValueError, match="other data"):
    train(tmp_path / "run", None, "train.keep_checkpoints=9")


def test_evaluation_is_equal_on_other_devices(finished):
  workdir, result = finished
  command = [sys.executable, "-m", "launch.evaluate", f"--workdir={workdir}",
             "--json", f"--plot={workdir / 'positions.png'}"]
  output = subprocess.run(
    [*command, "--cpu_devices=4", "--mesh=tensor:4"],
    cwd=ROOT, capture_output=True, text=True, check=True,
  ).stdout
  read = json.loads(output.splitlines()[-1])
  assert read["step"] == 12
  np.testing.assert_allclose(
    read["validation_loss"], result.evaluation.loss, rtol=1e-5
  )
  assert (workdir / "positions.png").stat().st_size > 1000


def test_divergence_names_step_groups_and_checkpoint(tmp_path):
  with pytest.raises(loop.NonFiniteError) as error:
    train(tmp_path / "run", {"tensor": 2}, "optimizer.learning_rate=1e30")
  message = str(error.value)
  assert "non-finite gradients in" in message
  assert "blocks/w_qkv" in message
  assert "last good checkpoint: none yet" in message


def test_two_processes_train_as_one(finished, tmp_path):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  runs = [
    launch(
      tmp_path / "run", "--cpu_devices=2", "--mesh=data:2,tensor:2",
      f"--coordinator=127.0.0.1:{port}", "--num_processes=2",
      f"--process_id={i}", num_steps=12,
    )
    for i in range(2)
  ]
  for run in runs:
    output = run.communicate(timeout=180)[0]
    assert run.returncode == 0, output
  ours, theirs = facts(tmp_path / "run"), facts(finished[0])
  assert [r["step"] for r in ours] == [r["step"] for r in theirs]
  for a, b in zip(ours, theirs, strict=True):
    key = "loss" if "loss" in a else "validation_loss"
    np.testing.assert_allclose(a[key], b[key], rtol=5e-4)
