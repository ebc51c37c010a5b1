"""How fast the devices multiply matrices: the yardstick for a model's rate."""

import functools
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Large enough to reach the rate, small enough to take well under a second.
_SIZE = {"cpu": 1024, "gpu": 8192, "tpu": 8192}


@functools.cache
def matmul_rate(mesh: Mesh, dtype: str, repeats: int = 5) -> float:
  """FLOP/s of square products, all devices of the mesh at once; asked once.

  Args:
    mesh: The devices.
    dtype: Of the operands.
    repeats: Measurements; the fastest counts.

  Returns:
    FLOP/s in all.
  """
  devices = mesh.devices.size
  size = _SIZE.get(mesh.devices.flat[0].platform, 4096)
  sharding = NamedSharding(mesh, P(mesh.axis_names))

  def products(x):  # eight in a row hide the launch
    for _ in range(8):
      x = jnp.einsum("dij,djk->dik", x, x) * (1.0 / size)
    return x

  ones = jax.jit(
    lambda: jnp.ones((devices, size, size), dtype), out_shardings=sharding
  )
  f = jax.jit(products, in_shardings=sharding, out_shardings=sharding)
  x = ones()
  f(x).block_until_ready()
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    f(x).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return devices * 8 * 2 * size**3 / min(seconds)
