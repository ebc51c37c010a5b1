"""Several processes as one run: they train, stop and end together."""

import contextlib
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from caatnet.train import loop
from caatnet.train.elastic import swarm_loop
from launch import processes
from parallel.axes import Axis
from tests.caatnet.train import linear_model as toy
from tests.caatnet.train.linear_model_test import facts
from tests.caatnet.train.outer_loops_test import make_linear
from tests.caatnet.train.swarm_test import coordinator

ROOT = pathlib.Path(__file__).parents[2]
JOIN = """
import os, sys, time
from launch import processes
processes.HEARTBEAT_S = int(os.environ["HEARTBEAT_S"])
processes.initialize(sys.argv[1], 2, int(sys.argv[2]))
print("joined", flush=True)
"""
# One worker on each process.
TRAIN = JOIN + """
from caatnet.train import loop
from tests.caatnet.train import linear_model as toy
loop.train(
  toy.make(workers=2, devices=(2, 1), num_steps=10**6, log_every=3,
           checkpoint_every=10**6, learning_rate=0.01),
  sys.argv[3], quiet=True,
)
"""
WAIT = JOIN + "time.sleep(99)"
# One worker of a swarm, with batches divided among the processes.
PEER = JOIN + """
import json
import jax
from caatnet.train.elastic import swarm_loop
from parallel.axes import Axis
from tests.caatnet.train.outer_loops_test import make_linear
from tests.parallel.peers.worlds import SECURITY
said = {}
result = swarm_loop.train(
  make_linear("streaming", sys.argv[5], 1, levels=(Axis("data", 2, 2),),
              batch_size=4, num_steps=14),
  sys.argv[3],
  None if jax.process_index() else swarm_loop.Endpoint(
    ("127.0.0.1", int(sys.argv[4])), SECURITY),
  quiet=True,
  on_commit=lambda run: said.update({run.swarm.revision: run.swarm.digest}),
)
print(json.dumps({"said": said, "loss": result.evaluation.loss}))
"""
STREAMING = "outer.overlap=(2,) outer.pieces=1 outer.fragment_layers=1"


@contextlib.contextmanager
def pair_of(script, *args, heartbeat_s=10):
  """Starts two processes, and kills them at the end."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_NUM_CPU_DEVICES": "1", "HEARTBEAT_S": str(heartbeat_s),
  }
  pair = [
    subprocess.Popen(
      [sys.executable, "-c", script, address, str(i), *map(str, args)],
      cwd=ROOT, env=environment, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE, text=True,
    )
    for i in range(2)
  ]
  try:
    yield pair
  finally:
    for process in pair:
      with process:  # waits for its end, and closes its pipes
        process.kill()


def test_workers_on_two_processes_train_and_stop_as_one(tmp_path):
  """Sends metrics every three steps; a signal to one process stops both."""
  with pair_of(TRAIN, tmp_path / "pair") as pair:
    path = tmp_path / "pair" / "metrics.jsonl"
    latest = time.monotonic() + 300
    while not (path.exists() and path.read_text().count("\n") > 2):
      assert all(process.poll() is None for process in pair)
      assert time.monotonic() < latest
      time.sleep(0.01)
    pair[1].send_signal(signal.SIGTERM)
    for process in pair:
      error = process.communicate(timeout=60)[1]
      assert process.returncode == 0, error
  found = facts(tmp_path / "pair")
  (checkpoint,) = (tmp_path / "pair" / "checkpoints").iterdir()
  assert 0 <= int(checkpoint.name) - found[-1]["step"] < 3
  loop.train(
    toy.make(workers=2, num_steps=9, log_every=3, learning_rate=0.01),
    tmp_path / "alone", quiet=True,
  )
  expected = [r for r in facts(tmp_path / "alone") if "loss" in r]
  assert [r["step"] for r in found[:3]] == [3, 6, 9]
  for ours, theirs in zip(found[:3], expected, strict=True):
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
      np.testing.assert_allclose(value, theirs[key], rtol=1e-5)


@pytest.mark.rotated(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_death_of_a_process_ends_the_other_with_one_line(victim):
  with pair_of(WAIT, heartbeat_s=2) as pair:
    for process in pair:
      assert process.stdout.readline() == "joined\n"
    pair[victim].kill()
    error = pair[1 - victim].communicate(timeout=60)[1]
    assert pair[1 - victim].returncode
  assert len(error.splitlines()) == 1
  assert "another process of this run has ended" in error


def test_worker_of_two_processes_has_the_bits_of_the_others(tmp_path):
  """Process 0 is connected to the swarm, and broadcasts to the other one."""
  with coordinator(tmp_path, 2) as place, pair_of(
    PEER, tmp_path / "pair", place.coordinator[1], STREAMING
  ) as pair:
    said = {}
    other = swarm_loop.train(
      make_linear("streaming", STREAMING, 1, levels=(Axis("data", 2, 2),),
                  batch_size=4, num_steps=14),
      tmp_path / "other", place, quiet=True,
      on_commit=lambda run: said.update({run.swarm.revision: run.swarm.digest}),
    )
    found = []
    for process in pair:
      out, error = process.communicate(timeout=120)
      assert process.returncode == 0, error
      found.append(json.loads(out.splitlines()[-1]))
  assert found[0] == found[1]
  assert {int(n): digest for n, digest in found[0]["said"].items()} == said
  assert len(said) > 3
  np.testing.assert_allclose(found[0]["loss"], other.evaluation.loss, rtol=1e-5)


def test_only_the_fatal_error_is_condensed():
  """Copies lines after a log line at the end, unless a fatal line follows."""
  log = b"E1122 07:18:02.9  1 coordination_service_agent.cc:289] Polled\nmore\n"
  fatal = (
    b"F1122 07:18:02.9  1 client.h:80] Terminating process because the JAX "
    b"distributed service detected fatal errors.\n*** Check failure stack"
  )
  for lines, expected in (
    (b"a\nE1122 b\n", b"a\nE1122 b\n"),
    (b"a\n" + log, b"a\n" + log),
    (b"a\n" + log + fatal, b"a\n" + processes.LOST_MESSAGE),
    (b"error: a\n" + fatal, b"error: a\n"),
  ):
    out = io.BytesIO()
    processes.condense(io.BytesIO(lines), out)
    assert out.getvalue() == expected
