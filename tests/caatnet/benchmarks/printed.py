"""Cells of tables that benchmarks print."""


def rows_of(printed: str) -> list[list[str]]:
  """Returns the cells of all rows, without headings.

  A line whose first cell is empty continues the row before it.
  """
  rows: list[list[str]] = []
  for line in printed.splitlines():
    if line.startswith("│"):
      cells = [cell.strip() for cell in line.strip("│").split("│")]
      if cells[0] or not rows:
        rows.append(cells)
      else:
        rows[-1] = [
          f"{a} {b}".strip() for a, b in zip(rows[-1], cells, strict=True)
        ]
  return rows
