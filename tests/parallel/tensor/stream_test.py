"""Residual streams and products of lanes, on one device."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.axes import Axis, make_mesh
from parallel.collectives import varying_axes
from parallel.tensor import products, projections
from parallel.tensor.partial_sync import PartialSync
from parallel.tensor.projections import column_parallel, row_parallel
from parallel.tensor.stream import PendingReduction, Stream, Update, enter

LANES, BATCH, LENGTH, WIDTH, FEATURES = 3, 2, 4, 7, 5


def draw(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype("f4")


def stream(num_shared, seed=0, lanes=LANES, kind=Stream):
  shared = draw(BATCH, LENGTH, num_shared, seed=seed)
  private = draw(lanes, BATCH, LENGTH, WIDTH - num_shared, seed=seed + 1)
  return kind(jnp.asarray(shared), jnp.asarray(private))


def whole(x):
  """Returns each lane's channels, ``[R, B, T, H]``."""
  return np.stack([
    np.concatenate([x.shared, private], axis=-1) for private in x.private
  ])


@pytest.mark.parametrize(("before", "after"), [(7, 4), (5, 0), (4, 4), (0, 0)])
def test_narrower_stream_has_the_same_channels(before, after):
  x = stream(before)
  update = stream(3, 5, kind=Update)
  found = (x + update).narrow(after)
  assert found.shared.shape == (BATCH, LENGTH, after)
  assert found.private.shape == (LANES, BATCH, LENGTH, WIDTH - after)
  assert found.width == x.width == WIDTH
  assert found.update is update
  np.testing.assert_array_equal(whole(found), whole(x))
  np.testing.assert_array_equal(x.per_rank(), whole(x))


@pytest.mark.parametrize("k", [0, 3, 6])
def test_updates_of_other_fractions_are_added(k):
  """The number of shared channels only decreases."""
  x, first, second = stream(5), stream(k, 2, kind=Update), stream(
    2, 4, kind=Update
  )
  found = x + first
  assert (found.update, found.is_pending) == (first, False)
  assert found.resolved().update is None
  np.testing.assert_allclose(
    whole(found.resolved()), whole(x) + whole(first), rtol=1e-6
  )
  more = found + second
  assert more.shared.shape[-1] == min(5, k)
  assert more.resolved().shared.shape[-1] == min(5, k, 2)
  np.testing.assert_allclose(
    whole(more.resolved()), whole(x) + whole(first) + whole(second), rtol=1e-5,
    atol=1e-6,
  )
  a, b = x.narrow_both(second)
  assert (a.shared.shape[-1], b.shared.shape[-1]) == (2, 2)
  np.testing.assert_array_equal(whole(b), whole(second))
  places = jnp.array([2, 0])
  np.testing.assert_allclose(
    whole(found.take(places)), (whole(x) + whole(first))[:, :, places],
    rtol=1e-6,
  )


def test_update_is_pending_until_it_is_reduced():
  axis, sync = Axis("tensor", 4, 4), PartialSync(0.5)
  pending = Update(jnp.ones((1, 2, 3)), jnp.ones((1, 1, 2, 4)),
                   PendingReduction(axis, sync))
  assert (stream(3, lanes=1) + pending).is_pending
  assert not stream(3).is_pending
  plain = stream(3, kind=Update)
  assert plain.reduced() is plain


@pytest.mark.parametrize("lanes", [1, LANES])
def test_products_of_lanes_are_those_of_their_matrices(lanes):
  x, y = draw(BATCH, LENGTH, WIDTH), draw(lanes, BATCH, LENGTH, FEATURES)
  columns = draw(lanes, WIDTH, FEATURES, seed=1)
  rows = draw(lanes, FEATURES, WIDTH, seed=2)
  np.testing.assert_allclose(
    projections._multiply_all_columns(x, columns),
    np.einsum("bth,rhf->rbtf", x, columns), rtol=1e-4, atol=1e-5,
  )
  np.testing.assert_allclose(
    projections._multiply_all_rows(y, rows),
    np.einsum("rbtf,rfh->bth", y, rows), rtol=1e-4, atol=1e-5,
  )


@pytest.mark.parametrize(("product", "theirs", "shapes"), [
  (products.product_per_rank, lambda x, w: jnp.einsum("rbth,rhf->rbtf", x, w),
   ((LANES, BATCH, LENGTH, WIDTH), (LANES, WIDTH, FEATURES))),
  (products.multiply, jnp.multiply,
   ((LANES, BATCH, LENGTH, FEATURES), (LANES, BATCH, LENGTH, 1))),
])
def test_derivatives_by_hand_equal_those_of_jax(product, theirs, shapes):
  operands = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
  out, transpose = jax.vjp(product, *operands)
  expected, other = jax.vjp(theirs, *operands)
  cotangent = draw(*out.shape, seed=5)
  for a, b in zip(
    (out, *transpose(cotangent)), (expected, *other(cotangent)), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_split_keeps_the_order_of_channels(k):
  x = stream(3, lanes=1)
  shared, private = projections._split_at(x, k)
  assert (shared.shape[-1], private.shape[-1]) == (k, WIDTH - k)
  np.testing.assert_array_equal(
    np.concatenate([shared, private], -1), whole(x)[0]
  )


@pytest.mark.parametrize("eps", [1e-5, 2.0])
@pytest.mark.parametrize(("lanes", "k"), [(1, 3), (LANES, 3), (LANES, 7)])
def test_norm_uses_the_given_epsilon(lanes, k, eps):
  x, gain = stream(k, lanes=lanes), draw(WIDTH, seed=7)
  w = draw(lanes, WIDTH, FEATURES, seed=8)
  _, y = column_parallel(x, gain, w, eps=eps)
  full = whole(x)
  normed = full / np.sqrt((full**2).mean(-1, keepdims=True) + eps) * gain
  expected = np.einsum("rbth,rhf->rbtf", normed, w)
  np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-4)
  if eps == 1e-5:
    np.testing.assert_array_equal(column_parallel(x, gain, w)[1], y)


@pytest.mark.parametrize(("width", "pending"), [(8, True), (2**20, False)])
def test_reduction_is_deferred_only_to_a_kernel(width, pending):
  """A stream that is too wide for the kernel is reduced by the projection."""
  axis = Axis("tensor", 4, 4)
  sync = PartialSync(0.5, route="one_shot")
  found = []

  def project(y, w):
    update = row_parallel(y, w, axis, sync, ("tpu_interpret", "reference"))
    found.append(update.pending)
    return update.private

  jax.eval_shape(
    jax.shard_map(
      project, mesh=make_mesh({"tensor": axis}), in_specs=P("tensor"),
      out_specs=P("tensor"),
    ),
    jax.ShapeDtypeStruct((4, 2, 8, 8), "float32"),
    jax.ShapeDtypeStruct((4, 8, width), "float32"),
  )
  assert found == [PendingReduction(axis, sync) if pending else None]


@pytest.mark.parametrize("p", [1.0, 0.5])
def test_parts_of_an_entered_stream_vary_over_the_same_axes(p):
  """A loop over layers carries both parts, so their types are constant."""
  tensor = Axis("tensor", 4, 2)

  def entered(x):
    found = enter(x, tensor, PartialSync(p))
    for part in (found.shared, found.private):
      assert varying_axes(part) == {"tensor"}
    return found.per_rank()

  jax.eval_shape(jax.shard_map(
    entered, mesh=make_mesh({"tensor": tensor}), in_specs=P(),
    out_specs=P("tensor"),
  ), draw(BATCH, LENGTH, WIDTH))
