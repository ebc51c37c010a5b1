"""Shards of a training state: any sizes and levels, without a model."""

import collections
import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.axes import Axis, make_mesh
from parallel.collectives import order_after
from parallel.kernels.codec.reference import Codec, max_error
from parallel.ledger import ledger
from parallel.plans.zero import cost, partition
from parallel.plans.zero.partition import Level, Partition
from parallel.zero.gathered import GatheredAccess, Shard
from parallel.zero.shards import MeshPartition, TensorSpec
from tests import users

LEVELS = tuple(map(Level, ("node", "gpu", "gcd"), (2, 2, 2)))


def shards_of(partition, devices=None):
  devices = devices or {}
  axes = {
    level.name: Axis(level.name, level.size, devices.get(level.name, 1))
    for level in partition.levels
  }
  shards = MeshPartition(partition, tuple(axes.values()), ordered=bool(devices))
  return shards, make_mesh(axes)


@st.composite
def drawn_partition(draw):
  sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
  levels = tuple(Level(f"l{i}", size) for i, size in enumerate(sizes))
  depth = st.integers(0, len(levels))
  w, g, o = sorted((draw(depth), draw(depth), draw(depth)))
  secondary = draw(st.integers(1, o)) if w else None
  return Partition(levels, w, g, o, secondary)


@pytest.mark.quick
@settings(max_examples=60)
@given(drawn_partition(), st.lists(st.integers(1, 7), max_size=3))
def test_stored_shards_have_minimal_padding(drawn, shape):
  """Includes small and indivisible sizes: DeepSpeed #5642, #6659."""
  shards, _ = shards_of(drawn)
  tensor = TensorSpec(tuple(shape), "float32")
  x = np.arange(2.0 * tensor.size, dtype="f4").reshape(2, *shape)
  padded = drawn.padded(tensor.size)
  assert 0 <= padded - tensor.size < drawn.degree(drawn.optimizer)
  found = jax.eval_shape(lambda x: shards.store(x, tensor), x)
  sizes = [level.size for level in drawn.inner[: drawn.optimizer]]
  assert found.shape == (2, *sizes, drawn.shard_size(tensor.size))
  assert math.prod(found.shape) == 2 * padded


