"""Objects built from a config: each key arrives under its own name."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from caatnet.config import experiments, sections
from caatnet.config.optimizer import OPTIMIZERS
from caatnet.config.override import override
from configs.caatnet import tiny

SMALL = (
  "parallel.worker=3 parallel.tensor=1 model.width=8 model.num_heads=2 "
  "model.num_kv_heads=2 model.ffn_width=8 model.vocab_size=16 data.seq_len=4 "
  "data.batch_size=6 "
)


def build(overrides, base=SMALL):
  config = override(
    tiny.get_config("test"), f"{base} {overrides}"
  )
  return experiments.build(config)


STEP = "outer.learning_rate=0.25 outer.momentum=0.75 "
WIRE = ("outer.codec=int8 outer.block=16 outer.route=all_to_all "
        "outer.stochastic_rounding=True outer.error_feedback=True ")
# Algorithm -> its keys, and attributes of the loop that is built.
OUTER = {
  "diloco": (f"outer.sync_every=7 {STEP} {WIRE}", {
    "sync_every": 7, "optimizer.learning_rate": 0.25,
    "optimizer.momentum": 0.75,
    "exchange.wire.codec": "int8", "exchange.wire.block": 16,
    "exchange.wire.route": "all_to_all", "exchange.wire.stochastic": True,
    "exchange.error_feedback": True, "exchange.seed": 5, "clients": None,
  }),
  "streaming": (
    f"outer.sync_every=8 {STEP} outer.fragment_layers=2 "
    "outer.pattern=sequential "
    "outer.overlap=(3,2,3) outer.keep=0.125 outer.pieces=2", {
      "sync_every": 8, "optimizer.learning_rate": 0.25,
      "optimizer.momentum": 0.75, "fragments.layers": 2,
      "fragments.strided": False, "overlap": (3, 2, 3), "keep": 0.125,
      "pieces": 2, "exchange.wire.codec": "none",
    },
  ),
  "eager": (f"outer.sync_every=7 {STEP}", {
    "sync_every": 7, "optimizer.learning_rate": 0.25,
    "optimizer.momentum": 0.75,
  }),
  "fedavg": ("outer.sync_every=7 outer.weights=(1,2,3) outer.clients=2", {
    "sync_every": 7, "exchange.weights": (1.0, 2.0, 3.0), "clients": 2,
  }),
  "dc_s3gd": ("outer.compensation=0.375 outer.codec=bfloat16", {
    "compensation": 0.375, "exchange.wire.dtype": "bfloat16",
  }),
  "sparseloco": (
    "outer.sync_every=7 outer.learning_rate=0.25 outer.chunk=32 outer.top_k=8 "
    "outer.error_decay=0.5", {
      "sync_every": 7, "rate": 0.25, "chunk": 32, "top_k": 8, "decay": 0.5,
    },
  ),
  "noloco": (
    "outer.sync_every=7 outer.learning_rate=0.25 outer.momentum=0.75 "
    "outer.pull=0.375", {
      "sync_every": 7, "rate": 0.25, "momentum": 0.75, "pull": 0.375, "seed": 5,
    },
  ),
}


@pytest.mark.parametrize("algorithm", OUTER)
def test_keys_of_an_outer_loop_arrive_under_their_names(algorithm):
  overrides, expected = OUTER[algorithm]
  outer = build(f"seed=5 outer.algorithm={algorithm} {overrides}").outer
  for path, value in expected.items():
    found = outer
    for name in path.split("."):
      found = getattr(found, name)
    assert found == value, path


def test_outer_adam_equals_its_equation():
  """Momentum is the decay of the first moment."""
  optimizer = build(
    "outer.algorithm=diloco outer.optimizer=adam outer.learning_rate=0.25 "
    "outer.momentum=0.75"
  ).outer.optimizer
  params = {"w": jnp.float32(4)}
  state = optimizer.init(params)
  for grad in (1.0, 2.0):
    update, state = optimizer.update({"w": jnp.float32(grad)}, state, params)
  first = (0.75 * 0.25 * 1 + 0.25 * 2) / (1 - 0.75**2)
  second = (0.999 * 0.001 * 1 + 0.001 * 4) / (1 - 0.999**2)
  assert float(update["w"]) == pytest.approx(
    -0.25 * first / second**0.5, rel=1e-4
  )


@pytest.mark.parametrize(("num_steps", "decay_steps"), [(12, 0), (5, 12)])
def test_learning_rate_decays_over_decay_steps(
  num_steps, decay_steps
):
  """Decays over num_steps if decay_steps is 0, and is constant afterwards."""
  rate = sections.build_selected("optimizer", OPTIMIZERS, {
    "name": "sgd", "learning_rate": 0.5, "warmup_steps": 2,
    "decay_steps": decay_steps, "final_fraction": 0.2, "momentum": 0.0,
  }, num_steps, {}).learning_rate
  assert [float(rate(s)) for s in (0, 1, 2, 7, 12, 13, 99)] == pytest.approx(
    [0, 0.25, 0.5, 0.3, 0.1, 0.1, 0.1]
  )


def second_step(optimizer, decays=True):
  """Returns the update after gradients 1 and 2 of a parameter of 4."""
  params = {"w": jnp.float32(4)}
  inner = sections.build_selected("optimizer", OPTIMIZERS, optimizer | {
    "learning_rate": 0.5, "warmup_steps": 2, "final_fraction": 0.25,
    "clip_norm": 3.0, "weight_decay": 0.125,
  }, 9, {"w": decays})
  assert inner.clip_norm == 3.0
  rates = [float(inner.learning_rate(step)) for step in (0, 1, 2, 9)]
  assert rates == pytest.approx([0.0, 0.25, 0.5, 0.125])
  state = inner.optimizer.init(params)
  for grad in (1.0, 2.0):
    updates, state = inner.optimizer.update(
      {"w": jnp.float32(grad)}, state, params
    )
  return float(updates["w"])


def test_adamw_equals_its_equation():
  keys = {"name": "adamw", "beta_1": 0.5, "beta_2": 0.75, "eps": 0.125}
  first = (0.5 * 0.5 * 1 + 0.5 * 2) / (1 - 0.5**2)
  second = (0.75 * 0.25 * 1 + 0.25 * 4) / (1 - 0.75**2)
  step = first / (second**0.5 + 0.125)
  assert second_step(keys, False) == pytest.approx(-0.25 * step)
  assert second_step(keys) == pytest.approx(-0.25 * (step + 0.125 * 4))


def test_sgd_equals_its_equation():
  """Weight decay is part of the gradient, so momentum accumulates it."""
  keys = {"name": "sgd", "momentum": 0.5}
  assert second_step(keys, False) == pytest.approx(-0.25 * (0.5 * 1 + 2))
  assert second_step(keys) == pytest.approx(-0.25 * (0.5 * 1.5 + 2.5))


@pytest.mark.parametrize(("momentum", "copies"), [(0.0, 0), (0.5, 1)])
def test_sgd_without_momentum_keeps_no_copy_of_the_parameters(momentum, copies):
  optimizer = sections.build_selected(
    "optimizer", OPTIMIZERS, {"name": "sgd", "momentum": momentum}, 99, None
  ).optimizer
  state = optimizer.init({"w": jnp.zeros((2, 3))})
  shapes = [x.shape for x in jax.tree.leaves(state)]
  assert shapes.count((2, 3)) == copies


def test_each_projection_has_its_own_fraction():
  projections = build(
    "sync.p=0.75 sync.p_mlp=(0.25,0.5) sync.forward_dtype=bfloat16 "
    "sync.backward_dtype= sync.private_scale=init sync.overlap=on"
  ).program.model.config.syncs
  assert [(a.p, m.p) for a, m in projections] == [(0.75, 0.25), (0.75, 0.5)]
  for sync in (*projections[0], *projections[1]):
    assert (sync.forward_dtype, sync.backward_dtype) == ("bfloat16", None)
    assert (sync.private_scale, sync.overlap) == ("init", True)


def test_levels_of_a_partition_are_counted_from_inside():
  layout = build(
    "parallel.worker=1 parallel.data=6 zero.levels=node:3,gpu:2 "
    "zero.scheme=zero3 zero.weights=gpu zero.secondary=gpu "
    "zero.weight_codec=int8 zero.secondary_codec=int4 zero.block=32"
  ).program.layout
  found = layout.partition
  assert [axis.name for axis in layout.data] == ["node", "gpu"]
  assert (found.weights, found.gradients, found.optimizer) == (1, 2, 2)
  assert (found.secondary, found.weight_codec) == (1, "int8")
  assert (found.secondary_codec, found.gradient_codec) == ("int4", "none")
  assert found.block == 32


def test_builder_receives_its_section_frozen():
  made = sections.build_section(
    "sync", lambda section, number: (section, number), {"p_mlp": [0.5, 1]}, 7
  )
  section, number = made
  assert (section.p_mlp, section.p, number) == ((0.5, 1), 1.0, 7)
  with pytest.raises(dataclasses.FrozenInstanceError):
    section.p = 0.5


def test_errors_of_builders_name_the_key():
  def refuses(section):
    raise ValueError(f"p={section.p} is not what I want")

  with pytest.raises(ValueError, match=r"^config\.sync\.p=1\.0 is not"):
    sections.build_section("sync", refuses, {})


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    ("sync.p=half", r"config.sync.p='half' must lie in \[0, 1\]"),
    ("sync.p=nan", r"config.sync.p=nan must lie in \[0, 1\]"),
    ("sync.q=1", "no config key 'sync.q'; did you mean sync.p"),
    ("kernels.x=1", "no config key 'kernels.x'"),
    ("outer.keep=3 outer.algorithm=data_parallel", "no config key 'outer.k"),
    ("outer.every=3 outer.algorithm=diloco", "it is now outer.sync_every"),
    ("zero.offload=True", "it is now memory.moments"),
    ("pipeline.timetable=1f1b", "it is now pipeline.schedule"),
    ("outer.algorithm=diloca",
     "config.outer.algorithm='diloca' must be one of 'data_parallel', "),
  ],
)
def test_override_needs_a_declared_key_and_its_type(overrides, message):
  config = tiny.get_config("test")
  with pytest.raises(ValueError, match=message):
    override(config, overrides)
  changed = override(
    config, "sync.p=1 outer.sync_every=3 outer.algorithm=diloco"
  )
  assert (changed.sync.p, type(changed.sync.p)) == (1.0, float)
  assert changed.outer.sync_every == 3
  assert config.outer.algorithm == "data_parallel"
