"""Matrix of int8 codes, and products of few rows with it on CPUs.

Before a product, XLA:CPU writes the decoded matrix to memory, four bytes per
element, which takes several times as long as the product with a single row. The
product here decodes in registers. Its loops are compiled by numba
(`coded_loops`), and its features are divided between threads (`cpu_calls`).

Shape legend: H = channels, F = features of one rank.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from parallel.kernels.calls import compiles_loops
from parallel.kernels.codec import reference as codec

# Maximum number of elements of a matrix row that share a scale.
BLOCK = 128
# Maximum number of rows of a product that reads the codes. XLA:CPU decodes an
# element in 1.3 ns on two cores. With decoding by XLA, products take 1.9 times
# as long for 64 rows, 1.2 times for 128
# (log/2026-11-28-products-of-few-rows.md).
_MAX_ROWS = 64
# Minimum number of elements of the matrix: for a smaller matrix, the overhead
# of a call exceeds the time of the product.
_MIN_ELEMENTS = 2**18


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodedMatrix:
  """Matrix as int8 codes, with one scale per block of a row.

  jax's functions accept it as an array, and decode it. It has no other methods
  of arrays than those below.

  Attributes:
    encoded: Codes and scales.
    width: Length of a row.
    dtype: Dtype in which the model reads the matrix.

  Example:
    >>> coded = CodedMatrix.encode(jnp.array([[127.0, -1.0, 64.0]]), "float32")
    >>> coded.shape, jnp.multiply(2, coded).tolist()
    ((1, 3), [[254.0, -2.0, 128.0]])
  """

  encoded: codec.Encoded
  width: int = dataclasses.field(metadata={"static": True})
  dtype: str = dataclasses.field(metadata={"static": True})

  @classmethod
  def encode(cls, x: jax.Array, dtype: str) -> "CodedMatrix":
    """Encodes an array ``[..., width]``."""
    width = x.shape[-1]
    return cls(codec.encode(x, _codec(width)), width, dtype)

  def decode(self) -> jax.Array:
    """Returns the array ``[..., width]``."""
    x = codec.decode(self.encoded, self.width, _codec(self.width))
    return x.astype(self.dtype)

  __jax_array__ = decode

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the array."""
    return *self.encoded.payload.shape[:-1], self.width

  def astype(self, dtype: Any) -> "CodedMatrix":
    """Returns the same codes with another ``dtype`` of the decoded matrix."""
    return dataclasses.replace(self, dtype=jnp.dtype(dtype).name)

  def __getitem__(self, index: Any) -> Any:
    """Returns itself for the index ``...``, else decodes and indexes."""
    return self if index is ... else self.decode()[index]

  def product(self, x: jax.Array) -> jax.Array:
    """Multiplies ``[..., H]`` by the matrix ``[1, H, F]`` of one rank.

    Args:
      x: Rows in the dtype of this matrix.

    Returns:
      ``[..., F]``.
    """
    _, channels, width = self.shape
    rows = math.prod(x.shape[:-1])
    if not (
      rows <= _MAX_ROWS
      and channels * width >= _MIN_ELEMENTS
      and channels % 4 == 0
      and x.dtype == jnp.float32
      and compiles_loops()  # imports numba
    ):
      return x @ self.decode()[0]
    # Compiles, or reads numba's cache: only programs with this kernel need it.
    from parallel.kernels import coded_loops, cpu_calls

    strip = coded_loops.STRIP
    y = cpu_calls.call(
      coded_loops.PRODUCT_KERNEL, -(-width // strip), (rows, strip),
      x.reshape(rows, channels),
      *(values[0] for values in self.encoded), vmap_method="sequential",
    )
    y = jnp.moveaxis(y, 0, 1).reshape(rows, -1)[:, :width]
    return y.reshape(*x.shape[:-1], width)


def _codec(width: int) -> codec.Codec:
  """Returns the int8 codec for rows of length ``width``, in even blocks."""
  return codec.Codec("int8", min(BLOCK, width + width % 2))