@settings(max_examples=4)
@given(drawn_partition(), st.lists(st.integers(1, 7), max_size=3))
def test_shards_nest(drawn, shape):
  """Stored shards, and those of the secondary copy, gather to the whole."""
  shards, mesh = shards_of(drawn)
  tensor = TensorSpec(tuple(shape), "float32")
  x = jnp.arange(2.0 * tensor.size).reshape(2, *shape)
  stored = shards.store(x, tensor)
  np.testing.assert_array_equal(shards.restore(stored, tensor), x)

  def gathered(stored):
    weights = shards.working(stored, tensor)
    whole = shards.materialise(weights, tensor)
    again = whole
    if drawn.secondary:
      again = shards.materialise_copy(shards.copy(whole, tensor), tensor)
    return whole, again

  names = [axis.name for axis in shards.inner[: drawn.optimizer]]
  for found in jax.jit(jax.shard_map(
    gathered, mesh=mesh, in_specs=P(None, *names), out_specs=P(),
  ))(stored):
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize(("prefetch", "depths"), [
  # Of weights, gradients and optimizer: equal and unequal, with and without
  # levels beyond the optimizer.
  (False, [(0, 0, 2), (0, 1, 3), (1, 2, 2), (3, 3, 3)]),
  # Whole weights are not prefetched.
  (True, [(1, 1, 3), (2, 3, 3)]),
])
def test_partitions_give_the_gradients_of_the_whole_batch(prefetch, depths):
  """Exact on integers; covers two functions, a scan and its remainder.

  Cotangents of the inputs depend on the parameters that every layer gathers.
  """
  devices = {"node": 2, "gcd": 2}
  draw = np.random.default_rng(0)
  layers = draw.integers(-3, 4, (3, 5, 5)).astype(np.float32)
  head = draw.integers(-3, 4, (5,)).astype(np.float32)
  x = draw.integers(-3, 4, (2, 2, 2, 5)).astype(np.float32)

  def loss(layers, head, x):
    for layer in layers:
      x = x @ layer
    return jnp.sum(x * head[None])

  expected = jax.grad(loss, (0, 1, 2))(layers, head, x.reshape(8, 5))
  tensors = TensorSpec((5, 5), "float32"), TensorSpec((5,), "float32")
  shards, mesh = [], None
  for of_states in depths:
    of_triple, mesh = shards_of(Partition(LEVELS, *of_states), devices)
    shards.append(of_triple)

  def gradients(stored, x, of_triple):
    access = GatheredAccess(of_triple, prefetch)
    weights = of_triple.working(stored, tensors)

    def loss(sinks, x):
      layers, head = map(Shard, weights, sinks, tensors)
      y = access.scan(lambda layer, x: x @ layer, layers, x.reshape(-1, 5))
      return jnp.sum(access.apply(lambda h, y: jnp.sum(y * h), head, y))

    sinks = jax.tree.map(of_triple.sink, stored, tensors)
    sinks, dx = jax.grad(loss, (0, 1))(sinks, x)
    return *of_triple.finish(sinks, tensors), dx

  def all_of_them(all_stored, x):
    found = []
    for stored, of_triple in zip(all_stored, shards, strict=True):
      x = x if not found else x + 0 * found[-1][1].ravel()[0]  # in order
      found.append(gradients(stored, x, of_triple))
    return found

  specs, batch = [], P("node", "gpu", "gcd")
  for of_triple in shards:
    names = [a.name for a in of_triple.inner[: of_triple.partition.optimizer]]
    specs.append((P(None, *names), P(*names)))
  stored = [
    tuple(map(of_triple.store, (layers, head), tensors))
    for of_triple in shards
  ]
  found = jax.jit(
    jax.shard_map(
      all_of_them, mesh=mesh,
      in_specs=(specs, batch), out_specs=[(*spec, batch) for spec in specs],
    )
  )(stored, x)
  for of_triple, (*result, dx) in zip(shards, found, strict=True):
    whole = (*map(of_triple.restore, result, tensors), dx.reshape(8, 5))
    for ours, theirs in zip(whole, expected, strict=True):
      np.testing.assert_array_equal(ours, theirs, str(of_triple.partition))


@pytest.mark.parametrize(("levels", "codec"), [
  (LEVELS, "int8"), ((Level("node", 8),), "int4"),
])
def test_codecs_keep_their_error_bounds(levels, codec):
  """Rounds weights once, and gradients once per level that they cross.

  DeepSpeed #4886 had an infinite loss, #4852 crashed on encoded weights.
  """
  depth, block = len(levels), 16
  drawn = Partition(
    levels, depth, depth, depth, weight_codec=codec, gradient_codec=codec,
    block=block, coded_blocks=0,
  )
  shards, mesh = shards_of(drawn)
  tensor = TensorSpec((7, 11), "float32")
  draw = np.random.default_rng(0)
  x = draw.normal(size=(7, 11)).astype(np.float32)
  summands = draw.normal(size=(8, 7, 11)).astype(np.float32)

  def run(stored, summands):
    weights = shards.working(stored, tensor)
    return (
      shards.materialise(weights, tensor), shards.reduce(summands, tensor)
    )

  whole, reduced = jax.jit(jax.shard_map(
    run, mesh=mesh,
    in_specs=(P(*shards.names[::-1]), P(shards.names)),
    out_specs=(P(), P(*shards.names[::-1])),
  ))(shards.store(jnp.asarray(x), tensor), jnp.asarray(summands))
  bound = max_error(Codec(codec, block))
  error = np.abs(whole - x).max()
  assert 0 < error <= bound * np.abs(x).max()
  # Each level rounds sums of equally many summands, 8 in all.
  largest = np.abs(summands).max() * (1 + bound) ** depth
  error = np.abs(shards.restore(reduced, tensor) - summands.sum(0)).max()
  assert 0 < error <= bound * largest * 8 * depth


