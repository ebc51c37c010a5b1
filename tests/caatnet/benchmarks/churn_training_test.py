"""Swarm that trains under faults: its folders, losses and complete restart."""

import json
import sys
import types

import pytest

from caatnet.benchmarks.elastic import churn_training
from configs.elastic import churn as config_of


class Training(churn_training.Training):
  """Its workers only print a loss, after a while."""

  losses = (1.5, 1.5)
  newest = None

  def __init__(self, *arguments):
    super().__init__(*arguments)
    Training.newest = self

  def _worker_command(self, word):
    loss = self.losses[len(self._workers)]
    line = json.dumps({"validation": loss})
    code = f"import time; time.sleep(0.1); print('{line}')"
    return [sys.executable, "-c", code]

  def _begin_again(self, new=None):
    self._run += 1
    self._seen[60] = {}


@pytest.fixture
def training(tmp_path):
  config = config_of.get_config("training")
  config.benchmark.workers = 2
  made = Training(tmp_path, config, 7)
  yield made
  made.end()


def test_config_of_workers_has_the_seed_and_evaluates_at_the_end(
  training, tmp_path
):
  config = json.loads((tmp_path / "config.json").read_text())
  assert "benchmark" not in config
  assert config["seed"] == 7
  assert config["train"]["num_steps"] == config["train"]["eval_every"] == 720
  # 85% of 120 rounds.
  assert training.goal == 102
  assert training.done == training.newest_revision == 0
  assert not {"ahead", "last holder"} & {*training.kinds}


def test_loss_is_that_of_all_workers_at_their_end(training):
  assert training.loss() == 1.5
  training._compare({"validation": 1.25})
  with pytest.raises(RuntimeError, match="ended with different losses"):
    training._raise_on_failure()


def test_workers_with_other_states_are_an_error(training):
  """Workers that train print no loss after a round."""
  line = {"revision": 3, "digest": "a", "samples": 6}
  for _ in range(2):
    training._compare(dict(line))
    training._raise_on_failure()
  training._compare(line | {"samples": 7})
  with pytest.raises(RuntimeError, match="workers differ"):
    training._raise_on_failure()


def test_all_workers_are_killed_once_after_half_of_the_rounds(training):
  training._seen = {51: {}}
  training._pause(0.0)
  assert training._events == []
  training._seen = {52: {}}
  for _ in range(2):
    training._pause(0.0)
  assert [kind for _, kind in training._events] == ["last holder"]


def _home(training, tmp_path, moments, word, killed, steps):
  """Returns the folder of a worker that joins others with checkpoints."""
  training._options.moments = moments
  training._workers = [types.SimpleNamespace(killed=x) for x in killed]
  training._homes = [tmp_path / f"worker-{i}" for i in range(len(killed))]
  for home, step in zip(training._homes, steps, strict=True):
    for part in ("swarm", f"checkpoints/{step}"):
      (home / part).mkdir(parents=True, exist_ok=True)
    (home / "swarm" / f"{step}.npz").touch()
  found = training._choose_folder(word)
  training._workers = []
  return found.relative_to(tmp_path).as_posix()


@pytest.mark.parametrize(("moments", "word", "killed", "expected"), [
  # That of the killed worker with the newest checkpoint.
  ("own", "new", (True, True, False), "worker-1"),
  ("own", "new", (False, False, False), "worker-3"),
  ("zero", "new", (True, True, False), "worker-3"),
  ("zero", "checkpoint", (True, True, False), "worker-1"),
  ("donor", "new", (True, True, True), "worker-3"),
])
def test_folder_of_a_worker(
  training, tmp_path, moments, word, killed, expected
):
  assert _home(
    training, tmp_path, moments, word, killed, (10, 12, 14)
  ) == expected
  assert not (tmp_path / "worker-3").exists()


def test_donor_is_the_running_worker_with_the_newest_checkpoint(
  training, tmp_path
):
  found = _home(
    training, tmp_path, "donor", "new", (False, False, True), (10, 12, 14)
  )
  assert found == "worker-3"
  assert churn_training._newest_step(tmp_path / found) == 12


def test_calm_run_has_as_many_samples_and_is_ended(training):
  """Whole rounds of the steps of all workers, and the same seed."""
  of_step = 2 * training._config.data.batch_size
  every = training._config.outer.sync_every
  assert training._loss_without_events(of_step * (3 * every + 1)) == 1.5
  calm = Training.newest
  assert calm is not training
  assert (calm._steps, calm._seed) == (3 * every, 7)
  assert calm._coordinator._process.popen.poll() is not None
