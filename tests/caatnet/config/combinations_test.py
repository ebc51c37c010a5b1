"""Combinations of keys: those that are refused, next to one that is allowed."""

import dataclasses

import jax.numpy as jnp
import ml_collections
import pytest

from caatnet.config import experiments, sections
from caatnet.config.context import ModelContext
from caatnet.config.model import MODELS
from caatnet.config.optimizer import OPTIMIZERS
from caatnet.config.override import Sweep, override, take_sweep
from caatnet.config.sync import build_sync
from caatnet.config.zero import build_zero
from caatnet.schema import tree
from configs.caatnet import tiny
from configs.images import tiny as images
from configs.pipeline import tiny as pipeline
from parallel.axes import Axis
from parallel.plans.zero.partition import Level

SMALL = (
  "model.width=8 model.num_heads=2 model.num_kv_heads=2 model.ffn_width=8 "
  "model.vocab_size=16 data.seq_len=4 data.batch_size=24 "
)
RUN = SMALL + "parallel.worker=3 parallel.tensor=1 parallel.data=2 "
STAGES = SMALL + (
  "parallel.stage=2 parallel.tensor=1 parallel.data=1 model.num_layers=4 "
  "train.accumulation=2 "
)


def build(overrides, base=tiny, small=RUN):
  return experiments.build(
    override(base.get_config("test"), f"{small} {overrides}")
  )


@pytest.mark.parametrize(("allowed", "refused", "message"), [
  # The batch is divided over 3 workers, 2 ranks and microbatches.
  ("train.accumulation=4", "train.accumulation=3",
   r"batch_size=24 must be a multiple of .* = 18"),
  ("", "parallel.data=3", r"batch_size=24 must be a multiple of .* = 9"),
  # The cache holds 8 pages of 2 positions, or as many as are needed.
  ("inference.pages=8 inference.page_size=2 inference.context=16",
   "inference.pages=8 inference.page_size=2 inference.context=17",
   "config.inference.context=17 must be at most 16, the posi"),
  ("inference.pages=0 inference.context=999",
   "inference.pages=1 inference.context=999", "context=999 must be at most"),
  # Outer loops.
  ("outer.algorithm=diloco outer.outlier_factor=0",
   "outer.algorithm=diloco outer.outlier_factor=1",
   "config.outer.outlier_factor=1 must be 0 or above 1"),
  ("outer.algorithm=diloco outer.outlier_factor=1.5",
   "outer.algorithm=diloco outer.outlier_factor=0.5", "0.5 must be 0 or abo"),
  ("outer.algorithm=diloco outer.optimizer=sgd outer.momentum=0.0",
   "outer.algorithm=diloco outer.optimizer=sgd outer.momentum=0.5",
   "momentum=0.5 has no effect with config.outer.optimizer='sgd'; set it to"),
  ("outer.algorithm=fedavg outer.weights=(1,2,3)",
   "outer.algorithm=fedavg outer.weights=(1,2)",
   r"weights=\(1.0, 2.0\) .* config.parallel.worker=3 workers"),
  ("outer.algorithm=sparseloco outer.weights=()",
   "outer.algorithm=sparseloco outer.weights=(1,2,3,4)",
   "must be empty, or one"),
  ("outer.algorithm=fedavg outer.clients=3",
   "outer.algorithm=fedavg outer.clients=4",
   r"clients=4 must lie in \[0, config.parallel.worker=3\]"),
  ("outer.algorithm=fedavg outer.codec=int8 outer.error_feedback=True",
   "outer.algorithm=fedavg outer.codec=int8 outer.error_feedback=True "
   "outer.clients=2", "error_feedback=True with config.outer.clients=2"),
  # A mean in bfloat16 has a rounding error, but no blocks.
  ("outer.algorithm=diloco outer.codec=bfloat16 outer.error_feedback=True",
   "outer.algorithm=diloco outer.error_feedback=True",
   "error_feedback=True has no effect with config.outer.codec='float32'"),
  ("outer.algorithm=diloco outer.codec=int8 outer.route=all_to_all",
   "outer.algorithm=diloco outer.codec=bfloat16 outer.route=all_to_all",
   "route='all_to_all' has no effect"),
  ("outer.algorithm=diloco outer.codec=int4 outer.stochastic_rounding=True",
   "outer.algorithm=diloco outer.codec=bfloat16 "
   "outer.stochastic_rounding=True", "stochastic_rounding=True has no effect"),
  # Warm-up ends before the last step.
  ("optimizer.warmup_steps=3 train.num_steps=4",
   "optimizer.warmup_steps=4 train.num_steps=4",
   r"warmup_steps=4 must lie in \[0, config.train.num_steps=4\)"),
  ("optimizer.warmup_steps=4 optimizer.decay_steps=5 train.num_steps=4",
   "optimizer.warmup_steps=5 optimizer.decay_steps=5 train.num_steps=99",
   r"warmup_steps=5 must lie in \[0, config.optimizer.decay_steps=5\)"),
])
def test_run_is_refused(allowed, refused, message):
  build(allowed)
  with pytest.raises(ValueError, match=message):
    build(refused)


