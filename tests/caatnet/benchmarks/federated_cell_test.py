"""Benchmark of a radio cell: a small run, its medians and its table."""

import types

import pytest

from caatnet.benchmarks.federated import federated_cell
from configs.benchmark import federated_cell as config_of


def test_last_client_is_slow():
  options = types.SimpleNamespace(compute_spread=0.1, compute_s=2.0, slow=1.5)
  found = [row["t_tr"] for row in federated_cell._compute(options, 3)]
  assert found == pytest.approx([1.8, 2.0, 3.3], abs=0.02)


def _rounds(*losses):
  return [
    {"loss": loss, "round": i, "time_s": 10.0 * (i + 1),
     "bytes_up": 5 * (i + 1), "bytes_down": 7 * (i + 1)}
    for i, loss in enumerate(losses)
  ]


def test_rows_are_medians_at_the_first_round_that_reaches_the_target():
  options = types.SimpleNamespace(target=0.5)
  row = federated_cell._row("uplink=int4", [
    _rounds(0.9, 0.5, 0.6), _rounds(0.4, 0.3), _rounds(0.9, 0.8, 0.7, 0.2),
  ], options)
  assert row == {
    "variant": "uplink=int4", "reached": 3, "seeds": 3, "loss": 0.3,
    "round_s": 10.0, "round": 2, "round_range": [0, 3],
    "time_s": 20.0, "time_s_range": [10.0, 40.0],
    "bytes_up": 10, "bytes_up_range": [5, 20],
    "bytes_down": 14, "bytes_down_range": [7, 28],
  }
  row |= {"bytes_up": 1.26e6, "bytes_down": 12_340e6}
  missed = federated_cell._row("", [_rounds(0.6), _rounds(0.4)], options)
  assert missed == {
    "variant": "", "reached": 1, "seeds": 2, "loss": 0.5, "round_s": 10.0
  }
  table = federated_cell.table([row, missed], 0.5)
  assert table.cells() == [
    ["uplink=int4", "3 of 3", "2", "20", "1.3", "12,340.0", "10.0", "0.300"],
    ["float32", "1 of 2", "-", "-", "-", "-", "10.0", "0.500"],
  ]


def test_run_has_the_bytes_and_times_of_its_variant(capsys):
  config = config_of.get_config("test")
  config.model.update({"widths": (4,), "blocks": 1, "groups": 2})
  config.federated.rounds, config.benchmark.target = 2, 100.0
  config.benchmark.variants = ("uplink=int4",)
  found = federated_cell.run(config)
  (row,), (run,) = found["rows"], found["runs"]
  assert (run["variant"], run["seed"]) == ("uplink=int4", 0)
  assert len(run["rounds"]) == 2
  assert row["reached"] == row["round"] == 1
  assert row["bytes_up"] < row["bytes_down"]
  assert row["time_s"] == pytest.approx(row["round_s"], rel=0.01)
  assert "uplink=int4, seed 0: loss" in capsys.readouterr().out
