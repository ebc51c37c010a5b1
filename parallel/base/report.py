"""Reports as data: tables, text and a figure, independent of their output.

A study turns its result into a `Report`. `caatnet.show.render` writes reports
as terminal text, Markdown and HTML, `caatnet.show.drawing` writes figures as
PNG. A table formats its own cells, so that all outputs show the same text:

  >>> table = Table("links", [
  ...   "link", Column("size_bytes", "MB", ",.1f", unit=1e6),
  ...   Column("", "busy, of", "{busy:.0%} of {ends[0]} to {ends[1]} us"),
  ... ], [{"link": "a", "size_bytes": 2_500_000, "busy": 0.5, "ends": [1, 2]}])
  >>> table.cells()
  [['a', '2.5', '50% of 1 to 2 us']]
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
from typing import Any

from parallel.base.plot import Figure

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
  """Column of a table.

  Attributes:
    key: Key of the rows; unused if ``form`` is a template.
    heading: Heading, unique within the table.
    form: Format specification (",.1f"), a function that returns the text of a
      value, or a template that formats several keys of a row
      ("{weights:.1f} + {cache:.1f}").
    unit: Size of one unit of the heading: 1e-3 shows seconds as milliseconds.
    default: Text of a row without a value (the key is absent or None). If
      `default` is None, every row must have the key.
  """

  key: str
  heading: str
  form: str | Callable[[Any], str] = ""
  unit: float = 1.0
  default: str | None = None

  def text(self, row: Row) -> str:
    """Returns the cell of a row."""
    if isinstance(self.form, str) and "{" in self.form:
      return self.form.format_map(row)  # a template of several keys
    # Without a default a missing key is an error.
    value = row.get(self.key) if self.default is not None else row[self.key]
    if value is None and self.default is not None:
      return self.default
    if callable(self.form):
      return self.form(value)
    return format(value if self.unit == 1 else value / self.unit, self.form)


@dataclasses.dataclass(frozen=True)
class Table:
  """Table of a report.

  Attributes:
    title: Title; may have several lines.
    columns: Columns; the first is aligned left, the others right. A string is
      a column that shows the key of that name under the same heading.
    rows: Rows, plain data.

  Raises:
    ValueError: Two columns have the same heading, or a row lacks a key.
  """

  title: str
  columns: Sequence[Column | str]
  rows: Sequence[Row]

  def __post_init__(self) -> None:
    columns = tuple(
      Column(c, c) if isinstance(c, str) else c for c in self.columns
    )
    # The class is frozen.
    object.__setattr__(self, "columns", columns)
    headings = self.headings
    if len(set(headings)) < len(headings):
      raise ValueError(f"headings must be unique: {', '.join(headings)}")
    for column in self.columns:
      if column.default is None and not (
        isinstance(column.form, str) and "{" in column.form
      ):
        for row in self.rows:
          if column.key not in row:
            raise ValueError(
              f"a row of {self.title!r} lacks the key {column.key!r}: {row}"
            )

  @property
  def headings(self) -> list[str]:
    """Headings of the columns."""
    return [column.heading for column in self.columns]

  def cells(self) -> list[list[str]]:
    """Returns the text of each row's cells."""
    return [[column.text(row) for column in self.columns] for row in self.rows]


def keyed(
  names: Iterable[str], form: str | Callable[[Any], str] = "", **options: Any
) -> list[Column]:
  """Returns columns whose headings are their keys, with a common format."""
  return [Column(name, name, form, **options) for name in names]


def span(
  ends: Iterable[Any], form: Callable[[Any], str], between: str = " to "
) -> str:
  """Formats a minimum and a maximum, once if their texts are equal."""
  # A dict keeps the order and removes duplicates.
  return between.join(dict.fromkeys(map(form, ends)))


def yes_no(value: bool) -> str:
  """Formats a boolean as "yes" or "no"."""
  return "yes" if value else "no"


def size_text(size_bytes: int) -> str:
  """Formats a size: 65536 is "64 KiB"."""
  for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
    if size_bytes >= unit:
      return f"{size_bytes / unit:g} {name}"
  return f"{size_bytes} B"


@dataclasses.dataclass(frozen=True)
class Report:
  """Report of a result.

  Attributes:
    title: Title of the document.
    parts: Tables and lines of text, in order. Tables without rows are left out.
    figure: Returns the figure, which may be expensive to compute; None if
      there is none.
  """

  title: str
  parts: Sequence[Table | str]
  figure: Callable[[], Figure] | None = None

  def __post_init__(self) -> None:
    shown = [
      part for part in self.parts if not isinstance(part, Table) or part.rows
    ]
    # The class is frozen.
    object.__setattr__(self, "parts", shown)

  @property
  def tables(self) -> list[Table]:
    """Tables of the report."""
    return [part for part in self.parts if isinstance(part, Table)]
