"""Top-k codec: the largest elements of each chunk, with two bits each.

Source: SparseLoCo, arXiv 2508.15706, which sends kept values in two bits. The
meaning of the two bits is a choice of this implementation: a sign, and one of
two magnitudes per chunk (`encode_top_k`). The authors' public code has four
values per tensor instead (`parallel.outer.sparseloco`).
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from parallel.kernels.codec.reference import in_blocks


class EncodedTopK(NamedTuple):
  """Encoded largest elements of each chunk.

  Attributes:
    indices: Positions of the kept elements in their chunk, ascending, uint16
      ``[..., chunks, k]``.
    codes: uint8 ``[..., chunks, k / 4]``, two bits per kept element: bit 0 is
      set for the upper of the two magnitudes, bit 1 for a negative sign. Byte i
      holds the elements i, i + k / 4, i + k / 2 and i + 3 k / 4, from the
      lowest bits up.
    scales: Lower and upper magnitude, float32 ``[..., chunks, 2]``.
  """

  indices: jax.Array
  codes: jax.Array
  scales: jax.Array


def encode_top_k(
  x: jax.Array, chunk: int = 4096, k: int = 64
) -> EncodedTopK:
  """Encodes the k elements of largest magnitude of each chunk, 2 bits each.

  The kept elements of a chunk are sorted by magnitude; of equal elements, the
  earlier one ranks higher. The k / 2 largest ones are encoded by their signs
  and mean magnitude, and so are the other k / 2. This preserves the sum of the
  kept magnitudes. A zero, which is kept if a chunk has fewer than k nonzero
  elements, has a positive sign.

  Args:
    x: Array to encode, ``[..., n]``; cast to float32, and padded with zeros to
      whole chunks.
    chunk: Elements per chunk, at most 65536.
    k: Elements kept per chunk; a multiple of 4, at most ``chunk``.

  Returns:
    Positions, codes and magnitudes. Both magnitudes of a chunk that contains an
    infinity or a NaN are NaN.

  Raises:
    ValueError: ``chunk`` or ``k`` is out of range.

  Example:
    >>> x = jnp.array([0.0, 5.0, -1.0, 0.1, 3.0, 0.0, 2.0, 0.2])
    >>> encoded = jax.jit(lambda x: encode_top_k(x, chunk=8, k=4))(x)
    >>> encoded.indices.tolist(), encoded.scales.tolist()
    ([[1, 2, 4, 6]], [[1.5, 4.0]])
    >>> jax.jit(lambda x: decode_top_k(x, n=8, chunk=8))(encoded).tolist()
    [0.0, 4.0, -1.5, 0.0, 4.0, 0.0, 1.5, 0.0]
  """
  if not 1 <= chunk <= 65536:
    raise ValueError(
      f"top-k chunk={chunk} must lie in [1, 65536], since positions are uint16"
    )
  if not 4 <= k <= chunk or k % 4:
    raise ValueError(
      f"top-k k={k} must be a multiple of 4 in [4, chunk={chunk}], since four "
      "codes share a byte"
    )
  chunks = in_blocks(x.astype(jnp.float32), chunk)
  # Both [..., chunks, k], in descending order of magnitude.
  magnitude, position = lax.top_k(jnp.abs(chunks), k)
  halves = magnitude.reshape(*magnitude.shape[:-1], 2, k // 2)
  # Flipped to (lower, upper), so that bit 0 of a code is the index.
  scales = jnp.flip(jnp.mean(halves, axis=-1), axis=-1)
  # top_k sorts NaN above all numbers, so that elements that are not finite are
  # always among the kept ones.
  finite = jnp.all(jnp.isfinite(magnitude), axis=-1, keepdims=True)
  upper = (jnp.arange(k) < k // 2).astype(jnp.int32)
  negative = jnp.take_along_axis(chunks, position, axis=-1) < 0
  upper = jnp.expand_dims(upper, range(negative.ndim - 1))
  codes = upper + 2 * negative.astype(jnp.int32)
  # Kept elements are sent in the order of their positions, not magnitudes.
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
    encoded: Result of `encode_top_k` for an array ``[..., n]``.
    n: Elements of the last dim, without padding.
    chunk: Elements per chunk, as passed to `encode_top_k`.

  Returns:
    float32 ``[..., n]``. The kept elements of a chunk that contained an
    infinity or a NaN are NaN.
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
