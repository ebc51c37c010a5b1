"""Measured FLOP/s of matrix products, the reference for a model's FLOP/s."""

import functools
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Sides of the matrices by platform: large enough for the full rate, and small
# enough for well under a second.
_MATRIX_SIDES = {"cpu": 512, "gpu": 8192, "tpu": 8192}


@functools.cache
def matmul_rate(mesh: Mesh, dtype: str) -> float:
  """Measures the FLOP/s of square matrix products on all devices at once.

  Args:
    mesh: The devices.
    dtype: The dtype of the operands.

  Returns:
    FLOP/s of all devices together, in the fastest of five measurements.
  """
  devices = mesh.devices.size
  size = _MATRIX_SIDES.get(mesh.devices.flat[0].platform, 4096)
  sharding = NamedSharding(mesh, P(mesh.axis_names))

  def products(x):  # eight products hide the launch overhead
    for _ in range(8):
      # The factor keeps products of ones at one, so that nothing overflows.
      x = jnp.einsum("dij,djk->dik", x, x) * (1.0 / size)
    return x

  ones = jax.jit(
    lambda: jnp.ones((devices, size, size), dtype), out_shardings=sharding
  )
  f = jax.jit(products, in_shardings=sharding, out_shardings=sharding)
  x = ones()
  f(x).block_until_ready()
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    f(x).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return devices * 8 * 2 * size**3 / min(seconds)
