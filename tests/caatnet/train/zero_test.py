"""Properties of partitions, in the real training step.

A new scheme inherits the suite by adding a row to one table. Properties that do
not depend on the model use a linear one, which compiles fast.
"""

import collections
import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.train.checkpoint.reshard import to_whole
from caatnet.train.evaluate import put_batch
from configs.caatnet import tiny
from parallel.axes import Axis
from parallel.ledger import ledger
from parallel.plans.zero import cost, partition
from tests import pairwise
from tests.caatnet.train import linear_model as toy

LEVELS = ("node", "gpu", "gcd")
SMALL = (
  "zero.levels=node:2,gpu:2,gcd:2 parallel.data=8 parallel.tensor=2 "
  "sync.p=0.5 model.width=18 model.num_heads=3 model.num_kv_heads=3 "
  "model.ffn_width=25 model.num_layers=3 model.vocab_size=257 data.seq_len=8 "
  "data.batch_size=16 data.validation_windows=16 train.accumulation=2 "
  "train.num_steps=6 train.checkpoint_every=2 train.keep_checkpoints=9 "
  "train.eval_every=6 optimizer.warmup_steps=2 "
)
# All device axes are present; gcd has 2 lanes.
MESH = {"node": 2, "gpu": 2, "tensor": 2}
CUSTOM = "zero1 zero.weights=gpu zero.gradients=gpu zero.secondary=gcd"
# "mics" is an alias of "hsdp"; "zeropp_by_level" has one hop per level, like
# "frontier3_quantised".
TWINS = ("mics", "zeropp_by_level")
SCHEMES = (*(s for s in partition.SCHEMES if s not in TWINS), CUSTOM)
QUANTISED = ("zeropp", "frontier3_quantised")
EXACT = [s for s in SCHEMES if s not in QUANTISED]


def make(scheme, overrides="", mesh=MESH):
  name, _, rest = scheme.partition(" ")
  block = "zero.block=32" if name in QUANTISED or "_codec" in rest else ""
  config = override(
    tiny.get_config("test"),
    f"{SMALL} zero.scheme={name} {block} {rest} {overrides}"
  )
  return experiments.build(config, mesh)


@functools.cache
def lowered(scheme, overrides=""):
  return make(scheme, overrides).lower_step()


@functools.cache
def compiled(scheme, overrides=""):
  return lowered(scheme, overrides).compile()


def two_steps(experiment, step, batches):
  """Returns metrics, whole parameters and moments."""
  state = experiment.init_state()
  for batch in batches:
    batch = put_batch(experiment.program.layout, batch)
    state, metrics = step(state, batch, ())
  state = to_whole(experiment.program, state)
  return jax.device_get((metrics, state.params, state.opt_state))


@functools.cache
def trained(scheme, mesh=None):
  """Returns the result of two accumulating steps of the language model."""
  experiment = make(scheme, "", MESH if mesh is None else dict(mesh))
  lower = experiment.lower_step
  step = compiled(scheme) if mesh is None else lower().compile()
  draw = np.random.default_rng(0)
  batches = [draw.integers(257, size=(16, 9)) for _ in range(2)]
  return two_steps(experiment, step, batches)


def linear_levels(devices=("node", "gpu")):
  """Axes of two ranks, each with two devices if named, else one."""
  return tuple(Axis(name, 2, 1 + (name in devices)) for name in LEVELS)


@functools.cache
def trained_linear(scheme, devices=("node", "gpu"), options=()):
  """Returns the result of two accumulating steps of the linear model."""
  experiment = toy.make(
    scheme=scheme, levels=linear_levels(devices), batch_size=16, accumulation=2
  )
  step = experiment.lower_step().compile(dict(options))
  return two_steps(experiment, step, [toy.draw(16, i) for i in range(2)])


def largest_difference(a, b):
  differences = jax.tree.map(lambda x, y: np.abs(x - y).max(), a, b)
  return max(jax.tree.leaves(differences))


def assert_trained_alike(ours, theirs):
  chex.assert_trees_all_close(ours[0], theirs[0], rtol=1e-5)
  chex.assert_trees_all_close(ours[1], theirs[1], atol=2e-6)
  chex.assert_trees_all_close(ours[2], theirs[2], rtol=1e-4, atol=1e-6)


