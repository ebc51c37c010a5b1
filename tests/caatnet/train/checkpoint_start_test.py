"""Runs that start from the parameters of another run of equal sizes."""

import dataclasses
import json
import shutil

import chex
import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.data.tokenizers import ByteTokenizer, LibraryTokenizer
from caatnet.schema import tree
from caatnet.train import loop
from caatnet.train.checkpoint import start
from caatnet.train.checkpoint.reshard import to_whole
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.records import read_metrics
from configs.caatnet import tiny
from tests.caatnet.data.small_tokenizers import llama_files
from tests.caatnet.train import linear_model as toy

CONFIG = {
  "model": {"name": "toy"}, "parallel": {"tensor": 1},
  "outer": {"algorithm": "data_parallel"},
}


def make(folder="", **options):
  experiment = toy.make(init_from=str(folder), **options)
  return dataclasses.replace(experiment, config=CONFIG)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Returns a run of 6 steps, and the folder of a run that starts from it."""
  folder = tmp_path_factory.mktemp("trained")
  first = loop.train(make(), folder / "first", quiet=True)
  loop.train(make(folder / "first", num_steps=8), folder / "next", quiet=True)
  return folder, first


def test_step_0_is_the_end_of_the_other_run(trained):
  folder, first = trained
  records = read_metrics(folder / "next")
  assert records[0] == {
    "step": 0, "validation_loss": first.measures["loss"],
    "validation_doubled": first.measures["doubled"],
  }
  assert [r["step"] for r in records if "grad_norm" in r] == [*range(1, 9)]
  facts = json.loads((folder / "next/environment.json").read_text())
  assert facts["started_from"] == {
    "folder": str(folder / "first"), "step": 6, "sync": {},
  }
  first = json.loads((folder / "first/environment.json").read_text())
  assert "started_from" not in first


def test_started_run_resumes_without_the_other_run(
  trained, tmp_path, capsys
):
  folder, _ = trained
  shutil.copytree(folder / "next", tmp_path / "next")
  for step in (6, 8):
    shutil.rmtree(tmp_path / f"next/checkpoints/{step}")
  gone = dataclasses.replace(
    make(tmp_path / "gone", num_steps=8),
    config=json.loads((folder / "next/config.json").read_text()),
  )
  loop.train(gone, tmp_path / "next")
  assert capsys.readouterr().out.splitlines()[-3:-1] == [
    f"starts    from {folder / 'first'}, step 6", "resumed   from step 4"
  ]
  chex.assert_trees_all_close(
    *(
      {r["step"]: r["loss"] for r in read_metrics(x / "next") if "loss" in r}
      for x in (tmp_path, folder)
    ),
    rtol=1e-6,
  )
  facts = json.loads((tmp_path / "next/environment.json").read_text())
  assert facts["started_from"]["folder"] == str(folder / "first")


def test_steps_before_the_first_checkpoint_are_repeated(trained, tmp_path):
  folder, _ = trained
  shutil.copytree(folder / "next", tmp_path / "next")
  shutil.rmtree(tmp_path / "next/checkpoints")
  again = make(folder / "first", num_steps=8)
  loop.train(again, tmp_path / "next", quiet=True)
  steps = [r["step"] for r in read_metrics(tmp_path / "next")]
  assert steps == [r["step"] for r in read_metrics(folder / "next")]


def test_all_workers_start_equal_at_another_p(tmp_path):
  """Starts the outer loop from the same parameters, sharded by zero3."""
  config = tiny.get_config("test")
  dense = experiments.build(config, {})
  params = dense.init_state().params
  _save(dense, tmp_path)
  config = override(
    config, "sync.p=0.5 parallel.worker=2 parallel.data=2 zero.scheme=zero3 "
    f"seed=9 train.init_from={tmp_path}"
  )
  config.outer = tree.defaults("outer", "diloco")
  half = experiments.build(config, {"worker": 2, "data": 2})
  start.check(half, tmp_path / "new", ByteTokenizer())
  found, facts = start.start_state(half)
  assert (facts["step"], facts["sync"]["p"]) == (0, 1.0)
  assert int(found.step) == 0
  whole = to_whole(half.program, (found.params, found.outer["params"]))
  one = jax.tree.map(lambda x: x[0], params)
  both = jax.tree.map(lambda x: np.concatenate([x, x]), params)
  chex.assert_trees_all_equal(whole, (both, one))


def _save(experiment, folder):
  checkpointer = Checkpointer(folder, experiment.program, keep=1)
  checkpointer.save(experiment.init_state(), {})
  checkpointer.close()
  (folder / "config.json").write_text(json.dumps(experiment.config))


@pytest.mark.parametrize(
  ("ours", "theirs", "message"),
  [
    ("model.width=64 parallel.tensor=4 model.dtype=bfloat16", {},
     r"model.width=32 there, 64 here; config.parallel.tensor=8 there, 4 here"),
    ("model.rope_base=5.0", {}, "model.rope_base=10000.0 there, 5.0 here"),
    ("", {"outer": {"algorithm": "noloco"}}, "outer.algorithm='noloco': its"),
    ("train.init_from=/nowhere", {}, "init_from=/nowhere holds no run"),
    ("train.init_from=ftp://x/y", {}, "init_from=ftp://x/y must be on this"),
    ("", {}, "no checkpoint in"),
  ],
)
def test_start_folder_that_does_not_fit_is_named(
  ours, theirs, message, tmp_path
):
  config = tiny.get_config("test")
  other = config.to_dict() | theirs
  (tmp_path / "other").mkdir()
  (tmp_path / "other/config.json").write_text(json.dumps(other))
  config = override(config, f"train.init_from={tmp_path / 'other'} {ours}")
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    loop.train(experiments.build(config), tmp_path / "new", quiet=True)
  claimed = (tmp_path / "new").exists()
  assert claimed == ("checkpoint" in message)


def test_models_are_compared_by_all_keys_that_change_their_function():
  model = {"width": 8, "dtype": "float32", "remat": "none", "unroll": 1,
           "attention": "a", "init_std": 0.1}
  theirs = {"model": model, "parallel": {"tensor": 2}}
  ours = {"model": dict.fromkeys(model, "b") | {"width": 8},
          "parallel": {"tensor": 2, "data": 4}}
  start.check_model("x", theirs, ours)
  for name, config in (("there", theirs), ("here", ours)):
    more = config | {"model": config["model"] | {"heads": 4}}
    pair = (more, ours) if name == "there" else (theirs, more)
    with pytest.raises(ValueError, match=rf"^x has .*model\.heads=.*4 {name}"):
      start.check_model("x", *pair)


def test_config_without_init_from_draws_its_parameters(tmp_path):
  config = tiny.get_config("test")
  del config.train.init_from
  (tmp_path / "config.json").write_text(config.to_json())
  assert experiments.from_folder(tmp_path).train.init_from == ""


def test_parameters_of_another_tokenizer_are_refused(tmp_path):
  config = tiny.get_config("test")
  (tmp_path / "config.json").write_text(config.to_json())
  experiment = experiments.build(
    override(config, f"train.init_from={tmp_path}")
  )
  tokens = LibraryTokenizer("llama", llama_files(), "x")
  with pytest.raises(ValueError, match=r"tokenizer bytes, but this run has"):
    start.check(experiment, tmp_path / "new", tokens)
