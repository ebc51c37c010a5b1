"""Recurrent model from training to text, by the code of the transformer."""

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.config import experiments, inference, serving
from caatnet.config.override import override
from caatnet.inference.requests import Request
from caatnet.inference.stops import Stops
from caatnet.serving.generate import Generation
from caatnet.train import loop, tokenizer
from caatnet.train.records import read_metrics
from configs.recurrent import tiny

CHANGES = (
  "parallel.worker=2 parallel.data=2 parallel.tensor=4 outer.algorithm=diloco "
  "outer.sync_every=2 zero.scheme=zero3 sync.p=0.5 model.num_heads=4 "
  "data.seq_len=16 data.validation_windows=16 optimizer.learning_rate=0.01 "
  "train.num_steps=8 train.eval_every=8 train.checkpoint_every=4 "
  "inference.batch=2 inference.context=64 inference.page_size=8 "
  "inference.chunk=16"
)
MESH = {"worker": 2, "data": 2, "tensor": 2}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """Folder of a run with DiLoCo, ZeRO-3 and p = .5."""
  folder = tmp_path_factory.mktemp("recurrent")
  config = override(tiny.get_config("test"), CHANGES)
  loop.train(experiments.build(config, MESH), folder, quiet=True)
  return folder


def test_training_lowers_the_loss(workdir):
  losses = [r["loss"] for r in read_metrics(workdir) if "loss" in r]
  assert losses[-1] < losses[0] - 0.3


def test_text_is_the_greedy_choice_of_the_whole_forward(workdir):
  """Generates three prompts, one of which waits for a slot."""
  made, params, _ = inference.from_folder(
    workdir, {"tensor": 2}, "parallel.data=1"
  )
  program = made.program
  forward = jax.jit(jax.shard_map(
    program.model.logits, mesh=program.layout.mesh,
    in_specs=(program.unpartitioned_specs, P()), out_specs=P("tensor"),
  ))
  tokens = tokenizer.load(workdir)
  prompts = [tuple(b"def f(x):\n  return"), tuple(b"x"), tuple(b"import ")]
  kept = jax.tree.map(np.asarray, params)
  found = Generation(
    made.decoder(params), [Request(p, Stops(9)) for p in prompts], tokens
  ).run()
  for prompt, completion in zip(prompts, found, strict=True):
    whole = np.zeros((1, 32), np.int32)  # later tokens change no earlier logits
    length = len(prompt) + len(completion.tokens)
    whole[0, :length] = prompt + completion.tokens
    logits = np.asarray(forward(kept, whole))[:, 0]
    logits = np.moveaxis(logits, 0, 1).reshape(32, -1)
    chosen = logits.argmax(axis=1)[len(prompt) - 1 : length - 1]
    assert tuple(chosen) == completion.tokens
    assert len(completion.tokens) == 9


def test_parameters_of_an_earlier_step_are_those_of_its_checkpoint(workdir):
  found = [
    inference.from_folder(workdir, {"tensor": 2}, "parallel.data=1", step)
    for step in (None, 4)
  ]
  assert [step for *_, step in found] == [8, 4]
  decoder, _ = serving.from_folder(workdir, {"tensor": 2}, step=4)
  newest, older = (
    np.asarray(made.weights(params).params["embedding"])
    for made, params, _ in found
  )
  np.testing.assert_array_equal(decoder.weights.params["embedding"], older)
  assert (newest != older).mean() > 0.5


def test_server_has_one_state_per_slot_independent_of_pages(workdir):
  """Sets a number of pages that would suffice for one sequence."""
  decoder, chosen = serving.from_folder(
    workdir, {"tensor": 2}, "inference.pages=8"
  )
  engine = serving.engine(decoder, chosen)
  engine.executor.close()
  has = serving.describe(decoder, engine)
  assert (has["pages"], has["states"], has["slots"]) == (0, 2, 2)
  assert engine.scheduler.pages.num_pages == 2
  assert decoder.capacity.pages_per_sequence == 1
  states = sum(x.nbytes for x in jax.tree.leaves(decoder.cache))
  assert has["cache_gb"] == has["host_gb"] == states / 1e9 > 0
