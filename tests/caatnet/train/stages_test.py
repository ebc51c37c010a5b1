"""Properties of pipeline stages: training equals that of one piece."""

import functools
import re

import chex
import jax
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.train import loop
from caatnet.train.checkpoint.reshard import to_stored, to_whole
from caatnet.train.evaluate import put_batch
from configs.images import tiny as images
from configs.pipeline import tiny
from tests import users

# Three stages of four layers, 259 tokens over two ranks and three stages:
# chunks have 1, 2 and 1 layers, and a rank has 130 tokens in slices of 44, the
# last one padded.
SMALL = (
  "parallel.stage=3 parallel.tensor=2 model.width=18 model.num_heads=3 "
  "model.num_kv_heads=3 model.ffn_width=25 model.vocab_size=259 "
  "data.seq_len=8 data.batch_size=8 data.validation_windows=8 "
  "train.accumulation=4 train.num_steps=4 train.checkpoint_every=2 "
  "train.keep_checkpoints=9 train.eval_every=4 optimizer.warmup_steps=1 "
  "optimizer.decay_steps=9 "
)
ALONE = "parallel.stage=1 "
# Combination with stages -> (overrides, mesh).
PAIRS = {
  "p, lanes of all axes": ("sync.p=0.5 parallel.data=2", {"tensor": 2}),
  "zero3, chunks, remat": (
    "parallel.data=2 zero.scheme=zero3 model.remat=full "
    "pipeline.schedule=looped pipeline.chunks=2 parallel.stage=2 ",
    {"data": 2, "stage": 2},
  ),
  "zero2, residuals, remat": (
    "parallel.data=2 zero.scheme=zero2 model.remat=reduced "
    "pipeline.keep=residuals pipeline.schedule=eager_1f1b",
    {"data": 2, "stage": 3},
  ),
  "workers, tied, two backwards": (
    "parallel.worker=2 outer.algorithm=diloco outer.sync_every=2 "
    "model.tied_embeddings=True pipeline.schedule=zb_h1 ",
    {"worker": 2, "stage": 3},
  ),
  "p, residuals, two backwards": (
    "sync.p=0.5 pipeline.keep=residuals pipeline.schedule=zb_h2",
    {"stage": 3},
  ),
  "zero3, remat, two backwards": (
    "parallel.data=2 zero.scheme=zero3 model.remat=full "
    "pipeline.schedule=zb_h1", {"data": 2, "stage": 3},
  ),
  "V, zero2, inputs, replicated vocabulary": (
    "parallel.data=2 zero.scheme=zero2 model.remat=full parallel.stage=2 "
    "pipeline.schedule=dualpipe_v pipeline.chunks=2 "
    "pipeline.vocabulary=replicated", {"stage": 2},
  ),
  "V, workers, tied, residuals, padded parts": (
    "parallel.worker=2 outer.algorithm=diloco outer.sync_every=2 "
    "model.num_layers=5 model.tied_embeddings=True parallel.stage=2 "
    "pipeline.schedule=zb_v pipeline.chunks=2 pipeline.keep=residuals",
    {"worker": 2, "stage": 2},
  ),
  "replicated vocabulary": (
    "pipeline.vocabulary=replicated pipeline.schedule=gpipe ",
    {"stage": 3, "tensor": 2},
  ),
}


def make(overrides, mesh):
  """Builds the small language model, or after "images " the image model."""
  _, is_images, of_images = overrides.rpartition("images ")
  config = images.get_config("data_parallel,test")
  small = "data.batch_size=8 train.accumulation=4 parallel.data=1"
  if not is_images:
    config, small = tiny.get_config("test"), SMALL
  return experiments.build(
    override(config, f"{small} {of_images}"), mesh
  )


@functools.cache
def trained(overrides, mesh=()):
  """Returns metrics and whole parameters after two steps."""
  experiment = make(overrides, dict(mesh))
  layout = experiment.program.layout
  state, draw = experiment.init_state(), np.random.default_rng(0)
  step = experiment.lower_step().compile()
  for _ in range(2):
    batch = put_batch(layout, jax.tree.map(
      lambda x: draw.integers(
        getattr(experiment.program.model, "vocab_size", 10),
        size=(8, *x.shape),
      ).astype(x.dtype), experiment.data.example,
    ))
    state, metrics = step(state, batch, experiment.outer.plan(0).numbers)
  whole = to_whole(experiment.program, state)
  return jax.device_get((metrics, whole.params, whole.opt_state))


