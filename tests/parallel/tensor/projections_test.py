"""Column- and row-parallel projections, without a model."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.axes import Axis, make_mesh
from parallel.ledger import ledger
from parallel.routes import ROUTES
from parallel.tensor import reductions
from parallel.tensor.partial_sync import PROJECTION_ROUTES, PartialSync
from parallel.tensor.projections import column_parallel, row_parallel
from parallel.tensor.stream import Stream, enter
from tests import pairwise, users

H, F, BATCH, LENGTH = 20, 6, 2, 3
# Weighs every channel of [R, B, T, H] differently.
CHANNEL_WEIGHTS = np.cos(np.arange(H, dtype="f4"))[None, None, None]
SPECS = {"gain": P(), "w_in": P("tensor"), "w_out": P("tensor")}


def draw(ranks, features=F):
  rng = np.random.default_rng(0)
  shapes = {"gain": (H,), "w_in": (ranks, H, features),
            "w_out": (ranks, features, H)}
  params = {k: rng.normal(size=s).astype("f4") for k, s in shapes.items()}
  return params, rng.normal(size=(BATCH, LENGTH, H)).astype("f4")


def streams(params, x, axis, syncs, implementation="reference"):
  """Applies MLP blocks; ``[R, B, T, H]`` of this device's lanes."""
  gain, w_in, w_out = params["gain"], params["w_in"], params["w_out"]
  options = {"implementation": implementation}
  x = enter(x, axis, syncs[0])
  for sync in syncs:
    x, y = column_parallel(x, gain, w_in, **options)
    x = x + row_parallel(jnp.tanh(y), w_out, axis, sync, **options)
  return x.per_rank()


def on_mesh(f, ranks, devices, out_specs):
  axis = Axis("tensor", ranks, devices)
  mesh = make_mesh({"tensor": axis})
  return jax.shard_map(
    functools.partial(f, axis=axis),
    mesh=mesh,
    in_specs=(SPECS, P()),
    out_specs=out_specs,
  ), mesh


def oracle(params, x, ranks, syncs):
  """Computes whole streams ``x``, one per rank, without collectives."""
  x = jnp.stack([x] * ranks)
  for sync in syncs:
    k = int(sync.p * H)
    rstd = 1 / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    normed = x * rstd * params["gain"][None, None, None]
    y = jnp.tanh(jnp.einsum("rbth,rhf->rbtf", normed, params["w_in"]))
    y = jnp.einsum("rbtf,rfh->rbth", y, params["w_out"])
    total = jnp.broadcast_to(y.sum(0), y.shape)
    scale = np.sqrt(ranks) if sync.private_scale == "forward" else 1
    x = x + jnp.concatenate([total[..., :k], float(scale) * y[..., k:]], -1)
  return x


FRACTIONS = [(1.0, 1.0), (0.5, 0.5), (0.29, 0.8), (0.0, 0.0)]
PLACES = [(1, 1), (4, 2), (8, 1), (8, 4), (8, 8)]


@pytest.mark.quick
@pytest.mark.parametrize(
  ("fractions", "ranks", "devices", "inside", "features"),
  # All fractions in all positions; each of both with both gradients.
  [(fractions, *place, (i + j) % 2 == 1, F)
   for i, fractions in enumerate(FRACTIONS) for j, place in enumerate(PLACES)]
  # The third block reads a stream that an update of the second has narrowed.
  + [((1.0, 0.5, 0.5), 4, 2, False, F),
     # More features than channels: lanes normalise their streams.
     ((0.5, 0.29), 8, 2, True, H + 1), ((0.0, 0.0), 4, 1, False, H + 1)],
)
def test_projections_equal_the_per_rank_oracle(
  fractions, ranks, devices, inside, features
):
  scales = "forward", "none", "forward"
  syncs = list(map(PartialSync, fractions, scales))
  params, x = draw(ranks, features)

  def loss(y):  # weighs every rank and channel differently
    return (y * CHANNEL_WEIGHTS).sum()

  def ours(params, x, axis):
    return jax.lax.psum(loss(streams(params, x, axis, syncs)), "tensor")

  if inside:
    f, _ = on_mesh(
      lambda params, x, axis: jax.value_and_grad(ours, (0, 1))(
        params, x, axis
      ),
      ranks, devices, (P(), (SPECS, P())),
    )
  else:
    f = jax.value_and_grad(on_mesh(ours, ranks, devices, P())[0], (0, 1))
  expected = jax.value_and_grad(
    lambda params, x: loss(oracle(params, x, ranks, syncs)), (0, 1)
  )
  ours, theirs = jax.jit(f)(params, x), jax.jit(expected)(params, x)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.quick
