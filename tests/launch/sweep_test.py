"""Sweeps and the demo."""

import json

from caatnet.train import sweep

TINY = ("--config=configs/caatnet/tiny.py:test", "--config.train.num_steps=4",
        "--config.model.num_layers=1", "--config.optimizer.warmup_steps=1")


def test_grid_is_all_combinations():
  assert sweep.expand("a=1,2 b=x,y") == ["a=1 b=x", "a=1 b=y", "a=2 b=x",
                                         "a=2 b=y"]
  assert sweep.expand("") == [""]


def test_sweep_trains_only_missing_points(tmp_path, launch):
  flags = [
    *TINY, "--cpu_devices=4", "--mesh=tensor:1", f"--workdir={tmp_path}",
    "--seeds=3",
  ]
  grid = "--grid=sync.p={} parallel.tensor=4"
  result = launch("sweep", *flags, grid.format("1.0"))
  assert result.returncode == 0, result.stderr
  stored = sorted((tmp_path / "runs").glob("*/result.json"))
  times = [path.stat().st_mtime_ns for path in stored]
  result = launch("sweep", *flags, grid.format("1.0,0.5"))
  assert result.returncode == 0, result.stderr
  assert [path.stat().st_mtime_ns for path in stored] == times
  rows = sweep.read_csv(tmp_path / "sweep.csv")
  assert [(r["p"], r["seed"]) for r in rows] == [(1.0, 3), (0.5, 3)]
  # The bytes of each projection halve; embedding and stack entry stay.
  full, half = rows[0]["backward_bytes"], rows[1]["backward_bytes"]
  entry = 8 * 32 * 32 * 4
  assert full - entry == 2 * (half - entry)
  assert len({r["validation_loss"] for r in rows}) == 2
  for x in ("p", "backward_bytes"):
    assert (tmp_path / f"loss_against_{x}.png").exists()
  assert json.loads(stored[0].read_text())["seed"] == 3


def test_demo_compares_with_simple_models(tmp_path, launch):
  result = launch("docs.demo", *TINY, f"--workdir={tmp_path}")
  assert result.returncode == 0, result.stderr
  for name in ("p=1", "p=0.5", "unigram", "bigram", "xz", "float32"):
    assert name in result.stdout
  assert (tmp_path / "loss.png").stat().st_size > 1000
  assert (tmp_path / "p0.5" / "checkpoints" / "4").is_dir()
