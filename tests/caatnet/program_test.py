"""A model on a mesh: sizes and placement of its parameters per device."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.models.access import CastOnRead
from caatnet.program import Layout, Program, is_spec, make_suffix_lookup
from configs.caatnet import tiny
from configs.images import tiny as images
from configs.pipeline import tiny as pipeline
from parallel.axes import Axis, make_mesh
from parallel.memory.offload import ON_DEVICE
from parallel.plans.zero.partition import Level, Partition
from tests.caatnet.models.transformer_test import make_config, make_program
from tests.caatnet.train.linear_model import Toy


def count(tree):
  return sum(x.size for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(("ranks", "devices"), [(1, 1), (4, 1), (4, 2), (8, 8)])
def test_local_and_cost_parameters_are_those_of_one_device(ranks, devices):
  """Slices of ranks are divided among devices; gains are on all of them."""
  program = make_program(make_config(width=48, vocab_size=61), ranks, devices)
  whole = jax.eval_shape(program.init_params, jax.random.key(0))
  gains = sum(
    x.size for x, spec in zip(
      jax.tree.leaves(whole),
      jax.tree.leaves(program.specs, is_leaf=lambda x: not isinstance(x, dict)),
      strict=True,
    ) if "tensor" not in spec
  )
  expected = (count(whole) - gains) // devices + gains
  assert count(program.local_shapes) == expected
  assert sum(p.size * p.count for p in program.cost_parameters) == expected
  assert {p.wire_bytes for p in program.cost_parameters} == {4}


def test_optimizer_states_have_the_specs_of_their_parameters():
  program = make_program(make_config(), 4, 2)
  leaf = jax.ShapeDtypeStruct((3,), np.float32)
  specs = program.specs_like_params({
    "mu": {"blocks": {"w_out": leaf}, "norm": leaf}, "count": leaf,
    "w_out": leaf,
  })
  assert specs["mu"]["blocks"]["w_out"] == program.specs["blocks"]["w_out"]
  assert specs["mu"]["norm"] == program.specs["norm"]
  # "w_out" and "count" are no parameter paths: replicated on every device.
  assert tuple(specs["count"]) == tuple(specs["w_out"]) == ()


SMALL = (
  "model.width=8 model.num_heads=2 model.num_kv_heads=2 model.ffn_width=8 "
  "model.vocab_size=18 data.seq_len=4 data.batch_size=24 parallel.tensor=2 "
)
# Two nodes of three data-parallel ranks; the optimizer is sharded over both.
ZERO = SMALL + (
  "parallel.worker=2 parallel.data=6 zero.levels=node:2,gpu:3 "
  "zero.scheme=zero1 "
)


def build(overrides, base=tiny):
  return experiments.build(override(base.get_config("test"), overrides)).program


def specs_of(tree):
  return jax.tree.leaves(tree, is_leaf=is_spec)


def test_layout_has_no_options_unless_given():
  axes = {name: Axis(name, 1) for name in ("worker", "data", "tensor")}
  layout = Layout(
    tuple(axes.values()), make_mesh(axes),
    Partition((Level("data", 1),)),
  )
  assert layout.kernels == ("reference",)
  assert (layout.prefetch, layout.stages) == (False, None)
  assert (layout.moments, layout.activations) == ("device", ON_DEVICE)
  assert layout.shards is None


def test_axes_are_ordered_from_the_outermost():
  layout = build(ZERO + "zero.prefetch=True zero.weights=gpu "
                 "zero.gradients=gpu").layout
  assert [axis.name for axis in layout.axes] == [
    "worker", "node", "gpu", "tensor"
  ]
  assert layout.model_axes == (layout.tensor,)
  assert layout.rank_names == ("node", "gpu", "tensor")
  assert layout.num_data_ranks == 6
  assert layout.batch_spec == P("worker", "node", "gpu")
  assert layout.batch_dims == (2, 2, 3)
  assert layout.prefetch
  assert layout.add_worker_dim({"a": P(None, "tensor"), "b": P()}) == {
    "a": P("worker", None, "tensor"), "b": P("worker")
  }
  (sharding,) = layout.shardings([P("tensor")])
  assert (sharding.mesh, sharding.spec) == (layout.mesh, P("tensor"))
  shards = layout.shards
  assert (shards.partition, shards.axes) == (layout.partition, layout.data)
  # CPUs need an order of collectives.
  assert (shards.ordered, shards.kernels) == (True, ("reference",))
  assert layout.shards is shards
  stages = build(SMALL + "parallel.stage=3", pipeline).layout
  assert stages.rank_names == ("data", "stage", "tensor")
  assert [axis.name for axis in stages.model_axes] == ["stage", "tensor"]


@pytest.mark.parametrize("overrides", [
  ZERO, ZERO + "zero.optimizer=gpu", SMALL + "parallel.worker=1",
])
def test_stored_parameters_have_a_dim_per_level(overrides):
  """Specs may end before the last leading dim; then they are padded."""
  program = build(overrides)
  depth = program.layout.partition.optimizer
  levels = ["gpu", "node"][:depth]
  whole = jax.eval_shape(program.model.init, jax.random.key(3))
  declared = jax.tree.leaves(program.model.parameters)
  leaves = jax.tree.leaves(
    program.leaves, is_leaf=lambda x: hasattr(x, "num_stored_dims")
  )
  count = 0
  for p, x, leaf, stored, spec, whole_spec in zip(
    declared, jax.tree.leaves(whole), leaves,
    jax.tree.leaves(program.stored_shapes), specs_of(program.specs),
    specs_of(program.unpartitioned_specs), strict=True,
  ):
    assert whole_spec == p.spec
    assert leaf.parameter == p
    assert leaf.shape == x.shape
    assert leaf.tensor.shape == x.shape[p.num_lead :]
    assert leaf.tensor.dtype == p.dtype
    assert leaf.num_stored_dims == stored.ndim
    if not depth:
      assert (spec, stored.shape) == (p.spec, x.shape)
      continue
    names = (*p.spec, *[None] * p.num_lead)[: p.num_lead]
    assert tuple(spec) == (*names, *levels)
    sizes = {"gpu": 3, "node": 2}
    elements = math.prod(x.shape[p.num_lead :])
    parts = [sizes[name] for name in levels]
    assert stored.shape == (
      *x.shape[: p.num_lead], *parts, -(-elements // math.prod(parts))
    )
    count += len(p.spec) < p.num_lead
  assert count or not depth  # some specs are padded
  assert jax.tree.leaves(program.decays) == [p.decays for p in declared]


def test_parameters_of_stages_have_a_leading_dim():
  program = build(
    SMALL + "parallel.stage=3 model.num_layers=4 parallel.data=1", pipeline
  )
  whole = jax.tree.leaves(jax.eval_shape(
    program.model.init, jax.random.key(0)
  ))
  split = 0
  for p, x, stored, tensor, spec in zip(
    jax.tree.leaves(program.model.parameters), whole,
    jax.tree.leaves(program.stored_shapes), jax.tree.leaves(program.tensors),
    specs_of(program.specs), strict=True,
  ):
    if p.stage_dim is None:
      assert (spec, stored.shape) == (p.spec, x.shape)
      assert tensor.shape == x.shape[p.num_lead :]
      continue
    split += 1
    assert spec == P("stage", *p.spec)
    here = -(-x.shape[p.stage_dim] // 3)
    assert stored.shape == (
      3, *x.shape[: p.stage_dim], here, *x.shape[p.stage_dim + 1 :]
    )
    assert tensor.shape == stored.shape[p.num_lead + 1 :]
  assert 0 < split < len(whole)
  local = sum(x.size for x in jax.tree.leaves(program.local_shapes))
  assert local == sum(p.size * p.count for p in program.cost_parameters)


def test_cost_parameters_have_uses_and_bytes_of_the_model():
  plain, tied = (
    build(ZERO + f"model.dtype=bfloat16 model.tied_embeddings={tied}")
    for tied in (False, True)
  )
  for program, uses in ((plain, {1}), (tied, {1, 2})):
    parameters = program.cost_parameters
    assert {p.wire_bytes for p in parameters} <= {2, 4}
    assert 2 in {p.wire_bytes for p in parameters}
    assert {p.uses for p in parameters} == uses
    declared = jax.tree.leaves(program.model.parameters)
    assert [(p.uses, p.regathered) for p in parameters] == [
      (p.uses, p.regathered) for p in declared
    ]
    assert [p.wire_bytes for p in parameters] == [
      jnp.dtype(p.dtype).itemsize for p in declared
    ]


def test_parameters_are_read_in_the_dtypes_of_the_model():
  config = images.get_config("data_parallel,test")
  program = experiments.build(
    override(config, "model.dtype=bfloat16")
  ).program
  params = program.stored_shapes
  found = program.readable(params)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  leaves = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, CastOnRead))
  expected = [
    p.dtype if p.cast else "float32"
    for p in jax.tree.leaves(program.model.parameters)
  ]
  assert [jnp.dtype(x.dtype) for x in leaves] == list(map(jnp.dtype, expected))
  assert len(set(expected)) == 2
  key = min(params)
  assert set(program.readable({key: params[key]})) == {key}


def test_scores_are_checked():
  program = build(SMALL + "parallel.worker=1")
  scores = {"loss": jnp.float32(1)}
  assert program.checked(scores) is scores
  with pytest.raises(ValueError, match="a dict with the key 'loss'"):
    program.checked({"error": jnp.float32(1)})
  with pytest.raises(ValueError, match="'loss' is bfloat16"):
    program.checked({"loss": jnp.bfloat16(1)})


@dataclasses.dataclass(frozen=True)
class Undeclared(Toy):
  """Model that does not declare one of its parameters."""

  @property
  def parameters(self):
    return {"w": super().parameters["w"]}


def test_members_of_a_model_are_checked():
  axes = {name: Axis(name, 1) for name in ("worker", "data", "tensor")}
  layout = Layout(
    tuple(axes.values()), make_mesh(axes),
    Partition((Level("data", 1),)),
  )
  assert Program(Toy(), layout).layout is layout
  with pytest.raises(ValueError, match=r"Undeclared\.parameters lacks"):
    Program(Undeclared(), layout)


def test_longest_path_of_a_parameter_is_found():
  key = jax.tree_util.DictKey
  find = make_suffix_lookup({"a": P("x"), "b": {"a": P("y")}})

  def found(*names):
    return find(tuple(map(key, names)))

  assert found("a") == found("mu", "a") == found("b", "c", "a") == P("x")
  assert found("b", "a") == found("mu", "b", "a") == P("y")
  assert found("b") is found("a", "b") is found() is None
  # Attributes of named tuples count like keys.
  assert find((jax.tree_util.GetAttrKey("mu"), key("b"), key("a"))) == P("y")
  pairs = make_suffix_lookup(
    {"a": (1, 2)}, is_leaf=lambda x: isinstance(x, tuple)
  )
  assert pairs((key("a"),)) == (1, 2)
