"""Named shapes, shared by tests and benchmarks."""

from typing import NamedTuple


class Case(NamedTuple):
  """Sizes of one call.

  Attributes:
    devices: n.
    rows: T.
    shared: K.
    private: P.
    dtype: Of all operands.
    private_scale: Of the private update.
    chunk: Rows of a chunk; None: as many as fit.
  """

  devices: int
  rows: int
  shared: int
  private: int
  dtype: str = "float32"
  private_scale: float = 1.0
  chunk: int | None = None


CASES = {
  "two devices, two segments": Case(2, 64, 16, 24, "float32", 2.0, 8),
  "two devices, three segments, bf16": Case(
    2, 192, 5, 3, "bfloat16", 2**0.5, 16
  ),
  "four devices": Case(4, 64, 8, 8, "float32", 2.0),
  "eight devices": Case(8, 128, 8, 8, "float32"),
}

LARGE = {
  "7B, p=.5": Case(4, 8192, 2048, 2048, "bfloat16", 8**0.5),
  "7B, p=.25": Case(4, 8192, 1024, 3072, "bfloat16", 8**0.5),
}
