"""Properties of convolutional networks, and of training a second model.

Everything outside of models uses the protocol only, so the outer loops and
partitions of the language model must run on this model unchanged.
"""

import collections

import chex
import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.outer import OUTER
from caatnet.config.override import override
from caatnet.models.convolutional import ConvolutionalModel
from caatnet.models.protocol import Parameter
from caatnet.schema import tree
from caatnet.train.checkpoint.reshard import to_whole
from caatnet.train.evaluate import put_batch
from configs.images import tiny
from parallel.axes import Axis, make_mesh
from parallel.ledger import ledger
from parallel.plans.zero import cost

SMALL = (
  "model.widths=(4,8) model.blocks=2 model.groups=2 data.batch_size=16 "
  "train.num_steps=8 train.eval_every=8 train.checkpoint_every=4"
)
LEVELS = "zero.levels=node:2,gpu:2 parallel.worker=1 parallel.data=4"


def make(algorithm, overrides="", mesh=None):
  config = tiny.get_config(f"{algorithm},test")
  return experiments.build(
    override(config, f"{SMALL} {overrides}"), mesh
  )


def model(**changes):
  values = {
    "shape": (4, 6, 2), "num_classes": 3, "widths": (4, 8), "blocks": 2,
    "groups": 2, "dtype": "float32", "tensor": Axis("tensor", 1),
  }
  return ConvolutionalModel(**(values | changes))


def draw_batch(shape, num_classes, size=5):
  rng = np.random.default_rng(0)
  return {
    "image": rng.random((size, *shape)).astype("f4"),
    "label": rng.integers(num_classes, size=size).astype("i4"),
  }


def scores(network, params, batch):
  """Returns scores on one device, with the tensor axis of ``shard_map``."""
  mesh = make_mesh({"tensor": network.tensor})
  spec = jax.sharding.PartitionSpec()
  return jax.shard_map(
    network.scores, mesh=mesh, in_specs=(spec, spec), out_specs=spec
  )(params, batch)


# Reference network: one image, loops over taps. -------------------------------


