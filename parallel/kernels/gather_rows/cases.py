"""Named shapes of gather_rows, shared by tests and benchmarks."""

from typing import NamedTuple


class Case(NamedTuple):
  """Sizes of one call.

  Attributes:
    rows: Number of rows of the table, N.
    width: Features of a row, F.
    ids: Number of rows that are fetched, n.
  """

  rows: int
  width: int
  ids: int


CASES = {
  "a line": Case(40, 32, 17),
  "no divisor of a block": Case(37, 100, 12),
  "one feature": Case(9, 1, 5),
  "two blocks": Case(11, 2500, 6),
}
# Features of the graphs of the paper: ogbn-products, ogbn-papers100M, Reddit.
LARGE = {
  "products": Case(1 << 20, 100, 1 << 15),
  "papers100M": Case(1 << 20, 128, 1 << 15),
  "reddit": Case(1 << 16, 602, 1 << 15),
}
