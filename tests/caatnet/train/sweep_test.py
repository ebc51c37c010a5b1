"""Sweeps: grids, points that are trained once, and rows."""

import dataclasses
import json
import signal

import pytest

from caatnet.train import sweep
from tests.caatnet.train import linear_model as toy


@pytest.mark.parametrize(("grid", "points"), [
  ("", [""]), ("a=1", ["a=1"]), ("a=1,2  b=3", ["a=1 b=3", "a=2 b=3"]),
  ("a=x=1,y", ["a=x=1", "a=y"]),
])
def test_grid_is_expanded(grid, points):
  assert sweep.expand(grid) == points


@pytest.mark.parametrize("part", ["a", "a=", "=", "b"])
def test_part_of_a_grid_without_values_is_an_error(part):
  with pytest.raises(ValueError, match=f"^--grid: '{part}' is not key=value"):
    sweep.expand(f"c=1 {part}")


def test_sweep_trains_each_point_once(tmp_path):
  """The folder of a long point has a digest in its name."""
  experiment = toy.make(num_steps=2)
  config = {"parallel": {"tensor": 1, "worker": 1},
            "outer": {"algorithm": "none"}}
  experiment = dataclasses.replace(experiment, config=config)
  rows = [
    {"axis": "tensor", "phase": "forward", "bytes": 5.0},
    {"axis": "tensor", "phase": "forward", "bytes": 7.0},
    {"axis": "tensor", "phase": "backward", "bytes": 20.0},
    {"axis": "worker", "phase": "update", "bytes": 30.0},
    {"axis": "data", "phase": "update", "bytes": 40.0},
    {"axis": "data+worker", "phase": "update", "bytes": 50.0},
  ]
  asked = []
  point = "a/b=1 " + "c" * 90

  def count():
    asked.append(1)
    return rows

  row = sweep.run_point(experiment, point, tmp_path, count)
  (folder,) = (tmp_path / "runs").iterdir()
  assert folder.name.startswith("a-b=1_" + "c" * 74 + "_")
  assert folder.name.endswith("_seed3")
  assert len(folder.name) == 80 + 1 + 6 + len("_seed3")
  assert row == json.loads((folder / "result.json").read_text())
  assert row["validation_doubled"] == 2 * row["validation_loss"]
  for key, value in {
    "point": point, "seed": 3, "p": 1.0, "tensor": 1, "worker": 1,
    "private_scale": "none", "algorithm": "none", "forward_bytes": 12.0,
    "backward_bytes": 20.0, "worker_bytes": 30.0, "data_bytes": 40.0,
    "unit": "points", "units_per_step": 24, "num_steps": 2,
    "loss_label": "squared error", "parameters": toy.Toy.num_params,
    "data_sha256": "0" * 64, "workdir": str(folder),
  }.items():
    assert row[key] == value, key
  assert sweep.run_point(experiment, point, tmp_path, count) == row
  assert asked == [1]
  other = dataclasses.replace(experiment, config=config | {"seed": 4})
  with pytest.raises(ValueError, match=r"holds a run with config\.seed=None"):
    sweep.run_point(other, point, tmp_path, count)


def test_stopped_run_ends_the_sweep_with_the_code_of_the_signal(tmp_path):
  def learning_rate(step):
    if isinstance(step, int) and step == 0:  # the first record's, no tracer
      signal.raise_signal(signal.SIGINT)
    return 0.01

  experiment = toy.make(num_steps=9, learning_rate=learning_rate)
  with pytest.raises(SystemExit) as ended:
    sweep.run_point(experiment, "a=1", tmp_path, list)
  assert ended.value.code == 128 + signal.SIGINT


def test_sweep_rows_round_trip_through_csv(tmp_path):
  rows = [{"point": "sync.p=0.5", "seed": 1, "p": 0.5},
          {"point": "", "seed": 2, "p": 1.0}]
  sweep.write_csv(rows, tmp_path / "sweep.csv")
  assert sweep.read_csv(tmp_path / "sweep.csv") == rows
  assert [path.name for path in tmp_path.iterdir()] == ["sweep.csv"]
  for text in ("a,b\n1,2\n3\n", "a,b\n1,2\n3,4,5\n"):
    (tmp_path / "sweep.csv").write_text(text)
    with pytest.raises(ValueError, match="csv: row 2 must have 2 fields"):
      sweep.read_csv(tmp_path / "sweep.csv")
