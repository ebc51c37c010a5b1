"""Residual add and RMSNorm of a stream of two parts: the specification.

The residual stream of a tensor rank has *shared* channels, which are equal on
all ranks, and *private* channels, which each rank has for itself. An update is
added to both, its private part times ``private_scale`` (sqrt(ranks) in
CAAT-Net, arXiv 2506.19645). Then RMSNorm (Zhang and Sennrich, arXiv 1910.07467)
normalises the whole row of shared and private channels.

Dtypes: the scale, the scaled update and the sum are rounded to the stream's
dtype. Statistics, gain and the products with them are float32 and are rounded
once, to the normalised row.

Shape legend: K = shared channels, P = private channels, H = K + P.
"""

import jax
from jax import lax
import jax.numpy as jnp


def add_norm(
  shared: jax.Array,
  private: jax.Array,
  d_shared: jax.Array | None,
  d_private: jax.Array | None,
  gain: jax.Array,
  *,
  private_scale: float = 1.0,
  eps: float = 1e-5,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Adds an update to a stream and normalises the result.

  Args:
    shared: Shared channels of the stream, ``[..., K]``; K or P may be 0.
    private: Private channels, ``[..., P]``, of the same dtype.
    d_shared: Update of the shared channels, ``[..., K]``; None if the stream is
      only normalised.
    d_private: Update of the private channels, ``[..., P]``; None exactly where
      ``d_shared`` is.
    gain: Gain of the norm, float32 ``[H]``.
    private_scale: Factor of ``d_private``.
    eps: Added to the mean square.

  Returns:
    The new shared channels ``[..., K]``, the new private channels ``[..., P]``
    and the normalised row ``[..., H]``.
  """
  if d_shared is not None:
    # In the stream's dtype, so that a bfloat16 update stays bfloat16.
    scale = jnp.asarray(private_scale, private.dtype)
    shared = shared + d_shared
    private = private + d_private * scale
  # The statistics are those of the rounded sum, which the next layer reads.
  squares = sum_of_squares(shared) + sum_of_squares(private)  # [...]
  both = jnp.concatenate([shared, private], axis=-1)
  rstd = lax.rsqrt(squares / both.shape[-1] + eps)
  normed = (both * rstd[..., None] * gain).astype(both.dtype)
  return shared, private, normed


def sum_of_squares(x: jax.Array) -> jax.Array:
  """Sums the squares of the last dim in float32."""
  x = x.astype(jnp.float32)
  return jnp.sum(x * x, axis=-1)
