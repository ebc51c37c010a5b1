"""Properties of a run's folder: valid after any kill, one trainer at a time."""

import asyncio
import contextlib
import itertools
import json
import math
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading

from etils import epath
import fsspec
from fsspec.implementations.memory import MemoryFileSystem
import numpy as np
import pytest
from tensorboardX import record_writer

from caatnet.config import experiments
from caatnet.train import loop, records
from caatnet.train.checkpoint.save import Checkpointer, waiting_for_arrays
from configs.caatnet import tiny
from parallel.base import files
from tests.caatnet.train import linear_model as toy
from tests.caatnet.train.linear_model_test import facts

ROOT = pathlib.Path(__file__).parents[3]


class Killed(BaseException):
  """Exception that stands for SIGKILL."""


class Writes:
  """Writes of this process below a folder, recorded by Python's audit events.

  From write number ``kill_at`` on, `Killed` is raised. If that write opens a
  file, the file is still truncated first: the worst moment of a kill.
  """

  def __init__(self):
    self.folder, self.kill_at, self.seen = None, None, []

  def __call__(self, event, args):
    if self.folder is None or event not in (
      "open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"
    ):
      return
    path = str(args[0])
    reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
    if reads or not path.startswith(self.folder):
      return
    self.seen.append((event, path))
    if self.kill_at is None or "/checkpoints" in path:  # Orbax' own files
      return
    self.kill_at -= 1
    if self.kill_at == 0 and event == "open":
      folder, self.folder = self.folder, None
      os.close(os.open(args[0], args[2], 0o644))
      self.folder = folder
    if self.kill_at <= 0:
      raise Killed(event, path)


WRITES = Writes()
sys.addaudithook(WRITES)  # Python has no function to remove a hook


@contextlib.contextmanager
def watched(folder, kill_at=None):
  WRITES.folder, WRITES.kill_at, WRITES.seen = str(folder), kill_at, []
  try:
    yield WRITES.seen
  finally:
    WRITES.folder = None


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Runs six steps with checkpoints at 2, 4 and 6."""
  workdir = tmp_path_factory.mktemp("files") / "run"
  experiment = toy.make(eval_every=3)
  loop.train(experiment, workdir, quiet=True)
  return experiment, workdir


def test_run_killed_at_any_write_resumes(finished, tmp_path):
  """Kills a run at its first write, resumes it, kills it at the second, ..."""
  experiment, whole = finished
  run = tmp_path / "run"
  shutil.copytree(whole, run)
  for step in ("4", "6"):  # leaves records after the last checkpoint
    shutil.rmtree(run / "checkpoints" / step)
  kept = [r for r in facts(whole) if r["step"] <= 2]
  for number in itertools.count(1):
    try:
      with watched(run, number):
        loop.train(experiment, run, quiet=True)
      break
    except Killed:
      assert facts(run)[: len(kept)] == kept, WRITES.seen
      assert records.read_config(run) == experiment.config, WRITES.seen
  assert number > 8
  assert facts(run) == facts(whole)


def test_reading_a_run_writes_nothing(finished):
  experiment, workdir = finished
  abstract = experiment.abstract_state()
  with watched(workdir) as seen:
    checkpointer = Checkpointer(workdir, experiment.program)
    checkpointer.restore_params(abstract.params, abstract.outer)
    checkpointer.close()
  assert not seen


LIVE = """
import sys
from caatnet.train import loop
from tests.caatnet.train import linear_model as toy
loop.train(toy.make(num_steps=25, checkpoint_every=1, keep_checkpoints=1),
           sys.argv[1], quiet=True)
