"""Properties of graph networks, and of training on rows fetched by devices."""

import functools
import shutil
import sys

import chex
import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.models.graph import GraphModel
from caatnet.schema import tree
from caatnet.train import loop
from caatnet.train.checkpoint.reshard import to_whole
from caatnet.train.evaluate import make_evaluate
from caatnet.train.prefetch import PrefetchIterator
from caatnet.train.records import read_metrics
from configs.graphs import tiny
from parallel.axes import Axis, make_mesh
from parallel.memory.features import stacked

FANOUTS = 2, 3
PLACES = 1 + 2 + 6


def make(algorithm="data_parallel", overrides="", mesh=None):
  config = tiny.get_config(f"{algorithm},test")
  return experiments.build(
    override(config, overrides), mesh
  )


def model(layer="sage", **changes):
  values = {
    "layer": layer, "num_features": 5, "num_classes": 3, "fanouts": FANOUTS,
    "width": 4, "dtype": "float32", "tensor": Axis("tensor", 1),
  }
  return GraphModel(**(values | changes))


def draw_batch(size=6):
  """Returns trees: roots have 0 to 5 neighbours, and these have 0 to 4."""
  rng = np.random.default_rng(0)
  degree = rng.integers(0, 5, (size, PLACES)).astype("i4")
  degree[:, 0] = np.arange(size)
  for parent, children in ((0, (1, 2)), (1, (3, 4, 5)), (2, (6, 7, 8))):
    for number, child in enumerate(children):
      degree[:, child] *= number < degree[:, parent]
  return {
    "features": rng.normal(size=(size, PLACES, 5)).astype("f4"),
    "degree": degree,
    "label": rng.integers(3, size=size).astype("i4"),
  }


def scores(network, params, batch):
  mesh = make_mesh({"tensor": network.tensor})
  spec = jax.sharding.PartitionSpec()
  return jax.jit(jax.shard_map(
    network.scores, mesh=mesh, in_specs=(spec, spec), out_specs=spec
  ))(params, batch)


# Reference networks: one node, recursion over neighbours. ---------------------


def children(place, degree):
  first, fanout = {0: (1, 2), 1: (3, 3), 2: (6, 3)}.get(place, (0, 0))
  return [first + j for j in range(min(degree[place], fanout))]


def state(layer, params, x, degree, place, depth):
  """Returns the state of a place after ``depth`` layers, float64."""
  if depth == 0:
    return x[place]
  below = [
    state(layer, params, x, degree, child, depth - 1)
    for child in children(place, degree)
  ]
  own = state(layer, params, x, degree, place, depth - 1)
  p = params[f"layer_{depth - 1}"]
  if layer == "sage":
    mean = np.mean(below, axis=0) if below else np.zeros_like(own)
    y = own @ p["own"]["kernel"] + p["own"]["bias"]
    y = y + mean @ p["neighbours"]["kernel"]
  else:
    d = degree[place]
    near = sum(
      h / np.sqrt((d + 1) * (degree[child] + 1)) * d / len(below)
      for h, child in zip(below, children(place, degree), strict=True)
    )
    y = (own / (d + 1) + near) @ p["linear"]["kernel"] + p["linear"]["bias"]
  return y if depth == 2 else np.maximum(y, 0)


@pytest.mark.parametrize("layer", ["sage", "gcn"])
def test_network_equals_its_oracle(layer):
  network, batch = model(layer), draw_batch()
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: np.asarray(x + 0.3 * rng.normal(size=x.shape), np.float64),
    network.init(jax.random.key(0)),
  )
  found = scores(
    network, jax.tree.map(lambda x: x.astype("f4"), params), batch
  )
  logits = np.stack([
    state(layer, params, x.astype("f8"), degree, 0, 2)
    for x, degree in zip(batch["features"], batch["degree"], strict=True)
  ])
  log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
  np.testing.assert_allclose(
    found["loss"], -log_probs[np.arange(6), batch["label"]], rtol=1e-5
  )
  np.testing.assert_array_equal(
    found["accuracy"], log_probs.argmax(axis=1) == batch["label"]
  )