def convolve(x, kernel, stride):
  height, width, _ = x.shape
  size = kernel.shape[0]
  before = (size - stride) // 2
  padded = np.pad(x, ((before, size), (before, size), (0, 0)))
  out = np.zeros((height // stride, width // stride, kernel.shape[3]))
  for i in range(size):
    for j in range(size):
      taps = padded[i : i + height : stride, j : j + width : stride]
      out += taps @ kernel[i, j]
  return out


def normalise(x, params, groups):
  grouped = x.reshape(*x.shape[:2], groups, -1)
  mean = grouped.mean(axis=(0, 1, 3), keepdims=True)
  variance = grouped.var(axis=(0, 1, 3), keepdims=True)
  y = ((grouped - mean) / np.sqrt(variance + 1e-6)).reshape(x.shape)
  return y * params["scale"] + params["bias"]


def oracle(params, image, groups=2):
  x = np.asarray(image, np.float64)
  for stage in range(2):
    x = convolve(x, params[f"enter_{stage}"]["kernel"], 1 + (stage > 0))
    blocks = params[f"stage_{stage}"]
    for layer in range(2):
      block = jax.tree.map(lambda p: p[layer], blocks)  # noqa: B023
      y = np.maximum(normalise(x, block["norm_1"], groups), 0)
      y = convolve(y, block["conv_1"]["kernel"], 1)
      y = np.maximum(normalise(y, block["norm_2"], groups), 0)
      x = x + convolve(y, block["conv_2"]["kernel"], 1)
  head = params["head"]
  y = np.maximum(normalise(x, head["norm"], groups), 0).mean(axis=(0, 1))
  logits = y @ head["linear"]["kernel"] + head["linear"]["bias"]
  return logits - np.log(np.exp(logits).sum())


def test_network_equals_its_oracle():
  network = model()
  params = network.init(jax.random.key(0))
  rng = np.random.default_rng(1)  # changes parameters that start as 0 or 1
  params = jax.tree.map(
    lambda x: np.asarray(x + 0.3 * rng.normal(size=x.shape), np.float64), params
  )
  batch = draw_batch(network.shape, network.num_classes)
  found = scores(
    network, jax.tree.map(lambda x: x.astype("f4"), params), batch
  )
  log_probs = np.stack([oracle(params, image) for image in batch["image"]])
  np.testing.assert_allclose(
    found["loss"], -log_probs[np.arange(5), batch["label"]], rtol=1e-4
  )
  np.testing.assert_array_equal(
    found["accuracy"], log_probs.argmax(axis=1) == batch["label"]
  )


def test_score_of_an_example_does_not_depend_on_others():
  """Normalisation statistics are per image: no state, no batch dependence."""
  network = model()
  params = network.init(jax.random.key(0))
  batch = draw_batch(network.shape, network.num_classes)
  changed = dict(batch, image=batch["image"].copy())
  changed["image"][3:] += 1.0
  before, after = (scores(network, params, b)["loss"] for b in (batch, changed))
  np.testing.assert_array_equal(before[:3], after[:3])
  assert (np.abs(before[3:] - after[3:]) > 1e-6).all()


def test_flops_count_the_products_of_each_layer():
  """Compares widths and depths."""
  def forward(height, width, stages):
    return 3 * 2 * (
      height * width * 9 * 2 * 4 + stages * 2 * height * width * 9 * 4 * 4
    )

  one = model(widths=(4,), blocks=1).flops(
    {"image": jax.ShapeDtypeStruct((4, 6, 2), "f4")}
  )
  assert one == forward(4, 6, 1) + 3 * 2 * 4 * 3
  deeper = model(widths=(4,), blocks=3).flops(
    {"image": jax.ShapeDtypeStruct((4, 6, 2), "f4")}
  )
  assert deeper - one == forward(4, 6, 3) - forward(4, 6, 1)


def test_flops_count_the_positions_of_each_stage():
  """Six per weight of a kernel and position; each stage has a quarter."""
  network = model(widths=(4, 8, 12), shape=(8, 16, 3))
  shapes = jax.eval_shape(network.init, jax.random.key(0))
  places = {"head": 1}
  for stage in range(3):
    number = 8 * 16 // 4**stage
    places |= {f"enter_{stage}": number, f"stage_{stage}": number}
  expected = sum(
    6 * x.size * places[path[0].key]
    for path, x in jax.tree.leaves_with_path(shapes)
    if path[-1].key == "kernel"
  )
  image = jax.ShapeDtypeStruct((8, 16, 3), "f4")
  assert network.flops({"image": image}) == expected


def run(algorithm, mesh, num_steps=6):
  """Returns whole parameters of all workers after some steps."""
  experiment = make(algorithm, mesh=mesh)
  state, programs = experiment.init_state(), {}
  batches = experiment.data.load(0).batches
  for number in range(num_steps):
    plan = experiment.outer.plan(number)
    if plan.variant not in programs:
      programs[plan.variant] = experiment.lower_step(plan).compile()
    batch = put_batch(experiment.program.layout, next(batches))
    numbers = jax.tree.map(np.int32, plan.numbers)
    state, _ = programs[plan.variant](state, batch, numbers)
  return jax.device_get(to_whole(experiment.program, state).params)


def test_lanes_equal_devices_with_fragments_of_both_stages():
  lanes, devices = (
    run("streaming", mesh) for mesh in ({}, {"worker": 2, "data": 2})
  )
  chex.assert_trees_all_close(lanes, devices, rtol=1e-3, atol=1e-5)
  first = jax.tree.map(lambda x: x[0], lanes)
  chex.assert_tree_all_finite(first)


@pytest.mark.rotated
@pytest.mark.parametrize("algorithm", OUTER)
def test_sent_bytes_of_outer_loops_equal_the_formula(algorithm):
  experiment = make(algorithm)
  layout, outer = experiment.program.layout, experiment.outer
  assert layout.worker.devices == 2
  plans = [outer.plan(step) for step in outer.steady_round]
  counts = collections.Counter(plan.variant for plan in plans)
  found = collections.Counter()
  for variant, count in counts.items():
    plan = next(p for p in plans if p.variant == variant)
    entries = ledger.collectives(experiment.lower_step(plan), layout.mesh)
    for entry in ledger.select(entries, axis="worker"):
      found[entry.dtype] += count * entry.bytes * entry.count
  assert found == outer.sent_bytes(experiment.program.local_shapes)
  assert found


@pytest.mark.rotated
@pytest.mark.parametrize("scheme", ["zero1", "zero3", "hsdp", "zeropp"])
def test_sent_bytes_of_partitions_equal_the_formula(scheme):
  experiment = make("data_parallel", f"{LEVELS} zero.scheme={scheme}")
  layout = experiment.program.layout
  found, expected = collections.Counter(), collections.Counter()
  for entry in ledger.collectives(experiment.lower_step(), layout.mesh):
    # The loss is a scalar and norms are one vector; shards have more dims.
    number = entry.kind == "all_reduce" and len(entry.shape) < 2
    if set(entry.axes) & {"node", "gpu"} and entry.bytes and not number:
      found[entry.axes, entry.kind, entry.dtype] += entry.count * entry.bytes
  for e in cost.level_collectives(
    layout.partition, experiment.program.cost_parameters
  ):
    expected[e.levels, e.kind, e.dtype] += e.operand_bytes
  assert found == expected


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ("parallel.tensor=2", r"config.parallel.tensor=2 must be 1 with config"),
    ("model.groups=3", r"config.model.groups=3 must divide all of"),
    ("model.widths=(4,4,4,4,4)", r"config.model.widths=\(4, 4, 4, 4, 4\) has"),
    ("data.num_classes=9", r"config.data.num_classes=9, but the labels"),
    ("data.shape=(8,8,3)", r"config.data.shape=\(8, 8, 3\), but the images"),
    ("data.validation_percent=1e-9", r"leaves no validation images"),
    ("data.path=/nowhere.npz", r"config.data.path='/nowhere.npz' must be"),
  ],
)
def test_invalid_key_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    make("data_parallel", changes).data.load(0)