@pytest.mark.parametrize(("allowed", "refused", "message"), [
  ("pipeline.schedule=1f1b", "pipeline.schedule=forward",
   "no backward, so it cannot train"),
  ("pipeline.schedule=looped pipeline.chunks=2",
   "pipeline.schedule=looped pipeline.chunks=3",
   "chunks=3 x config.parallel.stage=2 must be at most 4"),
  ("pipeline.keep=residuals pipeline.schedule=zb_h1 model.remat=none",
   "pipeline.keep=residuals pipeline.schedule=zb_h1 model.remat=full",
   "schedule='zb_h1' needs config.model.remat='none', not 'full'"),
  ("pipeline.keep=inputs pipeline.schedule=zb_h1 model.remat=full "
   "parallel.data=2 zero.scheme=zero2",
   "pipeline.keep=residuals pipeline.schedule=zb_h1 parallel.data=2 "
   "zero.scheme=zero2", "needs config.zero.scheme='ddp', not 'zero2'"),
  ("pipeline.keep=residuals pipeline.schedule=1f1b parallel.data=2 "
   "zero.scheme=zero3 model.remat=full",
   "pipeline.keep=residuals pipeline.schedule=1f1b parallel.data=4 "
   "zero.levels=node:2,gpu:2 zero.scheme=hpz", "config.zero.secondary='none'"),
  ("outer.algorithm=streaming outer.fragment_layers=2 outer.sync_every=4",
   "outer.algorithm=streaming outer.fragment_layers=1 outer.sync_every=4",
   "fragment_layers=1 must be 0 or a multiple of 2, the parts"),
  ("outer.algorithm=streaming outer.fragment_layers=0 outer.sync_every=4 "
   "outer.pattern=sequential",
   "outer.algorithm=streaming outer.fragment_layers=2 outer.sync_every=4 "
   "outer.pattern=sequential", "fragment_layers=2 must be 0 or"),
])
def test_run_in_stages_is_refused(allowed, refused, message):
  build(allowed, pipeline, STAGES)
  with pytest.raises(ValueError, match=message):
    build(refused, pipeline, STAGES)


def test_sections_are_those_of_a_training_run():
  for change, message in (
    ({"study": "planner"}, "there is python -m launch.simulate"),
    ({"sweep": {}}, "there is python -m launch.sweep"),
    ({"benchmark": {}}, "there is python -m launch.benchmark"),
    ({"x": 1}, "config.x has no effect on a training run; its sections are na"),
  ):
    config = ml_collections.ConfigDict(tiny.get_config("test").to_dict())
    config.update(change)
    with pytest.raises(ValueError, match=message):
      experiments.check(config)
  optional = ("sync", "pipeline", "inference", "elastic")
  for name in experiments._SECTIONS:
    config = ml_collections.ConfigDict(tiny.get_config("test").to_dict())
    if name in config:
      del config[name]
    if name in optional:
      experiments.check(config)
    else:
      with pytest.raises(ValueError, match=f"config.{name} is missing"):
        experiments.check(config)


