"""Benchmark of calibrated rates: draws, errors, and resumed files."""

import collections
import contextlib
import json
import math
import pathlib
import re
import time
import types

import jax
import numpy as np
import pytest

from caatnet.benchmarks.harness import setup
from caatnet.benchmarks.programs import calibration
from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.inspection import study
from configs.benchmark import calibration as config_of
from parallel.ledger import conformal, targets
from parallel.plans.hardware import cluster_files
from tests.caatnet.benchmarks.printed import rows_of

ROOT = pathlib.Path(__file__).parents[3]


def test_draws_are_random_and_repeat():
  config = config_of.get_config()
  some = [
    next(calibration.draw_configurations(config, index)) for index in range(60)
  ]
  assert some == [
    next(calibration.draw_configurations(config, index)) for index in range(60)
  ]
  texts = " ".join(text for text, _ in some)
  for value in ("sync.p=0.25", "zero.scheme=zero3", "pipeline.schedule=1f1b",
                "outer.algorithm=diloco", "data.batch_size=16"):
    assert value in texts
  for text, mesh in some:
    assert math.prod(mesh.values()) == 4
    assert ("pipeline" in text) == ("stage" in mesh)
    assert ("outer" in text) == ("worker" in mesh)
  lanes = {
    int(dict(part.split("=") for part in text.split())["parallel.tensor"])
    / mesh.get("tensor", 1) for text, mesh in some
  }
  assert lanes == {*config.benchmark.lanes}
  for text, mesh in some:  # two microbatches for each stage
    stages = mesh.get("stage", 1)
    assert (f"train.accumulation={2 * stages}" in text) == (stages > 1)


def test_configurations_of_all_kinds_are_valid():
  """Without compiling them."""
  config = config_of.get_config()
  base = setup.without_benchmark(config)
  built = collections.Counter()
  for index in range(8):
    text, mesh = next(calibration.draw_configurations(config, index))
    with contextlib.suppress(ValueError):
      experiments.build(override(base, text), mesh, jax.devices()[:4])
      built.update(["all", *mesh])
  assert built["all"] >= 4
  assert {"worker", "data", "stage", "tensor"} < {*built}


def test_errors_and_intervals_are_those_of_the_other_rows():
  """The first rows give residuals; the bias of the model is corrected."""
  rng = np.random.default_rng(0)
  rows = [
    {"configuration": str(i), "predicted_s": 2.0,
     "blocks_s": [3.0 * math.exp(e) * x for x in (0.9, 1.0, 1.2)]}
    for i, e in enumerate([*rng.uniform(-0.1, 0.1, 20), 0.0, 0.05, 0.5])
  ]
  values = [{"tensor": i} for i in range(23)]
  found = calibration.evaluate_predictions(rows, 20, values)
  assert found["family"] == {"tensor": [*range(20)]}
  assert found["widening"] == math.inf  # too few rows
  assert len(found["residuals"]) == 20
  assert [row["configuration"] for row in found["rows"]] == ["20", "21", "22"]
  assert [row["contained"] for row in found["rows"]] == [True, True, False]
  summary = found["summary"]
  assert summary["tested"] == 3
  assert summary["contained"] == pytest.approx(2 / 3)
  assert summary["error_median"] < 0.1 < summary["error_p95"]
  assert summary["spread_median"] == pytest.approx(0.1)
  assert summary["spread_p95"] == pytest.approx(0.2)
  # Without residuals there is no correction.
  few = calibration.evaluate_predictions(rows, 0, values)["summary"]
  assert few["error_median"] == pytest.approx(1 / 3, abs=0.1)
  assert few["contained"] == 1


def test_small_benchmark_ends_with_its_tables_and_continues(tmp_path, capsys):
  config = config_of.get_config("test")
  config.model.num_layers, config.data.seq_len = 1, 8
  config.benchmark.results = str(tmp_path / "rows.jsonl")
  config.benchmark.cluster = str(tmp_path / "cluster.json")
  start = time.perf_counter()
  found = calibration.run(config)
  elapsed = time.perf_counter() - start
  printed = capsys.readouterr().out
  (row,) = found["rows"]
  assert len(row["blocks_s"]) == config.benchmark.blocks
  assert 0 < row["compile_s"] < elapsed  # a part of the run
  assert row["interval"] == pytest.approx([0, row["interval"][1], math.inf])
  assert "links over tensor, 2 devices" in printed
  assert f"{row['measured_s'] * 1e3:.1f}" in printed
  assert "1 configurations: error of the median" in printed
  links = cluster_files.cluster(config.benchmark.cluster)
  assert (links.num_devices, links.mark) == (2, "measured")
  assert links.residuals == tuple(found["residuals"])
  assert links.family["parallel.tensor"][0] >= 1
  assert (links.family["devices"], links.widening) == ([2], math.inf)
  # All rows are there: nothing is measured again.
  assert calibration.run(config)["rows"] == found["rows"]
  # More configurations may be tested later, but not of another model.
  text, config.benchmark.tested = calibration._relevant_config_json(config), 7
  assert calibration._relevant_config_json(config) == text
  config.sync.p = 0.5
  assert calibration._relevant_config_json(config) != text
  config.sync.p, config.model.width = 1.0, 64
  assert calibration._relevant_config_json(config) != text


