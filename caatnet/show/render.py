"""Output of reports as terminal text, Markdown and HTML."""

import base64
from collections.abc import Mapping, Sequence
import html
import pathlib
import re
from typing import Any

from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from caatnet.show import drawing, results
from parallel.base import files
from parallel.base.report import Report, Table

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; padding: 0 1em;
  max-width: 72em; }
table { border-collapse: collapse; margin: 1.5em 0; }
caption { text-align: left; white-space: pre-line; padding: .3em 0; }
th, td { border: 1px solid #ccc; padding: .2em .6em; text-align: right;
  white-space: pre-line; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
p { white-space: pre-line; }
img { max-width: 100%; }
"""

# A column of single words such as paths, one of which is longer than this, is
# folded on a narrow terminal. In other columns, words too long are truncated.
_LONG_WORD = 24  # characters


def grid(
  title: str, headings: Sequence[str], cells: Sequence[Sequence[str]]
) -> rich_table.Table:
  """Returns a table for a terminal: first column left, others right."""
  # Texts are plain: "[key]" and ":loop:" are neither markup nor an emoji.
  made = rich_table.Table(
    title=Text(title, "table.title"), title_justify="left"
  )
  for index, heading in enumerate(headings):
    texts = [row[index] for row in cells]
    is_long = len(max(texts, key=len, default="")) > _LONG_WORD and not any(
      " " in text for text in texts
    )
    made.add_column(
      Text(heading), justify="right" if index else "left",
      overflow="fold" if is_long else "ellipsis",
    )
  for row in cells:
    made.add_row(*map(Text, row))
  return made


def print_table(
  title: str, columns: str | Sequence[str], rows: Sequence[Any]
) -> None:
  """Prints a table.

  Args:
    title: Title.
    columns: Headings; or a single string of columns in the syntax of `Table`.
    rows: Rows of cells; mappings if ``columns`` is a string.
  """
  if isinstance(columns, str):
    of = Table(title, columns, rows)
    columns, rows = of.headings, of.cells()
  made, console = grid(title, columns, rows), Console()
  if not console.is_terminal:  # a file has no width: no word is folded
    room = 0
    for column in made.columns:
      if column.overflow == "fold":
        column.no_wrap = True
        room += max(len(str(cell)) for cell in column.cells)
    console = Console(width=130 + room)
  console.print(made)


def show(*parts: Report | Table | str) -> None:
  """Prints reports, tables and lines of text."""
  for part in parts:
    if isinstance(part, Report):
      show(*part.parts)
    elif isinstance(part, Table):
      print_table(part.title, part.headings, part.cells())
    else:
      print(part)


def markdown_table(
  headings: Sequence[str], cells: Sequence[Sequence[str]],
  is_markdown: bool = False,
) -> str:
  """Returns a table as Markdown.

  Args:
    headings: Heading of each column.
    cells: Rows of cells.
    is_markdown: Whether the cells are Markdown already; otherwise they are
      escaped.

  Example:
    >>> print(markdown_table(["axis", "MB"], [["tensor", "1.5"]]), end="")
    | axis | MB |
    |---|---|
    | tensor | 1.5 |
  """
  write = str if is_markdown else _escaped
  head, *body = (
    f"| {' | '.join(map(write, row))} |\n" for row in (headings, *cells)
  )
  return "".join([head, f"|{'---|' * len(headings)}\n", *body])


def markdown(report: Report, picture: str = "") -> str:
  """Returns a report as Markdown.

  Args:
    report: The report.
    picture: URL of its figure; "" for none.
  """
  blocks = [f"# {_escaped(report.title)}"]
  if picture:
    blocks.append(f"![]({picture})")
  for part in report.parts:
    # Each line of a title or text is a paragraph.
    lines = (part.title if isinstance(part, Table) else part).splitlines()
    blocks += [_paragraph(line) for line in lines if line.strip()]
    if isinstance(part, Table):
      blocks.append(markdown_table(part.headings, part.cells()).rstrip("\n"))
  return "\n\n".join(blocks) + "\n"


def _escaped(text: str) -> str:
  """Escapes Markdown markup, except underscores within words."""
  # Also "&" where it would begin a character reference.
  text = re.sub(r"([\\`*|<\[\]~]|(?<!\w)_|_(?!\w)|&(?=#?\w+;))", r"\\\1", text)
  return text.strip().replace("\n", "<br>")


def _paragraph(line: str) -> str:
  """Returns a line as a paragraph, or a list item if it starts with "- "."""
  line = line.strip()
  item, line = ("- ", line[2:]) if line.startswith("- ") else ("", line)
  # At the beginning of a line these start headings, quotes, items or rules.
  return item + re.sub(r"^(\d+(?=[.)])|(?=[#>+=-]))", r"\1\\", _escaped(line))


def page(report: Report, picture: bytes | None = None) -> str:
  """Returns a report as a self-contained HTML page.

  Args:
    report: The report.
    picture: Its figure as PNG, or None.
  """
  title = html.escape(report.title)
  blocks = [f"<h1>{title}</h1>"]
  if picture is not None:
    # Embedded, so that the page is one file.
    data = base64.b64encode(picture).decode()
    blocks.append(f'<img alt="" src="data:image/png;base64,{data}">')
  for part in report.parts:
    if isinstance(part, Table):
      rows = [_html_row("th", part.headings), "</thead><tbody>"]
      rows += [_html_row("td", cells) for cells in part.cells()]
      blocks.append("\n".join([
        f"<table><caption>{html.escape(part.title)}</caption><thead>", *rows,
        "</tbody></table>",
      ]))
    else:
      blocks.append(f"<p>{html.escape(part)}</p>")
  return "\n".join([
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
    f"<title>{title}</title><style>{_STYLE}</style></head><body>", *blocks,
    "</body></html>\n",
  ])


def _html_row(tag: str, cells: Sequence[str]) -> str:
  """Returns an HTML table row with escaped cells."""
  inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
  return f"<tr>{inner}</tr>"


def write(report: Report, path: pathlib.Path) -> None:
  """Writes a report, with its figure if matplotlib is installed.

  Args:
    report: The report.
    path: File to write: .html with the figure embedded, or .md with the figure
      in a PNG of the same name.

  Raises:
    ValueError: The file's name has another suffix.
  """
  if path.suffix not in (".md", ".html"):
    raise ValueError(f"--report={path} must end in .md or .html")
  picture = None
  if report.figure and drawing.is_available():
    picture = drawing.render_figure(report.figure())
  if path.suffix == ".html":
    files.replace(path, page(report, picture))
    return
  target = path.with_suffix(".png")
  if picture is not None:
    with files.atomic_file(target) as temporary:
      temporary.write_bytes(picture)
  files.replace(path, markdown(report, target.name if picture else ""))


def present(
  report: Report,
  result: Mapping[str, Any],
  as_json: bool = False,
  output: str = "",
  picture: str = "",
  document: str = "",
  saved: Mapping[str, Any] | None = None,
) -> None:
  """Prints a report and writes the files requested on the command line.

  Args:
    report: The report.
    result: Data that the report shows.
    as_json: Whether to print the data as JSON instead of the report.
    output: JSON file to write; "" for none.
    picture: PNG to write; "" for none.
    document: Markdown or HTML file to write; "" for none.
    saved: Content of the JSON file ``output``; None for ``result``.

  Raises:
    ValueError: A PNG is requested of a report without a picture; the rest is
      printed and written.
  """
  if as_json:
    print(files.to_json(result))
  else:
    show(report)
  if output:
    results.write(pathlib.Path(output), result if saved is None else saved)
  if document:
    write(report, pathlib.Path(document))
  if picture:
    if report.figure is None:
      raise ValueError(
        f"--plot={picture} has no effect, since this report has no picture"
      )
    drawing.write(report.figure(), pathlib.Path(picture))
