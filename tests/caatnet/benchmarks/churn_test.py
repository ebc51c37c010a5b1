"""Benchmarks of workers that leave: tables, copied checkpoints, moments."""

import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from caatnet.benchmarks.elastic import (
  churn,
  churn_training,
  elastic_bits,
  moments,
)
from caatnet.config.schema import tree
from caatnet.train import loop
from configs.elastic import bits as bits_config
from configs.elastic import churn as config_of
from parallel.axes import Axis
from parallel.outer.diloco import DiLoCo
from parallel.outer.exchange import Exchange
from parallel.outer.optimizers import Nesterov
from parallel.wire import Wire
from tests.caatnet.benchmarks.printed import rows_of
from tests.caatnet.train import linear_model


def row_of(printed, start):
  """Returns the cells of the row that begins with a text."""
  return next(row for row in rows_of(printed) if row[0] == start)


def test_tables_count_events_and_compare_losses(capsys):
  churn._show([{
    "seed": 5, "rounds": 1234, "epochs": 7, "longest_s": 2.25, "refused": 3,
    "samples": 99_000, "loss": 1.1, "calm_loss": 1.0, "said": ["the log"],
    "events": [("kill", "in an exchange")] * 2 + [("cut", "between rounds")],
    "pauses": [(2.25, ["kill", "cut"])],
  }], types.SimpleNamespace(workers=4, network=True))
  printed = capsys.readouterr().out
  assert "among 4 workers" in printed
  assert row_of(printed, "kill") == ["kill", "0", "2", "0", "killed"]
  assert row_of(printed, "cut")[:4] == ["cut", "1", "0", "0"]
  assert row_of(printed, "join")[:4] == ["join", "0", "0", "0"]
  assert row_of(printed, "no dials")[:4] == ["no dials", "0", "0", "0"]
  assert row_of(printed, "5") == [
    "5", "3", "1,234", "7", "2.2", "3", "99,000", "1.10000", "1.00000",
    "+10.00%",
  ]
  assert "kill, cut" in printed
  assert "seed 5:\nthe log" in printed


def test_newest_checkpoint_is_copied_completely_or_not_at_all(tmp_path):
  donor = tmp_path / "donor"
  assert churn_training._step(donor) == -math.inf
  for step in (8, 12, 9):
    (donor / "checkpoints" / str(step)).mkdir(parents=True)
    (donor / "checkpoints" / str(step) / "x").write_text(str(step))
    (donor / "swarm").mkdir(exist_ok=True)
    (donor / "swarm" / f"{step}.npz").write_text(str(step))
  assert churn_training._step(donor) == 12
  churn_training._copy(donor, tmp_path / "home")
  found = {
    path.relative_to(tmp_path / "home").as_posix(): path.read_text()
    for path in (tmp_path / "home").rglob("*") if path.is_file()
  }
  assert found == {"checkpoints/12/x": "12", "swarm/12.npz": "12"}
  (donor / "checkpoints/12/x").unlink()
  (donor / "checkpoints/12").rmdir()
  churn_training._copy(donor, tmp_path / "other")
  assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("way", moments._WAYS)
def test_replaced_workers_have_the_moments_of_their_way(way):
  """Workers 2 and 0 are replaced; their donors are 3 and 1."""
  optimizer = optax.adam(0.1)
  params = {"x": jnp.arange(12.0).reshape(4, 3)}
  state = jax.vmap(optimizer.init)(params)
  state = jax.tree.map(
    lambda x: x + 1 + jnp.arange(4, dtype=x.dtype).reshape(
      4, *[1] * (x.ndim - 1)
    ), state,
  )
  experiment = dataclasses.replace(linear_model.make(), optimizer=optimizer)
  found = moments._replaced(
    experiment, way, state, params, np.array([2, 0]), np.array([3, 1])
  )
  expected = {
    "no newcomer": [1, 2, 3, 4], "zero": [0, 2, 0, 4], "donor": [2, 2, 4, 4],
  }[way]
  for moment in (found[0].mu["x"], found[0].nu["x"]):
    np.testing.assert_array_equal(
      moment, np.repeat(np.array(expected)[:, None], 3, axis=1)
    )