@pytest.mark.rotated
@pytest.mark.parametrize("pair", PAIRS)
def test_model_in_stages_trains_as_in_one_piece(pair):
  overrides, mesh = PAIRS[pair]
  ours = trained(overrides, tuple(mesh.items()))
  alone = {name: n for name, n in mesh.items() if name != "stage"}
  theirs = trained(overrides + " " + ALONE, tuple(alone.items()))
  chex.assert_trees_all_close(ours[0], theirs[0], rtol=2e-5)
  chex.assert_trees_all_close(ours[1], theirs[1], atol=5e-6)
  chex.assert_trees_all_close(ours[2], theirs[2], rtol=2e-4, atol=2e-6)


def test_device_order_changes_only_the_placement():
  overrides, mesh = PAIRS["replicated vocabulary"]
  ordered = f"{overrides} parallel.device_order=(5,0,3,1,4,2)"
  layout = make(ordered, mesh).program.layout
  ids = np.vectorize(lambda d: d.id)(layout.mesh.devices)
  assert ids.squeeze().tolist() == [[5, 0], [3, 1], [4, 2]]
  assert layout.mesh.shape["stage"] == 3
  ours, theirs = (
    trained(text, tuple(mesh.items())) for text in (ordered, overrides)
  )
  chex.assert_trees_all_equal(ours, theirs)


def test_buffers_are_updated_in_place():
  """Excludes scatters (updates under vmap), which XLA:TPU copies."""
  overrides = PAIRS["replicated vocabulary"][0]
  lowered = make(overrides, {"stage": 3}).lower_step().as_text()
  # Four inputs of GPipe and one more slot, of sequences of 8 tokens.
  assert "tensor<1x5x2x8x18xf32>" in lowered
  results = re.findall(r"stablehlo\.scatter.*?-> (tensor<\S+>)", lowered, re.S)
  assert results
  assert not [result for result in results if "x5x2x8x18x" in result]


@pytest.mark.parametrize("overrides", [
  "", "parallel.stage=4 parallel.data=2 zero.scheme=zero2",
  "parallel.stage=2 pipeline.schedule=looped pipeline.chunks=2 "
  "pipeline.vocabulary=replicated",
  "parallel.stage=2 pipeline.schedule=zb_v pipeline.chunks=2 "
  "model.num_layers=7",
])
def test_checkpoint_of_stages_equals_that_of_one_piece_bitwise(overrides):
  def state(overrides):
    experiment = make(overrides, {})
    return experiment, experiment.init_state()

  ours, cut = state(overrides)
  layers = ours.program.model.stacks["blocks"]
  _, whole = state(f"{ALONE} model.num_layers={layers}")
  joined = to_whole(ours.program, cut)
  chex.assert_trees_all_equal(joined.params, whole.params)
  shardings = jax.tree.map(lambda x: x.sharding, cut)
  chex.assert_trees_all_equal(
    to_stored(ours.program, joined, shardings), cut
  )


def test_checkpoint_joins_the_fragments_of_stages():
  """State of Streaming DiLoCo holds parts of the layers, too."""
  streaming = (
    "parallel.worker=2 outer.algorithm=streaming outer.fragment_layers=4 "
    "outer.overlap=(1,) model.num_layers=8 pipeline.chunks=2 "
  )
  looped = "parallel.stage=2 pipeline.schedule=looped"
  ours, alone = (make(streaming + s, {}) for s in (looped, ALONE))
  cut = ours.init_state()
  joined = to_whole(ours.program, cut)
  chex.assert_trees_all_equal_shapes_and_dtypes(
    joined.outer, alone.abstract_state().outer
  )
  shardings = jax.tree.map(lambda x: x.sharding, cut)
  chex.assert_trees_all_equal(to_stored(ours.program, joined, shardings), cut)


