"""`config.parallel.xla_options` reaches the compiler with every step.

XLA refuses an option that it does not know, so a refusal shows that it was
passed.
"""

import dataclasses

import jax
import numpy as np
import pytest

from caatnet.benchmarks.serving import decoders
from caatnet.config import experiments, inference
from caatnet.config.override import override
from caatnet.federated.local import LocalTrainer
from caatnet.federated.splits import Examples
from caatnet.inference import decoder
from caatnet.inspection import decoding, study
from caatnet.train import loop
from caatnet.train.elastic.single_process import Programs
from caatnet.train.evaluate import make_evaluate
from configs.caatnet import tiny
from parallel.ledger import targets
from tests.caatnet.train import linear_model as toy
from tests.caatnet.train.outer_loops_test import make_linear

SMALL = (
  "model.num_layers=1 parallel.tensor=2 inference.batch=2 inference.context=32 "
  "inference.page_size=16 parallel.xla_options="
)
UNKNOWN = "xla_unknown=true"


def config(text):
  return override(tiny.get_config("test"), SMALL + text)


def linear(workers, option="xla_unknown"):
  """Returns an experiment with an option."""
  made = make_linear("diloco", workers=workers)
  layout = dataclasses.replace(
    made.program.layout, xla_options=((option, True),)
  )
  program = dataclasses.replace(made.program, layout=layout)
  return dataclasses.replace(made, program=program)


def train(workdir):
  loop.train(linear(2), workdir, quiet=True)


def train_alone(workdir):
  programs = Programs(linear(1))
  experiment = programs.experiment
  programs.step(experiment.outer.plan(0), experiment.abstract_state(), None)


def train_client(workdir):
  examples = Examples("", toy.draw(8), toy.draw(0))
  client = LocalTrainer(linear(1), examples, 0, 1, validate=False, test=False)
  client.train(client.vectors.initial(), 0, lambda: False)


def evaluate(workdir):
  experiment = linear(1)
  params = jax.tree.map(lambda x: x[0], experiment.init_state().params)
  make_evaluate(experiment.program, 8)(params, toy.draw(8))


def forward(workdir):
  step = decoding.step_of("decode", inference.build(config(UNKNOWN)))
  run = decoder.make_forward(step.program, step.weights, step.cache_shape)
  run.lower(step.params, step.state[0], step.inputs[0]).compile()


def decode(workdir):
  built = inference.build(config(UNKNOWN))
  batch, sampling = jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype),
    decoding.step_of("decode", built).inputs,
  )
  decoders.decoder(built).step(batch, sampling, False)


def analyse_decoding(workdir):
  step = decoding.step_of("decode", inference.build(config(UNKNOWN)))
  decoding.analyse(step, targets.resolve("cpu:2"))


def score(workdir):
  built = inference.build(config(UNKNOWN))
  built.scorer_of(decoders.decoder(built).weights).score([[1, 2, 3]])


@pytest.mark.parametrize("run", [
  train, train_alone, train_client, evaluate, decode, forward,
  analyse_decoding, score,
])
def test_options_are_passed_to_the_compiler(run, tmp_path):
  with pytest.raises(
    jax.errors.JaxRuntimeError, match="No such compile option: 'xla_unknown'"
  ):
    run(tmp_path)


def test_wrong_option_names_its_key():
  with pytest.raises(
    ValueError, match=r"config\.parallel\.xla_options: .*'fast' must"
  ):
    experiments.build(config("fast"))


def test_analysis_shows_the_options_of_the_run():
  option = "xla_llvm_disable_expensive_passes"
  found = study.analyse(linear(1, option), targets.resolve("cpu:1"))
  assert found["compiler_options"] == {option: True}


def test_an_option_without_a_value_is_removed():
  layout = linear(1, "xla_unknown").program.layout
  for value, expected in ((True, {"xla_unknown": True}), ("", {})):
    layout = dataclasses.replace(layout, xla_options=(("xla_unknown", value),))
    assert layout.compiler_options() == expected


def test_options_of_the_machine_of_training_stay_there(tmp_path):
  made = override(config("xla_tpu_x=true"), "parallel.device_order=(1,0)")
  (tmp_path / "config.json").write_text(made.to_json())
  found = experiments.read_run_config(tmp_path)
  assert (found.parallel.xla_options, found.parallel.device_order) == ("", [])
