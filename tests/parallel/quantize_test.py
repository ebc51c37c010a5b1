"""Quantised means: definition worker by worker, determinism and bytes."""

import functools

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from parallel import quantize
from parallel.axes import Axis, make_mesh
from parallel.kernels.codec import reference
from parallel.ledger import ledger
from parallel.wire import NesterovStep, Wire

SHAPE, BLOCK = (7, 30), 16  # 210 elements: not a multiple of a block or slice
SIZE = 210
NONE = Wire()
ROUTES = ("all_gather", "all_to_all")
# Random bits compile slowly: two codecs represent the four.
CODED = [
  *(Wire(codec, BLOCK, r) for codec in reference.NAMES for r in ROUTES),
  *(Wire(codec, BLOCK, r, stochastic=True)
    for codec, r in zip(("e3m0", "int8"), ROUTES, strict=True)),
]
BF16 = Wire(dtype="bfloat16")
WIRES = [NONE, BF16, *CODED]
# Each route, with and without random bits: the codec does not depend on how
# ranks are split over devices, nor on weights.
SOME = [
  NONE, BF16, Wire("int4", BLOCK, "all_gather"),
  Wire("int8", BLOCK, "all_to_all"), *CODED[-2:],
]
WEIGHTS = np.array([3, 0.7, 1.3, 2, 0.01, 5, 1.1, 0.3], "f4")
KEY = 5


def draw(ranks, seed=0):
  """Returns deltas of unequal magnitude, so that float sums are inexact."""
  rng = np.random.default_rng(seed)
  scale = np.exp(2 * rng.normal(size=(ranks, 1, 1)))
  return (rng.normal(size=(ranks, *SHAPE)) * scale).astype("f4")


def both(x, weights, axis, wire):
  """Returns the mean, and each delta as decoded by the other workers."""
  key = jax.random.key(KEY)
  return (
    quantize.coded_mean(x, axis, wire, weights=weights, key=key)[0],
    quantize.roundtrip(x, axis, wire, key=key),
  )


# Wires of the program for ranks, devices and weights. Compilation dominates, so
# that one program has many wires.
PROGRAMS = {
  (1, 1, False): SOME, (8, 1, False): SOME, (8, 8, False): SOME,
  (8, 4, False): WIRES, (8, 1, True): SOME, (8, 4, True): SOME,
}


@functools.cache
def program(ranks, devices, weighted=False):
  """Returns a program: deltas and weights -> wire -> mean and decoded."""
  axis = Axis("worker", ranks, devices)
  wires = PROGRAMS[ranks, devices, weighted]

  def all_of_them(x, weights):
    w = weights if weighted else None
    return [both(x, w, axis, wire) for wire in wires]

  f = jax.jit(jax.shard_map(
    all_of_them,
    mesh=make_mesh({"worker": axis}),
    in_specs=(P("worker"), P()),
    # The out spec is replicated only if the varying-axes check proves it.
    out_specs=[(P(), P("worker"))] * len(wires),
  ))
  return lambda x, weights: dict(zip(wires, f(x, weights), strict=True))


@functools.cache
def results(ranks, devices, weighted=False):
  f = program(ranks, devices, weighted)
  return f(draw(ranks), WEIGHTS[:ranks])


def definition(seen, weights):
  weights = np.asarray(weights, "f8")
  return np.tensordot(weights / weights.sum(), np.asarray(seen, "f8"), 1)


@pytest.mark.quick
@pytest.mark.parametrize(("ranks", "devices", "weighted"), PROGRAMS)
def test_mean_is_the_mean_of_the_decoded_deltas(ranks, devices, weighted):
  x = draw(ranks)
  weights = WEIGHTS[:ranks] if weighted else np.ones(ranks)
  for wire, (mean, seen) in results(ranks, devices, weighted).items():
    expected = definition(seen, weights)
    assert mean.shape == SHAPE
    assert mean.dtype == seen.dtype == np.float32
    assert np.abs(seen - x).max() > 0 or wire == NONE
    tolerance = 1e-6 * np.abs(x).max()
    if wire == BF16:
      tolerance = len(weights) * 2.0**-8 * np.abs(x).max()
    if wire.route == "all_to_all":  # second rounding, per block
      tolerance += reference.max_error(wire.block_codec) * max_of_blocks(
        expected
      )
      assert len(weights) == 1 or (mean != expected.astype("f4")).any()
    assert (np.abs(mean - expected) <= tolerance).all(), wire


