"""Codecs of whole models: a float32 vector as bytes, and back.

Uplinks carry the updates of clients and downlinks the differences between
revisions, both as one vector of all parameters. The codes are those of
`parallel.kernels.codec`: blocks of 256 elements with one float32 scale, or the
largest elements of each chunk.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import numpy as np

from parallel.kernels.codec import reference, top_k
from parallel.kernels.codec.reference import Codec, Encoded

BLOCK = 256
CHUNK = 4096
NAMES = ("none", "int8", "int4", "e3m0", "sparse")


class VectorCodec(Protocol):
  """Codec of vectors."""

  def encode(self, x: np.ndarray, key: jax.Array) -> bytes:
    """Returns the coded vector.

    Args:
      x: float32 ``[n]``.
      key: Random key of stochastic rounding.
    """
    ...

  def decode(self, data: bytes, n: int) -> np.ndarray:
    """Returns the float32 ``[n]`` vector.

    Raises:
      ValueError: The data has another size than a vector of n elements.
    """
    ...


@dataclasses.dataclass(frozen=True)
class Plain:
  """Codec without compression: each element is four bytes of float32."""

  def encode(self, x: np.ndarray, key: jax.Array) -> bytes:
    del key
    return np.asarray(x, "<f4").tobytes()

  def decode(self, data: bytes, n: int) -> np.ndarray:
    return _split(data, [("<f4", n)])[0]


@dataclasses.dataclass(frozen=True)
class Blocks:
  """Block codec: codes, then scales.

  Attributes:
    codec: Number format, block and rounding.
  """

  codec: Codec

  def encode(self, x: np.ndarray, key: jax.Array) -> bytes:
    payload, scales = _encode_blocks(x, key, self.codec)
    return np.asarray(payload).tobytes() + np.asarray(scales).tobytes()

  def decode(self, data: bytes, n: int) -> np.ndarray:
    payload, scales = _split(data, [
      ("u1", self.codec.payload_bytes(n)), ("<f4", self.codec.num_scales(n)),
    ])
    return np.asarray(_decode_blocks(Encoded(payload, scales), n, self.codec))


@dataclasses.dataclass(frozen=True)
class Sparse:
  """Codec of each chunk's k largest elements: positions, codes, magnitudes.

  Attributes:
    chunk: Elements per chunk.
    k: Elements that are kept of each chunk, a multiple of 4.
  """

  chunk: int
  k: int

  def __post_init__(self) -> None:
    if not 4 <= self.k <= self.chunk <= 65536 or self.k % 4:
      raise ValueError(
        f"top_k={self.k} must be a multiple of 4 in [4, chunk={self.chunk}]"
      )

  def encode(self, x: np.ndarray, key: jax.Array) -> bytes:
    del key
    parts = _encode_sparse(x, self.chunk, self.k)
    return b"".join(np.asarray(part).tobytes() for part in parts)

  def decode(self, data: bytes, n: int) -> np.ndarray:
    chunks = -(-n // self.chunk)
    indices, codes, scales = _split(data, [
      ("<u2", chunks * self.k), ("u1", chunks * self.k // 4),
      ("<f4", chunks * 2),
    ])
    # Positions are untrusted, and one beyond the chunk would be clipped.
    if indices.size and int(indices.max()) >= self.chunk:
      raise ValueError(
        f"a position of the coded vector must be below chunk={self.chunk}"
      )
    return np.asarray(_decode_sparse(
      top_k.EncodedTopK(
        indices.reshape(chunks, -1), codes.reshape(chunks, -1),
        scales.reshape(chunks, 2),
      ),
      n, self.chunk,
    ))


def make(name: str, stochastic: bool = False, k: int = 64) -> VectorCodec:
  """Returns the codec with a given name.

  Args:
    name: One of `NAMES`.
    stochastic: Whether block codecs round at random, without bias.
    k: Elements that "sparse" keeps of each 4,096.

  Example:
    >>> x = np.float32([1.0, -0.5, 0.25, 0.0])
    >>> codec = make("e3m0")
    >>> data = codec.encode(x, jax.random.key(0))
    >>> codec.decode(data, 4).tolist()  # powers of two are exact
    [1.0, -0.5, 0.25, 0.0]
    >>> len(data)  # one block of 256 codes of 4 bits, and its scale
    132
  """
  if name == "none":
    return Plain()
  if name == "sparse":
    return Sparse(CHUNK, k)
  return Blocks(Codec(name, BLOCK, stochastic))


@functools.partial(jax.jit, static_argnums=2)
def _encode_blocks(x: jax.Array, key: jax.Array, codec: Codec) -> Encoded:
  return reference.encode(x, codec, key)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _decode_blocks(encoded: Encoded, n: int, codec: Codec) -> jax.Array:
  return reference.decode(encoded, n, codec)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _encode_sparse(x: jax.Array, chunk: int, k: int) -> top_k.EncodedTopK:
  return top_k.encode_top_k(x, chunk, k)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _decode_sparse(
  encoded: top_k.EncodedTopK, n: int, chunk: int
) -> jax.Array:
  return top_k.decode_top_k(encoded, n, chunk)


def _split(data: bytes, parts: list[tuple[str, int]]) -> list[np.ndarray]:
  """Cuts bytes into arrays, each with a given dtype and number of elements."""
  expected = sum(np.dtype(dtype).itemsize * n for dtype, n in parts)
  if len(data) != expected:
    raise ValueError(
      f"the coded vector has {len(data):,} bytes; it must have {expected:,}"
    )
  found, place = [], 0
  for dtype, n in parts:
    found.append(np.frombuffer(data, dtype, n, place))
    place += np.dtype(dtype).itemsize * n
  return found