def test_node_count_may_be_no_power_of_two():
  """Covers 3 nodes of 8: DeepSpeed #4386."""
  levels = (Level("node", 3), Level("gpu", 8))
  for scheme in partition.SCHEMES:
    found = partition.named(scheme, levels)
    assert found.num_ranks == 24
    for size in (1, 23, 24, 25, 1000):
      padded = found.padded(size)
      assert padded % found.degree(found.optimizer) == 0
      assert padded - size < found.degree(found.optimizer)
      assert math.gcd(padded, found.degree(found.optimizer)) == found.degree(
        found.optimizer
      )


# Lanes on every level, and devices on the two outer ones.
WIDE = tuple(map(Level, ("node", "gpu", "gcd"), (4, 2, 2)))
DEVICES = {"node": 2, "gpu": 2}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_secondary_copy_gathers_to_the_whole(depth):
  drawn = Partition(WIDE, 2, 3, 3, depth)
  shards, mesh = shards_of(drawn, DEVICES)
  tensor = TensorSpec((5, 7), "float32")
  x = jnp.arange(35.0).reshape(5, 7)

  def again(stored):
    whole = shards.materialise(shards.working(stored, tensor), tensor)
    copy = shards.copy(whole, tensor)
    assert copy.size == math.prod(
      a.lanes for a in shards.inner[:depth]
    ) * drawn.padded(35) // drawn.degree(depth)
    return shards.materialise_copy(copy, tensor)

  names = [axis.name for axis in shards.inner]
  found = jax.jit(jax.shard_map(
    again, mesh=mesh, in_specs=P(*names), out_specs=P(),
  ))(shards.store(x, tensor))
  np.testing.assert_array_equal(found, x)


def lowered_step(drawn, devices, layers=3, ordered=True):
  """Lowers the reduced gradients of a stack of matrices and one more."""
  shards, mesh = shards_of(drawn, devices)
  shards = dataclasses.replace(shards, ordered=ordered)
  tensors = TensorSpec((25,), "float32"), TensorSpec((25,), "float32")

  def layer(w, x):  # reads a reshaped parameter
    return jnp.tanh(x @ w.reshape(5, 5))

  def gradients(stored, x):
    access = GatheredAccess(shards)
    weights = shards.working(stored, tensors)
    x = x.reshape(-1, 5)

    def loss(sinks):
      stack, one = map(Shard, weights, sinks, tensors)
      return jnp.sum(access.apply(layer, one, access.scan(layer, stack, x)))

    sinks = jax.tree.map(shards.sink, stored, tensors)
    return shards.finish(jax.grad(loss)(sinks), tensors)

  names = [a.name for a in shards.inner[: drawn.optimizer]]
  specs = P(None, *names), P(*names)
  sizes = [level.size for level in drawn.inner[: drawn.optimizer]]
  k = drawn.shard_size(25)
  stored = [
    jax.ShapeDtypeStruct((*lead, *sizes, k), "float32")
    for lead in ((layers,), ())
  ]
  levels = [level.size for level in drawn.levels]
  x = jax.ShapeDtypeStruct((*levels, 5), "float32")
  mapped = jax.shard_map(
    gradients, mesh=mesh, out_specs=specs,
    in_specs=(specs, P(*(level.name for level in drawn.levels))),
  )
  return jax.jit(mapped).lower(tuple(stored), x), shards, mesh


CODED = {"weight_codec": "int8", "gradient_codec": "int4", "block": 4}
ALL_CODED = CODED | {"coded_blocks": 0}


@pytest.mark.parametrize("kernels", ["reference", "tpu_interpret"])
def test_codecs_run_as_the_selected_kernels(kernels):
  """Encodes and decodes weights, the second copy and gradients."""
  drawn = Partition(
    (Level("node", 2),), 1, 1, 1, 1, secondary_codec="int8", **ALL_CODED
  )
  shards, mesh = shards_of(dataclasses.replace(drawn, block=256))
  shards = dataclasses.replace(shards, kernels=kernels)
  tensor = TensorSpec((600,), "float32")

  def run(stored):
    whole = shards.materialise(shards.working(stored, tensor), tensor)
    copy = shards.copy(whole, tensor)
    again = shards.materialise_copy(copy, tensor)
    return shards.reduce(jnp.stack([whole, again]), tensor)

  traced = jax.make_jaxpr(jax.shard_map(
    run, mesh=mesh, in_specs=P("node"), out_specs=P("node"),
  ))(jnp.ones((2, 300)))
  count = str(traced).count("pallas_call[")
  assert count == (0 if kernels == "reference" else 6)


