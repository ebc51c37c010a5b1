"""Named shapes, shared by tests and benchmarks."""

from typing import NamedTuple


class Case(NamedTuple):
  """Sizes of one call.

  Attributes:
    rows: Tokens.
    shared: K.
    private: P.
    dtype: Of the stream.
    private_scale: Of the update.
    update: Whether there is one.
  """

  rows: int
  shared: int
  private: int
  dtype: str = "float32"
  private_scale: float = 1.0
  update: bool = True

  @property
  def forward_bytes(self) -> int:
    """That must be moved."""
    width = self.shared + self.private
    passes = 4 if self.update else 2
    size = 2 if self.dtype == "bfloat16" else 4
    return size * passes * self.rows * width + 4 * width

  @property
  def backward_bytes(self) -> int:
    width = self.shared + self.private
    size = 2 if self.dtype == "bfloat16" else 4
    elements = 4 * width
    if self.update and self.private_scale != 1.0:
      elements += self.private
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
  # More rows than a GPU's backward has programs; the wide ones are read late.
  "many rows": Case(600, 24, 8, "float32", 2.0),
  "many wide rows": Case(300, 4096, 20, "float32", 2.0),
}

# One device's share of the 7B model's step at r = 8, and larger rows.
LARGE = {
  "7B, p=.5": Case(8192, 2048, 2048, "bfloat16", 8**0.5),
  "7B, p=1": Case(8192, 4096, 0, "bfloat16"),
  "7B, p=.5, no update": Case(8192, 2048, 2048, "bfloat16", 1.0, False),
  "7B, p=.5, float32": Case(8192, 2048, 2048, "float32", 8**0.5),
  "8192 x 8192": Case(8192, 4096, 4096, "bfloat16", 8**0.5),
  "width 12288, p=.25": Case(4096, 3072, 9216, "bfloat16", 8**0.5),
}
