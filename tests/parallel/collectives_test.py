"""Collectives equal their definitions on any assignment of ranks to devices."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel import collectives, routes
from parallel.axes import Axis, make_mesh

N = 8
PAIRS = [(m, (m + 3) % N) for m in range(N) if m != 2]


def permuted(x):
  out = np.zeros_like(x)
  for source, destination in PAIRS:
    out[destination] = x[source]
  return out


# collective -> (call on lanes, definition on [N, ...], whether ranks differ)
VERBS = {
  "all_reduce": (collectives.all_reduce, lambda x: x.sum(0), False),
  "reduce_scatter": (
    lambda x, axis: collectives.reduce_scatter(x, axis, dim=1),
    lambda x: np.stack(np.split(x.sum(0), N, axis=1)),
    True,
  ),
  "all_gather": (
    lambda x, axis: collectives.all_gather(x, axis, dim=1),
    lambda x: np.concatenate(list(x), axis=1),
    False,
  ),
  "all_to_all": (
    lambda x, axis: collectives.all_to_all(
      x, axis, split_dim=1, concat_dim=0
    ),
    lambda x: np.stack(
      [
        np.concatenate([np.split(y, N, axis=1)[m] for y in x], axis=0)
        for m in range(N)
      ]
    ),
    True,
  ),
  "permute": (
    lambda x, axis: collectives.permute(x, axis, PAIRS), permuted, True
  ),
}


def lifted(verb, devices, differ):
  axis = Axis("a", N, devices)
  return jax.shard_map(
    lambda x: verb(x, axis),
    mesh=make_mesh({"a": axis}),
    in_specs=P("a"),
    # The out spec is replicated only if the varying-axes check proves it.
    out_specs=P("a") if differ else P(),
  )


@pytest.mark.quick
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", VERBS)
def test_collective_equals_its_definition(name, devices):
  verb, definition, differ = VERBS[name]
  x = np.random.default_rng(0).integers(-9, 9, (N, 3, 2 * N, 2)).astype("f4")
  y = jax.jit(lifted(verb, devices, differ))(x)
  np.testing.assert_array_equal(y, definition(x))


def test_reduce_scatter_keeps_short_dims_out_of_the_minor_position():
  """XLA:TPU would pad each row of 3 elements to 128 (docs/methods.md)."""
  verb, _, differ = VERBS["reduce_scatter"]
  x = jax.ShapeDtypeStruct((N, 3, N * 128), "float32")
  text = jax.jit(lifted(verb, N, differ)).lower(x).as_text()
  assert {*re.findall(r"x(\d+)xf32>", text)} == {"128", "1024"}


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("name", VERBS)
def test_gradient_is_the_transpose(name, devices):
  """Checks <w, F x> = <F^T w, x>, exactly on small integers."""
  verb, definition, differ = VERBS[name]
  rng = np.random.default_rng(1)
  x = rng.integers(-9, 9, (N, 3, 2 * N, 2)).astype("f4")
  w = rng.integers(-9, 9, definition(x).shape).astype("f4")
  f = lifted(verb, devices, differ)
  transposed = jax.jit(jax.grad(lambda x: (f(x) * w).sum()))(x)
  assert (np.asarray(transposed) * x).sum() == (definition(x) * w).sum()


def test_all_reduce_accepts_another_reduction():
  axis = Axis("a", N, 4)

  def ring(x, name):
    total = x
    for _ in range(3):
      x = jax.lax.ppermute(x, name, [(i, (i + 1) % 4) for i in range(4)])
      total = total + x
    return total[None]

  f = jax.shard_map(
    lambda x: collectives.all_reduce(x, axis, via=ring),
    mesh=make_mesh({"a": axis}),
    in_specs=P("a"),
    out_specs=P("a"),
  )
  x = np.arange(N * 5, dtype="f4").reshape(N, 5)
  for device in np.asarray(jax.jit(f)(x)):
    np.testing.assert_array_equal(device, x.sum(0))


@pytest.mark.parametrize("dim", [0, 1])
def test_other_scatters_and_gathers_act_on_dim_0(dim):
  """The replacement of a collective over the mesh axis works on dim 0 only."""
  axis = Axis("a", N, 4)

  def scatter(x, name):
    return jax.lax.psum_scatter(x, name, scatter_dimension=0, tiled=True)

  def gather(x, name):
    return jax.lax.all_gather(x, name, tiled=True, to="invarying")

  def both(x):
    mine = collectives.reduce_scatter(x, axis, dim=dim, via=scatter)
    return mine, collectives.all_gather(mine, axis, dim=dim, via=gather)

  x = np.random.default_rng(0).integers(-9, 9, (N, 2 * N, N, 3)).astype("f4")
  mine, whole = jax.jit(jax.shard_map(
    both, mesh=make_mesh({"a": axis}), in_specs=P("a"), out_specs=(P("a"), P()),
  ))(x)
  np.testing.assert_array_equal(whole, x.sum(0))
  np.testing.assert_array_equal(
    mine, np.stack(np.split(x.sum(0), N, axis=dim))
  )


@pytest.mark.parametrize("call", [
  lambda x, axis: collectives.reduce_scatter(x, axis),
  lambda x, axis: collectives.all_to_all(x, axis, split_dim=0, concat_dim=0),
  lambda x, axis: collectives.permute(x, axis, []),
], ids=["a reduce-scatter", "an all-to-all", "a permute"])
def test_ranks_in_separate_processes_have_sums_and_gathers_only(call, request):
  axis = Axis("worker", 2, 1, backend=object())
  what = request.node.callspec.id
  with pytest.raises(ValueError, match=f"{what} over the axis 'worker'"):
    call(np.zeros((1, 2), "f4"), axis)


@pytest.mark.parametrize("lanes", [1, 3])
def test_function_of_a_rank_runs_for_each_lane(lanes):
  axis = Axis("a", lanes)

  def f(x, tree):
    assert x.shape == (2,)
    return {"y": x * tree[0]}, tree[0].sum()

  x = np.arange(2.0 * lanes, dtype="f4").reshape(lanes, 2)
  y, total = jax.jit(lambda x: collectives.each_lane(f, axis, x, (x + 1,)))(x)
  np.testing.assert_array_equal(y["y"], x * (x + 1))
  np.testing.assert_array_equal(total, (x + 1).sum(1))


def test_dependency_keeps_values_and_types():
  """Also on NaN and on empty arrays; an int stays invariant over devices."""
  tree = {"a": np.arange(3, dtype="i4"), "b": np.full(2, np.inf, "f4")}
  results = (np.full((2, 2), np.nan, "f4"), np.zeros((2, 0), "f4"),
             np.arange(7, 9, dtype="i4"))
  f = jax.jit(jax.shard_map(
    collectives.order_after, mesh=make_mesh({"a": Axis("a", 2, 2)}),
    in_specs=(P(), P("a")), out_specs=P(),
  ))
  found = f(tree, results)
  for name, x in tree.items():
    assert found[name].dtype == x.dtype
    np.testing.assert_array_equal(found[name], x)
  assert collectives.order_after(tree, results, needed=False) is tree
  # Each result with elements is read.
  assert str(f.trace(tree, results).jaxpr).count("bitcast_convert_type") == 2


@pytest.mark.parametrize("ordered", [False, True])
def test_results_in_turn_keep_values_and_follow_the_tree(ordered):
  """By a barrier that binds both, or by a dependency of the tree."""
  x, y = np.arange(4, dtype="f4"), np.full(2, np.nan, "f4")
  f = jax.jit(jax.shard_map(
    lambda x, y: collectives.order_both({"x": x}, y, ordered),
    mesh=make_mesh({"a": Axis("a", 2, 2)}), in_specs=P("a"), out_specs=P("a"),
  ))
  tree, results = f(x, y)
  np.testing.assert_array_equal(tree["x"], x)
  np.testing.assert_array_equal(results, y)
  text = f.lower(x, y).as_text()
  assert bool(re.search(r"optimization_barrier %\w+, %\w+ ", text)) != ordered
  assert ("bitcast_convert" in text) == ordered


def test_permute_needs_no_communication_within_devices():
  axis = Axis("a", 6, 2)
  inside = [(0, 1), (3, 4), (1, 2)]
  assert collectives.permute_routes(axis, inside) == {
    (0, 1): None, (1, 2): [(0, 0)],
  }
  assert collectives.permute_routes(axis, [(5, 0), (2, 3), (0, 5)]) == {
    (0, 2): [(0, 1)], (2, 0): [(1, 0), (0, 1)],
  }


@pytest.mark.parametrize(
  "pairs", [[(0, 1), (0, 2)], [(0, 1), (2, 1)], [(0, 8)], [(-1, 0)]]
)
def test_permute_refuses_repeated_or_missing_ranks(pairs):
  axis = Axis("a", N, 1)
  with pytest.raises(ValueError, match="appear once"):
    collectives.permute(np.zeros((N, 2), "f4"), axis, pairs)


def test_one_shot_sums_in_rank_order_and_rounds_once():
  """256 + 1 rounds to 256 in bfloat16; integers stay integers."""
  f = jax.jit(jax.shard_map(
    lambda x: routes.sum_by_one_shot(x, "a"),
    mesh=make_mesh({"a": Axis("a", 4, 4)}), in_specs=P("a"), out_specs=P(),
  ))
  x = jnp.asarray([[256.0], [1.0], [-256.0], [2.0**-7]], jnp.bfloat16)
  assert f(x).dtype == jnp.bfloat16
  assert float(f(x)[0, 0]) == 1 + 2.0**-7
  large = jnp.asarray([[1 << 24], [1], [0], [0]])
  assert int(f(large)[0, 0]) == (1 << 24) + 1


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_rank_number_is_its_position(devices):
  axis = Axis("a", N, devices)
  numbers = jax.jit(jax.shard_map(
    lambda: collectives.ranks_here(axis), mesh=make_mesh({"a": axis}),
    in_specs=(), out_specs=P("a"),
  ))()
  np.testing.assert_array_equal(numbers, np.arange(N))


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_permutes_into_the_same_lane_are_merged(devices):
  """Permutes between arbitrary lanes, within and across devices."""
  there = [3, 0, 7, 1, 6, 2, 5, 4]
  x = np.random.default_rng(0).integers(1, 9, (N, 3)).astype("f4")

  def moved(x, axis):
    return collectives.permute(x, axis, list(enumerate(there)))

  expected = np.zeros_like(x)
  expected[there] = x
  found = jax.jit(lifted(moved, devices, True))(x)
  np.testing.assert_array_equal(found, expected)