def max_of_blocks(x):
  flat = np.pad(np.abs(x).ravel(), (0, -x.size % BLOCK))
  peaks = np.repeat(flat.reshape(-1, BLOCK).max(1), BLOCK)
  return peaks[: x.size].reshape(x.shape)


@pytest.mark.quick
def test_worker_is_encoded_independently_of_the_others():
  x = draw(8)
  found = results(8, 4)
  for name in reference.NAMES:
    codec = reference.Codec(name, BLOCK)
    one = jax.jit(lambda row, codec=codec: reference.decode(
      reference.encode(row, codec), SIZE, codec
    ))
    alone = [one(row) for row in x.reshape(8, SIZE)]
    for route in ROUTES:
      seen = found[Wire(name, BLOCK, route)][1]
      np.testing.assert_array_equal(seen, np.reshape(alone, x.shape))
  np.testing.assert_array_equal(found[NONE][1], x)


@pytest.mark.quick
@pytest.mark.parametrize("weighted", [False, True])
def test_results_are_bitwise_equal_for_any_lanes_and_devices(weighted):
  first = results(8, 1, weighted)
  for devices in [4] if weighted else [4, 8]:
    found = results(8, devices, weighted)
    for wire in SOME:
      mean, seen = found[wire]
      copies = [np.asarray(s.data) for s in mean.addressable_shards]
      assert len(copies) == devices
      for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])
        if wire in CODED:  # else XLA chooses the order of the sum
          np.testing.assert_array_equal(copy, first[wire][0])
      np.testing.assert_array_equal(seen, first[wire][1])


def gathered(found):
  """Returns results of wires without a second rounding."""
  return [x for wire, x in found.items() if wire in CODED
          and wire.route == "all_gather"]


def test_workers_are_summed_in_rank_order():
  for mean, seen in gathered(results(8, 4)):
    seen = np.asarray(seen)

    def summed(order, seen=seen):
      total = np.zeros(SHAPE, "f4")
      for rank in order:
        total = total + seen[rank]
      return total / np.float32(8)

    np.testing.assert_array_equal(mean, summed(range(8)))
    assert (summed(range(8)) != summed(range(7, -1, -1))).any()


def test_weighted_values_are_rounded_before_the_sum():
  """Rounds to 23 bits exactly as numpy does, without fused multiply-adds."""
  for mean, seen in gathered(results(8, 4, weighted=True)):
    total, weight = np.zeros(SHAPE, "f4"), np.float32(0)
    for rank in range(8):
      bits = (WEIGHTS[rank] * np.asarray(seen)[rank]).view("u4")
      rounded = (bits + ((bits >> 1) & 1)) & ~np.uint32(1)
      total = total + rounded.view("f4")
      weight = weight + WEIGHTS[rank]
    np.testing.assert_array_equal(mean, total * (1 / weight))


