"""The draws of ``jax.random.uniform``, inside of kernels.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011) of an element's number, as jax draws with
``jax_threefry_partitionable``: so kernels round as the reference does.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def uniform(
  key_0: jax.Array, key_1: jax.Array, index: jax.Array
) -> jax.Array:
  """float32 in [0, 1), as ``jax.random.uniform(key, shape)`` has it.

  Args:
    key_0: uint32, first word of the key's data.
    key_1: uint32, the second.
    index: uint32, numbers of elements in the flattened ``shape``, which has
      fewer than 2^32.
  """
  keys = (key_0, key_1, key_0 ^ key_1 ^ np.uint32(0x1BD11BDA))
  x, y = jnp.zeros_like(index) + keys[0], index + keys[1]
  for group in range(5):
    for rotation in _ROTATIONS[group % 2]:
      x = x + y
      y = lax.shift_left(y, np.uint32(rotation)) | lax.shift_right_logical(
        y, np.uint32(32 - rotation)
      )
      y = x ^ y
    x = x + keys[(group + 1) % 3]
    y = y + (keys[(group + 2) % 3] + np.uint32(group + 1))
  mantissa = lax.shift_right_logical(x ^ y, np.uint32(9))
  bits = mantissa | np.uint32(0x3F800000)
  return lax.bitcast_convert_type(bits, jnp.float32) - 1.0


def refusal(key: jax.Array, num_elements: int) -> str | None:
  """Why these draws cannot be made here; None: they can."""
  if not jax.config.jax_threefry_partitionable:
    return "jax_threefry_partitionable is off"
  if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    implementation = str(jax.random.key_impl(key))
    if implementation != "threefry2x32":
      return f"random keys of {implementation}: threefry only"
  if num_elements >= 2**32:
    return f"{num_elements} draws: fewer than 2^32"
  return None
