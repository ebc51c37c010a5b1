"""Launch scripts as users run them, each in a separate process."""

import gc
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys
import time
import traceback
from typing import NamedTuple

import pytest

from caatnet.config import experiments
from caatnet.train.checkpoint.save import Checkpointer
from configs.caatnet import tiny

ROOT = pathlib.Path(__file__).parents[2]

# Imports of scripts: loaded once, in the server that forks the process of each
# script. Without `launch`, whose flags differ between scripts.
PRELOADED = [
  "jax", "jax.experimental.pallas.tpu", "jax.experimental.pallas.triton",
  "flax.nnx", "optax", "grain", "orbax.checkpoint", "scipy.sparse.csgraph",
  "networkx", "rich.progress", "ml_collections.config_flags", "pytest",
  "caatnet.config.experiments", "caatnet.config.serving", "caatnet.train.loop",
  "caatnet.serving.server.start",
]


class Ended(NamedTuple):
  """Exit code and output of a process."""

  returncode: int | None
  stdout: str
  stderr: str


def _script(name, args, out, err):
  """Runs a script as ``python -m launch.NAME ARGS`` would.

  A name with a dot is that of a module, as in docs.demo.
  """
  module = name if "." in name else f"launch.{name}"
  gc.freeze()  # else collections copy pages of the server
  for stream, path in ((1, out), (2, err)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
  os.chdir(ROOT)
  sys.path.insert(0, str(ROOT))
  sys.argv = [f"{module.replace('.', '/')}.py", *args]
  try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
  except SystemExit:
    raise
  except BaseException:
    traceback.print_exc()
    sys.exit(1)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
  """Function that runs a launch script in a process forked from a server."""
  server = multiprocessing.get_context("forkserver")
  server.set_forkserver_preload(PRELOADED)

  def start(name, *args):
    """Starts a script; returns its process, and the files of its output."""
    folder = tmp_path_factory.mktemp("printed")
    out, err = folder / "out", folder / "err"
    process = server.Process(target=_script, args=(name, args, out, err))
    process.start()
    return process, out, err

  def run(name, *args, interrupt=False):
    """Runs to the end, or interrupts after the first output."""
    process, out, err = start(name, *args)
    while interrupt and process.is_alive():
      if out.exists() and out.stat().st_size:
        os.kill(process.pid, signal.SIGINT)
        break
      time.sleep(0.01)
    process.join(300)
    process.kill()
    return Ended(process.exitcode, out.read_text(), err.read_text())

  run.start = start
  return run


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """Folder of a run that has not trained."""
  config = tiny.get_config("test")
  config.model.num_layers = 1
  config.parallel.tensor = 2
  config.train.num_steps = 1
  config.optimizer.warmup_steps = 0
  folder = tmp_path_factory.mktemp("run")
  (folder / "config.json").write_text(config.to_json())
  experiment = experiments.build(config, {"tensor": 1})
  checkpointer = Checkpointer(folder, experiment.program, keep=1)
  checkpointer.save(experiment.init_state(), {})
  checkpointer.wait()
  checkpointer.close()
  return folder