def test_sync_section_has_no_effect_and_is_refused():
  config = tiny.get_config("data_parallel,test")
  config.sync = tree.defaults("sync")
  with pytest.raises(ValueError, match=r"config\.sync has no effect"):
    experiments.build(config)


def sized(**changes):
  sizes = {"shape": (8, 12, 3), "num_classes": 5, "widths": (4, 6)}
  return model(**(sizes | changes))


def test_flops_of_convolutions_are_counted_by_hand():
  """Six per weight and position; the second stage has a quarter of them."""
  model = sized()
  example = {"image": jax.ShapeDtypeStruct((8, 12, 3), "float32")}
  places = 8 * 12
  products = places * (9 * 3 * 4 + 2 * 2 * 9 * 4 * 4)
  products += places // 4 * (4 * 4 * 6 + 2 * 2 * 9 * 6 * 6)
  assert model.flops(example) == 6 * (products + 6 * 5)
  weights = 9 * 3 * 4 + 2 * (2 * 9 * 16 + 4 * 4)
  weights += 4 * 4 * 6 + 2 * (2 * 9 * 36 + 4 * 6) + 2 * 6 + 6 * 5 + 5
  assert model.num_params == weights
  assert model.stacks == {"stage_0": 2, "stage_1": 2}
  stages = {
    part: {p.stage_dim for p in jax.tree.leaves(
      tree, is_leaf=lambda p: isinstance(p, Parameter)
    )} for part, tree in model.parameters.items()
  }
  assert stages == {"enter_0": {None}, "stage_0": {0}, "enter_1": {None},
                    "stage_1": {0}, "head": {None}}


@pytest.mark.parametrize(("changes", "message"), [
  ({"blocks": 0}, "blocks=0 must be at least 1"),
  ({"widths": ()}, r"widths=\(\) must not be empty"),
  ({"groups": 3}, r"groups=3 must divide all of widths=\(4, 6\)"),
  ({"groups": 0}, "groups=0 must divide"),
  ({"groups": 4}, "groups=4 must divide"),
  ({"shape": (9, 12, 3)}, r"which halve height and width 1 times, so both of"),
  ({"shape": (8, 13, 3)}, r"\(8, 13\) must be multiples"),
  ({"widths": (4, 4, 4, 4)}, r"4 stages, which halve height and width 3 tim"),
])
def test_sizes_of_convolutions_that_do_not_fit_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    sized(**changes)


def test_smallest_convolutional_networks_are_valid():
  sized(blocks=1, widths=(2,), shape=(1, 1, 1))
  sized(widths=(4, 4, 4), shape=(4, 8, 3))  # sides of multiples of 4
  with pytest.raises(ValueError, match="activations of one shape"):
    sized().parts()
