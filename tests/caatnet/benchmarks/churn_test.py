"""Benchmarks of workers that leave: tables and copied checkpoints."""

import functools
import math
import types

import pytest

from caatnet.benchmarks.elastic import churn, churn_training
from configs.elastic import churn as config_of
from tests.caatnet.benchmarks.printed import rows_of


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
    "5", "3", "1,234", "7", "2.25 s", "3", "99,000", "1.10000", "1.00000",
    "+10.00%",
  ]
  assert "kill, cut" in printed
  assert "seed 5:\nthe log" in printed


def test_newest_checkpoint_is_copied_completely_or_not_at_all(tmp_path):
  donor = tmp_path / "donor"
  assert churn_training._newest_step(donor) == -math.inf
  for step in (8, 12, 9):
    (donor / "checkpoints" / str(step)).mkdir(parents=True)
    (donor / "checkpoints" / str(step) / "x").write_text(str(step))
    (donor / "swarm").mkdir(exist_ok=True)
    (donor / "swarm" / f"{step}.npz").write_text(str(step))
  assert churn_training._newest_step(donor) == 12
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
