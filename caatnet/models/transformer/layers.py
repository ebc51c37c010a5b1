"""Rank-local layers, written for one tensor rank and lifted over lanes by vmap.

Nothing here communicates or knows that there are other ranks.

Shape legend: B = batch, T = position, F = features of one rank.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from caatnet.models.transformer.attention import attention


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """Returns ``silu(gate) * up``, ``[..., F]``. Shazeer, arXiv 2002.05202."""
  return jax.nn.silu(gate) * up


def kept(*activations: jax.Array) -> tuple[jax.Array, ...]:
  """Names activations, so that the backward keeps them.

  A partition does not keep slices and other forms of arrays, which might be
  parameters (`parallel.zero.gathered`), but what has a name it keeps.
  """
  return tuple(checkpoint_name(x, "activation") for x in activations)


def rotate(x: jax.Array, base: float) -> jax.Array:
  """Rotates queries or keys by their positions.

  Channel i of the first half of a head is paired with channel i of the second.

  Source: Su et al., "RoFormer", arXiv 2104.09864.

  Args:
    x: ``[B, T, heads, head width]``; the head width is even.
    base: Sets the longest wavelength, about ``2 pi base`` positions.

  Returns:
    An array like x; angles are computed in float32.
  """
  num_positions, half = x.shape[1], x.shape[-1] // 2
  frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  position = jnp.arange(num_positions, dtype=jnp.float32)
  angle = (position[:, None] * frequency)[None, :, None, :]  # [1, T, 1, half]
  cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
  first, second = x[..., :half], x[..., half:]
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


def attend(
  qkv: jax.Array,
  *,
  num_heads: int,
  num_kv_heads: int,
  rope_base: float,
  implementation: str,
) -> jax.Array:
  """Causal self-attention of one rank's heads.

  Args:
    qkv: ``[B, T, (num_heads + 2 num_kv_heads) * head width]``.
    num_heads: Query heads of this rank.
    num_kv_heads: Key/value heads of this rank; divides ``num_heads``.
    rope_base: The base of the rotary wavelengths.
    implementation: How attention is computed: "xla", "cudnn" or "splash".

  Returns:
    ``[B, T, num_heads * head width]``.
  """
  batch, num_positions, _ = qkv.shape
  heads = qkv.reshape(
    batch, num_positions, num_heads + 2 * num_kv_heads, -1
  )
  q, k, v = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=2)
  q, k, v = kept(rotate(q, rope_base), rotate(k, rope_base), v)
  out = attention(q, k, v, implementation)
  return out.reshape(batch, num_positions, -1)