@pytest.mark.parametrize(("layers", "chunks"), [(4, 1), (6, 1), (7, 2)])
def test_padding_takes_the_predicted_memory(layers, chunks):
  """Counts parameters and two float32 moments, also of padded layers."""

  def of_stage(layers, chunks):  # parts of 3 stages have equally many layers
    return chunks * -(-layers // (3 * chunks))

  def argument_bytes(layers, chunks):
    experiment = make(
      f"model.num_layers={layers} pipeline.chunks={chunks} "
      "pipeline.schedule=looped", {"stage": 3},
    )
    state = experiment.abstract_state()
    program = jax.jit(lambda s: s.step, keep_unused=True).lower(state)
    blocks = state.params["blocks"]
    of_layer = sum(
      x.size // (3 * of_stage(layers, chunks)) for x in jax.tree.leaves(blocks)
    )
    stages = experiment.program.layout.stages
    missing = np.sum(stages.layers(layers) < 0)
    held = 3 * of_stage(layers, chunks)
    assert missing == held - layers
    found = users.compiled(program).memory_analysis()
    return found.argument_size_in_bytes, of_layer

  ours, of_layer = argument_bytes(layers, chunks)
  least, _ = argument_bytes(3, 1)
  more = of_stage(layers, chunks) - 1
  assert ours - least == 3 * 4 * more * of_layer


@pytest.mark.parametrize("place", [0, 1])
def test_fragments_of_stages_have_the_layers_of_one_piece(place):
  """Streaming DiLoCo sends equal fragments, and checkpoints may hold one."""
  streaming = (
    "parallel.worker=2 outer.algorithm=streaming outer.fragment_layers=4 "
    "model.num_layers=8 parallel.stage=2 pipeline.schedule=looped "
    "pipeline.chunks=2 "
  )
  ours, alone = (make(s, {}) for s in (streaming, streaming + ALONE))
  stages = ours.program.layout.stages
  whole = {"blocks": np.arange(16).reshape(8, 2)}
  stored = jax.tree.map(lambda x: stages.store(x, 0), whole)
  kind, place_here = ours.outer.fragments.place(place)
  assert (kind, place_here) == alone.outer.fragments.place(place)
  part = ours.outer.fragments.take(stored, kind, place, 0)
  expected = alone.outer.fragments.take(whole, kind, place, 0)
  assert expected["blocks"].shape == (4, 2)
  np.testing.assert_array_equal(
    part["blocks"], stages.store(expected["blocks"], 0)
  )
  np.testing.assert_array_equal(
    stages.restore(part["blocks"], 0, 4), expected["blocks"]
  )
  again = ours.outer.fragments.put(stored, part, kind, place, 0)
  chex.assert_trees_all_equal(again, stored)


def test_run_resumes_with_another_number_of_stages(tmp_path):
  """From a V to a loop; evaluates on one device, independently of the stages.
  """
  whole = loop.train(make(ALONE, {}), tmp_path / "whole", quiet=True)
  first = make(
    "parallel.stage=2 pipeline.schedule=zb_v pipeline.chunks=2 "
    "train.num_steps=2", {"stage": 2},
  )
  loop.train(first, tmp_path / "moved", quiet=True)
  moved = loop.train(make("", {}), tmp_path / "moved", quiet=True)
  np.testing.assert_allclose(
    moved.evaluation.loss, whole.evaluation.loss, rtol=1e-5
  )


def test_convolutional_network_trains_in_stages():
  """Covers a second model of the protocol, with fewer blocks in one chunk."""
  small = "images model.widths=(8,) model.blocks=3 parallel.worker=1 "
  ours = trained(small + "parallel.stage=2", (("stage", 2),))
  theirs = trained(small + ALONE)
  chex.assert_trees_all_close(ours, theirs, rtol=2e-4, atol=5e-6)


@pytest.mark.parametrize(("overrides", "words"), [
  ("parallel.stage=5", "parallel.stage=5 must be at most"),
  ("pipeline.schedule=zb_h3", "pipeline.schedule='zb_h3'"),
  ("pipeline.chunks=2", "pipeline.schedule='1f1b' has one chunk"),
  ("pipeline.schedule=zb_v", "pipeline.schedule='zb_v' has two chunks"),
  ("pipeline.keep=residuals pipeline.schedule=dualpipe_v pipeline.chunks=2 "
   "parallel.stage=2 model.remat=full", "model.remat='none'"),
  ("pipeline.schedule=interleaved_1f1b pipeline.chunks=2 "
   "parallel.stage=3 model.num_layers=6", "a multiple of"),
  ("pipeline.schedule=forward", "cannot train"),
  ("pipeline.keep=residuals pipeline.schedule=zb_h1 model.remat=full",
   "model.remat='none'"),
  ("pipeline.keep=residuals pipeline.schedule=zb_h1 parallel.data=2 "
   "zero.scheme=zero1", "zero.scheme='ddp'"),
  ("pipeline.keep=residuals parallel.data=2 zero.scheme=zero3 "
   "zero.secondary=data", "secondary='none'"),
  ("sync.p_mlp=(.5,.5,1,1)", "same sync policies"),
  ("sync.route=one_shot sync.carry=on kernels=interpret",
   "sync.carry='off'"),
  ("images parallel.stage=2 model.widths=(8,16)", "one entry"),
  ("outer.algorithm=streaming parallel.worker=2",
   "fragment_layers=1 must be 0 or a multiple of 3, the parts"),
  ("outer.algorithm=streaming outer.pattern=sequential parallel.stage=2 "
   "outer.fragment_layers=2 parallel.worker=2", "pattern='strided'"),
])
def test_invalid_combination_is_refused_by_its_key(overrides, words):
  with pytest.raises(ValueError, match="config.*" + re.escape(words)):
    make(overrides, {})
