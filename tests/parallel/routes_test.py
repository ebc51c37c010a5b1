"""Routes of an all-reduce over a mesh axis."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.axes import Axis, make_mesh
from parallel.routes import ROUTES


def summed(route, x):
  """Returns each device's result ``[n, ...]`` of summands ``[n, ...]``."""
  n = len(x)
  return np.asarray(jax.jit(jax.shard_map(
    lambda x: ROUTES[route](x[0], "tensor")[None], check_vma=False,
    mesh=make_mesh({"tensor": Axis("tensor", n, n)}), in_specs=P("tensor"),
    out_specs=P("tensor"),
  ))(x).astype("f4"))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5, 4), (3, 6, 1), (5, 7, 2)],
                         ids=str)
def test_route_computes_the_sum_on_every_device(route, shape):
  """Integers add exactly in any order; rows need not divide by devices."""
  x = np.random.default_rng(0).integers(-99, 99, shape).astype("f4")
  found = summed(route, x)
  assert found.shape == shape
  for one in found:
    np.testing.assert_array_equal(one, x.sum(0))


@pytest.mark.parametrize("route", ROUTES)
def test_all_devices_hold_the_same_bits(route):
  x = np.random.default_rng(1).normal(size=(6, 11, 3)).astype("f4")
  found = summed(route, x)
  for one in found[1:]:
    np.testing.assert_array_equal(one, found[0])
  np.testing.assert_allclose(found[0], x.sum(0), rtol=0, atol=1e-5)


def test_one_shot_rounds_once():
  """In bfloat16, 1 + 2^-9 rounds to 1, but 1 + 3 * 2^-9 to 1 + 2^-7."""
  x = jnp.asarray([[[1.0]], [[2.0**-9]], [[2.0**-9]], [[2.0**-9]]], "bfloat16")
  assert summed("one_shot", x).ravel().tolist() == [1 + 2.0**-7] * 4


def test_one_shot_adds_short_integers_as_integers():
  """Overflow wraps as in a psum, without a detour through float32."""
  x = np.full((3, 2, 1), 100, "i1")
  for route in ("psum", "one_shot"):
    assert summed(route, x).ravel().tolist() == [300 - 256] * 6
