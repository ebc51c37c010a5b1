"""Named shapes of gather_rows, shared by tests and benchmarks."""

from typing import NamedTuple


class GatherCase(NamedTuple):
  """Sizes of one call of the kernel.

  Attributes:
    rows: Number of rows of the table, N.
    width: Features of a row, F.
    ids: Number of rows that are fetched, n.
  """

  rows: int
  width: int
  ids: int


CASES = {
  "a line": GatherCase(40, 32, 17),
  "no divisor of a block": GatherCase(37, 100, 12),
  "one feature": GatherCase(9, 1, 5),
  "two blocks": GatherCase(11, 2500, 6),
}
# Features of the graphs of the paper: ogbn-products, ogbn-papers100M, Reddit.
LARGE = {
  "products": GatherCase(1 << 20, 100, 1 << 15),
  "papers100M": GatherCase(1 << 20, 128, 1 << 15),
  "reddit": GatherCase(1 << 16, 602, 1 << 15),
}