@pytest.mark.parametrize(
  ("route", "overlap", "devices"),
  # All routes on all devices; each of both with and without overlap.
  [(route, (i + j) % 2 == 0, devices)
   for i, route in enumerate(ROUTES)
   for j, devices in enumerate([1, 3, 6])],  # 6 rows: 3 and 6 need padding
)
def test_route_equals_psum(route, overlap, devices):
  params, x = draw(6)
  results = []
  for sync in (PartialSync(0.5), PartialSync(0.5, route=route,
                                             overlap=overlap)):

    def ours(params, x, axis, sync=sync):
      y = streams(params, x, axis, [sync] * 2)
      return jax.lax.psum((y * CHANNEL_WEIGHTS).sum(), "tensor")

    f, _ = on_mesh(ours, 6, devices, P())
    results.append(jax.jit(jax.value_and_grad(f, (0, 1)))(params, x))
  for a, b in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
  ("route", "kinds"),
  [
    # Six rows are padded to 8 and, for the bidirectional ring, to 16.
    ("psum", {"all_reduce": 6}),
    ("scatter_gather", {"reduce_scatter": 8, "all_gather": 1}),
    ("ring", {"permute": 2 * 2 * 7}),
    ("one_shot", {"all_gather": 6}),
  ],
)
def test_bytes_of_each_route(route, kinds):
  params, x = draw(8)
  f, mesh = on_mesh(
    functools.partial(streams, syncs=[PartialSync(0.5, route=route)]),
    8, 8, P("tensor"),
  )
  found = {}
  for c in ledger.collectives(jax.jit(f).lower(params, x), mesh):
    found[c.kind] = found.get(c.kind, 0) + c.bytes
  assert found == {kind: rows * 4 * H // 2 for kind, rows in kinds.items()}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("devices", [2, 8])  # one device has a single copy
def test_shared_channels_are_bitwise_equal_and_private_ones_differ(
  devices, route
):
  params, x = draw(8)
  f, _ = on_mesh(
    functools.partial(streams, syncs=[PartialSync(0.5, route=route)] * 2),
    8, devices, P("tensor"),
  )
  y = np.asarray(jax.jit(f)(params, x))
  for rank in range(1, 8):
    np.testing.assert_array_equal(y[0, ..., :10], y[rank, ..., :10])
    assert (y[0, ..., 10:] != y[rank, ..., 10:]).all()


def test_row_parallel_derivative_is_its_transpose():
  """Checks sum_m <w_m, F(y)_m> = sum_m <F^T(w)_m, y_m>."""
  rng = np.random.default_rng(2)
  y, w = rng.normal(size=(2, 8, BATCH, LENGTH, H)).astype("f4")
  eye = np.broadcast_to(np.eye(H, dtype="f4"), (8, H, H))
  axis = Axis("tensor", 8, 4)

  def projection(y, eye):
    zero = Stream(jnp.zeros(y.shape[1:]), jnp.zeros((*y.shape[:-1], 0)))
    update = row_parallel(y, eye, axis, PartialSync(0.3))
    return (zero + update).per_rank()

  f = jax.jit(jax.shard_map(
    projection, mesh=make_mesh({"tensor": axis}), in_specs=(P("tensor"),) * 2,
    out_specs=P("tensor"),
  ))
  out, transpose = jax.vjp(lambda y: f(y, eye), y)
  k = int(0.3 * H)
  expected = np.concatenate(
    [np.broadcast_to(w[..., :k].sum(0), w[..., :k].shape),
     np.sqrt(8) * w[..., k:]], -1
  )
  np.testing.assert_allclose(transpose(jnp.asarray(w))[0], expected, rtol=1e-5)
  np.testing.assert_allclose(
    (w * out).sum(), (expected * y).sum(), rtol=1e-4
  )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("forward", [None, "float32"])
@pytest.mark.parametrize("backward", [None, "float32"])
def test_forward_and_backward_reduce_in_their_dtypes(dtype, forward, backward):
  syncs = [PartialSync(0.5, "forward", forward, backward)] * 2
  params, x = draw(8)

  def loss(params, x, axis):
    y = streams(params, x.astype(dtype), axis, syncs)
    return jax.lax.psum(y.astype(jnp.float32).sum(), "tensor")

  f, mesh = on_mesh(loss, 8, 8, P())
  entries = ledger.collectives(jax.jit(jax.grad(f, (0, 1))).lower(
      params, x
    ), mesh)
  projections = [c for c in entries if c.shape == (BATCH, LENGTH, H // 2)]
  for phase, wanted in (("forward", forward), ("backward", backward)):
    found = {c.dtype for c in projections if c.phase == phase}
    assert found == {wanted or dtype}
  entry = [c for c in entries if c.where == "stack_entry"]
  assert [(c.shape, c.dtype) for c in entry] == [
    ((BATCH, LENGTH, H), backward or dtype)
  ]


@pytest.mark.parametrize(
  ("ranks", "devices", "fractions"),
  [
    (2, 2, (0.8, 0.29)),
    (2, 2, (1.0, 1.0)),
    (4, 2, (0.5, 0.5)),  # two streams per device: the reference
    (4, 2, (1.0, 0.5)),  # from the first private channel on
  ],
)
def test_kernels_equal_the_reference(ranks, devices, fractions):
  params, x = draw(ranks)
  syncs = [PartialSync(p) for p in fractions]

  def ours(params, x, axis, implementation):
    y = streams(params, x, axis, syncs, implementation)
    return jax.lax.psum((y * CHANNEL_WEIGHTS).sum(), "tensor")

  results = []
  for implementation in ("tpu_interpret", "reference"):
    f, _ = on_mesh(
      functools.partial(ours, implementation=implementation),
      ranks, devices, P(),
    )
    f = jax.jit(jax.value_and_grad(f, (0, 1)))
    uses = "add_norm" in str(f.trace(params, x).jaxpr)
    one_stream = ranks == devices or fractions[0] == 1.0
    assert uses == (implementation == "tpu_interpret" and one_stream)
    results.append(f(params, x))
  for a, b in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.rotated
@pytest.mark.parametrize(
  ("route", "ranks", "devices", "fractions", "dtype", "kernel"),
  [
    ("one_shot", 2, 2, (0.8, 0.5, 0.8, 0.5), "bfloat16", "reduce_add_norm"),
    ("one_shot", 4, 4, (1.0, 1.0, 1.0), "float32", "reduce_add_norm"),
    ("one_shot", 4, 2, (0.5, 0.5, 0.5), "float32", None),  # two streams
    ("ring_kernel", 2, 2, (0.5, 0.5, 0.5), "float32",
     "ring_partial_all_reduce"),
    ("ring_kernel", 2, 2, (1.0, 1.0, 1.0), "float32", None),
    ("ring_kernel", 4, 2, (0.5, 0.5, 0.5), "float32", None),
  ],
)
def test_kernels_of_routes_equal_psum(
  route, ranks, devices, fractions, dtype, kernel
):
  """Shared channels are also bitwise equal on all devices."""
  params, _ = draw(ranks)
  x = np.random.default_rng(1).normal(size=(4, 8, H)).astype("f4")
  x = jnp.asarray(x, dtype)

  def run(params, x, axis, syncs, implementation):
    def loss(params, x):
      y = streams(params, x, axis, syncs, implementation)
      weighted = y.astype("float32") * CHANNEL_WEIGHTS
      return jax.lax.psum(weighted.sum(), "tensor"), y

    (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return y, grads

  results = []
  for route_, kernels in (
    (route, ("tpu_interpret", "reference")), ("psum", "reference")
  ):
    syncs = [PartialSync(p, route=route_) for p in fractions]
    f, _ = on_mesh(
      functools.partial(run, syncs=syncs, implementation=kernels),
      ranks, devices, (P("tensor"), (SPECS, P())),
    )
    f = jax.jit(f)
    text = str(f.trace(params, x).jaxpr)
    for name in ("reduce_add_norm", "ring_partial_all_reduce"):
      assert (f"name={name}" in text) == (name == kernel and route_ == route)
    results.append(f(params, x))
  y = np.asarray(results[0][0], "f4")
  shared = int(min(fractions) * H)
  for other in y[1:]:
    np.testing.assert_array_equal(y[0, ..., :shared], other[..., :shared])
  unit = 2.0**-6 if dtype == "bfloat16" else 1e-5
  for a, b in zip(*map(jax.tree.leaves, results), strict=True):
    a, b = np.asarray(a, "f4"), np.asarray(b, "f4")
    assert np.linalg.norm(a - b) <= unit * np.linalg.norm(b)


def test_kernel_is_chosen_by_the_number_of_channels():
  """A kernel has a largest width, but any number of rows."""
  params, _ = draw(2)
  f, _ = on_mesh(
    functools.partial(
      streams, syncs=[PartialSync(0.5, route="one_shot")] * 2,
      implementation=("tpu_interpret", "reference"),
    ), 2, 2, P("tensor"),
  )
  x = jax.ShapeDtypeStruct((2**16, 1, H), "float32")
  assert "name=reduce_add_norm" in str(jax.jit(f).trace(params, x).jaxpr)


TABLE = pairwise.rows(
  {
    "route": tuple(PROJECTION_ROUTES), "ranks": (2, 4),
    "fractions": ((0.8, 0.29, 0.8), (1.0, 0.5, 1.0)), "kernels": (True, False),
    "dtype": ("bfloat16", "float32"), "forward": (None, "float32"),
    "backward": ("float32", "bfloat16"), "overlap": (False, True),
  },
  # The kernel reduces in the dtype of the stream.
  lambda row: row["route"] == "ring_kernel" and row["forward"] is not None
  and row["dtype"] == "bfloat16",
)


@pytest.mark.rotated
@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
def test_options_together_reduce_as_the_oracle_in_their_dtypes(row):
  """Two devices with one or two lanes; also gradients."""
  dtype, ranks = row["dtype"], row["ranks"]
  syncs = [
    PartialSync(
      p, "forward", row["forward"], row["backward"], row["overlap"],
      row["route"],
    ) for p in row["fractions"]
  ]
  params, _ = draw(ranks)
  params["w_in"] /= 4  # so that few features are saturated
  x = np.random.default_rng(1).normal(size=(4, 16, H)).astype("f4")
  kernels = ("tpu_interpret", "reference") if row["kernels"] else "reference"

  def loss(y):
    return (y.astype(jnp.float32) * CHANNEL_WEIGHTS).sum()

  def ours(params, x, axis):
    y = streams(params, x.astype(dtype), axis, syncs, kernels)
    return jax.lax.psum(loss(y), "tensor"), y

  f, mesh = on_mesh(
    lambda *args, axis: jax.value_and_grad(ours, (0, 1), has_aux=True)(
      *args, axis
    ), ranks, 2, ((P(), P("tensor")), (SPECS, P())),
  )
  lowered = jax.jit(f).lower(params, x)
  found = {"forward": set(), "backward": set()}
  for c in ledger.collectives(lowered, mesh):
    if np.prod(c.shape) > H and c.where != "stack_entry":  # no gain or loss
      found[c.phase].add(c.dtype)
  # With ring_kernel, no kernel takes the fully shared projections, as here.
  assert found == {
    "forward": {row["forward"] or dtype}, "backward": {row["backward"]}
  }
  (_, y), grads = lowered.compile()(params, x)
  (_, expected), theirs = jax.value_and_grad(
    lambda *args: (lambda y: (loss(y), y))(oracle(*args, ranks, syncs)), (0, 1),
    has_aux=True,
  )(params, x)
  shared = int(min(row["fractions"]) * H)
  for other in np.asarray(y[1:], "f4"):
    np.testing.assert_array_equal(
      np.asarray(y[0, ..., :shared], "f4"), other[..., :shared]
    )
  narrow = "bfloat16" in (dtype, row["backward"])
  for a, b in zip(
    jax.tree.leaves((y, grads)), jax.tree.leaves((expected, theirs)),
    strict=True,
  ):
    a, b = np.asarray(a, "f4"), np.asarray(b, "f4")
    unit = 2.0**-5 if narrow else 1e-5
    assert np.linalg.norm(a - b) <= unit * np.linalg.norm(b)


def test_ring_kernel_adds_in_the_dtype_of_the_stream():
  params, x = draw(2)
  sync = PartialSync(0.5, forward_dtype="bfloat16", route="ring_kernel")
  f, _ = on_mesh(
    functools.partial(streams, syncs=[sync] * 2), 2, 2, P("tensor")
  )
  with pytest.raises(ValueError, match="forward_dtype='bfloat16' must be ''"):
    jax.jit(f).lower(params, x)


def test_bidirectional_ring_uses_both_directions():
  """Half of the rows is sent to the next device, half to the previous one."""
  f = jax.jit(jax.shard_map(
    lambda x: ROUTES["ring"](x, "tensor"),
    mesh=make_mesh({"tensor": Axis("tensor", 4, 4)}), in_specs=P("tensor"),
    out_specs=P("tensor"),
  ))
  text = f.lower(np.ones((4, 8, 2), "f4")).as_text()
  steps = re.findall(r"source_target_pairs = dense<\[\[0, (\d)\]", text)
  assert sorted(steps) == ["1"] * 6 + ["3"] * 6


def reduced(dtype, sync, weigh):
  """Sums four ranks' draws in `dtype`; returns program, draws and result."""
  y = np.random.default_rng(2).normal(size=(4, 2, 3, H)).astype("f4")
  y = jnp.asarray(y, dtype)
  f = jax.jit(jax.shard_map(
    lambda y: weigh(
      lambda y: reductions.sum_over_ranks(y[0], "tensor", sync)[None], y
    ),
    mesh=make_mesh({"tensor": Axis("tensor", 4, 4)}), in_specs=P("tensor"),
    out_specs=P("tensor"),
  ))
  return f.lower(y).as_text(), y, f(y)


def forward(f, y):
  return f(y)


def backward(f, y):
  """Applies the transpose of f to the draws as cotangents."""
  _, transpose = jax.vjp(f, y)
  return transpose(y)[0]


@pytest.mark.parametrize(("dtype", "sent"), [
  ("float32", "bfloat16"), ("bfloat16", "float32"),
  ("float32", "float32"), ("bfloat16", "bfloat16"),
])
@pytest.mark.parametrize("way", [forward, backward])
def test_sum_is_rounded_once_to_the_narrower_dtype(dtype, sent, way):
  """The dtypes of forward and backward are independent."""
  dtypes = {"forward_dtype": None, "backward_dtype": None}
  dtypes[f"{way.__name__}_dtype"] = sent
  text, y, found = reduced(dtype, PartialSync(**dtypes), way)
  assert found.dtype == dtype
  short = {"float32": "f32", "bfloat16": "bf16"}
  operands = re.findall(r"all_reduce.*?\}\) : \(tensor<[\dx]*x(\w+)>\)", text,
                        re.DOTALL)
  assert set(operands) == {short[sent]}
  # The sum is rounded to the narrower of the two dtypes before the cast, so
  # that no compiler can move the cast to the other side of the reduction.
  rounded = re.findall(r"reduce_precision.*format = (\w+)", text)
  assert rounded == (["e8m7"] if sent != dtype else [])
  total = np.asarray(y.astype(sent), "f4").sum(0)
  unit = 2.0**-8 if "bfloat16" in (dtype, sent) else 1e-6
  for rank in np.asarray(found, "f4"):
    np.testing.assert_allclose(
      rank, total, rtol=0, atol=3 * unit * np.abs(total).max()
    )
  if (dtype, sent) == ("bfloat16", "float32"):  # rounded once, at the end
    np.testing.assert_array_equal(
      found[0], jnp.asarray(total).astype("bfloat16")
    )


def test_one_device_neither_sends_nor_rounds():
  y = np.random.default_rng(0).normal(size=(2, 3, H)).astype("f4")
  sync = PartialSync(forward_dtype="bfloat16", backward_dtype="bfloat16")
  f = jax.jit(jax.shard_map(
    lambda y: reductions.sum_over_ranks(y, "tensor", sync),
    mesh=make_mesh({"tensor": Axis("tensor", 4, 1)}), in_specs=P("tensor"),
    out_specs=P("tensor"),
  ))
  assert "all_reduce" not in f.lower(y).as_text()
  found, transpose = jax.vjp(f, y)
  np.testing.assert_array_equal(found, y)
  np.testing.assert_array_equal(transpose(found)[0], y)


@pytest.mark.parametrize(("overlap", "products"), [
  ({}, 1), ({"overlap": False}, 1), ({"overlap": True}, 2),
])
def test_overlap_computes_shared_columns_in_a_separate_product(
  overlap, products
):
  params, _ = draw(2)

  def projection(params, x, axis):
    y = row_parallel(x, params["w_out"], axis, PartialSync(0.5, **overlap))
    return y.shared + 0 * y.private.sum()

  f, _ = on_mesh(
    lambda params, x, axis: projection(
      params, jnp.ones((1, BATCH, LENGTH, F)) * x.sum(), axis
    )[None], 2, 2, P("tensor"),
  )
  text = jax.jit(f).lower(params, np.ones((BATCH, LENGTH, H), "f4")).as_text()
  assert text.count("stablehlo.dot_general") == products


def test_bfloat16_products_on_cpus_copy_no_weights_to_float32():
  def loss(x, w, axis):
    x = Stream(x, jnp.zeros((1, *x.shape[:-1], 0), x.dtype))
    _, y = column_parallel(x, jnp.ones(32), w)
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))

  axis = Axis("tensor", 1)
  gradient = jax.shard_map(
    functools.partial(jax.grad(loss), axis=axis),
    mesh=make_mesh({"tensor": axis}), in_specs=(P(), P("tensor")),
    out_specs=P(),
  )
  operands = (jnp.ones(shape, "bfloat16") for shape in ((2, 32, 32),
                                                        (1, 32, 48)))
  text = users.compiled(jax.jit(gradient).lower(*operands)).as_text()
  assert "bf16[32,48]" in text
  assert "f32[32,48]" not in text