@pytest.mark.parametrize(
  "drawn",
  [Partition(WIDE, 1, 2, 3), Partition(WIDE, 3, 3, 3, 2),
   Partition(WIDE, 0, 1, 2),
   Partition(WIDE, 2, 3, 3, 1, secondary_codec="int8", **ALL_CODED),
   Partition(WIDE, 3, 3, 3, gradient_hops="two", **ALL_CODED),
   # A shard of 25 elements over 4 ranks is a whole block.
   Partition(WIDE, 2, 2, 2, **CODED)],
  ids=str,
)
def test_sent_bytes_equal_the_cost_formula(drawn):
  """Uses a mesh with lanes inside, outside and alongside devices."""
  lowered, shards, mesh = lowered_step(drawn, DEVICES)
  found = collections.Counter()
  for c in ledger.collectives(lowered, mesh):
    found[c.axes, c.kind, c.dtype] += c.bytes * c.count
  lanes = {axis.name: axis.lanes for axis in shards.axes}
  expected = collections.Counter()
  for e in cost.level_collectives(
    drawn, [cost.Parameter(25, 3), cost.Parameter(25)], lanes=lanes
  ):
    axes = tuple(n for n in e.levels if mesh.shape[n] > 1)
    expected[axes, e.kind, e.dtype] += e.operand_bytes
  assert +found == +expected


# A matrix cut by rows, explicit state, a slice per gpu, and a vector.
OWN = {
  "expert": TensorSpec((7,), "float32", apart=("gpu",)),
  "matrix": TensorSpec((5, 3), "float32", "rows"),
  "state": TensorSpec((4,), "float32", "whole"),
  "vector": TensorSpec((11,), "float32"),
}


@pytest.mark.parametrize("drawn", [
  Partition(LEVELS, 1, 2, 3), Partition(LEVELS, 3, 3, 3, 2),
  Partition(LEVELS, 0, 0, 2),
  Partition(
    LEVELS, 2, 2, 3, 2, secondary_codec="int8", gradient_codec="int8",
    block=2, coded_blocks=0,
  ),
], ids=str)
def test_each_tensor_of_a_tree_has_its_own_partition(drawn):
  """Checks values, sums, shapes of shards and sent bytes."""
  shards, mesh = shards_of(drawn, {"node": 2, "gpu": 2})  # 2 lanes of gcd
  rng = np.random.default_rng(0)
  specs, params, summands, sums = {}, {}, {}, {}
  for name, tensor in OWN.items():
    own, lead = shards.of_tensor(tensor), ["gpu"] * len(tensor.apart)
    specs[name] = jax.P(
      *lead, *[a.name for a in own.inner[: own.partition.optimizer]]
    )
    params[name] = rng.normal(size=(*[2] * len(lead), *tensor.shape))
    # [node, gpu, gcd, *lead on one device, *shape]
    parts = rng.normal(size=(2, 2, 2, *[1] * len(lead), *tensor.shape))
    sums[name] = parts[..., 0, :].sum((0, 2)) if lead else parts.sum((0, 1, 2))
    summands[name] = parts.reshape(8, *parts.shape[3:]).astype("f4")
  stored = {
    name: shards.store(jnp.asarray(x, "float32"), OWN[name])
    for name, x in params.items()
  }
  size = 2 if drawn.optimizer == 2 else 4  # ranks over node and gcd
  assert stored["expert"].size // 2 == -(-7 // size) * size
  assert stored["matrix"].shape[-1] % 3 == 0
  assert stored["state"].shape == (4,)

  def run(stored, summands):
    weights = shards.working(stored, OWN)
    whole = again = shards.materialise(weights, OWN)
    if drawn.secondary:
      again = shards.materialise_copy(shards.copy(whole, OWN), OWN)
    reduced = shards.reduce(order_after(summands, again), OWN)
    return again, shards.finish(reduced, OWN)

  whole = {name: jax.P(*["gpu"] * len(x.apart)) for name, x in OWN.items()}
  lowered = jax.jit(jax.shard_map(
    run, mesh=mesh, in_specs=(specs, jax.P(("node", "gpu", "gcd"))),
    out_specs=(whole, specs),
  )).lower(stored, summands)
  gathered, reduced = lowered.compile()(stored, summands)
  coded = drawn.gradient_codec != "none"
  for name, tensor in OWN.items():
    exact = tensor.form == "whole" or not coded
    np.testing.assert_allclose(
      gathered[name], params[name], atol=1e-6 if exact else 0.02
    )
    np.testing.assert_allclose(
      shards.restore(reduced[name], tensor), sums[name],
      atol=1e-5 if exact else 0.3,
    )
  found, expected = collections.Counter(), collections.Counter()
  for c in ledger.collectives(lowered, mesh):
    found[c.axes, c.kind, c.dtype] += c.bytes * c.count
  for e in cost.level_collectives(drawn, [
    cost.Parameter(
      tensor.size, regathered=int(bool(drawn.secondary)), form=tensor.form,
      apart=tensor.apart, unit=tensor.unit,
    ) for tensor in OWN.values()
  ], lanes={"gcd": 2}):
    axes = tuple(n for n in e.levels if mesh.shape[n] > 1)
    expected[axes, e.kind, e.dtype] += e.operand_bytes
  assert +found == +expected


