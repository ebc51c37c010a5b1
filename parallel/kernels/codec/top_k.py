"""Keeps the largest elements of each chunk of a vector, at two bits each.

Source: SparseLoCo, arXiv 2508.15706, which sends kept values in two bits. What
these stand for is a choice made here: a sign, and one of two magnitudes of the
chunk (`encode_top_k`). The authors' public code has four values per tensor
instead (`parallel.outer.sparseloco`).
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from parallel.kernels.codec.reference import in_blocks


class EncodedTopK(NamedTuple):
  """The largest elements of each chunk, as they go over the wire.

  Attributes:
    indices: Positions of the kept elements in their chunk, ascending, uint16
      ``[..., chunks, k]``.
    codes: uint8 ``[..., chunks, k / 4]``, two bits per kept element: bit 0 is
      set for the upper of the two magnitudes, bit 1 for a negative sign. Byte i
      holds the elements i, i + k / 4, i + k / 2 and i + 3 k / 4, the first in
      its lowest bits.
    scales: The lower and the upper magnitude, float32 ``[..., chunks, 2]``.
  """

  indices: jax.Array
  codes: jax.Array
  scales: jax.Array


def encode_top_k(
  x: jax.Array, chunk: int = 4096, k: int = 64
) -> EncodedTopK:
  """Keeps the k elements of largest magnitude of each chunk, at two bits each.

  The kept elements of a chunk are ordered by magnitude, and of equal ones the
  earlier counts as larger. Each of the upper k / 2 keeps its sign and gets the
  mean magnitude of these k / 2; the lower k / 2 likewise get theirs. So the sum
  of the kept magnitudes is preserved. A zero that is kept because a chunk has
  fewer than k other elements counts as positive.

  Args:
    x: What is encoded, ``[..., n]``; cast to float32, and padded with zeros to
      whole chunks.
    chunk: Elements per chunk, at most 65536.
    k: Elements kept per chunk; a multiple of 4, at most ``chunk``.

  Returns:
    Positions, codes and magnitudes. Both magnitudes are NaN where the chunk
    holds an infinity or a NaN.

  Raises:
    ValueError: The format cannot hold such a chunk or such a k.
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
  # Both [..., chunks, k], in descending order of magnitude.
  magnitude, position = lax.top_k(jnp.abs(chunks), k)
  halves = magnitude.reshape(*magnitude.shape[:-1], 2, k // 2)
  # Flipped: the lower magnitude comes first, so that bit 0 of a code selects.
  scales = jnp.flip(jnp.mean(halves, axis=-1), axis=-1)
  # top_k sorts NaN above everything, so if a chunk holds anything that is not
  # finite, it is among the kept elements.
  finite = jnp.all(jnp.isfinite(magnitude), axis=-1, keepdims=True)
  upper = (jnp.arange(k) < k // 2).astype(jnp.int32)
  negative = jnp.take_along_axis(chunks, position, axis=-1) < 0
  codes = upper + 2 * negative
  # On the wire kept elements are in the order of their positions, not of their
  # magnitudes.
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
  """Decodes to the kept elements, with zeros elsewhere.

  Args:
    encoded: What `encode_top_k` made of ``[..., n]``.
    n: Elements of the last dim, without padding.
    chunk: Elements per chunk, as in the call that encoded.

  Returns:
    float32 ``[..., n]``. In a chunk that held an infinity or a NaN the kept
    elements are NaN.
  """
  indices, packed, scales = encoded
  # [..., chunks, k / 4] bytes -> [..., chunks, k] codes
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
