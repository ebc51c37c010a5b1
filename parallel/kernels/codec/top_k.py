"""The largest elements of each chunk of a vector, at two bits each.

Source: SparseLoCo, arXiv 2508.15706; the paper's levels are not specified to
us, ours are described in `encode_top_k`.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from parallel.kernels.codec.reference import in_blocks


class EncodedTopK(NamedTuple):
  """The largest elements of each chunk.

  Attributes:
    indices: uint16 ``[..., chunks, k]``, positions in the chunk, ascending.
    codes: uint8 ``[..., chunks, k / 4]``, two bits per element: 1 for the
      upper of the two magnitudes, 2 for the sign. Byte i holds the elements
      i, i + k / 4, i + k / 2, i + 3 k / 4, the first in its lowest bits.
    scales: float32 ``[..., chunks, 2]``, the lower and the upper magnitude.
  """

  indices: jax.Array
  codes: jax.Array
  scales: jax.Array


def encode_top_k(
  x: jax.Array, chunk: int = 4096, k: int = 64
) -> EncodedTopK:
  """Keeps the k elements of largest magnitude of each chunk, at two bits each.

  The kept elements of a chunk are ordered by magnitude (among equals the
  earlier is the larger). Each of the upper k / 2 becomes their mean magnitude
  with its own sign, each of the lower k / 2 theirs; so the sum of kept
  magnitudes is preserved. A zero that is kept because a chunk has fewer than k
  others counts as positive.

  Args:
    x: ``[..., n]``, padded with zeros to whole chunks; taken as float32.
    chunk: Elements per chunk, at most 65536.
    k: Elements kept per chunk; a multiple of 4, at most ``chunk``.

  Returns:
    Positions, codes and magnitudes. Both magnitudes are NaN where the chunk
    holds an infinity or a NaN.

  Raises:
    ValueError: A chunk or a k that the format cannot hold.
  """
  if not 1 <= chunk <= 65536:
    raise ValueError(
      f"top-k chunk={chunk} must lie in [1, 65536]: positions are uint16"
    )
  if not 4 <= k <= chunk or k % 4:
    raise ValueError(
      f"top-k k={k} must be a multiple of 4 (four codes share a byte) in "
      f"[4, chunk={chunk}]"
    )
  chunks = in_blocks(x.astype(jnp.float32), chunk)
  magnitude, position = lax.top_k(jnp.abs(chunks), k)
  halves = magnitude.reshape(*magnitude.shape[:-1], 2, k // 2)
  scales = jnp.flip(jnp.mean(halves, axis=-1), axis=-1)
  # A NaN sorts above everything, so what is not finite is among the kept.
  finite = jnp.all(jnp.isfinite(magnitude), axis=-1, keepdims=True)
  upper = (jnp.arange(k) < k // 2).astype(jnp.int32)
  negative = jnp.take_along_axis(chunks, position, axis=-1) < 0
  codes = upper + 2 * negative
  order = jnp.argsort(position, axis=-1)
  position = jnp.take_along_axis(position, order, axis=-1)
  codes = jnp.take_along_axis(codes, order, axis=-1).astype(jnp.uint8)
  a, b, c, d = jnp.split(codes, 4, axis=-1)
  return EncodedTopK(
    position.astype(jnp.uint16),
    a | (b << 2) | (c << 4) | (d << 6),
    jnp.where(finite, scales, jnp.nan),
  )


def decode_top_k(
  encoded: EncodedTopK, n: int, chunk: int = 4096
) -> jax.Array:
  """The vector of kept elements, zero elsewhere.

  Args:
    encoded: What `encode_top_k` made of ``[..., n]``.
    n: Elements without padding.
    chunk: As encoded.

  Returns:
    float32 ``[..., n]``. In a chunk that held an infinity or a NaN the kept
    elements are NaN.
  """
  indices, packed, scales = encoded
  codes = jnp.concatenate(
    [(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1
  )
  magnitude = jnp.where((codes & 1) > 0, scales[..., 1:], scales[..., :1])
  values = jnp.where((codes & 2) > 0, -magnitude, magnitude)
  dense = jnp.put_along_axis(
    jnp.zeros((*scales.shape[:-1], chunk)),
    indices.astype(jnp.int32),
    values,
    axis=-1,
    inplace=False,
  )
  return dense.reshape(*scales.shape[:-2], -1)[..., :n]
