"""Benchmark of a radio cell: a small run, its medians, table and figure."""

import json
import types

import pytest

from caatnet.benchmarks.federated import federated_cell
from configs.benchmark import federated_cell as config_of


def test_last_client_is_slow():
  options = types.SimpleNamespace(compute_spread=0.1, compute_s=2.0, slow=1.5)
  found = [row["t_tr"] for row in federated_cell._compute(options, 3)]
  assert found == pytest.approx([1.8, 2.0, 3.3], abs=0.02)


def _rounds(*accuracies):
  return [
    {"accuracy": accuracy, "loss": 1 - accuracy, "round": i,
     "time_s": 10.0 * (i + 1), "bytes_up": 5 * (i + 1),
     "bytes_down": 7 * (i + 1)}
    for i, accuracy in enumerate(accuracies)
  ]


@pytest.mark.parametrize(("changes", "name"), [
  ("", "float32"), ("uplink=int4 downlink=int4", "int4 both ways"),
  ("uplink=sparse downlink=int4", "sparse up, int4 down"),
  ("uplink=int8 stragglers=late compensation=.2",
   "int8 up, late, compensated by .2"),
  ("downlinks_at_once=2 uplinks_at_once=2", "2 transfers at once"),
  ("stragglers=drop deadline_s=30", "deadline 30 s"),
  ("uplink=int4 proximal=0.1", "int4 up, proximal=0.1"),
])
def test_name_of_a_variant(changes, name):
  assert federated_cell._named(changes) == name


def test_rows_are_medians_at_the_first_round_that_reaches_the_target():
  options = types.SimpleNamespace(target=0.5)
  row = federated_cell._row("uplink=int4", [
    _rounds(0.1, 0.5, 0.4), _rounds(0.75, 0.75), _rounds(0.1, 0.2, 0.3, 0.8),
  ], options)
  assert row == {
    "variant": "uplink=int4", "reached": 3, "seeds": 3, "loss": 0.25,
    "accuracy": 0.75, "round_s": 10.0, "round": 2, "round_range": [1, 4],
    "time_s": 20.0, "time_s_range": [10.0, 40.0],
    "bytes_up": 10, "bytes_up_range": [5, 20],
    "bytes_down": 14, "bytes_down_range": [7, 28],
  }
  row |= {"bytes_up": 1.26e6, "bytes_down": 12_340e6}
  runs = [_rounds(0.25), _rounds(0.75)]
  missed = federated_cell._row("float32", runs, options)
  assert missed == {
    "variant": "float32", "reached": 1, "seeds": 2, "loss": 0.5,
    "accuracy": 0.5, "round_s": 10.0,
  }
  table = federated_cell.table([row, missed], 0.5)
  assert table.cells() == [
    ["uplink=int4", "3 of 3", "2", "20", "1.3", "12,340.0", "10.0", "75.0%",
     "0.250"],
    ["float32", "1 of 2", "-", "-", "-", "-", "10.0", "50.0%", "0.500"],
  ]
  curves, points = federated_cell.figure(
    [row, missed], [
      {"variant": name, "rounds": rounds}
      for name in ("uplink=int4", "float32") for rounds in runs
    ], 0.5,
  ).panels
  assert [(line.label, line.x, line.y) for line in curves.marks[1:]] == [
    ("uplink=int4", [10.0], [0.5]), ("float32", [10.0], [0.5]),
  ]
  assert [(line.colour, line.marker) for line in curves.marks[1:]] == [
    ("C0", "o"), ("C1", "s")
  ]
  # What has not reached the target has no point.
  (point,) = points.marks
  assert point.x == [(1.26e6 + 12_340e6) / 1e6]
  assert (point.label, point.y, point.errors) == (
    "uplink=int4", [20], ([10.0], [40.0])
  )


def test_run_has_the_bytes_and_times_of_its_variant(tmp_path, capsys):
  config = config_of.get_config("test")
  config.model.update({"widths": (4,), "blocks": 1, "groups": 2})
  config.federated.rounds, config.benchmark.target = 2, 1e-9
  config.benchmark.variants = config.benchmark.streamed = ("uplink=int4",)
  config.benchmark.plot = str(tmp_path / "cell.png")
  path = tmp_path / "cell.json"
  config.benchmark.results = str(path)
  found = federated_cell.run(config)
  names = ["int4 up", "int4 up, 2 fragments streamed"]
  assert [(r["variant"], r["seed"]) for r in found["runs"]] == [
    (name, 0) for name in names
  ]
  plain, streamed = found["rows"]
  for run, row in zip(found["runs"], found["rows"], strict=True):
    assert len(run["rounds"]) == 2
    assert row["reached"] == row["round"] == 1
    assert row["bytes_up"] < row["bytes_down"]
  assert plain["time_s"] == pytest.approx(plain["round_s"], rel=0.01)
  # Half of the update is sent under the compute.
  assert streamed["time_s"] < plain["time_s"]
  printed = capsys.readouterr().out
  for name in names:
    assert f"{name}, seed 0: accuracy" in printed
  assert (tmp_path / "cell.png").exists()
  # An interrupted benchmark has the same result: a run that is there is not
  # repeated, and the other one has equal bits.
  kept = json.loads(path.read_text())
  del kept["runs"][1]
  kept["runs"][0]["rounds"][1]["time_s"] = 1e3
  path.write_text(json.dumps(kept))
  again = federated_cell.run(config)["runs"]
  assert again[0] == kept["runs"][0]
  assert again[1] == found["runs"][1]
  config.seed = 5
  with pytest.raises(ValueError, match="has rows of another config"):
    federated_cell.run(config)
