"""Benchmark of coded weights and caches: its losses, bytes and limits."""

import types

import numpy as np
import pytest

from caatnet.benchmarks.serving import coded
from caatnet.config import experiments
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.evaluate import make_evaluate
from configs.benchmark import coded as config_of
from configs.caatnet import tiny
from tests.caatnet.benchmarks.printed import rows_of


def test_loss_through_a_float_cache_is_that_of_training(tmp_path, capsys):
  """Windows of 32 tokens, in chunks of 20 and 12."""
  run = tiny.get_config("test")
  run.model.num_layers, run.optimizer.warmup_steps = 1, 0
  run.parallel.tensor, run.train.num_steps = 2, 1
  (tmp_path / "config.json").write_text(run.to_json())
  experiment = experiments.build(run, {"tensor": 1})
  program, state = experiment.program, experiment.init_state()
  checkpointer = Checkpointer(tmp_path, program, keep=1)
  checkpointer.save(state, {})
  checkpointer.wait()
  checkpointer.close()
  config = config_of.get_config("test")
  config.benchmark.workdir, config.benchmark.chunk = str(tmp_path), 20
  first, *coded_rows = coded.run(config)["rows"]

  windows = np.asarray(experiment.data.load(experiment.seed).validation)[:2]
  whole = experiment.make_export()(state.params, state.outer)
  expected = make_evaluate(program, 2)(whole, windows).loss
  assert first["loss"] == pytest.approx(expected, rel=1e-5)
  sizes = first["weight_bytes"], first["cache_bytes_per_token"]
  # Keys and values of all ranks in float32.
  assert sizes[1] == 4 * 2 * run.model.width
  for row in coded_rows:
    assert 0 < abs(row["loss"] - first["loss"]) < 0.05
    assert (row["weight_bytes"] < sizes[0]) == (row["weights"] == "int8")
    assert (row["cache_bytes_per_token"] < sizes[1]) == (row["cache"] == "int8")
  assert len({(r["weights"], r["cache"]) for r in coded_rows}) == 3
  printed = capsys.readouterr().out
  assert "step 0: 64 tokens, read in chunks of 20" in " ".join(printed.split())
  assert rows_of(printed) == [
    [r["weights"], r["cache"], f"{r['loss']:.5f}",
     f"{r['loss'] - first['loss']:+.5f}", f"{r['weight_bytes'] / 1e6:.3f}",
     f"{r['cache_bytes_per_token']:,.0f}"]
    for r in (first, *coded_rows)
  ]


def test_runs_with_data_ranks_are_refused():
  layout = types.SimpleNamespace(num_data_ranks=2)
  made = types.SimpleNamespace(
    program=types.SimpleNamespace(layout=layout), capacity=None
  )
  with pytest.raises(ValueError, match=r"parallel\.data of the run must be 1"):
    coded._loss(made, None, None)
