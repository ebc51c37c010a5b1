"""Named shapes of reduce_add_norm, shared by tests and benchmarks.

Shape legend: r = ranks, K = shared channels, P = private channels.
"""

from typing import NamedTuple


class ReduceAddNormCase(NamedTuple):
  """Sizes and options of one call of the kernel.

  Attributes:
    rows: Number of rows (tokens).
    shared: Shared channels per row, K.
    private: Private channels per row, P.
    ranks: Number of partial sums that are added, r.
    dtype: Dtype of the stream, and of partial sums that are not encoded.
    block: Channels per scale of int8 partial sums; None if they are not
      encoded.
    private_scale: Factor of the update of the private channels.
  """

  rows: int
  shared: int
  private: int
  ranks: int
  dtype: str = "bfloat16"
  block: int | None = None
  private_scale: float = 8**0.5

  @property
  def forward_bytes(self) -> int:
    """Minimum bytes that the forward pass reads and writes."""
    width = self.shared + self.private
    size = 2 if self.dtype == "bfloat16" else 4
    # In: stream and private update. Out: stream and normalised row.
    per_row = size * (3 * width + self.private)
    per_rank = size * self.shared
    if self.block:
      per_rank = self.shared + 4 * self.shared // self.block  # codes, scales
    # The last term is the gain.
    return self.rows * (per_row + self.ranks * per_rank) + 4 * width


CASES = {
  "odd, bf16": ReduceAddNormCase(19, 33, 20, 3),
  "odd": ReduceAddNormCase(5, 7, 6, 3, "float32"),
  "all shared": ReduceAddNormCase(8, 48, 0, 8, "float32", None, 1.0),
  "int8": ReduceAddNormCase(16, 256, 128, 4, "bfloat16", 128),
  "int8, float32": ReduceAddNormCase(9, 512, 10, 2, "float32", 256),
}

# Sizes on one of r = 8 devices in a training step of the 7B model, and a case
# with larger rows.
LARGE = {
  "7B, p=.5": ReduceAddNormCase(8192, 2048, 2048, 8),
  "7B, p=.5, int8": ReduceAddNormCase(8192, 2048, 2048, 8, "bfloat16", 256),
  "8192 x 8192": ReduceAddNormCase(8192, 4096, 4096, 8),
}