@pytest.mark.parametrize("layer", ["sage", "gcn"])
def test_padding_places_and_other_examples_have_no_effect(layer):
  """Changes the features of padding places and of one other example."""
  network, batch = model(layer), draw_batch()
  params = network.init(jax.random.key(0))
  counts = np.zeros((6, PLACES), bool)
  for row, degree in zip(counts, batch["degree"], strict=True):
    row[0] = True
    for place in range(3):
      if row[place]:
        row[children(place, degree)] = True
  noise = np.where(counts, 0, np.float32(7))[..., None]
  changed = dict(batch, features=batch["features"] + noise)
  changed["features"][5] += 1
  before, after = (scores(network, params, b)["loss"] for b in (batch, changed))
  np.testing.assert_array_equal(before[:5], after[:5])
  assert before[5] != after[5]


def test_flops_are_those_of_products():
  """Six per weight, at all places of the levels that a layer computes."""
  example = {"features": jax.ShapeDtypeStruct((PLACES, 5), "f4")}
  assert model("gcn").flops(example) == 6 * (3 * 5 * 4 + 4 * 3)
  assert model("sage").flops(example) == 12 * (3 * 5 * 4 + 4 * 3)
  deep = model("gcn", fanouts=(2, 3, 4))
  assert deep.flops(example) == 6 * (9 * 5 * 4 + 3 * 4 * 4 + 4 * 3)


# Training. --------------------------------------------------------------------


def test_resumed_run_has_equal_trees_and_order(tmp_path):
  """Resumes with another sampler and more batches prepared ahead."""
  whole = loop.train(make(), tmp_path / "whole", quiet=True)
  assert whole.measures["accuracy"] < whole.measures["bound"] < 0.9
  records = read_metrics(tmp_path / "whole")
  shutil.rmtree(tmp_path / "whole" / "checkpoints" / "12")
  loop.train(
    make(overrides="data.ahead=3 data.sampler=reference"),
    tmp_path / "whole", quiet=True,
  )
  for before, after in zip(
    records, read_metrics(tmp_path / "whole"), strict=True
  ):
    if "loss" in before:
      assert before["loss"] == after["loss"]


@functools.cache
def run(algorithm, overrides="", mesh=(), num_steps=4):
  """Returns whole parameters of all workers, and losses, after steps."""
  experiment = make(algorithm, overrides, dict(mesh))
  state, programs, losses = experiment.init_state(), {}, []
  dataset = experiment.data.load(0)
  batches = PrefetchIterator(
    experiment.program.layout, dataset.batches, dataset.ahead
  )
  for number in range(num_steps):
    plan = experiment.outer.plan(number)
    if plan.variant not in programs:
      programs[plan.variant] = experiment.lower_step(plan).compile()
    numbers = jax.tree.map(np.int32, plan.numbers)
    state, metrics = programs[plan.variant](state, next(batches), numbers)
    losses.append(np.asarray(metrics["loss"]))
  batches.close()
  assert dataset.table.counts.programs == 1
  assert len(programs) == len({experiment.outer.plan(i).variant
                               for i in range(num_steps)})
  params = to_whole(experiment.program, state).params
  return jax.device_get(params), np.array(losses)


PLACED = (("worker", 2), ("data", 2))


@pytest.mark.parametrize(
  "access",
  [
    "data.access=device", "data.access=sharded",
    "data.cache_rows=5000", "data.cache_rows=5000 data.cache=presampling",
    "data.access=sharded data.cache_rows=5000 data.ahead=0",
  ],
)
def test_training_is_equal_under_every_access(access):
  """Compares bits, since batches are equal."""
  plain = run("data_parallel", "data.access=cpu_gather", PLACED)
  chex.assert_trees_all_equal(plain, run("data_parallel", access, PLACED))


