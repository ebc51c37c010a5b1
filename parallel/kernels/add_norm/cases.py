"""Named shapes of add_norm, shared by tests and benchmarks.

Shape legend: K = shared channels, P = private channels, H = K + P.
"""

from typing import NamedTuple


class AddNormCase(NamedTuple):
  """Sizes and options of one call of the kernel.

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
    """Minimum bytes that the forward pass reads and writes."""
    width = self.shared + self.private
    # In: stream and update. Out: stream and normalised rows. Without an update
    # the stream is unchanged and not written.
    passes = 4 if self.update else 2
    size = 2 if self.dtype == "bfloat16" else 4
    return size * passes * self.rows * width + 4 * width

  @property
  def backward_bytes(self) -> int:
    """Minimum bytes that the backward pass reads and writes."""
    width = self.shared + self.private
    size = 2 if self.dtype == "bfloat16" else 4
    # In: new stream, its cotangent, cotangent of the normalised rows. Out:
    # cotangent of the stream.
    elements = 4 * width
    # The update has the stream's cotangent, except for a scaled private part.
    if self.update and self.private_scale != 1.0:
      elements += self.private
    # In: float32 gain. Out: its cotangent.
    return size * elements * self.rows + 2 * 4 * width


CASES = {
  "half shared, bf16": AddNormCase(16, 64, 64, "bfloat16", 8**0.5),
  "odd": AddNormCase(37, 33, 20, "float32", 2.0),
  "odd, bf16": AddNormCase(37, 33, 20, "bfloat16", 3**0.5),
  "one row": AddNormCase(1, 5, 3),
  "all shared": AddNormCase(24, 48, 0, "bfloat16", 2.0),
  "all private": AddNormCase(24, 0, 48, "float32", 2**0.5),
  "no update, odd": AddNormCase(7, 16, 3, "float32", 1.0, False),
  # More rows than programs in the GPU's backward pass. Wide rows are too long
  # to be prefetched during the previous row.
  "many rows": AddNormCase(600, 24, 8, "float32", 2.0),
  "many wide rows": AddNormCase(300, 4100, 20, "float32", 2.0),
}

# Sizes on one of r = 8 devices in a training step of the 7B model, and cases
# with larger rows.
LARGE = {
  "7B, p=.5": AddNormCase(8192, 2048, 2048, "bfloat16", 8**0.5),
  "7B, p=1": AddNormCase(8192, 4096, 0, "bfloat16"),
  "7B, p=.5, no update": AddNormCase(8192, 2048, 2048, "bfloat16", 1.0, False),
  "7B, p=.5, float32": AddNormCase(8192, 2048, 2048, "float32", 8**0.5),
  "8192 x 8192": AddNormCase(8192, 4096, 4096, "bfloat16", 8**0.5),
  "width 12288, p=.25": AddNormCase(4096, 3072, 9216, "bfloat16", 8**0.5),
}
