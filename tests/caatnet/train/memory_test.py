"""Properties of `config.memory`: placement changes no bit of a run."""

import collections
import json
import re

import chex
import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.train.evaluate import put_batch
from caatnet.train.step import make_train_step
from configs.caatnet import tiny
from tests.caatnet.train.loop_test import assert_resumes

SMALL = (
  "parallel.tensor=2 model.width=16 model.num_heads=2 model.num_kv_heads=2 "
  "model.ffn_width=24 model.vocab_size=64 data.seq_len=8 data.batch_size=8 "
)
ON_HOST = "memory.moments=pinned_host memory.activations=pinned_host"


def make(overrides, mesh=None):
  config = override(tiny.get_config("test"), f"{SMALL} {overrides}")
  return experiments.build(config, mesh)


def five_steps(experiment, start, options):
  """Returns losses and state after five steps from a state on the host."""
  step = experiment.lower_step().compile(options)
  shardings = jax.tree.map(lambda x: x.sharding, experiment.abstract_state())
  state, losses = jax.device_put(start, shardings), []
  for number in range(5):
    tokens = np.random.default_rng(number).integers(64, size=(8, 9))
    batch = put_batch(experiment.program.layout, tokens)
    state, metrics = step(state, batch, ())
    losses.append(metrics)
  return jax.device_get((losses, state))


# Shares of layers: saved or recomputed, on the device or on the host.
SHARES = {
  "saved": {"device": 0.25, "host": 0.25},
  "recomputed": {"device": 0.25, "host": 0.25},
}
IN_FILE = "memory.activations=placement memory.placement="


@pytest.fixture
def placement(tmp_path):
  """A file with the fields of launch.place that a run reads."""
  row = {
    "policy": "latency_first", "activations": SHARES, "placed": {
      "activations": {"device": 0.25, "cxl0": 0.25}, "weights": {"device": 1.0},
      "master weights": {"dram": 1.0}, "gradients": {"dram": 1.0},
    },
  }
  other = {"policy": "dram_only", "activations": None}
  path = tmp_path / "placement.json"
  path.write_text(json.dumps({"policies": [row, row | other]}))
  return path


@pytest.mark.rotated(6)
@pytest.mark.parametrize(("overrides", "mesh", "where"), [
  ("model.remat=full", {}, ON_HOST),
  ("model.num_layers=8 model.remat=named", {}, IN_FILE),
  ("model.remat=reduced sync.p=0.5 parallel.data=4", None, ON_HOST),
  ("model.remat=named parallel.data=2 zero.scheme=zero3", {"tensor": 2},
   ON_HOST),
  # Eight layers of each stage.
  ("model.num_layers=16 model.remat=full parallel.data=2 parallel.stage=2 "
   "train.accumulation=2 zero.scheme=zero1", {"stage": 2}, IN_FILE),
  ("model.remat=reduced parallel.data=4 zero.scheme=zero3 zero.prefetch=True",
   {"data": 2, "tensor": 2}, ON_HOST),
  ("model.remat=full parallel.data=2 parallel.stage=2 train.accumulation=2 "
   "zero.scheme=zero1 sync.p=0.5", None, ON_HOST),
  ("model.num_layers=8 model.remat=reduced sync.p=0.5 parallel.data=4 "
   "zero.scheme=zero3", {"data": 2, "tensor": 2}, IN_FILE),
  ("model.remat=named model.dtype=bfloat16 parallel.data=4 "
   "train.accumulation=2", {"data": 4}, ON_HOST),
], ids=str)
def test_five_steps_have_the_same_bits(
  overrides, mesh, where, placement, same_bits
):
  if where == IN_FILE:
    where += str(placement)
  on_device, elsewhere = (
    make(f"{overrides} {place}", mesh) for place in ("", where)
  )
  start = jax.device_get(on_device.init_state())
  chex.assert_trees_all_equal(*(
    five_steps(x, start, same_bits) for x in (on_device, elsewhere)
  ))


@pytest.mark.rotated  # starts a process
def test_killed_run_resumes_with_another_placement(tmp_path):
  assert_resumes(
    tmp_path, f"model.remat=reduced {ON_HOST}", "model.remat=reduced"
  )


def on_host(overrides, platform):
  """Returns the types that a lowered step places on the host, with counts."""
  experiment = make(f"model.dtype=bfloat16 {overrides}", {})
  step = make_train_step(
    experiment.program, experiment.optimizer, experiment.outer,
    experiment.clip_norm,
  )
  traced = step.trace(
    experiment.abstract_state(), experiment.abstract_batch(), ()
  )
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  return collections.Counter(re.findall(
    r'_xla_buffer_placement = "pinned_host".*-> tensor<(\S+)>', text
  ))


