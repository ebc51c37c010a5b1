"""The local half of a one-shot partial all-reduce: the specification.

Every rank has sent its partial sum of the shared channels to every other. What
is left on a device: sum the r partial blocks, add sum and private update to the
residual stream, normalise (``add_norm``).

Blocks come as they are, or in int8 with one float32 scale per ``block``
channels (``codec``): then an element is ``scale * code``. They are summed in
float32, in the order of the ranks, and rounded to the stream's dtype once.

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
  """Sums partial updates of shared channels, adds, normalises.

  Args:
    shared: ``[..., K]``, the stream.
    private: ``[..., P]``, of the same dtype; P may be 0.
    partial: ``[r, ..., K]``, int8 with scales.
    scales: float32 ``[r, ..., K / block]``; None: blocks come as they are.
      Encoded blocks are constants: no derivative goes through them.
    d_private: ``[..., P]``.
    gain: float32 ``[H]``.
    private_scale: Multiplies ``d_private``.
    eps: Added to the mean square.

  Returns:
    The new shared and private channels, and ``[..., H]``: the normalised row.
  """
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