def test_equal_weights_change_no_bit():
  for value in (1, 2):
    found = program(8, 4, weighted=True)(draw(8), np.full(8, value, "f4"))
    for wire, (mean, _) in found.items():
      np.testing.assert_array_equal(mean, results(8, 4)[wire][0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_diverged_worker_reaches_the_mean_only_with_a_weight(bad):
  x, f = draw(8), program(8, 4, weighted=True)
  others = np.ones(8, "f4")
  others[2] = 0
  without = f(x, others)
  x[2, 3, 3] = bad
  seen = f(x, np.ones(8, "f4"))
  unseen = f(x, others)
  for wire in SOME:
    assert not np.isfinite(seen[wire][0][3, 3]), wire
    np.testing.assert_array_equal(unseen[wire][0], without[wire][0])
  for mean, _ in f(x, np.zeros(8, "f4")).values():
    assert np.isnan(mean).all()


def test_ranks_round_independently():
  """Equal deltas everywhere: the mean is finer than each worker's rounding."""
  x = np.broadcast_to(draw(1), (8, *SHAPE))
  mean, seen = program(8, 4)(x, WEIGHTS)[
    Wire("e3m0", BLOCK, "all_gather", stochastic=True)
  ]
  assert not (seen == seen[:1]).all()
  assert np.abs(mean - x[0]).mean() < 0.6 * np.abs(seen - x).mean()


@pytest.mark.quick
@pytest.mark.parametrize(("ranks", "devices"), [(8, 8), (8, 2), (4, 1)])
@pytest.mark.parametrize(
  "wire", [e for e in WIRES if not e.stochastic], ids=str
)
def test_sent_bytes_equal_the_formula(wire, ranks, devices):
  axis = Axis("worker", ranks, devices)
  mesh = make_mesh({"worker": axis})
  f = jax.shard_map(
    lambda x: quantize.coded_mean(x, axis, wire)[0], mesh=mesh,
    in_specs=P("worker"), out_specs=P(),
  )
  entries = ledger.collectives(jax.jit(f).lower(draw(ranks)), mesh)
  found = {}
  for c in entries:
    assert c.count == 1
    if c.bytes:
      found[c.dtype] = found.get(c.dtype, 0) + c.bytes
  assert found == quantize.sent_bytes(SIZE, axis, wire)
  if devices == 1:
    assert not found
    return
  if wire.block_codec is None:
    assert [c.kind for c in entries] == ["all_reduce"]
    assert list(found) == [wire.dtype]
    return
  twice = ["all_gather"] * 2
  if wire.route == "all_to_all":
    twice = ["all_to_all"] * 2 + twice
  assert sorted(c.kind for c in entries) == sorted(twice)
  # 210 elements are 14 blocks of 16 (224); each of 8 slices has 2 blocks.
  elements = 224 if wire.route == "all_gather" else 8 * 32 + 32
  bits = {"int8": 8, "fp8": 8, "int4": 4, "e3m0": 4}[wire.codec]
  assert found == {
    "uint8": axis.lanes * elements * bits // 8,
    "float32": axis.lanes * elements // 16 * 4,
  }


@pytest.mark.parametrize(("route", "implementation"), [
  ("all_gather", "tpu_interpret"), ("all_to_all", "reference"),
])
def test_fused_delta_with_feedback_equals_its_definition(route, implementation):
  """Fuses a subtraction, an addition and a roundtrip into one pass."""
  axis = Axis("worker", 2, 2)
  wire = Wire(
    "int4", 256, route, stochastic=True, implementation=(implementation,)
  )
  rng = np.random.default_rng(6)
  anchor, x, residual = (
    rng.normal(size=shape).astype("f4")
    for shape in ((300,), (2, 300), (2, 300))
  )

  def f(anchor, x, residual):
    key = jax.random.key(1)
    mean, left = quantize.coded_mean(
      x, axis, wire, anchor=anchor, residual=residual, key=key
    )
    delta = anchor[None] - x + residual
    seen = quantize.roundtrip(delta, axis, wire, key=key)
    alone, _ = quantize.coded_mean(delta, axis, wire, key=key)
    expected = alone, delta - seen
    return (mean, left), expected

  ours, theirs = jax.jit(jax.shard_map(
    f, mesh=make_mesh({"worker": axis}),
    in_specs=(P(), P("worker"), P("worker")),
    out_specs=((P(), P("worker")),) * 2,
  ))(anchor, x, residual)
  np.testing.assert_array_equal(ours[0], theirs[0])
  np.testing.assert_allclose(ours[1], theirs[1], atol=1e-6)
  assert np.abs(ours[1]).max() > 0.1


@pytest.mark.parametrize("wire", [
  NONE,
  Wire("int8", 256, "all_to_all"),
  Wire("int4", 256),
  Wire("int4", 256, implementation=("tpu_interpret",)),
], ids=str)
def test_outer_step_equals_optax_on_the_mean(wire):
  """Covers the step fused into the decoding pass, and the separate one."""
  axis = Axis("worker", 4, 2)
  rng = np.random.default_rng(3)
  params, momentum = rng.normal(size=(2, 5, 120)).astype("f4")
  x = rng.normal(size=(4, 5, 120)).astype("f4")
  optimizer = optax.sgd(0.7, 0.9, nesterov=True)

  def f(params, momentum, x):
    step = NesterovStep(
      params, momentum, reference.OuterOptions(0.7, 0.9)
    )
    ours, _ = quantize.coded_mean(
      x, axis, wire, anchor=params, epilogue=step
    )
    mean, _ = quantize.coded_mean(x, axis, wire, anchor=params)
    state = optax.tree_utils.tree_set(optimizer.init(params), trace=momentum)
    updates, state = optimizer.update(mean, state)
    theirs = optax.apply_updates(params, updates)
    return ours, (theirs, optax.tree_utils.tree_get(state, "trace"))

  ours, theirs = jax.jit(jax.shard_map(
    f, mesh=make_mesh({"worker": axis}), in_specs=(P(), P(), P("worker")),
    out_specs=P(),
  ))(params, momentum, x)
  for a, b in zip(ours, theirs, strict=True):
    assert a.shape == params.shape
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_error_feedback_loses_no_update():
  """The sum of decoded deltas trails the sum of deltas by one residual."""
  wire, f = Wire("e3m0", BLOCK), program(8, 4)
  deltas, told, residual = 0.0, 0.0, np.zeros((8, *SHAPE), "f4")
  means = 0.0
  for seed in range(30):
    x = draw(8, seed)
    mean, seen = f(x + residual, WEIGHTS)[wire]
    residual = x + residual - np.asarray(seen)
    deltas, told = deltas + x.astype("f8"), told + np.asarray(seen, "f8")
    means = means + np.asarray(mean, "f8")
  np.testing.assert_allclose(told + residual, deltas, atol=1e-4)
  lost = np.abs(means - deltas.mean(0)).max()
  assert 0 < lost <= np.abs(residual).max()


@pytest.mark.quick
@pytest.mark.parametrize("route", ["all_gather", "all_to_all"])
def test_result_does_not_depend_on_lanes_of_another_axis(route):
  """Blocks do not cross the tensor dim: any mesh yields the same bits."""
  # Noise per tensor rank would need a key per tensor lane: nearest here.
  wire = Wire("int4", BLOCK, route)
  x = np.random.default_rng(3).normal(size=(4, 2, 3, 25)).astype("f4")
  found = []
  for workers, tensors in ((1, 1), (2, 2), (4, 1)):
    axes = {
      "worker": Axis("worker", 4, workers), "tensor": Axis("tensor", 2, tensors)
    }
    axis, mesh = axes["worker"], make_mesh(axes)
    f = jax.jit(jax.shard_map(
      lambda x, axis=axis: quantize.coded_mean(x, axis, wire, block_dims=1)[0],
      mesh=mesh, in_specs=P("worker", "tensor"), out_specs=P("tensor"),
    ))
    found.append(np.asarray(f(x)))
    entries = ledger.collectives(f.lower(x), mesh)
    expected = quantize.sent_bytes(
      75, axis, wire, rows=axes["tensor"].lanes
    )
    assert ledger.total(entries) == sum(expected.values())
    assert ledger.total(entries, axis="tensor") == 0
  assert found[0].shape == (2, 3, 25)
  assert np.abs(found[0] - x.mean(0)).max() < 0.4
  for other in found[1:]:
    np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("shape", [(), (1,), (5,)])
@pytest.mark.parametrize("route", ["all_gather", "all_to_all"])
def test_small_leaves(route, shape):
  axis = Axis("worker", 4, 2)
  x = np.random.default_rng(4).normal(size=(4, *shape)).astype("f4")
  f = jax.shard_map(
    lambda x: quantize.coded_mean(x, axis, Wire("int8", 256, route))[0],
    mesh=make_mesh({"worker": axis}), in_specs=P("worker"), out_specs=P(),
  )
  y = jax.jit(f)(x)
  assert y.shape == shape
  np.testing.assert_allclose(y, x.mean(0), atol=0.02)


@pytest.mark.parametrize(("ranks", "devices"), [(1, 1), (4, 2)])
def test_reduce_scatter_is_the_sum_of_the_decoded_slices(ranks, devices):
  """Encodes slice by slice; a single rank sends and rounds nothing."""
  axis, codec = Axis("level", ranks, devices), reference.Codec("int4", BLOCK)
  x = np.random.default_rng(5).normal(size=(ranks, 3, ranks * 20))
  x = x.astype("f4")
  y = jax.jit(jax.shard_map(
    lambda x: quantize.reduce_scatter(x, axis, codec),
    mesh=make_mesh({"level": axis}), in_specs=P("level"),
    out_specs=P("level"),
  ))(x)
  slices = x.reshape(ranks, 3, ranks, 20)
  seen = slices
  if ranks > 1:
    seen = jax.jit(
      lambda x: reference.decode(reference.encode(x, codec), 20, codec)
    )(slices)
    assert (seen != slices).any()
  total = np.zeros((3, ranks, 20), "f4")
  for one in np.asarray(seen):
    total = total + one
  np.testing.assert_array_equal(y, np.moveaxis(total, 1, 0))


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"codec": "int3"}, "none, int8, int4, e3m0, fp8"),
    ({"codec": "int8", "route": "ring"}, "all_gather, all_to_all"),
    ({"dtype": "float16"}, "float32, bfloat16"),
    ({"route": "all_to_all"}, "codec='none'"),
    ({"stochastic": True}, "codec='none'"),
    ({"codec": "int8", "dtype": "bfloat16"}, "sums in float32"),
    ({"codec": "int4", "block": 7}, "even"),
  ],
)
def test_invalid_wire_is_refused(values, message):
  with pytest.raises(ValueError, match=message):
    Wire(**values)


