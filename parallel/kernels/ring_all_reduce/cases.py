"""Named shapes of the ring all-reduce, shared by tests and benchmarks.

Shape legend: n = devices, T = rows, K = shared channels, P = private channels.
"""

from typing import NamedTuple


class RingCase(NamedTuple):
  """Sizes and options of one call of the kernel.

  Attributes:
    devices: Devices of the ring, n.
    rows: Number of rows (tokens), T.
    shared: Shared channels per row, K.
    private: Private channels per row, P.
    dtype: Dtype of all operands but the gain.
    private_scale: Factor of the update of the private channels.
    chunk: Rows of one message; None for the maximum that fits in VMEM.
  """

  devices: int
  rows: int
  shared: int
  private: int
  dtype: str = "float32"
  private_scale: float = 1.0
  chunk: int | None = None


CASES = {
  "two devices, three segments, bf16": RingCase(
    2, 192, 5, 3, "bfloat16", 2**0.5, 16
  ),
  "four devices": RingCase(4, 64, 8, 8, "float32", 2.0),
}

# Sizes on one of four devices in a training step of the 7B model.
LARGE = {
  "7B, p=.5": RingCase(4, 8192, 2048, 2048, "bfloat16", 8**0.5),
  "7B, p=.25": RingCase(4, 8192, 1024, 3072, "bfloat16", 8**0.5),
}
