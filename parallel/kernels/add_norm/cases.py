"""Named shapes of add_norm, shared by tests and benchmarks.

Shape legend: K = shared channels, P = private channels, H = K + P.
"""

from typing import NamedTuple


class Case(NamedTuple):
  """Sizes of one call.

  Attributes:
    rows: Number of rows (tokens).
    shared: Shared channels per row, K.
    private: Private channels per row, P.
    dtype: Dtype of the stream and of the update.
    private_scale: Factor of the private part of the update.
    update: Whether an update is added before the norm.
  """

  rows: int
  shared: int
  private: int
  dtype: str = "float32"
  private_scale: float = 1.0
  update: bool = True

  @property
  def forward_bytes(self) -> int:
    """Bytes that the forward has to read and write once."""
    width = self.shared + self.private
    # Stream and update in, stream and normalised rows out. Without an update
    # the stream does not change and is not written.
    passes = 4 if self.update else 2
    size = 2 if self.dtype == "bfloat16" else 4
    return size * passes * self.rows * width + 4 * width

  @property
  def backward_bytes(self) -> int:
    """Bytes that the backward has to read and write once."""
    width = self.shared + self.private
    size = 2 if self.dtype == "bfloat16" else 4
    # The new stream, its cotangent and that of the normalised rows in, the
    # stream's cotangent out.
    elements = 4 * width
    # The update's cotangent is the stream's, but for a scaled private part.
    if self.update and self.private_scale != 1.0:
      elements += self.private
    # The float32 gain in, its cotangent out.
    return size * elements * self.rows + 2 * 4 * width


CASES = {
  "half shared": Case(16, 64, 64, "float32", 8**0.5),
  "half shared, bf16": Case(16, 64, 64, "bfloat16", 8**0.5),
  "odd": Case(37, 33, 20, "float32", 2.0),
  "odd, bf16": Case(37, 33, 20, "bfloat16", 3**0.5),
  "one row": Case(1, 5, 3),
  "all shared": Case(24, 48, 0, "bfloat16"),
  "all private": Case(24, 0, 48, "float32", 2**0.5),
  "no update": Case(24, 16, 32, "bfloat16", 1.0, False),
  "no update, odd": Case(7, 16, 3, "float32", 1.0, False),
  # More rows than a GPU's backward has programs. The wide rows are too long to
  # be read while the row before is worked on.
  "many rows": Case(600, 24, 8, "float32", 2.0),
  "many wide rows": Case(300, 4096, 20, "float32", 2.0),
}

# What one of r = 8 devices has of a step of the 7B model, and larger rows.
LARGE = {
  "7B, p=.5": Case(8192, 2048, 2048, "bfloat16", 8**0.5),
  "7B, p=1": Case(8192, 4096, 0, "bfloat16"),
  "7B, p=.5, no update": Case(8192, 2048, 2048, "bfloat16", 1.0, False),
  "7B, p=.5, float32": Case(8192, 2048, 2048, "float32", 8**0.5),
  "8192 x 8192": Case(8192, 4096, 4096, "bfloat16", 8**0.5),
  "width 12288, p=.25": Case(4096, 3072, 9216, "bfloat16", 8**0.5),
}