def test_stochastic_rounding_needs_a_key():
  axis = Axis("worker", 1)
  with pytest.raises(ValueError, match="needs a random key"):
    quantize.roundtrip(
      np.ones((1, 4), "f4"), axis, Wire("int8", stochastic=True)
    )


def test_kernels_and_reference_send_equal_bits():
  """Four workers on two devices, two lanes each."""
  axis = Axis("worker", 4, 2)
  x = np.random.default_rng(0).normal(size=(4, 600)).astype("f4")
  results = []
  for name in ("reference", "tpu_interpret"):
    wire = Wire("int4", 256, "all_to_all", True, implementation=(name,))

    def f(x, wire=wire):
      key = jax.random.key(0)
      return (
        quantize.coded_mean(x, axis, wire, key=key)[0],
        quantize.roundtrip(x, axis, wire, key=key),
        quantize.reduce_scatter(
          x, axis, reference.Codec("int4", 256), wire.implementation
        ),
      )

    f = jax.shard_map(
      f, mesh=make_mesh({"worker": axis}), in_specs=P("worker"),
      out_specs=(P(), P("worker"), P("worker")),
    )
    results.append(jax.jit(f)(x))
    # Three in the mean, of deltas and of their means; one; and two in the sum.
    kernels = str(jax.make_jaxpr(f)(x)).count("pallas_call[")
    assert kernels == (6 if name == "tpu_interpret" else 0)
  for a, b in zip(*results, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("wire", [NONE, BF16], ids=str)
def test_uncoded_delta_includes_its_residual(wire):
  """The next residual is the rounding error of the wire's dtype."""
  axis = Axis("worker", 2, 2)
  rng = np.random.default_rng(7)
  anchor, x, residual = (
    rng.normal(size=shape).astype("f4") for shape in ((9,), (2, 9), (2, 9))
  )
  mean, left = jax.jit(jax.shard_map(
    lambda anchor, x, residual: quantize.coded_mean(
      x, axis, wire, anchor=anchor, residual=residual
    ),
    mesh=make_mesh({"worker": axis}), in_specs=(P(), P("worker"), P("worker")),
    out_specs=(P(), P("worker")),
  ))(anchor, x, residual)
  delta = anchor - x + residual
  np.testing.assert_allclose(mean, delta.mean(0), atol=0.05)
  rounded = delta.astype(jax.numpy.dtype(wire.dtype)).astype("f4")
  np.testing.assert_allclose(left, delta - rounded, atol=1e-6)