"""


def test_every_checkpoint_of_a_live_run_can_be_read(tmp_path):
  """Reads the newest checkpoint while the trainer keeps only one."""
  experiment = toy.make(num_steps=25, checkpoint_every=1, keep_checkpoints=99)
  loop.train(experiment, tmp_path / "whole", quiet=True)
  abstract = experiment.abstract_state()
  reader = Checkpointer(tmp_path / "whole", experiment.program)
  expected = {
    step: reader.restore_params(abstract.params, abstract.outer, step)[0]
    for step in reader.steps()
  }
  reader.close()
  trainer = subprocess.Popen(
    [sys.executable, "-c", LIVE, tmp_path / "run"], cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"}, stderr=subprocess.PIPE,
  )
  seen = set()
  # A trainer whose checkpoint files are removed may wait for them forever.
  stuck = threading.Timer(100, trainer.kill)
  stuck.start()
  with trainer:
    while trainer.poll() is None:
      reader = Checkpointer(tmp_path / "run", experiment.program)
      with contextlib.suppress(FileNotFoundError):  # no checkpoint yet
        params, _, step, _ = reader.restore_params(
          abstract.params, abstract.outer
        )
        seen.add(step)
        for key, value in params.items():
          np.testing.assert_array_equal(value, expected[step][key])
      reader.close()
    stuck.cancel()
    assert trainer.returncode == 0, trainer.stderr.read()
  assert len(seen) > 1
  assert facts(tmp_path / "run") == facts(tmp_path / "whole")


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("process 7 on far")
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


def test_folder_has_one_trainer(finished, tmp_path):
  experiment, _ = finished
  run = tmp_path / "run"
  run.mkdir()
  holder = subprocess.Popen(
    [sys.executable, "-c", HOLD, run / "lock"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
  )
  assert holder.stdout.readline()
  with pytest.raises(ValueError, match="is in use: process 7 on far is train"):
    loop.train(experiment, run, quiet=True)
  assert [p.name for p in run.iterdir()] == ["lock"]
  with holder:  # waits for its end, and closes its pipes
    holder.send_signal(signal.SIGKILL)
  with files.lock(epath.Path(run)):  # the text of the dead holder is ignored
    us = f"in use: process {os.getpid()} on {socket.gethostname()} is"
    with pytest.raises(ValueError, match=us):
      loop.train(experiment, run, quiet=True)
  (run / "config.json").write_text('{"name": "other", "seed": 1}')
  for _ in range(2):  # a run that cannot start releases the lock
    with pytest.raises(ValueError, match=r"config\.seed=1"):
      loop.train(experiment, run, quiet=True)


def test_full_disk_is_a_one_line_error(finished, tmp_path, monkeypatch):
  """Links the temporary file to /dev/full."""
  experiment, workdir = finished
  shutil.copytree(workdir, tmp_path / "run")
  monkeypatch.setattr(secrets, "token_hex", lambda _: "known")
  temporary = f".environment.{os.getpid()}_known.json"
  (tmp_path / "run" / temporary).symlink_to("/dev/full")
  with pytest.raises(ValueError, match=r"^--workdir=.*No space left .*$"):
    loop.train(experiment, tmp_path / "run", quiet=True)
  assert not os.path.lexists(tmp_path / "run" / temporary)


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (lambda p: shutil.rmtree(p / "position"), r"/6 is damaged: .*position"),
    (lambda p: shutil.rmtree(p / "params"), r"/6 is damaged: params is mis"),
    (lambda p: (p / "rest/manifest.ocdbt").write_bytes(b"x" * 9),
     r"checkpoints/6 is damaged: .+$"),
    (lambda p: [f.unlink() for f in (p / "params").rglob("d/*")],
     r"checkpoints/6 is damaged: the file params/.* is missing"),
    (lambda p: (p / "../../config.json").write_text('{"name": '),
     r"config.json is damaged: "),
    (lambda p: (p / "../../metrics.jsonl").write_text('{"st\n{"step": 1}\n'),
     r"metrics.jsonl:1 is damaged: "),
  ],
)
def test_damaged_file_is_named_in_one_line(
  finished, damage, message, tmp_path
):
  experiment, workdir = finished
  shutil.copytree(workdir, tmp_path / "run")
  damage(tmp_path / "run/checkpoints/6")
  with pytest.raises(ValueError, match=message) as error:
    loop.train(experiment, tmp_path / "run", quiet=True)
  assert "\n" not in str(error.value)


def test_failed_read_waits_for_concurrent_reads():
  """Ends concurrent reads before Orbax closes its event loop."""
  ended = []

  async def read(fails):
    await asyncio.sleep(0 if fails else 0.01)
    ended.append(fails)
    if fails:
      raise OSError("damaged")

  async def restore():
    await asyncio.gather(read(True), read(False))

  with waiting_for_arrays():
    loop = asyncio.new_event_loop()
  with contextlib.closing(loop), pytest.raises(OSError, match="damaged"):
    loop.run_until_complete(restore())
  assert ended == [True, False]


def test_config_of_an_older_run_loads(tmp_path):
  """Fills in the defaults of newer keys; unknown keys are refused."""
  config = tiny.get_config("test")
  with config.unlocked():
    del config.optimizer.decay_steps, config.data.tokenizer
  (tmp_path / "config.json").write_text(config.to_json())
  assert experiments.from_folder(tmp_path).config["optimizer"] == (
    tiny.get_config("test").optimizer.to_dict()
  )
  config.optimizer.decay = 3
  (tmp_path / "config.json").write_text(config.to_json())
  with pytest.raises(ValueError, match=r"json: config\.optimizer\.decay=3 has"):
    experiments.from_folder(tmp_path)



@pytest.mark.parametrize(
  ("path", "local", "message"),
  [
    ("gs://bucket/run", False, "needs pip install .*gcsfs"),
    ("s3://bucket/run", False, "needs pip install .*s3fs"),
    ("gs://bucket/run", True, "must be on this machine$"),
    ("ftp://host/run", False, "on this machine, or start with gs:// or s3://"),
  ],
)
def test_unreachable_folder_is_a_one_line_error(path, local, message):
  with pytest.raises(ValueError, match=message):
    files.parse_folder(path, local=local)


class Bucket(MemoryFileSystem):
  """In-memory file system that stands for gcsfs."""

  protocol = "gcs"
  store, pseudo_dirs = {}, [""]

  @classmethod
  def _strip_protocol(cls, path):
    return "/" + str(path).removeprefix("gs://").strip("/")


class Events:
  """Stand-in for TensorBoard's writer to cloud storage."""

  def __init__(self):
    self.paths = []

  def directory_check(self, path):
    pass

  def open(self, path):
    self.paths.append(path)
    return self

  def write(self, data):
    pass

  flush = close = lambda self: None


