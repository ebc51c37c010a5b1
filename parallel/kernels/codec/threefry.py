"""Random numbers in kernels, equal to those of ``jax.random.uniform``.

With ``jax_threefry_partitionable`` jax computes an element's random bits by
Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011) from the key and the element's position alone. Kernels use
the same function, so that stochastic rounding produces the reference's bits.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# Rotations of Threefry-2x32, for alternating groups of four rounds.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def words(
  key_0: jax.Array, key_1: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the 64 random bits of each position as two words.

  Args:
    key_0: First word of the key's data, uint32.
    key_1: Second word of the key's data, uint32.
    index: Positions, uint32 of any shape.

  Returns:
    Two uint32 arrays of the shape of ``index``.
  """
  # Threefry's third key word; the constant is the paper's.
  keys = (key_0, key_1, key_0 ^ key_1 ^ np.uint32(0x1BD11BDA))
  # The plaintext is the 64-bit position, whose high word is zero.
  x, y = jnp.zeros_like(index) + keys[0], index + keys[1]
  for group in range(5):
    for rotation in _ROTATIONS[group % 2]:
      x = x + y
      y = lax.shift_left(y, np.uint32(rotation)) | lax.shift_right_logical(
        y, np.uint32(32 - rotation)
      )
      y = x ^ y
    # Key injection after every four rounds: rotating key words and a counter.
    x = x + keys[(group + 1) % 3]
    y = y + (keys[(group + 2) % 3] + np.uint32(group + 1))
  return x, y


def uniform(
  key_0: jax.Array, key_1: jax.Array, index: jax.Array
) -> jax.Array:
  """Returns elements of ``jax.random.uniform(key, shape)``.

  Args:
    key_0: First word of the key's data, uint32.
    key_1: Second word of the key's data, uint32.
    index: Positions of the elements in the flattened ``shape``, uint32 of any
      shape. ``shape`` has fewer than 2^32 elements.

  Returns:
    float32 in [0, 1), of the shape of ``index``.

  Example:
    >>> key = jax.random.key(0)
    >>> key_0, key_1 = np.asarray(jax.random.key_data(key))
    >>> drawn = jax.jit(uniform)(key_0, key_1, np.arange(4, dtype=np.uint32))
    >>> np.array_equal(drawn, jax.random.uniform(key, [4]))
    True
  """
  x, y = words(key_0, key_1, index)
  # As in jax: 23 random bits are the mantissa of a float in [1, 2).
  mantissa = lax.shift_right_logical(x ^ y, np.uint32(9))
  bits = mantissa | np.uint32(0x3F800000)  # the exponent bits of 1.0
  return lax.bitcast_convert_type(bits, jnp.float32) - 1.0


def refusal(key: jax.Array, num_elements: int) -> str | None:
  """Returns the reason why kernels cannot match jax's numbers, or None.

  Args:
    key: Random key, typed or as its uint32 words.
    num_elements: Number of random numbers.
  """
  if not jax.config.jax_threefry_partitionable:
    return "jax_threefry_partitionable is off"
  if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    implementation = str(jax.random.key_impl(key))
    if implementation != "threefry2x32":
      return f"random keys of {implementation}: threefry only"
  if num_elements >= 2**32:
    return f"{num_elements} draws: fewer than 2^32"
  return None