def test_backward_gathers_each_layer_again():
  """Checks that XLA does not merge the forward's and backward's gathers."""
  drawn = Partition((Level("node", 2),), 1, 1, 1)
  text = users.compiled(lowered_step(drawn, {"node": 2})[0]).as_text()
  gathers = [line for line in text.splitlines() if " all-gather(" in line]
  backward = [line for line in gathers if "transpose" in line]
  assert (len(gathers), len(backward)) == (4, 2)
  # On CPUs, data flow orders collectives. On other devices, a barrier separates
  # the sources of the two gathers: one for the stack, one for the last matrix.
  unordered = lowered_step(drawn, {"node": 2}, ordered=False)[0].as_text()
  assert unordered.count("stablehlo.optimization_barrier") == 2


def test_functions_run_without_derivatives():
  """Evaluates layers and a last function, with and without prefetch."""
  shards, mesh = shards_of(Partition((Level("node", 2),), 1, 1, 1), {"node": 2})
  tensor = TensorSpec((2, 2), "float32")
  layers = np.arange(12, dtype="f4").reshape(3, 2, 2)
  x = np.arange(4, dtype="f4").reshape(2, 2)

  def run(stored, x):
    weights = Shard(shards.working(stored, tensor), None, tensor)
    last = Shard(weights.weight[-1], None, tensor)
    found = []
    for prefetch in (False, True):
      access = GatheredAccess(shards, prefetch)
      y = access.scan(lambda w, x: x @ w, weights, x)
      found.append(access.apply(lambda w, y: y @ w + 1, last, y))
    return found

  found = jax.jit(jax.shard_map(
    run, mesh=mesh, in_specs=(P(None, "node"), P("node")), out_specs=P("node"),
  ))(shards.store(jnp.asarray(layers), tensor), x)
  for y in found:
    np.testing.assert_array_equal(
      y, x @ layers[0] @ layers[1] @ layers[2] @ layers[2] + 1
    )


def test_gradients_are_summed_in_float32():
  """256 + 1 rounds to 256 in bfloat16."""
  shards, mesh = shards_of(Partition((Level("node", 2),), 1, 1, 1), {"node": 2})
  tensor = TensorSpec((2,), "bfloat16")
  summands = jnp.asarray([[256, 1], [1, 256]], jnp.bfloat16)
  found = jax.jit(jax.shard_map(
    lambda x: shards.finish(shards.reduce(x, tensor), tensor), mesh=mesh,
    in_specs=P("node"), out_specs=P("node"),
  ))(summands)
  assert found.dtype == jnp.float32
  np.testing.assert_array_equal(found, [[257.0], [257.0]])