@pytest.mark.rotated
@pytest.mark.parametrize("devices", [("node", "gpu"), ()], ids=str)
@pytest.mark.parametrize("scheme", [s for s in EXACT if s != CUSTOM])
def test_every_scheme_trains_as_data_parallelism_does(scheme, devices):
  """Uses two microbatches per step, where DeepSpeed's differed (#1488)."""
  assert_trained_alike(trained_linear(scheme, devices), trained_linear("ddp"))


TABLE = pairwise.rows({
  "scheme": [s for s in EXACT if s not in (CUSTOM, "ddp")],
  "devices": (("node", "gpu"), ()),
  "moments": ("pinned_host", "device"),
  "accumulation": (1, 2), "momentum": (0.9, 0.0), "clip_norm": (0.0, 0.3),
  "prefetch": (True, False), "model": (toy.Deep(), toy.Toy()),
})


@jax.jit
def plain(params, batch):
  """Returns loss and gradients of the linear model, without its code."""

  def loss(params):
    x = batch["x"]
    for w in params.get("blocks", {"w": ()})["w"]:
      x = x + x @ w
    return jnp.square(x @ params["w"] + params["b"][None] - batch["y"]).mean()

  return jax.value_and_grad(loss)(params)


@pytest.mark.rotated
@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
def test_options_together_train_by_the_equation(row):
  """SGD with momentum and clipping, on one device without partitions."""
  options = {k: v for k, v in row.items() if k not in ("devices", "prefetch")}
  experiment = toy.make(
    levels=linear_levels(row["devices"]), batch_size=16, **options
  )
  layout = dataclasses.replace(
    experiment.program.layout, prefetch=row["prefetch"]
  )
  program = dataclasses.replace(experiment.program, layout=layout)
  experiment = dataclasses.replace(experiment, program=program)
  step, state = experiment.lower_step().compile(), experiment.init_state()
  params = jax.tree.map(lambda x: np.asarray(x[0]), to_whole(
    program, state
  ).params)
  speed = jax.tree.map(np.zeros_like, params)
  for number in range(3):
    batch = toy.draw(16, number)
    loss, gradients = plain(params, batch)
    norm = np.sqrt(sum(np.sum(x * x) for x in jax.tree.leaves(gradients)))
    shrink = min(1, row["clip_norm"] / norm) if row["clip_norm"] else 1
    speed = jax.tree.map(
      lambda v, g, shrink=shrink: row["momentum"] * v + shrink * g,
      speed, gradients,
    )
    params = jax.tree.map(lambda p, v: p - np.float32(0.1) * v, params, speed)
    state, metrics = step(state, put_batch(layout, batch), ())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
  found = jax.tree.map(lambda x: x[0], to_whole(program, state).params)
  chex.assert_trees_all_close(found, params, rtol=1e-5, atol=2e-6)


@pytest.mark.rotated(2)
@pytest.mark.quick
@pytest.mark.parametrize("scheme", ["zero1", CUSTOM])
def test_layers_and_tables_train_as_data_parallelism_does(scheme):
  """Covers whole weights, gathered ones, and ones gathered from a copy."""
  assert_trained_alike(trained(scheme), trained("ddp"))


@pytest.mark.rotated(2)
@pytest.mark.parametrize(
  ("scheme", "mesh"), [("frontier3_quantised", None), ("zeropp", ())]
)
def test_quantised_scheme_stays_near_the_exact_one(scheme, mesh):
  """Covers devices and lanes."""
  metrics, params, _ = trained(scheme, mesh)
  exact = trained("ddp")[0]
  # The loss sees int8 weights, the norm int4 gradients (DeepSpeed #6926).
  assert 0 < abs(metrics["loss"] - exact["loss"]).max() < 1e-3
  np.testing.assert_allclose(metrics["grad_norm"], exact["grad_norm"], rtol=0.1)
  # At most a few of Adam's first steps, the learning rate each.
  assert 0 < largest_difference(params, trained("ddp")[1]) < 1.5e-2


def test_bfloat16_and_remat_train_as_data_parallelism_does():
  """Covers embedding gradients, which add many rows into one."""
  overrides = "model.dtype=bfloat16 model.remat=full train.accumulation=1"

  def gradient_norms(scheme):
    experiment = make(scheme, overrides)
    step = experiment.lower_step().compile()
    tokens = put_batch(experiment.program.layout, np.zeros((16, 9), int))
    return jax.device_get(step(experiment.init_state(), tokens, ())[1])

  chex.assert_trees_all_close(
    gradient_norms("zero3"), gradient_norms("ddp"), rtol=5e-3
  )


