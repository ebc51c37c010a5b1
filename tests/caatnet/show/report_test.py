"""Reports: tables as data, and rendering of arbitrary text."""

import doctest
import html.parser
import io
import sys

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
import pytest
from rich.console import Console

from caatnet.show import drawing, plot, render, report
from caatnet.show.report import Column, Report, Table

# Markup of the three formats, and letters.
HOSTILE = st.text("a_*`|<>&;[]()\\#-+=!~.1 \n\"'b/", max_size=12)
TABLES = st.integers(1, 4).flatmap(lambda n: st.tuples(
  st.lists(HOSTILE, min_size=n, max_size=n, unique=True),
  st.lists(st.lists(HOSTILE, min_size=n, max_size=n), max_size=3),
))


def table_of(headings, rows, title="title"):
  return Table(
    title, [Column(f"{i}", heading) for i, heading in enumerate(headings)],
    [{f"{i}": cell for i, cell in enumerate(row)} for row in rows],
  )


def words(text):
  """Collapses spaces, in which formats differ."""
  return " ".join(text.split())


def from_markdown(text):
  """Returns lines outside of tables and rows of tables, parsed as Markdown."""
  lines, tables, row = [], [], None
  for token in MarkdownIt().enable("table").parse(text):
    if token.type == "table_open":
      tables.append([])
    elif token.type == "tr_open":
      row = []
      tables[-1].append(row)
    elif token.type == "tr_close":
      row = None
    elif token.type == "inline":
      content = words("".join(
        {"html_inline": "\n", "softbreak": "\n"}.get(child.type, child.content)
        for child in token.children
      ))
      # No text is parsed as markup.
      assert {child.type for child in token.children} <= {
        "text", "text_special", "html_inline", "softbreak", "image"
      }, text
      assert all(
        child.content == "<br>" for child in token.children
        if child.type == "html_inline"
      ), text
      (lines if row is None else row).append(content)
  return lines, tables


class Page(html.parser.HTMLParser):
  """Parser of a page: cells, captions, paragraphs and all tags."""

  def __init__(self, text):
    super().__init__()
    self.lines, self.tables, self.tags = [], [], set()
    self._inside = None
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    if tag == "table":
      self.tables.append([])
    elif tag == "tr":
      self.tables[-1].append([])
    elif tag in ("td", "th"):
      self._inside = self.tables[-1][-1]
    elif tag in ("h1", "p", "caption"):
      self._inside = self.lines
    if tag in ("td", "th", "h1", "p", "caption"):
      self._inside.append("")

  def handle_endtag(self, tag):
    if tag in ("td", "th", "h1", "p", "caption"):
      self._inside = None

  def handle_data(self, data):
    if self._inside is not None:
      self._inside[-1] += data


def from_terminal(table):
  """Returns printed rows of cells; each row is followed by a line."""
  made = render.grid(table.title, table.headings, table.cells())
  made.show_lines = True
  out = io.StringIO()
  Console(file=out, width=10_000).print(made)
  lines = out.getvalue().splitlines()
  rows = [[""] * len(table.headings)]
  for line in lines[next(i for i, x in enumerate(lines) if x[:1] == "┏"):]:
    if line[0] in "┃│":
      cells = line[1:-1].replace("┃", "│").split("│")
      rows[-1] = [a + "\n" + b for a, b in zip(rows[-1], cells, strict=True)]
    elif line[0] in "┡├":
      rows.append([""] * len(table.headings))
  return [list(map(words, row)) for row in rows]


def check(made):
  """Checks that each format shows the same cells and lines."""
  expected = [
    [list(map(words, row)) for row in (table.headings, *table.cells())]
    for table in made.tables
  ]
  texts = [made.title, *(
    part.title if isinstance(part, Table) else part for part in made.parts
  )]
  lines, tables = from_markdown(render.markdown(made))
  assert tables == expected
  assert lines == [
    words(line.strip().removeprefix("- ")) for text in texts
    for line in text.splitlines() if line.strip()
  ]
  page = Page(render.page(made))
  assert [[list(map(words, row)) for row in t] for t in page.tables] == expected
  assert page.tags <= {
    "html", "head", "meta", "title", "style", "body", "h1", "p", "table",
    "caption", "thead", "tbody", "tr", "th", "td",
  }
  assert list(map(words, page.lines)) == list(map(words, texts))
  assert [
    from_terminal(table) if table.rows else rows
    for table, rows in zip(made.tables, expected, strict=True)
  ] == expected


@given(TABLES, HOSTILE, HOSTILE)
def test_every_format_shows_any_text_unchanged(table, title, line):
  check(Report("report", [table_of(*table, title), line]))


def test_columns_format_values_units_templates_and_defaults():
  table = Table("t", [
    "a", Column("b", "ms", ",.1f", unit=1e-3, default="-"),
    Column("c", "upper", str.upper), Column("", "both", "{a:03} of {d[0]}"),
  ], [{"a": 1, "b": 2.5, "c": "x", "d": [7]},
      {"a": 2, "b": None, "c": "y", "d": [8]}, {"a": 3, "c": "z", "d": [9]}])
  assert table.cells() == [
    ["1", "2,500.0", "X", "001 of 7"], ["2", "-", "Y", "002 of 8"],
    ["3", "-", "Z", "003 of 9"],
  ]


def test_example_of_the_documentation_runs():
  assert doctest.testmod(report) == (0, 2)


def test_invalid_table_is_refused_when_made():
  with pytest.raises(ValueError, match="headings must be unique: a, a"):
    Table("t", ["a", Column("b", "a")], [])
  with pytest.raises(ValueError, match="a row of 't' lacks the key 'b'"):
    Table("t", ["a", "b"], [{"a": 1, "b": 2}, {"a": 1}])


def test_report_is_written_with_its_figure(tmp_path):
  pytest.importorskip("matplotlib")
  made = Report("t", ["x"], lambda: plot.Figure(
    [plot.Panel([plot.Line([1, 2], [3, 4])])], (2, 1)
  ))
  render.write(made, tmp_path / "new" / "a.md")
  assert "![](a.png)" in (tmp_path / "new" / "a.md").read_text()
  picture = (tmp_path / "new" / "a.png").read_bytes()
  assert picture.startswith(b"\x89PNG")
  render.write(made, tmp_path / "a.html")
  page = (tmp_path / "a.html").read_text()
  assert 'src="data:image/png;base64,' in page
  assert "http" not in page  # the page loads nothing
  with pytest.raises(ValueError, match=r"a.txt must end in .md or .html"):
    render.write(made, tmp_path / "a.txt")


def test_without_matplotlib_documents_have_no_figure(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)  # not installed
  made = Report("t", ["x"], lambda: pytest.fail("nothing can draw it"))
  for name in ("a.md", "a.html"):
    render.write(made, tmp_path / name)
    assert "x" in (tmp_path / name).read_text()
    assert "png" not in (tmp_path / name).read_text()
  with pytest.raises(ValueError, match=r'pip install "caatnet\[plot\]"'):
    drawing.pyplot()
