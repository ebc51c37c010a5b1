"""Shared helpers of the kernels."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel.axes import Axis, make_mesh
from parallel.kernels import calls


@pytest.mark.parametrize("fitting", [*range(1, 40), 1000])
def test_blocks_are_whole_tiles_or_all_rows(fitting):
  """Mosaic accepts no other blocks, and a bfloat16 tile has 16 rows."""
  row_bytes = calls.MAX_BLOCK_VMEM_BYTES // fitting
  for num_rows in (1, 5, 8, 13, 15, 16, 20, 33, 64, 2000):
    rows = calls.rows_per_block(num_rows, row_bytes)
    assert rows in (0, num_rows) or rows % 16 == 0
    assert rows * row_bytes <= calls.MAX_BLOCK_VMEM_BYTES
    assert bool(rows) == (fitting >= min(16, num_rows))


def test_unchecked_call_varies_over_the_axes_of_its_operands():
  """A psum of its result therefore adds up the devices' results."""
  mesh = make_mesh({"a": Axis("a", 2, 2), "b": Axis("b", 2, 2)})
  x = jnp.arange(12.0).reshape(4, 3)
  w = jnp.arange(3.0)[None]

  def body(x, w):
    out = calls.call_unchecked(lambda x, w: jnp.cumsum(x * w, axis=-1), x, w)
    return out, jax.lax.psum(out, "b")

  each, total = jax.jit(jax.shard_map(
    body, mesh=mesh, in_specs=(P(("a", "b")), P()),
    out_specs=(P(("a", "b")), P("a")),
  ))(x, w)
  theirs = np.cumsum(x * w, axis=-1)
  np.testing.assert_array_equal(each, theirs)
  np.testing.assert_array_equal(total, theirs.reshape(2, 2, 3).sum(axis=1))


@pytest.mark.quick
def test_rows_and_their_shapes():
  x, y, z = jnp.ones((2, 3, 4)), jnp.ones((2, 3, 0)), jnp.ones((2, 3, 1))
  assert calls.leading_size(x) == 6
  rows = calls.as_rows(x, z)
  assert [r.shape for r in rows] == [(6, 4), (6, 1)]
  back = calls.as_arrays(rows, (x, y, z))
  assert [r.shape for r in back] == [x.shape, y.shape, z.shape]
  sends = calls.KernelSends("data", 3, 5, jnp.bfloat16)
  assert sends.metadata == {
    "sends_over": "data", "messages": "3", "elements": "5", "dtype": "bfloat16"
  }


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_value_is_rounded_as_a_product_of_its_dtype(dtype):
  x = jnp.asarray(np.random.default_rng(0).normal(size=50), dtype)
  scale = float(np.asarray(3**0.5, dtype))
  found = calls.scaled(x.astype("float32"), scale, dtype)
  assert found.dtype == "float32"
  wanted = x * jnp.asarray(scale, dtype)
  np.testing.assert_array_equal(found, wanted.astype("float32"))
  assert calls.scaled(found, 1.0, dtype) is found
