"""Training workers that are killed, stopped, cut off and join.

The workers are processes that run the same code as ``launch.train --elastic``
(`churn_trainer`). A run lasts for the steps of its config, and faults occur
during most of them. Its loss is compared with that of a swarm without faults
that trains on the same number of samples, with a learning-rate schedule over
the steps that these samples take.
"""

import json
import math
import pathlib
import random
import shutil
import tempfile
import time
from typing import Any

from caatnet.benchmarks.elastic.churn_run import EVENT_KINDS, Churn
from parallel.peers.emulation import processes

# Faults are injected until this fraction of the rounds.
_FAULT_END_FRACTION = 0.85


class Training(Churn):
  """Run of `Churn` whose workers train a model."""

  kinds = tuple(k for k in EVENT_KINDS if k not in ("last holder", "ahead"))

  def __init__(
    self, folder: pathlib.Path, config: Any, seed: int, num_steps: int = 0
  ) -> None:
    """Starts a coordinator, as in `Churn`.

    Args:
      folder: Folder for all files that the run writes.
      config: Config like configs/elastic/churn.py:training.
      seed: Seed of the events, of the model and of its data.
      num_steps: Number of steps; 0 keeps the config's.
    """
    self._config, self._losses = config, set[float]()
    self._homes: list[pathlib.Path] = []  # folder of each of the workers
    changed = json.loads(config.to_json())
    del changed["benchmark"]
    changed["seed"] = seed
    self._steps = num_steps or config.train.num_steps
    changed["train"] |= {
      "num_steps": self._steps, "eval_every": self._steps,
    }
    (folder / "config.json").write_text(json.dumps(changed))
    super().__init__(folder, config, seed)

  @property
  def goal(self) -> float:
    return _FAULT_END_FRACTION * self._steps // self._config.outer.sync_every

  @property
  def done(self) -> float:
    return self.newest_revision

  def loss(self) -> float:
    """Trains without any events; returns the validation loss."""
    for _ in range(self._options.workers):
      self._join()
    self._finish()
    return self._loss()

  def _pause(self, seconds: float) -> None:
    """Waits as in `Churn`, then until a round ends: workers start slowly."""
    super()._pause(seconds)
    reached, run = self.newest_revision, self._run
    self._until(
      lambda: self.newest_revision > reached or not self._live_workers()
    )
    # Once in a run all workers are killed, which takes longest.
    if not run and self.done > self.goal / 2:
      self._events.append((time.time(), "last holder"))
      self._begin_again()
      self._until(lambda: self.newest_revision)

  def _cause(self, kind: str, rng: random.Random) -> None:
    """Injects one event; restarts workers that have died."""
    super()._cause(kind, rng)
    while len(self._live_workers()) < self._options.workers:
      self._join()

  def _finish(self) -> None:
    self._until(lambda: not self._live_workers())

  def _worker_command(self, word: str) -> list[str]:
    self._homes.append(self._choose_folder(word))
    return processes.module_command(
      "caatnet.benchmarks.elastic.churn_trainer", self._port,
      self._folder / "config.json", self._homes[-1],
    )

  def _choose_folder(self, word: str) -> pathlib.Path:
    """Returns a new worker's folder, perhaps with optimizer moments.

    ``word`` is "new" or "checkpoint", see `churn_peer`. Moments are in a folder
    that a killed worker left, or copied from the newest worker.
    """
    moments = self._options.moments
    pairs = list(zip(self._workers, self._homes, strict=True))
    busy = {home for worker, home in pairs if not worker.killed}
    free = {home for _, home in pairs} - busy
    if free and (moments == "own" or word == "checkpoint"):
      return max(free, key=lambda home: (_newest_step(home), home))
    home = self._folder / f"worker-{len(pairs)}"
    if moments == "donor" and busy:
      _copy(max(busy, key=_newest_step), home)
    return home

  def _compare(self, line: dict[str, Any]) -> None:
    if "validation" not in line:
      super()._compare(line)
      return
    self._losses.add(line["validation"])
    if len(self._losses) > 1:
      self._problem = f"workers ended with different losses: {self._losses}"

  def _loss(self) -> float:
    (loss,) = self._losses
    return loss

  def _loss_without_events(self, samples: int) -> float:
    """Returns the loss after ``samples`` samples of a swarm without events."""
    of_step = self._options.workers * self._config.data.batch_size
    every = self._config.outer.sync_every
    steps = every * round(samples / (of_step * every))
    with tempfile.TemporaryDirectory() as folder:
      calm = type(self)(
        pathlib.Path(folder), self._config, self._seed, steps
      )
      try:
        return calm.loss()
      finally:
        calm.end()


def _newest_step(home: pathlib.Path) -> float:
  """Returns the step of a folder's newest checkpoint; -inf without one."""
  steps = (int(path.stem) for path in (home / "swarm").glob("*.npz"))
  return max(steps, default=-math.inf)


def _copy(donor: pathlib.Path, home: pathlib.Path) -> None:
  """Copies a checkpoint; removes the copy if the original is deleted."""
  step = _newest_step(donor)
  try:
    shutil.copytree(
      donor / "checkpoints" / str(step), home / "checkpoints" / str(step)
    )
    (home / "swarm").mkdir()
    shutil.copy(donor / "swarm" / f"{step}.npz", home / "swarm")
  except (OSError, shutil.Error):
    shutil.rmtree(home, ignore_errors=True)
