"""Orders of pages: their shapes, and keys and values written and read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel.kernels.codec.reference import Codec, max_error
from parallel.kernels.paged_attention import order
from tests import users


@pytest.mark.parametrize("name", order.NAMES)
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_written_keys_and_values_are_read_back(name, stored):
  """Codes are within the codec's error bound; other slots are unchanged."""
  n, k, d, page = 6, 2, 32, 8
  rng = np.random.default_rng(0)
  before = jax.tree.map(
    lambda x: jnp.ones(x.shape, x.dtype),
    order.shapes(name, n, page, k, d, stored),
  )
  slots = np.array([5, -1, 17, n * page, 30, -n * page, 47, 10**6])
  keys, values = (
    jnp.asarray(rng.normal(size=(slots.size, k, d)), "f4") for _ in range(2)
  )
  after = jax.jit(order.write)(before, keys, values, jnp.asarray(slots))
  assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, before)
  table = jnp.arange(n)
  inside = np.flatnonzero((slots >= 0) & (slots < n * page))
  bound = max_error(Codec("int8", block=d)) if stored == "int8" else 2.0**-8
  for new, old, x in zip(
    order.read(after, table), order.read(before, table), (keys, values),
    strict=True,
  ):
    assert new.shape == (k, n * page, d)
    x = np.asarray(x).swapaxes(0, 1)[:, inside]
    error = np.abs(np.asarray(new, "f4")[:, slots[inside]] - x)
    assert (error <= bound * np.abs(x).max(-1, keepdims=True)).all()
    others = np.setdiff1d(np.arange(n * page), slots[inside])
    np.testing.assert_array_equal(new[:, others], old[:, others])


@pytest.mark.parametrize("name", order.NAMES)
def test_pages_are_written_in_place(name):
  """No layer of a loop allocates a copy of the pages."""
  layers, n, page, k, d = 3, 64, 8, 2, 64
  types = order.shapes(name, layers * n, page, k, d, "float32")
  tokens = jax.ShapeDtypeStruct((4, k, d), "float32")
  slots = jax.ShapeDtypeStruct((4,), "int32")

  def step(pages, keys, values, slots):
    def layer(pages, i):
      return order.write(pages, keys, values, slots + i * n * page), None

    return jax.lax.scan(layer, pages, jnp.arange(layers))[0]

  program = users.compiled(jax.jit(step, donate_argnums=0).lower(
    types, tokens, tokens, slots
  )).memory_analysis()
  total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(types))
  assert program.alias_size_in_bytes == total
  assert program.temp_size_in_bytes < total / 10


@pytest.mark.quick
@pytest.mark.parametrize(("name", "pages", "shape", "scale"), [
  ("heads", (3, 16, 2, 64), (2, 3, 16, 64), (2, 3, 1, 16)),
  ("packed", (3, 16, 2, 64), (2, 3, 8, 128), (2, 3, 2, 8)),
  ("packed", (3, 16, 2, 96), (2, 3, 16, 96), (2, 3, 1, 16)),
  ("packed", (3, 16, 2, 256), (2, 3, 16, 256), (2, 3, 1, 16)),
  ("interleaved", (3, 16, 2, 64), (3, 16, 4, 64), (3, 16, 4)),
])
def test_pages_have_the_shapes_of_their_order(name, pages, shape, scale):
  num_pages, page_size, heads, width = pages
  for dtype in ("bfloat16", "int8"):
    found = order.shapes(name, *pages, dtype)
    assert {x.shape for x in found.data} == {shape}
    assert len(found.data) == (1 if name == "interleaved" else 2)
    assert {x.shape for x in found.scales} == ({scale} & {
      scale if dtype == "int8" else None
    })
    assert found.coded == (dtype == "int8")
    assert (found.num_pages, found.page_size) == (num_pages, page_size)
    assert (found.num_kv_heads, found.head_width) == (heads, width)
