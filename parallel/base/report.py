"""Reports as data: tables, text and a figure, independent of their output.

A study turns its result into a `Report`. `caatnet.show.render` writes reports
as terminal text, Markdown and HTML, `caatnet.show.drawing` writes figures as
PNG. A table formats its own cells, so that all outputs show the same text:

  >>> table = Table(
  ...   "links", "link | sent_bytes | busy:.0% | {ends[0]} to {ends[1]}=us",
  ...   [{"link": "a", "sent_bytes": 2_500_000, "busy": 0.5, "ends": [1, 2]}],
  ... )
  >>> table.headings, table.cells()
  (['link', 'sent', 'busy', 'us'], [['a', '2.5 MB', '50%', '1 to 2']])
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
from typing import Any

from parallel.base import labels
from parallel.base.checks import known
from parallel.base.plot import Figure

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
  """Column of a table.

  Attributes:
    key: Key of the values in the rows; unused if ``form`` is a template.
    heading: Heading, unique within the table.
    form: Format specification (",.1f") of a number or of a list's items, a
      function that returns the text of a value, or a template that formats
      several keys of a row ("{weights:.1f} + {cache:.1f}"). "" formats the
      value in the unit that the key names (`labels.text`).
    unit: Divisor of the values: 1e-3 shows seconds as milliseconds.
    default: Text for a row in which the key is absent or its value is None. If
      ``default`` is None, every row must have the key.
  """

  key: str
  heading: str
  form: str | Callable[[Any], str] = ""
  unit: float = 1.0
  default: str | None = None

  def text(self, row: Row) -> str:
    """Returns the text of this column's cell in a row."""
    if isinstance(self.form, str) and "{" in self.form:
      return self.form.format_map(row)  # a template of several keys
    try:
      value = labels.find(row, self.key)
    except (KeyError, TypeError):  # TypeError if the mapping in "a.b" is None
      if self.default is None:
        raise
      value = None
    if value is None and self.default is not None:
      return self.default
    if callable(self.form):
      return self.form(value)
    if not self.form and self.unit == 1:
      return labels.text(value, self.key)
    if isinstance(value, list | tuple):
      return ", ".join(map(self._number, value))
    return self._number(value)

  def _number(self, value: Any) -> str:
    if value is None:
      return "-"
    return format(value if self.unit == 1 else value / self.unit, self.form)


def _parse_columns(text: str, title: str, rows: Sequence[Row]) -> list[Column]:
  """Returns the columns that a text "key/unit:form=heading" describes.

  Unit, form and heading follow from the key if they are left out. "key.*" gives
  one column for each item of the mappings that are the key's values. A text
  with braces is a template, as in `Column.form`.
  """
  text, _, heading = text.strip().partition("=")
  if "{" in text:
    return [Column("", heading, text)]
  key, _, form = text.partition(":")
  key, _, size = key.partition("/")
  unit = float(size or 1)
  if key.endswith(".*"):
    key = key.removesuffix(".*")
    names = dict.fromkeys(name for row in rows for name in row[key])
    return [
      Column(key, str(name), Column(name, str(name), form, unit, "-").text)
      for name in names
    ]
  if rows and not any(key.split(".")[0] in row or key in row for row in rows):
    raise ValueError(
      f"{title!r} has no row with the key {key!r}; its first row is {rows[0]}"
    )
  return [Column(key, heading or labels.heading(key), form, unit, "-")]


