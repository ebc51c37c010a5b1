"""Layers of one tensor rank, mapped over a device's ranks by `jax.vmap`.

No function here communicates or depends on the number of ranks.

Shape legend: B = batch, T = position, F = features of one rank, D = head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from caatnet.models.lm.layers import name_activations
from caatnet.models.transformer.attention import attention
from caatnet.models.transformer.positions import Scaling, rotate


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
  """Normalises the last dim by its root mean square, in float32.

  This norm is for queries and keys of one rank. The residual stream is
  normalised by `parallel.tensor.projections.column_parallel`.

  Args:
    x: ``[..., D]``.
    gain: ``[D]``.
    eps: Epsilon that is added to the mean square.

  Returns:
    An array with the shape and dtype of x.
  """
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  normed = wide * jax.lax.rsqrt(mean_square + eps)
  return (normed * jnp.expand_dims(gain, range(x.ndim - 1))).astype(x.dtype)


class AttentionConfig(NamedTuple):
  """Sizes and constants of one rank's attention.

  Attributes:
    num_queries: Number of query heads of this rank.
    num_keys: Number of key/value heads of this rank; divides ``num_queries``.
    rope_base: The base of the rotary wavelengths.
    rope_scaling: Scaling of rotary frequencies for longer contexts, or None.
    window: Sliding window in positions, including the query's position; 0 for
      full causal attention.
    eps: Epsilon of the norms of queries and keys.
  """

  num_queries: int
  num_keys: int
  rope_base: float
  rope_scaling: Scaling | None = None
  window: int = 0
  eps: float = 1e-5


class QkvParams(NamedTuple):
  """Optional biases and gains of queries, keys and values.

  Attributes:
    bias: One rank's biases ``[(num_queries + 2 num_keys) D]``, or None.
    query_gain: Gain ``[D]`` of the norm of each query head, or None.
    key_gain: Gain ``[D]`` of the norm of each key head, or None.
  """

  bias: jax.Array | None = None
  query_gain: jax.Array | None = None
  key_gain: jax.Array | None = None


def split_heads(
  qkv: jax.Array,
  heads: AttentionConfig,
  params: QkvParams,
  positions: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Splits products into heads, and rotates queries and keys.

  Args:
    qkv: ``[B, T, (num_queries + 2 num_keys) * D]``, one rank's products.
    heads: Sizes of one rank's attention.
    params: Biases, and gains of the norms of queries and keys.
    positions: int ``[B, T]``; None for 0 to T - 1.

  Returns:
    Queries ``[B, T, num_queries, D]``; keys and values ``[B, T, num_keys, D]``.
  """
  if params.bias is not None:
    qkv = qkv + params.bias.astype(qkv.dtype)[None, None]
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
  qkv: jax.Array, params: QkvParams, heads: AttentionConfig, implementation: str
) -> jax.Array:
  """Returns causal self-attention of one rank's heads over whole sequences.

  Args:
    qkv: ``[B, T, (num_queries + 2 num_keys) * D]``, one rank's products.
    params: Biases, and gains of the norms of queries and keys.
    heads: Sizes of one rank's attention.
    implementation: "xla", "cudnn" or "splash", see `attention.attention`.

  Returns:
    ``[B, T, num_queries * D]``.
  """
  q, k, v = name_activations(*split_heads(qkv, heads, params))
  out = attention(q, k, v, implementation, heads.window)
  return out.reshape(*qkv.shape[:-1], -1)