def test_secondary_copy_changes_no_bit(same_bits):
  """At the first loss (DeepSpeed #4851, #7164) and after updates (#5059)."""
  hpz, zero3 = (
    trained_linear(scheme, options=tuple(same_bits.items()))
    for scheme in ("hpz", "zero3")
  )
  chex.assert_trees_all_equal(hpz, zero3)


def test_prefetching_changes_no_result():
  ahead = trained(f"{CUSTOM} zero.prefetch=True")
  chex.assert_trees_all_close(ahead[0], trained(CUSTOM)[0], rtol=1e-6)
  chex.assert_trees_all_close(ahead[1], trained(CUSTOM)[1], atol=1e-6)


def _lanes(program):
  return {axis.name: axis.lanes for axis in program.layout.data}


# Tied tables are read twice, matrices sent as bfloat16, layers recomputed.
OTHERWISE = (
  "model.tied_embeddings=True model.dtype=bfloat16 model.remat=full"
)


@pytest.mark.rotated
@pytest.mark.parametrize(
  ("scheme", "overrides"),
  # "zero2" is between "zero1" and "zero3", whose bytes prefetching keeps.
  [*((s, "") for s in SCHEMES if s not in ("zero2", "zero3")),
   ("hpz", OTHERWISE), ("zero3", "zero.prefetch=True")],
)
def test_sent_bytes_equal_the_formula(scheme, overrides):
  program = make(scheme, overrides).program
  found = collections.Counter()
  mesh = program.layout.mesh
  for entry in ledger.collectives(lowered(scheme, overrides), mesh):
    # Reductions of norms and of the loss.
    numbers = entry.kind == "all_reduce" and entry.elements < 10
    if set(entry.axes) & set(LEVELS) and not numbers:
      assert not set(entry.axes) - set(LEVELS), entry
      found[entry.axes, entry.kind, entry.dtype] += entry.bytes * entry.count
  expected = collections.Counter()
  for e in cost.level_collectives(
    program.layout.partition, program.cost_parameters, accumulation=2,
    lanes=_lanes(program),
  ):
    axes = tuple(n for n in e.levels if program.layout.mesh.shape[n] > 1)
    expected[axes, e.kind, e.dtype] += e.operand_bytes
  assert found == expected


# Schemes that other tests compile.
COMPILED = ("ddp", "zero1", CUSTOM, "frontier3_quantised")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_argument_bytes_equal_the_formula(scheme):
  experiment = make(scheme)
  program = experiment.program
  tokens = experiment.abstract_batch().size * 4 // 4  # 4 pairs of ranks
  others = tokens + 4 + 8 + 4 + 4  # step, key, counts of Adam and of the rate
  stored = cost.memory(
    program.layout.partition, program.cost_parameters, _lanes(program)
  ).stored
  shards = sum(
    x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
    for x in jax.tree.leaves(experiment.abstract_state())
  )
  assert shards + tokens == stored + others
  if scheme in COMPILED:
    measured = compiled(scheme).memory_analysis().argument_size_in_bytes
    assert measured == stored + others


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    ("zero.scheme=zero4", "must be one of ddp, zero1"),
    ("zero.levels=node:2,gpu:2", "have 4 ranks, not the 8"),
    ("zero.levels=node", "'node' is not name:size"),
    ("zero.levels=tensor:8", "names must differ"),
    ("zero.levels= zero.scheme=hsdp", "needs two levels or more"),
    ("zero.scheme=zero3 zero.optimizer=gpu", "must not decrease"),
    ("zero.scheme=zero3 zero.weights=rack", "or a level of config.zero.levels"),
    ("zero.scheme=zero1 zero.secondary=gcd", "need no copy"),
    ("zero.scheme=zero3 zero.secondary_codec=int8", "without a second copy"),
    ("zero.weight_codec=int8", "no weights are gathered"),
    ("zero.scheme=zero2 zero.prefetch=True", "shards no weights"),
    ("zero.scheme=zeropp zero.block=7", "must be even"),
    ("zero.scheme=zeropp zero.gradient_hops=three", "by_level, two"),
    ("zero.scheme=zero3 zero.gradient_hops=two", "gradients have no codec"),
  ],
)
def test_invalid_key_is_named(overrides, message):
  with pytest.raises(ValueError, match=message):
    make("ddp", overrides)