def test_records_in_cloud_storage_are_read_by_the_resumed_run(monkeypatch):
  """Checks that each flush rewrites the file."""
  fsspec.register_implementation("gcs", Bucket, clobber=True)
  events = Events()
  monkeypatch.setitem(record_writer.REGISTERED_FACTORIES, "gs", events)
  workdir = epath.Path("gs://bucket/run")
  records.write_config(workdir, {"seed": 1})
  assert records.read_config(workdir) == {"seed": 1}
  with files.lock(workdir):
    writer = records.MetricsWriter(workdir, 0)
    for step in (1, 2, 3):
      writer.write(step, {"loss": step / 2})
      if step == 2:
        writer.flush()
    assert [r["step"] for r in records.read_metrics(workdir)] == [1, 2]
    writer.close()
  assert [r["step"] for r in records.read_metrics(workdir)] == [1, 2, 3]
  records.MetricsWriter(workdir, 2).close()
  assert records.read_metrics(workdir) == [
    {"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0},
  ]
  assert events.paths[0].startswith("gs://bucket/run/tensorboard/")
  assert not pathlib.Path("gs:").exists()


def test_run_works_without_git(monkeypatch):
  monkeypatch.setenv("PATH", "")
  mesh = toy.make().program.layout.mesh
  assert records.environment(mesh)["commit"] == "unknown"


def test_missing_module_of_a_missing_package_is_not_there():
  assert files._is_there("os.path")
  assert not files._is_there("no_such_module_here")
  assert not files._is_there("no_such_package_here.module")


@pytest.mark.parametrize(
  "text", ["[1]", "null", '{"loss": 1.5}', '{"step": "1"}', '{"step": true}']
)
def test_line_of_metrics_without_a_step_is_named(tmp_path, text):
  (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{text}\n')
  with pytest.raises(ValueError, match="jsonl:2 is damaged: a record must"):
    records.read_metrics(tmp_path)


def test_json_is_strict_and_names_what_is_no_number(capsys):
  """Other readers of JSON refuse NaN and Infinity."""
  value = {"rows": [{"a": 1.5, "b": math.nan}], "n": (math.inf, -math.inf)}
  text = files.to_json(value)
  assert json.loads(text, parse_constant=pytest.fail) == {
    "rows": [{"a": 1.5, "b": None}], "n": [None, None]
  }
  assert capsys.readouterr().err == (
    "warning: rows[0].b and 2 more: no finite number; null in JSON\n"
  )
  assert files.to_json({"a": math.nan}, 2) == '{\n  "a": null\n}'