@dataclasses.dataclass(frozen=True)
class Table:
  """Table of a report.

  Attributes:
    title: Title; may have several lines.
    columns: Columns; the first is aligned left, the others right. A column may
      be a string: "template=heading", or "key/unit:form=heading", of which only
      the key is required. "a.b" is item b of the mapping a, and "a.*" makes a
      column for each item. "|" separates several columns in one string.
    rows: Rows of plain data. If a column is a string, rows without its key have
      the cell "-".

  Raises:
    ValueError: Two columns have the same heading, or rows lack a key.
  """

  title: str
  columns: str | Sequence[Column | str]
  rows: Sequence[Row]

  def __post_init__(self) -> None:
    columns = self.columns
    if isinstance(columns, str):
      columns = columns.split("|")
    columns = tuple(
      column for given in columns for column in (
        _parse_columns(given, self.title, self.rows)
        if isinstance(given, str) else [given]
      )
    )
    # A plain assignment fails, since the class is frozen.
    object.__setattr__(self, "columns", columns)
    headings = self.headings
    if len(set(headings)) < len(headings):
      raise ValueError(
        f"headings of a table must be unique, got {', '.join(headings)}"
      )
    for column in self.columns:
      if column.default is None and not (
        isinstance(column.form, str) and "{" in column.form
      ):
        for row in self.rows:
          if column.key not in row:
            raise ValueError(
              f"a row of {self.title!r} must have the key {column.key!r}, got "
              f"the row {row}"
            )

  @property
  def headings(self) -> list[str]:
    """Headings of the columns."""
    return [column.heading for column in self.columns]

  def cells(self) -> list[list[str]]:
    """Returns a list of cell texts for each row."""
    return [[column.text(row) for column in self.columns] for row in self.rows]

  def only(self, *headings: str) -> "Table":
    """Returns the table with the columns of these headings, in this order.

    Raises:
      ValueError: The table has no column with one of the headings.
    """
    columns = dict(zip(self.headings, self.columns, strict=True))
    for heading in headings:
      known(f"column of {self.title!r}: ", heading, columns)
    return dataclasses.replace(self, columns=[columns[h] for h in headings])


def columns_of_keys(
  names: Iterable[str], form: str | Callable[[Any], str] = "", **options: Any
) -> list[Column]:
  """Returns columns whose headings are their keys, with a common format."""
  return [Column(name, name, form, **options) for name in names]


def format_range(
  ends: Iterable[Any], form: Callable[[Any], str], between: str = " to "
) -> str:
  """Formats the minimum and the maximum of ``ends``, joined by ``between``.

  If ``form`` gives both the same text, the result is that text.
  """
  # A dict keeps the order and removes duplicates.
  return between.join(dict.fromkeys(map(form, ends)))


def pivot(
  rows: Iterable[Row], index: Sequence[str], column: str, value: str
) -> list[dict[str, Any]]:
  """Groups rows, and makes one row per group with a mapping under the key "of".

  Args:
    rows: Rows, one for each combination of the values of index and column.
    index: Keys whose values define the groups.
    column: Key whose values become the keys of the mapping.
    value: Key whose values become the values of the mapping.

  Example:
    >>> pivot([{"a": 1, "b": "x", "c": 2}, {"a": 1, "b": "y", "c": 3}],
    ...       ["a"], "b", "c")
    [{'a': 1, 'b': 'x', 'c': 2, 'of': {'x': 2, 'y': 3}}]
  """
  found: dict[tuple[Any, ...], dict[str, Any]] = {}
  for row in rows:
    line = found.setdefault(
      tuple(row[key] for key in index), dict(row) | {"of": {}}
    )
    line["of"][row[column]] = row[value]
  return list(found.values())


@dataclasses.dataclass(frozen=True)
class Report:
  """Report of a result.

  Attributes:
    title: Title of the document.
    parts: Tables and lines of text, in order. Tables without rows are left out.
    figure: Function that returns the figure, which may be expensive to compute;
      None if there is none.
  """

  title: str
  parts: Sequence[Table | str]
  figure: Callable[[], Figure] | None = None

  def __post_init__(self) -> None:
    shown = [
      part for part in self.parts if not isinstance(part, Table) or part.rows
    ]
    # A plain assignment fails, since the class is frozen.
    object.__setattr__(self, "parts", shown)

  @property
  def tables(self) -> list[Table]:
    """Tables of the report."""
    return [part for part in self.parts if isinstance(part, Table)]

  def table(self, words: str) -> Table:
    """Returns the first table whose title begins with these words.

    Raises:
      ValueError: No title begins with them.
    """
    for table in self.tables:
      if table.title.startswith(words):
        return table
    raise ValueError(
      f"no title of a table of {self.title!r} begins with {words!r}; the "
      "titles are " + "; ".join(repr(table.title) for table in self.tables)
    )
