"""The local half of a one-shot partial all-reduce: the specification.

In a one-shot all-reduce every rank sends its partial sum of the shared channels
to every other rank. What is left to each device is to sum these r arrays, to
add the sum and the private update to the residual stream, and to normalise
(``add_norm``).

The partial sums come in a floating-point dtype, or in int8 with one float32
scale per ``block`` channels (``codec``), where an element is ``scale * code``.
They are added in float32, in the order of the ranks, so that the sum is the
same on all devices. It is rounded once, to the stream's dtype.

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
  """Specifies `api.reduce_add_norm`, whose operands it takes."""
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
