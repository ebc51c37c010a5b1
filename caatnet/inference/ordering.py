"""Sums and thresholds of float32 that do not depend on batch size or padding.

Shape legend: S = sequences.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from parallel.collectives import varying, varying_axes

# The sign bit of a float32, which the bisection in `find_largest_float` tries
# first.
_TOP_BIT = np.uint32(1 << 31)


def varying_as(x: jax.Array, *others: jax.Array) -> jax.Array:
  """Casts ``x`` to vary over every mesh axis that another array varies over."""
  return varying(x, *frozenset().union(*map(varying_axes, others)))


def float_to_ordered_bits(x: jax.Array) -> jax.Array:
  """Maps float32 to uint32, preserving the order."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  return jnp.where(bits >= _TOP_BIT, ~bits, bits | _TOP_BIT)


def find_largest_float(
  holds: Callable[[jax.Array], jax.Array], like: jax.Array
) -> jax.Array:
  """Returns for each sequence the largest float32 that satisfies a condition.

  Args:
    holds: Returns for each sequence, bool ``[S]``, whether a value satisfies
      the condition; values are uint32 ``[S, 1]``, mapped by
      `float_to_ordered_bits`. The condition is monotone: if it holds for a
      value, it holds for all smaller ones. It holds for -inf.
    like: float32 ``[S]``; the result has its shape and varying mesh axes.
  """

  # Bisection from the highest bit: a bit is set if the condition still holds.
  def with_bit(i, keys):
    higher = keys | lax.shift_right_logical(_TOP_BIT, i.astype(jnp.uint32))
    return jnp.where(holds(higher[:, None]), higher, keys)

  zeros = varying_as(jnp.zeros(like.shape, jnp.uint32), like)
  keys = lax.fori_loop(0, 32, with_bit, zeros)
  bits = jnp.where(keys >= _TOP_BIT, keys ^ _TOP_BIT, ~keys)
  return lax.bitcast_convert_type(bits, jnp.float32)


def ordered_sum(x: jax.Array) -> jax.Array:
  """Sums ``[..., n]`` over n in an order that trailing zeros do not change.

  A compiler may order a reduction differently for each batch size, and the
  padding of the vocabulary depends on the number of ranks.
  """
  size = x.shape[-1]
  width = 1 << (size - 1).bit_length()
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - size)])
  while width > 1:
    width //= 2
    x = x[..., :width] + x[..., width:]
  return x[..., 0]
