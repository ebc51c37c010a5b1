"""Properties of `config.memory`: placement changes no bit of a run.

The exception is a file that selects layers to recompute, with microbatches:
XLA fuses their operations differently, so last bits change.
"""

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
from tests import pairwise
from tests.caatnet.train.loop_test import assert_resumes

SMALL = (
  "parallel.tensor=2 model.width=16 model.num_heads=2 model.num_kv_heads=2 "
  "model.ffn_width=24 model.vocab_size=64 data.seq_len=8 data.batch_size=8 "
)
ON_HOST = "memory.moments=pinned_host memory.activations=pinned_host"


def make(overrides, mesh=None):
  config = override(tiny.get_config("test"), f"{SMALL} {overrides}")
  return experiments.build(config, mesh)


# Shares of layers: saved or recomputed, on the device or on the host.
SHARES = {
  "saved": {"device": 0.25, "host": 0.25},
  "recomputed": {"device": 0.25, "host": 0.25},
}
IN_FILE = "memory.activations=placement memory.placement="


@pytest.fixture
def placement(tmp_path):
  """A file with the fields of launch.place that a run reads."""
  shares = {"0": 0.4, str(tmp_path): 0.6}
  row = {
    "policy": "latency_first", "activations": SHARES, "host_optimizer": {
      "weights": shares, "first": {"0": 1.0}, "second": {str(tmp_path): 1.0},
      "gradients": shares,
    }, "placed": {
      "activations": {"device": 0.25, "cxl0": 0.25}, "weights": {"device": 1.0},
      "master weights": {"dram": 1.0}, "gradients": {"dram": 1.0},
    },
  }
  other = {"policy": "dram_only", "activations": None}
  path = tmp_path / "placement.json"
  path.write_text(json.dumps({"policies": [row, row | other]}))
  return path


def refused(row):
  """Whether a row places nothing, or a run refuses it."""
  on_host, tiers = row["optimizer"] == "host", row["tiers"]
  return (
    on_host != (tiers != "") or (on_host and row["moments"] != "device")
    or (not on_host and row["moments"] == row["activations"] == "device")
    # A file has the state of the host's optimizer, too.
    or (row["activations"] == "placement" and tiers == "striped")
    or (row["activations"] == "placement" and "prefetch" in row["scheme"])
    or row["stages"] > row["accumulation"]
    or (row["stages"] > 1 and "zero3" in row["scheme"])
  )


# Values of config.memory, and options on which placed arrays depend.
TABLE = pairwise.rows({
  "scheme": ("zero3", "zero3 zero.prefetch=True", "zero1", "ddp"),
  "optimizer": ("host", "device"), "tiers": ("", "file", "striped"),
  "moments": ("device", "pinned_host"),
  "activations": ("placement", "pinned_host", "device"),
  "remat": ("named", "reduced", "full"), "dtype": ("float32", "bfloat16"),
  "accumulation": (2, 1), "stages": (1, 2), "p": (1.0, 0.5),
  "on_devices": (True, False),
}, refused)


def overrides_of(row, placement, folder):
  """Returns the overrides of a row without and with its placement."""
  run = (
    f"model.num_layers={8 * row['stages']} model.remat={row['remat']} "
    f"model.dtype={row['dtype']} sync.p={row['p']} parallel.data=2 "
    f"parallel.stage={row['stages']} zero.scheme={row['scheme']} "
    f"train.accumulation={row['accumulation']} "
    f"memory.optimizer={row['optimizer']}"
  )
  where = (
    f"memory.moments={row['moments']} memory.activations={row['activations']}"
  )
  if row["tiers"] == "file" or row["activations"] == "placement":
    where += f" memory.placement={placement}"
  if row["tiers"] == "striped":
    where += f' memory.tiers=(("0",0.3),("{folder}",0.7)) memory.threads=3'
  return run, f"{run} {where}"


def three_steps(experiment, program, start):
  """Returns metrics and state of steps from a state on the host."""
  steps = experiment.update.open(experiment.program, experiment.learning_rate)
  shardings = jax.tree.map(lambda x: x.sharding, experiment.abstract_state())
  state, metrics = steps.load(jax.device_put(start, shardings)), []
  for number in range(3):
    tokens = np.random.default_rng(number).integers(64, size=(8, 9))
    batch = put_batch(experiment.program.layout, tokens)
    state, found = steps.run(program, state, batch, ())
    metrics.append(found)
  return jax.tree.map(np.array, (metrics, steps.whole(state)))


# Largest relative error of metrics if a file selects layers to recompute, in a
# loop over microbatches.
ROUNDING = {"float32": 1e-5, "bfloat16": 0.02}


@pytest.mark.rotated(len(TABLE))  # a row takes about 10 s
@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
def test_options_together_change_no_result(
  row, placement, same_bits, tmp_path
):
  mesh = {"data": 2, "tensor": 2} if row["on_devices"] else {}
  plain, placed = (
    make(keys, mesh) for keys in overrides_of(row, placement, tmp_path)
  )
  start = jax.device_get(plain.init_state())
  program = plain.lower_step().compile(same_bits)
  expected = three_steps(plain, program, start)
  if (row["moments"], row["activations"]) != ("device", "device"):
    program = placed.lower_step().compile(same_bits)
  found = three_steps(placed, program, start)
  if row["activations"] == "placement" and row["accumulation"] > 1:
    chex.assert_trees_all_close(
      found[0], expected[0], rtol=ROUNDING[row["dtype"]]
    )
  else:
    chex.assert_trees_all_equal(found, expected)


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
  ("memory.activations=pinned_host", "needs a language model with config.m"),
  ("memory.activations=pinned_host model.remat=full parallel.stage=2 "
   "pipeline.keep=residuals", "needs config.pipeline.keep='inputs'"),
])
def test_invalid_placement_is_an_error(overrides, message):
  with pytest.raises(ValueError, match=message) as error:
    make(overrides)
  assert "\n" not in str(error.value)