def test_stages_need_a_pipeline_and_older_runs_have_none():
  config = override(pipeline.get_config("test"), STAGES)
  assert experiments.build(config).program.layout.stages.axis.size == 2
  del config.pipeline
  with pytest.raises(ValueError, match=r"stage=2 needs the section"):
    experiments.build(config)
  config.parallel.stage = 1
  assert experiments.build(config).program.layout.stages is None
  del config.parallel.stage
  layout = experiments.build(config).program.layout
  assert layout.stages is None
  assert "stage" not in layout.mesh.shape


@pytest.mark.parametrize(("vocabulary", "sharded"), [
  ("sharded", True), ("replicated", False),
])
def test_stages_cut_the_vocabulary_if_it_is_sharded(vocabulary, sharded):
  made = build(
    f"pipeline.vocabulary={vocabulary} pipeline.keep=residuals", pipeline,
    STAGES,
  )
  stages = made.program.layout.stages
  assert (made.program.model.stage == stages.axis) == sharded
  assert stages.keeps
  assert (stages.evaluation.name, stages.evaluation.num_parts) == ("forward", 2)
  assert not build("pipeline.keep=inputs", pipeline, STAGES).program.layout\
    .stages.keeps


@pytest.mark.parametrize(("value", "platform", "expected"), [
  ("interpret", "cpu", ("tpu_interpret", "reference")),
  ("interpret", "tpu", ("tpu_interpret", "reference")),
  ("reference", "tpu", ("reference",)), ("reference", "cpu", ("reference",)),
  ("auto", "tpu", ("tpu", "reference")),
  ("pallas", "tpu", ("tpu", "reference")),
  ("auto", "cpu", ("reference",)),
])
def test_kernels_are_those_of_the_platform(value, platform, expected):
  assert experiments._kernels(value, platform) == expected


def test_swarm_keeps_values_for_workers_that_join():
  plain = build("outer.algorithm=eager").outer
  config = override(tiny.get_config("test"), f"{RUN} outer.algorithm=eager")
  config.elastic = tree.defaults("elastic")
  elastic = experiments.build(config).outer
  assert (plain.common, elastic.common) == (False, True)
  assert dataclasses.replace(elastic, common=False).sync_every == (
    plain.sync_every
  )


def test_swarm_has_its_defaults_without_a_section():
  config = tiny.get_config("test")
  plain = experiments.swarm_options(config)
  assert plain == tree.parse_section("elastic", {})
  config.elastic = tree.defaults("elastic")
  assert experiments.swarm_options(config) == plain


def test_sweep_is_removed_from_its_config():
  config = tiny.get_config("test")
  config.seed = 7
  before = config.to_dict()
  assert take_sweep(config) == Sweep(("",), (7,), {})
  config.sweep = {"points": ("sync.p=0.5", ""), "seeds": (1, 2), "sections": {}}
  found = take_sweep(config)
  assert (found.points, found.seeds) == (("sync.p=0.5", ""), (1, 2))
  assert not found.sections
  assert config.to_dict() == before
  del config.seed
  assert take_sweep(config).seeds == (0,)


LEVELS = (Level("pod", 2), Level("node", 3), Level("gpu", 4))


@pytest.mark.parametrize(("keys", "changes"), [
  ({"scheme": "zero1"}, {"optimizer": 3}),
  ({"scheme": "zero1", "weights": "gpu", "gradients": "node"},
   {"weights": 1, "gradients": 2, "optimizer": 3}),
  ({"scheme": "zero3", "weights": "none", "gradients": "pod"},
   {"gradients": 3, "optimizer": 3}),
  ({"scheme": "zero3", "weights": "none", "gradients": "none",
    "optimizer": "node"}, {"optimizer": 2}),
  ({"scheme": "hpz"},
   {"weights": 3, "gradients": 3, "optimizer": 3, "secondary": 2}),
  ({"scheme": "hpz", "secondary": "none"},
   {"weights": 3, "gradients": 3, "optimizer": 3}),
  ({"scheme": "hpz", "secondary": "pod"},
   {"weights": 3, "gradients": 3, "optimizer": 3, "secondary": 3}),
  ({"scheme": "zero1", "weight_codec": "int8", "block": 32, "coded_blocks": 3},
   {"optimizer": 3, "weight_codec": "int8", "block": 32, "coded_blocks": 3}),
  ({"scheme": "zero1", "gradient_codec": "int4", "gradient_hops": "two"},
   {"optimizer": 3, "gradient_codec": "int4", "gradient_hops": "two"}),
])
def test_depths_are_named_by_levels(keys, changes):
  made = sections.build_section(
    "zero", build_zero, {"levels": "pod:2,node:3,gpu:4"} | keys, {"data": 24}
  )
  plain = dataclasses.asdict(made.partition) | {"levels": LEVELS}
  defaults = {
    "weights": 0, "gradients": 0, "optimizer": 0, "secondary": None,
    "weight_codec": "none", "gradient_codec": "none",
    "secondary_codec": "none", "block": 256, "coded_blocks": 1,
    "gradient_hops": "by_level", "levels": LEVELS,
  }
  assert plain == defaults | changes
  assert made.partition.levels == LEVELS
  assert not made.prefetch


