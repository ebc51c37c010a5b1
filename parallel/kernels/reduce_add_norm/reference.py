"""Computation after the gather of a one-shot all-reduce: the specification.

In a one-shot all-reduce every rank sends its partial sum of the shared channels
to every other rank. Each device then sums these r arrays, adds the sum and the
private update to the residual stream, and normalises it (``add_norm``).

The partial sums have a floating-point dtype, or are int8 codes with one float32
scale per ``block`` channels (``codec``), where an element is ``scale * code``.
They are added in float32, in the order of the ranks, so that the sums are equal
on all devices. The sum is rounded once, to the stream's dtype.

Shape legend: r = ranks, K = shared channels, P = private channels, H = K + P.
"""

import jax
from jax import lax
import jax.numpy as jnp

from parallel.kernels.add_norm import reference as add_norm


def reduce_add_norm(
  shared: jax.Array,
  private: jax.Array,
  partial: jax.Array,
  scales: jax.Array | None,
  d_private: jax.Array,
  gain: jax.Array,
  *,
  private_scale: float = 1.0,
  eps: float = 1e-5,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Implements `api.reduce_add_norm` in plain jnp."""
  total = jnp.zeros(shared.shape, jnp.float32)
  for rank in range(partial.shape[0]):
    part = partial[rank].astype(jnp.float32)
    if scales is not None:
      scale = lax.stop_gradient(scales[rank])
      block = part.shape[-1] // scale.shape[-1]
      part = part * jnp.repeat(scale, block, axis=-1)
    total = total + part
  return add_norm.add_norm(
    shared, private, total.astype(shared.dtype), d_private, gain,
    private_scale=private_scale, eps=eps,
  )