def test_only_other_moments_change_a_training(tmp_path):
  """One of three workers is replaced after each of three rounds."""
  worker = Axis("worker", 3)
  exchange = Exchange(worker, Wire(), {"w": 0, "b": 0})
  experiment = linear_model.make(
    3, outer=DiLoCo(worker, 2, Nesterov(0.7, 0.5), exchange), batch_size=12,
    learning_rate=0.05,
  )
  losses = {way: moments._trained(experiment, way, 1) for way in moments._WAYS}
  trained = loop.train(experiment, tmp_path, quiet=True)
  assert losses["no newcomer"] == pytest.approx(
    trained.evaluation.loss, rel=1e-6
  )
  assert len({f"{loss:.4g}" for loss in losses.values()}) == 3
  # Without momentum there are no moments.
  experiment = dataclasses.replace(experiment, optimizer=optax.sgd(0.05))
  plain = {moments._trained(experiment, way, 1) for way in moments._WAYS}
  assert len(plain) == 1


def test_losses_of_newcomers_are_compared_with_each_other(capsys):
  moments._show(
    [{"seed": 3, "no newcomer": 2.0, "zero": 2.5, "donor": 2.25}], 8, 1
  )
  printed = capsys.readouterr().out
  assert "of 8 workers 1 is replaced" in printed
  assert rows_of(printed) == [
    ["3", "2.0000", "2.5000", "2.2500", "+25.00%", "-10.00%"]
  ]


def test_table_of_bits_counts_elements_of_other_bits(capsys):
  elastic_bits._show([{
    "case": "DiLoCo", "workers": 3, "elements": 12_345, "unequal": 6_789,
    "largest": 0.00123, "seconds": 4.4,
  }], 9)
  printed = capsys.readouterr().out
  assert "on a mesh axis, 9 steps" in printed
  assert rows_of(printed) == [
    ["DiLoCo", "3", "12,345", "6,789", "1.2e-03", "4"]
  ]


def test_compared_workers_have_equal_batches():
  config = bits_config.get_config("test")
  for workers in (1, 3):
    experiment = elastic_bits._built(
      config, "outer.algorithm=data_parallel", workers
    )
    assert experiment.program.layout.worker.size == workers
    assert experiment.data.batch_size == workers * config.data.batch_size
    assert (experiment.config.get("elastic") is None) == (workers > 1)


def test_signed_zeros_have_different_bits():
  zero = np.zeros(2, np.float32)
  assert elastic_bits._bits(zero).tolist() == [0, 0]
  assert (elastic_bits._bits(zero) != elastic_bits._bits(-zero)).all()


@pytest.mark.parametrize(("size", "network", "kind"), [
  ("test", False, "Churn"), ("test", True, "Network"),
  ("training", False, "Training"),
])
def test_each_seed_is_a_run_that_is_ended(
  size, network, kind, monkeypatch, capsys
):
  made = []

  class Run:
    def __init__(self, name, folder, config, seed):
      assert folder.is_dir()
      made.append((name, seed))

    def run(self, progress):
      made.append("run")
      return {
        "rounds": 12, "epochs": 1, "longest_s": 0.5, "refused": 0,
        "samples": 5, "loss": 1.0, "calm_loss": 1.0, "said": [], "events": [],
        "pauses": [], "dropped": 0,
      }

    def end(self):
      made.append("end")

  for name in ("Churn", "Network", "Training"):
    monkeypatch.setattr(churn, name, functools.partial(Run, name))
  config = config_of.get_config(size)
  config.benchmark.seeds, config.benchmark.network = (5, 7), network
  found = churn.run(config)
  assert made == [(kind, 5), "run", "end", (kind, 7), "run", "end"]
  assert [row["seed"] for row in found["runs"]] == [5, 7]
  printed = capsys.readouterr().out
  assert "seed 7: {'rounds': 12, 'longest_s': 0.5" in printed
  assert row_of(printed, "7")[2] == "12"


def test_a_swarm_without_peers_is_refused():
  """A single worker waits for a peer until the run's limit."""
  config = config_of.get_config("test")
  for workers in (2, 3):
    config.benchmark.workers = workers
    tree.check(config)
  config.benchmark.workers = 1
  with pytest.raises(ValueError, match=r"config\.benchmark\.workers=1 must"):
    tree.check(config)