def test_partition_gathers_when_its_keys_tell():
  for prefetch in (False, True):
    made = sections.build_section(
      "zero", build_zero, {"scheme": "zero3", "prefetch": prefetch}, {"data": 4}
    )
    assert made.prefetch == prefetch
  for keys, message in (
    ({"prefetch": True}, "prefetch=True has no effect, .*scheme='ddp' shar"),
    ({"block": 32}, "block=32 has no effect, since no codec is set"),
    ({"weights": "node"},
     "weights='node' must be 'none' or a level of .*: 'data'"),
    ({"scheme": "zero1", "gradient_hops": "two"},
     "gradient_hops='two' has no effect, since gradients have"),
    *(({"levels": f"{name}:4"}, "names must differ from worker, stage and")
      for name in ("worker", "stage", "tensor")),
  ):
    with pytest.raises(ValueError, match=message):
      sections.build_section("zero", build_zero, keys, {"data": 4})


def context(platform="cpu", **changes):
  """Returns a context of text, with four tensor ranks on two devices."""
  return dataclasses.replace(ModelContext(
    platform, Axis("tensor", 4, 2), ("reference",), None, build("").data, {},
  ), **changes)


def policies(keys, platform="cpu", layers=3, remat="none"):
  return sections.build_section(
    "sync", build_sync, keys, context(platform), layers, remat
  )


@pytest.mark.parametrize(("keys", "attention", "mlp"), [
  ({}, [1, 1, 1], [1, 1, 1]), ({"p": 0.5}, [0.5] * 3, [0.5] * 3),
  ({"p": 0.5, "p_mlp": (0.25,)}, [0.5] * 3, [0.25] * 3),
  ({"p_attention": (0, 0.5, 1)}, [0, 0.5, 1], [1, 1, 1]),
  ({"p_attention": (0.5,), "p_mlp": (0, 0.25, 0.75)}, [0.5] * 3,
   [0, 0.25, 0.75]),
])
def test_fractions_are_given_once_or_per_layer(keys, attention, mlp):
  made = policies(keys)
  assert [a.p for a, _ in made.policies] == attention
  assert [m.p for _, m in made.policies] == mlp


@pytest.mark.parametrize(("keys", "message"), [
  ({"p_mlp": (0.5, 1.0)}, r"p_mlp=\(0.5, 1.0\) has 2 values; it must have "
   r"none, one, or one per layer \(config.model.num_layers=3"),
  ({"p_attention": (0.5,) * 4}, "has 4 values"),
  ({"p": 0.5, "p_mlp": (1.0,), "p_attention": (1.0,)}, "p=0.5 has no effect"),
  ({"route": "x"}, "route='x' must be one of .*psum.*schedule:ring"),
  ({"topology": "ring"}, "which is not a schedule"),
  ({"route": "schedule:x"},
   "route='schedule:x' with config.sync.topology='torus' on 2 devices"),
  ({"route": "schedule:ring", "topology": "x"},
   "route='schedule:ring' with config.sync.topology='x' on 2 devices"),
  ({"carry": "on"}, "carry='on' has no effect with config.sync.route='psum'"),
])
def test_sync_without_effect_or_builder_is_refused(keys, message):
  with pytest.raises(ValueError, match=message):
    policies(keys)


