"""Rank-local layers, written for one tensor rank and lifted over lanes by vmap.

Nothing here communicates or knows that there are other ranks.

Shape legend: B = batch, T = position, F = features of one rank, D = head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from caatnet.models.lm.layers import kept
from caatnet.models.transformer.attention import attention
from caatnet.models.transformer.positions import Scaling, rotate


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
  """Normalises the last dim by its root mean square, in float32.

  It is for queries and keys of one rank; the residual stream, parts of which
  lie on other ranks, is normalised by its column doors.

  Args:
    x: ``[..., D]``.
    gain: ``[D]``.
    eps: What is added to the mean square.

  Returns:
    An array like x.
  """
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(mean_square + eps) * gain).astype(x.dtype)


class Heads(NamedTuple):
  """What one rank's attention is made of.

  Attributes:
    num_queries: The query heads of this rank.
    num_keys: The key/value heads of this rank; divides ``num_queries``.
    rope_base: The base of the rotary wavelengths.
    rope_scaling: How their frequencies are changed for longer contexts.
    window: How many positions a query sees, its own among them; 0 for all.
    eps: What norms of queries and keys add to the mean square.
  """

  num_queries: int
  num_keys: int
  rope_base: float
  rope_scaling: Scaling | None = None
  window: int = 0
  eps: float = 1e-5


class QkvParams(NamedTuple):
  """What a layer may have besides the matrix of queries, keys and values.

  Attributes:
    bias: One rank's biases ``[(num_queries + 2 num_keys) D]``, or None.
    query_gain: Gain ``[D]`` of the norm of each query head, or None.
    key_gain: The same of each key head.
  """

  bias: jax.Array | None = None
  query_gain: jax.Array | None = None
  key_gain: jax.Array | None = None


def split_heads(
  qkv: jax.Array,
  heads: Heads,
  params: QkvParams,
  positions: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns queries and keys at their positions, and values.

  Args:
    qkv: ``[B, T, (num_queries + 2 num_keys) * D]``, one rank's products.
    heads: How many there are, and how they are rotated.
    params: Biases, and gains of the norms of queries and keys.
    positions: int ``[B, T]``; None for 0 to T - 1.

  Returns:
    ``[B, T, num_queries, D]`` and twice ``[B, T, num_keys, D]``.
  """
  if params.bias is not None:
    qkv = qkv + params.bias.astype(qkv.dtype)
  num_heads = heads.num_queries + 2 * heads.num_keys
  split = qkv.reshape(*qkv.shape[:-1], num_heads, -1)
  q, k, v = jnp.split(
    split, [heads.num_queries, heads.num_queries + heads.num_keys], axis=-2
  )
  if params.query_gain is not None:
    q = rms_norm(q, params.query_gain, heads.eps)
    k = rms_norm(k, params.key_gain, heads.eps)
  base, scaling = heads.rope_base, heads.rope_scaling
  q, k = (rotate(x, base, scaling, positions) for x in (q, k))
  return q, k, v


def attend(
  qkv: jax.Array, params: QkvParams, heads: Heads, implementation: str
) -> jax.Array:
  """Causal self-attention of one rank's heads, from position 0 on.

  Args:
    qkv: ``[B, T, (num_queries + 2 num_keys) * D]``, one rank's products.
    params: Biases, and gains of the norms of queries and keys.
    heads: How many there are, and what they see.
    implementation: How attention is computed: "xla", "cudnn" or "splash".

  Returns:
    ``[B, T, num_queries * D]``.
  """
  q, k, v = kept(*split_heads(qkv, heads, params))
  out = attention(q, k, v, implementation, heads.window)
  return out.reshape(*qkv.shape[:-1], -1)
