"""How a table of rows lies in the host's memory, by who reads it.

A GPU's threads read what they address, so rows lie one after another. A TPU's
DMA from the host's memory addresses blocks of 8 x 256 words (smaller ones do
not compile: LOG.md), so rows are padded to a divisor or a multiple of a block,
and a row is fetched with its whole block. What that costs is `waste`.
"""

import numpy as np

# Words of 4 bytes in a block that a TPU's DMA can address.
BLOCK = (8, 256)
_WORDS = BLOCK[0] * BLOCK[1]


def padded_width(width: int) -> int:
  """Returns the words of a row in blocks, at least ``width``."""
  if width > _WORDS:
    return -(-width // _WORDS) * _WORDS
  return 1 << (width - 1).bit_length()


def waste(width: int, kind: str) -> float:
  """Returns the bytes that cross the link for each useful byte.

  Args:
    width: F, the float32 features of a row.
    kind: "tpu" for blocks; other kernels and the reference fetch rows alone.
  """
  if kind != "tpu":
    return 1.0
  return max(padded_width(width), _WORDS) / width


def stored_shape(num_rows: int, width: int, kind: str) -> tuple[int, ...]:
  """Returns the shape of a table as `stored` lays it out.

  Args:
    num_rows: N.
    width: F, the float32 features of a row.
    kind: "tpu", "gpu" or "reference".
  """
  if kind == "gpu":
    return (num_rows * width,)
  if kind != "tpu":
    return num_rows, width
  return -(-num_rows * padded_width(width) // _WORDS), *BLOCK


def stored(rows: np.ndarray, kind: str) -> np.ndarray:
  """Lays a table out for an implementation, without a copy where it can.

  Args:
    rows: float32 ``[N, F]``.
    kind: "tpu", "gpu" or "reference".

  Returns:
    ``[blocks, 8, 256]`` for TPUs, where a row of more than a block takes
    several; ``[N * F]`` for GPUs; else the rows.
  """
  shape = stored_shape(*rows.shape, kind)
  if kind == "tpu":
    width = padded_width(rows.shape[1])
    short = shape[0] * _WORDS // width - len(rows)  # rows that fill it up
    if short or width != rows.shape[1]:
      rows = np.pad(rows, ((0, short), (0, width - rows.shape[1])))
  return rows.reshape(shape)