def test_stored_calibration_has_its_family_and_the_documented_coverage():
  """Intervals are better by the family, and cover less in some groups."""
  found = json.loads((ROOT / "results/calibration.json").read_text())
  rows, family = found["rows"], found["family"]
  values = calibration.features(config_of.get_config(), rows)
  groups = dict(r.values() for r in calibration.coverage(rows, values))
  assert sum(row["contained"] for row in rows) == 85
  for text in groups.values():  # each row is of one group
    assert sum(int(n) for n in re.findall(r" of (\d+)", text)) == 100
  assert groups["parallel.tensor"].endswith("8: 2 of 5")
  residuals = [math.log(r["measured_s"] / r["predicted_s"]) for r in rows]
  assert found["widening"] == conformal.widening(values, residuals)
  links = types.SimpleNamespace(**found)
  tensor = []
  for row, features in zip(rows, values, strict=True):
    made = study.step_time_interval(row["predicted_s"], links, features)
    assert [*made["interval"].values()] == pytest.approx(row["interval"]) or (
      made["outside"] == ["parallel.tensor=8 (calibration: 1 to 4)"]
    )
    if made["outside"]:
      low, _, high = made["interval"].values()
      tensor.append(low <= row["measured_s"] <= high)
  assert (sum(tensor), len(tensor)) == (4, 5)
  text = (ROOT / "docs/ledger.md").read_text()
  assert f"a factor of {math.exp(found['widening']):.2f}" in text
  assert "4 of the\n5 steps with eight tensor ranks" in text
  raw = [abs(math.exp(-r) - 1) for r in residuals]
  assert f"{np.median(raw):.1%} and {np.quantile(raw, 0.95):.1%})" in text
  other = {**values[0], "model.width": 128, "target": "gpu"}
  assert len(conformal.find_extrapolations(family, other)) == 2


def test_mistakes_name_their_key():
  config = config_of.get_config("test")
  config.benchmark.devices = 1024
  with pytest.raises(ValueError, match="devices=1024 needs as many CPU"):
    calibration.run(config)
  config.benchmark.devices = 2
  config.benchmark.schemes = ("zero9",)
  with pytest.raises(ValueError, match=r"is a valid configuration; .*zero9"):
    calibration._measure_configuration(config, targets.resolve("cpu:2"), 0)
  with pytest.raises(ValueError, match=r"profiled: 'tensor' is not AXIS:DEVI"):
    calibration._mesh("tensor")


def test_tables_show_rates_and_intervals(capsys):
  calibration._show_fit([
    {"what": "products", "samples": 5, "rate": 12.5e9, "latency_s": 3.5e-6,
     "share": 0.25, "residual": 0.125},
    {"what": "other", "samples": 1, "rate": None, "latency_s": None,
     "share": 0.75, "residual": 0.0},
  ])
  calibration.show({
    "rows": [
      {"configuration": "a", "interval": [0.001, 0.002, 0.004],
       "measured_s": 0.0031, "contained": True},
      {"configuration": "b", "interval": [0.001, 0.002, 0.004],
       "measured_s": 0.005, "contained": False},
    ],
    "summary": {
      "tested": 2, "error_median": 0.1, "error_p95": 0.2, "contained": 0.5,
      "spread_median": 0.03, "spread_p95": 0.04,
    },
    "coverage": [{"key": "tensor", "intervals": "1: 1 of 1; 2: 0 of 1"}],
  })
  printed = capsys.readouterr().out
  assert rows_of(printed) == [
    ["products", "5", "12.500", "3.5", "25.0%", "12.5%"],
    ["other", "1", "-", "-", "75.0%", "0.0%"],
    ["a", "1.0, 2.0, 4.0", "3.1", "yes"],
    ["b", "1.0, 2.0, 4.0", "5.0", "no"],
    ["tensor", "1: 1 of 1; 2: 0 of 1"],
  ]
  assert "of the median 10.0%, P95 20.0%; intervals contain 50%" in printed
  assert "spread of repeated measurements 3.0%, P95 4.0%" in printed


def test_block_is_the_mean_of_calls_that_take_a_time():
  calls = []

  def call():
    calls.append(time.perf_counter())
    time.sleep(0.002)

  start = time.perf_counter()
  found = calibration._block_s(call, 0.02)
  passed = time.perf_counter() - start
  assert len(calls) > 1
  assert 0.002 <= found <= passed / len(calls)
  assert found * len(calls) >= 0.02
  assert calibration._block_s(call, 0.0) >= 0.002  # once in any case