def test_hop_over_several_levels_computes_the_sum():
  """Each rank has its slice of the sum; both levels have lanes and devices."""
  drawn = Partition(
    WIDE, 0, 3, 3, gradient_codec="int8", block=2, coded_blocks=0,
    gradient_hops="two",
  )
  shards, mesh = shards_of(drawn, {"node": 2, "gpu": 2, "gcd": 2})
  assert [list(hop) for hop in drawn.hops(0, 3)] == [[0, 1], [2]]
  tensor = TensorSpec((5, 13), "float32")
  summands = np.random.default_rng(0).normal(size=(16, 5, 13)).astype("f4")
  reduced = jax.jit(jax.shard_map(
    lambda x: shards.finish(shards.reduce(x, tensor), tensor), mesh=mesh,
    in_specs=P(("node", "gpu", "gcd")), out_specs=P("gcd", "gpu", "node"),
  ))(summands)
  found = shards.restore(reduced, tensor)
  assert 0 < np.abs(found - summands.sum(0)).max() < 0.2


def test_small_tensors_are_not_encoded():
  """Decided by the elements of a shard, which is equal at all depths."""
  drawn = Partition(WIDE, 1, 2, 3, **CODED)  # of 16 ranks, blocks of 4
  for size, dtype in ((48, "float32"), (49, "uint8"), (64, "uint8")):
    shards, mesh = shards_of(drawn)
    tensor = TensorSpec((size,), "float32")
    on_wire = jax.eval_shape(jax.shard_map(
      lambda x, t=tensor, s=shards: s.working(x, t), mesh=mesh,
      in_specs=P(*shards.names[::-1]), out_specs=P(shards.names[-1]),
    ), jax.eval_shape(
      lambda x, t=tensor, s=shards: s.store(x, t), jnp.ones(size)
    ))
    assert jax.tree.leaves(on_wire)[0].dtype == dtype


WEIGHTS = jnp.arange(9.0).reshape(3, 3) / 8


@pytest.mark.parametrize("prefetch", [False, True])
def test_backward_that_reads_no_parameters_gathers_none(prefetch):
  """Includes the secondary copy, which the forward then does not create."""
  drawn = Partition((Level("node", 2),), 1, 1, 1, 1)
  shards, mesh = shards_of(drawn, {"node": 2})
  tensor = TensorSpec((3,), "float32")
  stored = shards.store(WEIGHTS, tensor)

  def gradients(stored, x):
    access = GatheredAccess(shards, prefetch)
    weights = shards.working(stored, tensor)

    def loss(sinks):
      layers = Shard(weights, sinks, tensor)
      y = access.scan(lambda w, x: x * x + w, layers, x)
      return jnp.sum(y * y)

    return shards.finish(jax.grad(loss)(shards.sink(stored, tensor)), tensor)

  f = jax.jit(jax.shard_map(
    gradients, mesh=mesh,
    in_specs=(P(None, "node"), P("node")), out_specs=P(None, "node"),
  ))
  x = jnp.arange(6.0).reshape(2, 3) / 8
  lowered = f.lower(stored, x)
  gathers = [
    c for c in ledger.collectives(lowered, mesh) if c.kind == "all_gather"
  ]
  assert sum(c.count for c in gathers) == 3  # the forward's
  found = shards.restore(lowered.compile()(stored, x), tensor)

  def loss(weights):
    y = x
    for w in weights:
      y = y * y + w[None]
    return jnp.sum(y * y)

  np.testing.assert_allclose(found, jax.grad(loss)(WEIGHTS), rtol=1e-5)


def test_unsharded_gradients_count_once_per_lane():
  """Each lane holds gradients until they are summed."""
  plain = Partition((Level("node", 4),))
  for lanes in (1, 4):
    found = cost.memory(plain, [cost.Parameter(10, 2)], {"node": lanes})
    assert found.gradients == 4 * 2 * 10 * lanes
    assert found.stored == 12 * 2 * 10


