"""Residual add and RMSNorm of a stream of two parts: the specification.

A stream has *shared* channels, equal on all tensor ranks, and *private* ones,
a rank's own. An update is added to both, its private part times
``private_scale`` (sqrt(ranks) in CAAT-Net, arXiv 2506.19645); then the whole
row is normalised (Zhang and Sennrich, arXiv 1910.07467).

Dtypes: the scale, the scaled update and the sum are rounded to the stream's
dtype; statistics, gain and the product with them are float32, rounded once.

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
    shared: ``[..., K]``; K or P may be 0.
    private: ``[..., P]``, of the same dtype.
    d_shared: ``[..., K]``; None: no update.
    d_private: ``[..., P]``; None with ``d_shared``.
    gain: float32 ``[H]``.
    private_scale: Multiplies ``d_private``.
    eps: Added to the mean square.

  Returns:
    The new shared and private channels, and ``[..., H]``: the normalised row.
  """
  if d_shared is not None:
    scale = jnp.asarray(private_scale, private.dtype)
    shared = shared + d_shared
    private = private + d_private * scale
  squares = sum_of_squares(shared) + sum_of_squares(private)
  both = jnp.concatenate([shared, private], axis=-1)
  rstd = lax.rsqrt(squares / both.shape[-1] + eps)
  normed = (both * rstd[..., None] * gain).astype(both.dtype)
  return shared, private, normed


def sum_of_squares(x: jax.Array) -> jax.Array:
  """Over the last dim, in float32."""
  x = x.astype(jnp.float32)
  return jnp.sum(x * x, axis=-1)
