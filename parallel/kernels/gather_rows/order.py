"""Layouts of a table in host memory, by the device that reads it.

The threads of a GPU load single elements, so that rows are stored contiguously
without padding. A TPU's DMA from host memory addresses blocks of 8 x 256 words
(smaller ones do not compile: log/2026-11-23-graph-host-reads.md). Rows are
therefore padded to a divisor or a multiple of a block, and a row is fetched
with its whole block. `read_amplification` returns the ratio of fetched to
useful bytes.
"""

import numpy as np

# Words of 4 bytes in a block that a TPU's DMA can address.
DMA_BLOCK = (8, 256)
_BLOCK_WORDS = DMA_BLOCK[0] * DMA_BLOCK[1]


def padded_width(width: int) -> int:
  """Returns the words of a row of ``width`` words after padding, for TPUs."""
  if width > _BLOCK_WORDS:
    return -(-width // _BLOCK_WORDS) * _BLOCK_WORDS
  # The next power of two, which divides a block.
  return 1 << (width - 1).bit_length()


def read_amplification(width: int, kind: str) -> float:
  """Returns the bytes that are transferred per useful byte.

  Args:
    width: Number of float32 features of a row, F.
    kind: "tpu" for blocks; other kernels and the reference fetch single rows.

  Example:
    >>> read_amplification(128, "tpu"), read_amplification(128, "gpu")
    (16.0, 1.0)
  """
  if kind != "tpu":
    return 1.0
  return max(padded_width(width), _BLOCK_WORDS) / width


def stored_shape(num_rows: int, width: int, kind: str) -> tuple[int, ...]:
  """Returns the shape of a table in the layout of `lay_out_table`.

  Args:
    num_rows: Number of rows, N.
    width: Number of float32 features of a row, F.
    kind: "tpu", "gpu" or "reference".
  """
  if kind == "gpu":
    return (num_rows * width,)
  if kind != "tpu":
    return num_rows, width
  return -(-num_rows * padded_width(width) // _BLOCK_WORDS), *DMA_BLOCK


def lay_out_table(rows: np.ndarray, kind: str) -> np.ndarray:
  """Returns a table in the layout of an implementation, a view if possible.

  Args:
    rows: float32 ``[N, F]``.
    kind: "tpu", "gpu" or "reference".

  Returns:
    ``[blocks, 8, 256]`` for TPUs, with several blocks per row if F > 2048;
    ``[N * F]`` for GPUs; else ``rows``.
  """
  shape = stored_shape(*rows.shape, kind)
  if kind == "tpu":
    width = padded_width(rows.shape[1])
    short = shape[0] * _BLOCK_WORDS // width - len(rows)  # rows of padding
    if short or width != rows.shape[1]:
      rows = np.pad(rows, ((0, short), (0, width - rows.shape[1])))
  return rows.reshape(shape)
