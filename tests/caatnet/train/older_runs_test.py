"""Runs of older commits (`tests/fixtures/older_runs`), read by today's code."""

import pathlib
import tarfile

from etils import epath
import pytest

from caatnet.config import experiments, inference
from caatnet.config.override import override
from caatnet.train import records
from caatnet.train.checkpoint import export
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.evaluate import make_evaluate
from configs.caatnet import tiny
from configs.diloco import base

RUNS = pathlib.Path(__file__).parents[2] / "fixtures" / "older_runs"
SIZES = (
  "data.path=text data.validation_percent=30.0 data.batch_size=4 "
  "data.seq_len=16 data.validation_windows=8 model.width=2 model.num_layers=2 "
  "model.ffn_width=4 model.num_heads=1 model.num_kv_heads=1 "
  "model.tied_embeddings=True train.num_steps=3 train.checkpoint_every=2 "
  "train.eval_every=2 optimizer.warmup_steps=0 optimizer.decay_steps=0 "
  "parallel.tensor=1 parallel.data=1 "
)
# The config that continues each run today, and overrides.
TODAY = {
  "2026-11-23": (
    base, "diloco", "parallel.worker=2 outer.sync_every=2 model.init_std=0.06",
  ),
  "2026-11-25": (
    tiny, "test", "optimizer.name=sgd parallel.stage=2 "
    "pipeline.schedule=gpipe train.accumulation=2 zero.scheme=zero1",
  ),
}


@pytest.fixture(params=TODAY)
def name(request, tmp_path, monkeypatch):
  with tarfile.open(RUNS / f"{request.param}.tar.xz") as archive:
    archive.extractall(tmp_path, filter="data")
  monkeypatch.chdir(tmp_path)  # the path of the text is relative
  return request.param


def test_older_run_is_evaluated_read_for_inference_and_resumed(name):
  run = epath.Path("run")
  experiment = experiments.from_folder(run)
  params, step = export.read_stored_params(experiment, run)
  data = experiment.data
  dataset = data.load(experiment.seed)
  evaluate = make_evaluate(experiment.program, data.batch_size)
  recorded = records.read_metrics(run)[-1]
  assert step == recorded["step"] == 2
  assert evaluate(params, dataset.validation).loss == pytest.approx(
    recorded["validation_loss"], rel=1e-6
  )
  inference.build_from_folder(run)  # raises for keys that it does not know
  module, argument, overrides = TODAY[name]
  config = override(module.get_config(argument), SIZES + overrides)
  experiment = experiments.build(config)
  records.check_data(run, dataset.sha256)
  records.write_config(run, experiment.config)
  checkpointer = Checkpointer(run, experiment.program)
  state, _ = checkpointer.restore(experiment.abstract_state())
  checkpointer.close()
  assert int(state.step) == 2
