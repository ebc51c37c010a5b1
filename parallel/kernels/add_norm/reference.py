"""Residual add and RMSNorm of a stream of two parts: the specification.

The residual stream of a tensor rank has *shared* channels, which are equal on
all ranks, and *private* channels, which differ between ranks. An update is
added to both, with the factor ``private_scale`` for private channels
(sqrt(ranks) in CAAT-Net, arXiv 2506.19645). RMSNorm (Zhang and Sennrich, arXiv
1910.07467) then normalises the whole row of shared and private channels.

Dtypes: the scale, the scaled update and the sum are rounded to the stream's
dtype. Statistics, gain and the products with them are float32; the normalised
row is rounded once.

Shape legend: K = shared channels, P = private channels, H = K + P.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp


class NormOptions(NamedTuple):
  """Static options of the norm kernels.

  Attributes:
    scale: Factor of the private channels' update, representable in the stream's
      dtype; 1 if there are no private channels or no update.
    eps: Constant added to the mean square.
    interpret: Whether the kernels run in the interpreter, on any machine.
  """

  scale: float
  eps: float
  interpret: bool = False


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
  """Implements `api.add_norm` in plain jnp."""
  if d_shared is not None:
    # In the stream's dtype, so that a bfloat16 update remains bfloat16.
    scale = jnp.asarray(private_scale, private.dtype)
    shared = shared + d_shared
    private = private + d_private * scale
  # Statistics are computed from the rounded sum, which the next layer reads.
  squares = sum_of_squares(shared) + sum_of_squares(private)  # [...]
  both = jnp.concatenate([shared, private], axis=-1)
  rstd = lax.rsqrt(squares / both.shape[-1] + eps)[..., None]
  # Fingerprints of recorded programs depend on the order of these operations.
  normed = both.astype(jnp.float32) * rstd
  normed = normed * jnp.expand_dims(gain, range(both.ndim - 1))
  return shared, private, normed.astype(both.dtype)


def sum_of_squares(x: jax.Array) -> jax.Array:
  """Sums the squares of the last dim in float32."""
  x = x.astype(jnp.float32)
  return jnp.sum(x * x, axis=-1)