def test_lanes_equal_devices_with_fragments():
  lanes, devices = (
    run("streaming", num_steps=6, mesh=mesh)[0] for mesh in ((), PLACED)
  )
  chex.assert_trees_all_close(lanes, devices, rtol=1e-3, atol=1e-5)
  chex.assert_tree_all_finite(lanes)


def test_partitioned_run_is_evaluated_on_any_devices():
  """Includes both workers as lanes of one device."""
  found = []
  for mesh in ({"data": 2}, {"worker": 2}, {}):
    experiment = make("data_parallel", "zero.scheme=zero3", mesh)
    state = experiment.init_state()
    params = experiment.make_export_params()(state.params, state.outer)
    validation = experiment.data.load(0).validation
    few = jax.tree.map(lambda x: x[:22], validation)
    found.append(make_evaluate(experiment.program, 16)(params, few).means)
  for means in found[1:]:
    chex.assert_trees_all_close(means, found[0], rtol=1e-5)


def test_microbatches_change_no_parameter():
  parts = run("data_parallel", "train.accumulation=2", num_steps=3)[0]
  plain = run("data_parallel", num_steps=3)[0]
  chex.assert_trees_all_close(plain, parts, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ("parallel.tensor=2", r"config.parallel.tensor=2 must be 1 with config"),
    ("model.layer=gat", r"config.model.layer='gat' must be one of sage"),
    ("data.num_features=9", r"config.data.num_features=9, but nodes have 16"),
    ("data.num_classes=7", r"config.data.num_classes=7, but there is the lab"),
    ("data.access=dma", r"config.data.access='dma' must be one of"),
    ("data.sampler=fast", r"config.data.sampler='fast' must be one of"),
    ("data.cache=lru", r"config.data.cache='lru' must be one of degree"),
    ("data.path=/nowhere", r"config.data.path='/nowhere': .* is not a folder"),
    ("data.fanouts=(9999,99999)", r"config.data.fanouts=.* places for nodes"),
    ("data.cache_rows=65537", r"config.data.cache_rows=65537 must be at most"),
    ("data.batch_size=65536", r"but must have 65536, config.data.batch_size"),
  ],
)
def test_invalid_key_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    make("data_parallel", changes).data.load(0)


def test_missing_compiled_sampler_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "numba", None)  # as if not installed
  with pytest.raises(ValueError, match=r"config.data.sampler='compiled' needs"):
    make("data_parallel", "data.sampler=compiled").data.load(0)


def test_single_examples_equal_those_of_batches():
  """Crosses into the second epoch, at any position of the next batch."""
  dataset = make().data.load(0)
  dataset.batches.set_state({"examples": 39_140})  # of 39,153
  batch = next(dataset.batches)
  ones = [dataset.examples[39_140 + number] for number in range(32)]
  for key in ("degree", "label"):
    np.testing.assert_array_equal(stacked(*(x[key] for x in ones)), batch[key])
  features = stacked(*(one["features"] for one in ones))
  assert features.table is batch["features"].table is dataset.table
  np.testing.assert_array_equal(features.ids, batch["features"].ids)
  assert dataset.batches.get_state() == {"examples": 39_140 + 32}


def test_neither_sync_policies_nor_stages_apply():
  config = tiny.get_config("data_parallel,test")
  config.sync = tree.defaults("sync")
  with pytest.raises(ValueError, match=r"config\.sync has no effect"):
    experiments.build(config)
  with pytest.raises(ValueError, match=r"parallel.stage must be 1"):
    model().parts()


@pytest.mark.parametrize(("layer", "matrices"), [("sage", 2), ("gcn", 1)])
def test_flops_of_graphs_are_six_per_weight_and_position(layer, matrices):
  model = GraphModel(
    layer, 10, 3, (4, 5), 8, "float32", Axis("tensor", 1)
  )
  # The root and its 4 neighbours, and then the root.
  assert model.flops(None) == 6 * matrices * (5 * 10 * 8 + 8 * 3)
  assert model._level_sizes == (1, 4, 20)
  assert model.num_params == matrices * (10 * 8 + 8 * 3) + 8 + 3
  assert model.stacks == {}