# Partitions whose weights, copies and gradients have several depths and codecs.
STORED = [
  Partition(WIDE), Partition(WIDE, 0, 0, 3), Partition(WIDE, 1, 2, 3),
  Partition(WIDE, 3, 3, 3, 2), Partition(WIDE, 0, 1, 2),
  Partition(WIDE, 2, 3, 3, 1, secondary_codec="int8", **ALL_CODED),
  Partition(WIDE, 2, 2, 2, 1, secondary_codec="int4", **CODED),
  Partition(WIDE, 2, 3, 3, 3, secondary_codec="int8", **CODED),
]


@pytest.mark.parametrize("drawn", STORED, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_equals_the_bytes_of_the_arrays(drawn, dtype):
  """Three tensors of 25 elements on a device with lanes."""
  shards, mesh = shards_of(drawn, DEVICES)
  tensor, found = TensorSpec((25,), dtype), {}

  def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

  def run(stored):
    weights = shards.working(stored, tensor)
    found["moments"] = 2 * size(stored)
    found["stored"] = size(stored) + found["moments"]
    found["gradients"] = size(shards.sink(stored, tensor))
    found["weights"] = size(weights)
    found["secondary"] = 0
    if drawn.secondary:
      whole = shards.materialise(weights, tensor)
      found["secondary"] = size(shards.copy(whole, tensor))
    return shards.sink(stored, tensor)

  names = [axis.name for axis in shards.inner]
  jax.eval_shape(jax.shard_map(
    run, mesh=mesh, in_specs=P(None, *names[: drawn.optimizer]),
    out_specs=P(None, *names),
  ), jax.eval_shape(
    lambda x: shards.store(x, tensor), jnp.ones((3, 25))
  ))
  if drawn.weights == drawn.optimizer and dtype == "float32" and not (
    drawn.is_coded(drawn.shard_size(25)) and drawn.weight_codec != "none"
  ):
    found["weights"] = 0  # the stored weights serve
  lanes = {axis.name: axis.lanes for axis in shards.axes}
  memory = cost.memory(drawn, [
    cost.Parameter(25, 2, jnp.dtype(dtype).itemsize),
    cost.Parameter(25, 1, jnp.dtype(dtype).itemsize),
  ], lanes)
  assert dataclasses.asdict(memory) == found
  assert memory.total == sum(found.values()) - found["moments"]


def test_copy_is_kept_only_for_backwards_that_read_it():
  drawn = Partition(WIDE, 3, 3, 3, 2)
  once = cost.memory(drawn, [cost.Parameter(25)])
  for regathered in (0, 2):
    found = cost.memory(drawn, [cost.Parameter(25, regathered=regathered)])
    assert found == dataclasses.replace(
      once, secondary=regathered * once.secondary
    )
  # Papers count two bytes per gradient.
  half = cost.memory(drawn, [cost.Parameter(25, gradient_bytes=2)])
  assert half == dataclasses.replace(once, gradients=once.gradients // 2)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_leading_dims_are_reduced_separately(codec):
  """Gradients of tensor ranks; multiples by powers of two round alike."""
  drawn = Partition(
    WIDE, 0, 2, 3, gradient_codec=codec, block=2, coded_blocks=0,
    gradient_hops="two",
  )
  shards, mesh = shards_of(drawn, {"node": 2, "gpu": 2})
  tensor = TensorSpec((5, 3), "float32")
  summands = np.random.default_rng(0).normal(size=(16, 1, 1, 5, 3))
  factors = 2.0 ** np.arange(6).reshape(2, 3, 1, 1)
  reduced = jax.jit(jax.shard_map(
    lambda x: shards.finish(shards.reduce(x, tensor), tensor), mesh=mesh,
    in_specs=P(("node", "gpu", "gcd")),
    out_specs=P(None, None, "gcd", "gpu", "node"),
  ))((summands * factors).astype("f4"))
  found = np.asarray(shards.restore(reduced, tensor))
  np.testing.assert_array_equal(found, factors * found[:1, :1])
  error = np.abs(found[0, 0] - summands.sum((0, 1, 2))).max()
  assert error < (1e-5 if codec == "none" else 0.2)
