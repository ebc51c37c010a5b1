"""The ledger against programs whose collectives are known."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import pytest

from parallel.xla import ledger


def make_mesh(**sizes):
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
  )


def entries_of(f, mesh, *args, in_specs, out_specs):
  mapped = jax.shard_map(
    f, mesh=mesh, in_specs=in_specs, out_specs=out_specs
  )
  return ledger.collectives(jax.jit(mapped).lower(*args), mesh)


@pytest.mark.quick
def test_every_kind_axis_dtype_and_shape():
  mesh = make_mesh(a=2, b=4, one=1)
  x = jnp.ones((8, 16), jnp.bfloat16)

  def program(x):  # [4, 4] on a device
    y = lax.psum(x, "a")
    z = lax.psum(x.astype(jnp.float32), ("a", "b"))
    scattered = lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True)
    gathered = lax.all_gather(x, "b", axis=0, tiled=True, to="invarying")
    swapped = lax.all_to_all(x, "b", 0, 1, tiled=True)
    moved = lax.ppermute(x, "a", [(0, 1)])
    largest = lax.pmax(x, "b")
    alone = lax.psum(x, "one")
    empty = lax.psum(x[:, :0], "b")
    parts = (y, z, scattered, gathered, swapped, moved, largest, alone, empty)
    return sum(p.astype(jnp.float32).sum() for p in parts)[None, None]

  found = entries_of(
    program, mesh, x, in_specs=P("a", "b"), out_specs=P("a", "b")
  )
  assert [
    (c.kind, c.axes, c.dtype, c.shape, c.reduction, c.bytes) for c in found
  ] == [
    ("all_reduce", ("a",), "bfloat16", (4, 4), "add", 32),
    ("all_reduce", ("a", "b"), "float32", (4, 4), "add", 64),
    ("reduce_scatter", ("b",), "bfloat16", (4, 4), "add", 32),
    ("all_gather", ("b",), "bfloat16", (4, 4), None, 32),
    ("all_to_all", ("b",), "bfloat16", (4, 4), None, 32),
    ("permute", ("a",), "bfloat16", (4, 4), None, 32),
    ("all_reduce", ("b",), "bfloat16", (4, 4), "max", 32),
    ("all_reduce", (), "bfloat16", (4, 4), "add", 0),
    ("all_reduce", ("b",), "bfloat16", (4, 0), "add", 0),
  ]
  assert {c.phase for c in found} == {"forward"}
  wire = {(c.kind, c.axes): c.wire_bytes_ring for c in found if c.bytes}
  assert wire["all_reduce", ("a",)] == 2 * 1 / 2 * 32
  assert wire["all_reduce", ("a", "b")] == 2 * 7 / 8 * 64
  assert wire["all_gather", ("b",)] == 3 * 32
  assert wire["reduce_scatter", ("b",)] == 3 / 4 * 32
  assert wire["permute", ("a",)] == 32


@pytest.mark.quick
def test_loops_multiply_and_an_unknown_trip_count_stays_unknown():
  mesh = make_mesh(a=4)

  def program(x):
    def inner(x, _):
      return lax.pcast(lax.psum(x, "a"), "a", to="varying") * 0.1, None

    def outer(x, _):
      x, _ = lax.scan(inner, x, length=3)
      with jax.named_scope("outer"):
        return lax.ppermute(x, "a", [(i, i ^ 1) for i in range(4)]), None

    x, _ = lax.scan(outer, x, length=5)
    x = lax.fori_loop(2, 9, lambda _, x: lax.pcast(
      lax.pmax(x, "a"), "a", to="varying"), x)
    return lax.while_loop(
      lambda x: lax.psum(x.sum(), "a") < 1e6,
      lambda x: 2 * lax.pcast(lax.psum(x, "a"), "a", to="varying"),
      x,
    )

  found = entries_of(
    program, mesh, jnp.ones((8, 2)), in_specs=P("a"), out_specs=P("a")
  )
  known = [(c.kind, c.reduction, c.count) for c in found
           if c.count is not None]
  assert known == [
    ("all_reduce", "add", 15), ("permute", None, 5), ("all_reduce", "max", 7)
  ]
  assert [c.count for c in found].count(None) == 2
  assert found[1].where == "outer"
  with pytest.raises(ValueError, match="unknown number of times"):
    ledger.total(found)
  assert ledger.total(found, kind="permute") == 5 * 2 * 2 * 4


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("remat", [True, False])
def test_phases(inside, remat):
  mesh = make_mesh(a=4)

  def layer(x, w):
    with jax.named_scope("layer"):
      y = lax.pcast(lax.psum(jnp.sin(x * w), "a"), "a", to="varying")
      return jnp.sin(y) * w, None

  def loss(w, x):
    body = jax.checkpoint(layer) if remat else layer
    x = lax.pcast(x, "a", to="varying")
    return lax.psum(lax.scan(body, x, w)[0].sum(), "a")

  mapped = functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P(None, "a"), P())
  )
  if inside:
    f = mapped(jax.value_and_grad(loss), out_specs=(P(), P(None, "a")))
  else:
    f = jax.value_and_grad(mapped(loss, out_specs=P()))
  lowered = jax.jit(f).lower(jnp.ones((6, 4, 2)), jnp.ones((1, 2)))
  found = [
    c for c in ledger.collectives(lowered, mesh) if c.where == "layer"
  ]
  counts = {
    (phase, rematted): sum(
      c.count for c in ledger.select(found, phase=phase, rematted=rematted)
    )
    for phase in ("forward", "backward")
    for rematted in (False, True)
  }
  assert counts == {
    ("forward", False): 6, ("forward", True): 0,
    ("backward", False): 6, ("backward", True): 6 if remat else 0,
  }


def test_another_mesh_is_an_error():
  mesh = make_mesh(a=4)
  f = jax.shard_map(
    lambda x: lax.psum(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P()
  )
  lowered = jax.jit(f).lower(jnp.ones(4))
  with pytest.raises(ValueError, match="lowered for the meshes"):
    ledger.collectives(lowered, make_mesh(b=2, c=2))


def test_merging_adds_counts():
  mesh = make_mesh(a=4)
  found = entries_of(
    lambda x: lax.psum(x, "a") + lax.psum(2 * x, "a"),
    mesh, jnp.ones(4), in_specs=P("a"), out_specs=P(),
  )
  assert [c.count for c in found] == [1, 1]
  assert [c.count for c in ledger.merge(found)] == [2]