@pytest.mark.parametrize(("overlap", "platform", "overlaps"), [
  ("auto", "gpu", True), ("auto", "cpu", False), ("auto", "tpu", False),
  ("on", "cpu", True), ("on", "tpu", True), ("off", "gpu", False),
])
def test_products_overlap_where_xla_does_not_split_them(
  overlap, platform, overlaps
):
  made = policies({"overlap": overlap}, platform)
  assert {p.overlap for layer in made.policies for p in layer} == {overlaps}


@pytest.mark.parametrize(("carry", "remat", "carries"), [
  ("auto", "none", True), ("auto", "full", False), ("auto", "reduced", False),
  ("on", "full", True), ("off", "none", False),
])
def test_update_is_carried_unless_its_reduction_is_repeated(
  carry, remat, carries
):
  made = policies({"carry": carry, "route": "ring_kernel"}, remat=remat)
  assert made.carry == carries


def test_schedules_of_equal_configs_are_equal():
  keys = {"route": "schedule:ring", "topology": "ring"}
  made = policies(keys)
  assert made == policies(keys)
  assert callable(made.policies[0][0].route)
  assert made != policies(keys | {"topology": "torus"})


@pytest.mark.parametrize(("keys", "attention"), [
  ({"width": 32, "num_heads": 4, "dtype": "bfloat16"}, "cudnn"),
  ({"width": 24, "num_heads": 4, "dtype": "bfloat16"}, "xla"),  # heads of 6
  ({"width": 24, "num_heads": 4, "head_width": 8, "dtype": "bfloat16"},
   "cudnn"),
  ({"width": 32, "num_heads": 4, "head_width": 6, "dtype": "bfloat16"}, "xla"),
  ({"width": 32, "num_heads": 4, "dtype": "float32"}, "xla"),
])
def test_attention_is_selected_by_the_width_of_heads(keys, attention):
  config = tiny.get_config("test")
  section = dict(config.model) | {"attention": "auto"} | keys
  section |= {"num_kv_heads": section["num_heads"]}
  model = sections.build_selected("model", MODELS, section, context("gpu"))
  assert model.config.attention == attention


@pytest.mark.parametrize(("name", "change", "message"), [
  ("transformer", {"sync": None}, "config.sync is missing: .*'transformer'"),
  ("recurrent", {"sync": None}, "config.sync is missing: .*'recurrent'"),
  ("transformer", {"data": None}, "config.data.name must be 'text' with"),
  ("convolutional", {}, "config.parallel.tensor=4 must be 1 with"),
  ("convolutional", {"tensor": Axis("tensor", 1)},
   "config.sync has no effect with config.model.name='convolutional'"),
  ("convolutional", {"tensor": Axis("tensor", 1), "sync": None},
   "config.data.name must be 'images' with"),
  ("graph", {"tensor": Axis("tensor", 1), "sync": None},
   "config.data.name must be 'graphs' with"),
])
def test_model_is_refused_in_another_context(name, change, message):
  with pytest.raises(ValueError, match=message):
    sections.build_selected(
      "model", MODELS, tree.defaults("model", name), context(**change)
    )


def test_images_have_neither_tensor_ranks_nor_sync():
  made = experiments.build(images.get_config("data_parallel,test"))
  assert made.program.layout.tensor.size == 1
  assert "sync" not in made.config


def test_learning_rate_without_warm_up_starts_at_its_peak():
  for warmup_steps, first in ((0, 0.5), (1, 0.0)):
    rate = sections.build_selected("optimizer", OPTIMIZERS, {
      "name": "adamw", "learning_rate": 0.5, "warmup_steps": warmup_steps,
      "final_fraction": 0.5,
    }, 8, {}).learning_rate
    assert float(rate(0)) == first
    assert float(rate(99)) == 0.25


@pytest.mark.parametrize("algorithm", ["local_sgd", "fedavg"])
def test_mean_of_workers_replaces_their_parameters(algorithm):
  """Outer SGD at rate 1: parameters minus the mean difference."""
  outer = build(f"outer.algorithm={algorithm} outer.sync_every=4").outer
  assert outer.sync_every == 4
  optimizer = outer.optimizer.optimizer
  params = jnp.float32(3)
  update, _ = optimizer.update(jnp.float32(0.5), optimizer.init(params), params)
  assert float(update) == -0.5