# Dims: data-parallel rank, lanes of tensor ranks, batch, position, features.
INPUT, GATE = "1x8x8x16xbf16", "1x2x8x8x12xbf16"
QKV = "1x2x8x8x1x8xbf16"


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(("remat", "expected"), [
  ("full", {INPUT: 1}),
  # The sum of the MLP is part of the next layer's input.
  ("reduced", {INPUT: 2}),
  ("named", {INPUT: 2, QKV: 3, GATE: 2}),
])
def test_named_activations_are_placed_on_the_host(remat, expected, platform):
  found = on_host(
    f"model.remat={remat} memory.activations=pinned_host", platform
  )
  assert found == expected


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_moments_are_placed_on_the_host(platform):
  experiment = make("memory.moments=pinned_host")
  kinds = jax.tree.map(
    lambda x: x.sharding.memory_kind, experiment.abstract_state()
  )
  # Adam's state has a step count in addition to two moments.
  params = len(jax.tree.leaves(kinds.params))
  assert collections.Counter(jax.tree.leaves(kinds.opt_state)) == {
    "pinned_host": 2 * params, "device": 2
  }
  others = jax.tree.leaves(kinds._replace(opt_state=()))
  assert set(others) == {"device"}
  found = on_host("memory.moments=pinned_host", platform)
  shapes = collections.Counter(
    "x".join(map(str, x.shape)) + "xf32"
    for x in jax.tree.leaves(experiment.abstract_state().params)
  )
  assert found.keys() == shapes.keys()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_layers_of_a_placement_are_on_the_host(placement, platform):
  """One of four layers saves its input there, one what the policy selects."""
  found = on_host(
    f"model.num_layers=8 model.remat=named {IN_FILE}{placement}", platform
  )
  assert found == {INPUT: 3, QKV: 3, GATE: 2}


def test_parts_of_a_placement_that_do_not_run_are_named(placement):
  experiment = make(f"model.remat=full {IN_FILE}{placement}")
  assert experiment.unexecuted == (
    "activations on cxl0 (in pinned memory of any node); master weights on "
    "dram (config.memory.moments='device'); gradients on dram (on the device)"
  )
  assert make("model.remat=full").unexecuted == ""


@pytest.mark.parametrize(("overrides", "message"), [
  ("memory.activations=placement", "needs config.memory.placement, a file"),
  (f"{IN_FILE}{{}} memory.policy=dram_only",
   "policy='dram_only' must be one of 'latency_first', .* that fit"),
  (f"{IN_FILE}{{}}", "activations='placement' needs a language model with"),
  (f"{IN_FILE}{{}} model.remat=full parallel.data=2 zero.scheme=zero3 "
   "zero.prefetch=True", "cannot be combined with config.zero.prefetch"),
  (f"{IN_FILE}/nowhere.json model.remat=full", "/nowhere.json"),
])
def test_placement_of_layers_that_cannot_run_is_an_error(
  overrides, message, placement
):
  with pytest.raises((ValueError, OSError), match=message) as error:
    make(overrides.format(placement))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(("row", "message"), [
  ('"activations": [1]', r"policies\[0\].activations must be an object"),
  ('"activations": {"saved": {"device": 3}}', "device=3 must be less than or"),
  ('"activations": {"saved": {"device": -1}}', "device=-1 must be greater"),
  ('"activations": {"saved": {"host": NaN}}', "host=NaN must be a finite"),
  ('"activations": {"saved": {"cxl0": 1}}', "activations.saved.cxl0"),
  ('"activations": null', "must be one of none, the policies of .* that fit"),
])
def test_damaged_placement_is_an_error(row, message, tmp_path):
  path = tmp_path / "placement.json"
  path.write_text(f'{{"policies": [{{"policy": "latency_first", {row}}}]}}')
  with pytest.raises(ValueError, match=message) as error:
    make(f"{IN_FILE}{path} model.remat=full")
  assert "\n" not in str(error.value)
  assert str(error.value).count(str(path)) == 1


def test_nothing_is_placed_on_the_host_by_default():
  assert not on_host("model.remat=named", "cuda")


@pytest.mark.parametrize(("overrides", "message"), [
  ("memory.moments=host", "must be one of 'device', 'pinned_host'"),
  ("memory.activations=pinned_host", "needs a language model with config.m"),
  ("memory.activations=pinned_host model.remat=full parallel.stage=2 "
   "pipeline.keep=residuals", "needs config.pipeline.keep='inputs'"),
])
def test_invalid_placement_is_an_error(overrides, message):
  with pytest.raises(ValueError, match=message) as error:
    make(overrides)
  assert "\n" not in str(error.value)
