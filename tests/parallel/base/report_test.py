"""Reports: tables as data, and rendering of arbitrary text."""

import doctest
import html.parser
import io
import json
import sys

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
import pytest
from rich.console import Console

from caatnet.show import drawing, render, results
from parallel.base import plot, report
from parallel.base.report import Column, Report, Table
from tests.caatnet.show import terminal

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
  assert list(map(from_terminal, made.tables)) == expected


@given(TABLES, HOSTILE, HOSTILE)
def test_every_format_shows_any_text_unchanged(table, title, line):
  check(Report("report", [table_of(*table, title), line]))


def test_tables_without_rows_are_left_out():
  none, one = table_of("a", [], "none"), table_of("a", ["b"], "one")
  made = Report("report", [none, "line", one])
  assert made.parts == ["line", one]


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
  assert table.headings == ["a", "ms", "upper", "both"]


def test_columns_share_a_format():
  first, second = report.columns_of_keys(
    ["a", "b"], ".1f", unit=10, default="-"
  )
  assert (first, second) == (
    Column("a", "a", ".1f", 10, "-"), Column("b", "b", ".1f", 10, "-")
  )
  assert [c.text({"a": 25, "b": None}) for c in (first, second)] == ["2.5", "-"]
  assert report.columns_of_keys("c") == [Column("c", "c")]


def test_none_is_a_value_unless_there_is_a_default():
  assert Column("a", "a", str).text({"a": None}) == "None"
  assert Column("a", "a", str, default="-").text({"a": 0}) == "0"
  with pytest.raises(KeyError, match="a"):
    Column("a", "a").text({})


@pytest.mark.parametrize(("ends", "text"), [
  ((1.04, 2.0), "1.0 to 2.0"), ((2.0, 1.0), "2.0 to 1.0"),
  ((1.04, 0.96), "1.0"),
])
def test_range_of_equal_texts_is_one_text(ends, text):
  assert report.format_range(ends, "{:.1f}".format) == text
  assert report.format_range(
    ends, "{:.1f}".format, ".."
  ) == text.replace(" to ", "..")


@pytest.mark.parametrize(("text", "headings", "cells"), [
  ("name | num_hits", ["name", "hits"], ["x", "1,234"]),
  ("name=of|share", ["of", "share"], ["x", "25.0%"]),
  ("size_bytes | b/1e6:.1f=MB | wait_s", ["size", "MB", "wait"],
   ["2 KiB", "2.5", "20 ms"]),
  ("ends/1e3:.1f", ["ends"], ["1.0, -, 3.0"]),
  ("of.a:.2f=a | of.z | of.z.y", ["a", "of.z", "of.z.y"], ["1.50", "-", "-"]),
  ("of.*:.1f", ["a", "b.c"], ["1.5", "-"]),
  ("of.*/10:.2f", ["a", "b.c"], ["0.15", "-"]),
  ("{name}, {of[a]:.0f}=both", ["both"], ["x, 2"]),
])
def test_columns_are_declared_by_a_text(text, headings, cells):
  row = {
    "name": "x", "num_hits": 1234, "share": 0.25, "size_bytes": 2048,
    "b": 2.5e6, "wait_s": 0.02, "ends": [1e3, None, 3e3],
    "of": {"a": 1.5, "b.c": None},
  }
  table = Table("t", text, [row])
  assert (table.headings, table.cells()) == (headings, [cells])
  assert Table("t", text, []).rows == []


def test_rows_without_a_value_have_a_cell():
  table = Table("t", "a | b:.1f | of.*", [
    {"a": 1, "of": {"x": 1}}, {"a": None, "b": 2.0, "of": {"y": 2}},
  ])
  assert table.headings == ["a", "b", "x", "y"]
  assert table.cells() == [["1", "-", "1", "-"], ["-", "2.0", "-", "2"]]


def test_pivot_keeps_the_last_value_and_the_order_of_rows():
  rows = [dict(zip("abcd", x, strict=True)) for x in (
    (2, "x", "m", 1), (1, "x", "m", 2), (2, "x", "n", 3), (2, "x", "m", 4),
  )]
  assert report.pivot(rows, ["a", "b"], "c", "d") == [
    rows[0] | {"of": {"m": 4, "n": 3}}, rows[1] | {"of": {"m": 2}},
  ]


def test_example_of_the_documentation_runs():
  assert doctest.testmod(report) == (0, 3)


def test_invalid_table_is_refused_when_made():
  with pytest.raises(ValueError, match="headings of a table must be unique,"):
    Table("t", ["a", Column("b", "a")], [])
  with pytest.raises(ValueError, match="a row of 't' must have the key 'b'"):
    Table("t", [Column("b", "b")], [{"a": 1, "b": 2}, {"a": 1}])
  with pytest.raises(ValueError, match="'t' has no row with the key 'b'"):
    Table("t", "a | b", [{"a": 1}, {"a": 2}])


def test_template_needs_no_key_and_a_default_replaces_one():
  Table("t", [Column("x", "x", "{a}"), Column("y", "y", default="-")],
        [{"a": 1}])
  # A function or a format specification reads its key.
  for form in (str, ".1f"):
    with pytest.raises(ValueError, match="must have the key 'x'"):
      Table("t", [Column("x", "x", form)], [{"a": 1}])


def test_printed_tables_fit_a_terminal_and_are_whole_elsewhere(
  monkeypatch, capsys
):
  """A file has 130 columns; a terminal has its own number."""
  monkeypatch.setenv("COLUMNS", "60")
  table = Table("t", ["a"], [{"a": "x" * 126}, {"a": "y " * 70}])
  render.show(table)
  lines = capsys.readouterr().out.splitlines()
  assert max(map(len, lines)) == 130
  assert f"│ {'x' * 126} │" in lines
  out = terminal.attach(monkeypatch, "stdout", width=60)
  render.show(table)
  assert max(map(len, out.text.splitlines())) == 60


def test_paths_are_whole_in_files_and_folded_on_a_terminal(
  monkeypatch, capsys
):
  monkeypatch.setenv("COLUMNS", "60")
  path = "/".join(["folder"] * 30) + "/x.py:17"
  table = Table("x.py:loop: [red]t", ["a", "b", "c"], [
    {"a": path, "b": "a sentence " * 20, "c": "x.py:loop:1"},
  ])
  render.show(table)
  printed = capsys.readouterr().out
  assert f"│ {path} │" in printed
  assert "x.py:loop:1" in printed
  assert "x.py:loop: [red]t" in printed
  # Two columns of paths, one of which has a short one, too.
  short = Table("t", ["a", "b"], [
    {"a": path, "b": path}, {"a": "x", "b": path},
  ])
  render.show(short)
  printed = capsys.readouterr().out
  assert f"│ {path} │ {path} │" in printed
  assert f"│ {'x':{len(path)}} │ {path} │" in printed
  out = terminal.attach(monkeypatch, "stdout", width=60)
  render.show(table)
  lines = [x for x in out.text.splitlines() if x.startswith("│")]
  assert "".join(x.split("│")[1].strip() for x in lines) == path
  assert "…" not in out.text


def test_first_column_is_aligned_left_and_others_right(capsys):
  render.print_table("[b]t", ["a", "[i]"], [["x", "y"], ["long", "[/]"]])
  assert capsys.readouterr().out.splitlines() == [
    "[b]t          ", "┏━━━━━━┳━━━━━┓", "┃ a    ┃ [i] ┃", "┡━━━━━━╇━━━━━┩",
    "│ x    │   y │", "│ long │ [/] │", "└──────┴─────┘",
  ]


MADE = Report("title", ["one", Table("t", ["a"], [{"a": 1}]), "two"])


def test_parts_of_a_report_are_printed_in_order(capsys):
  render.show("zero", MADE, "three")
  lines = capsys.readouterr().out.split("\n")
  assert (lines[:2], lines[-4:]) == (["zero", "one"], [
    "└───┘", "two", "three", ""
  ])
  assert MADE.tables == [MADE.parts[1]]


def test_markdown_is_blocks_in_order():
  made = Report("a|b", ["- x\n\n# y", MADE.parts[1], "1. z"])
  assert render.markdown(made, "p.png") == (
    "# a\\|b\n\n![](p.png)\n\n- x\n\n\\# y\n\nt\n\n"
    "| a |\n|---|\n| 1 |\n\n1\\. z\n"
  )
  assert "![]" not in render.markdown(made)
  cells = [["a", "b"]], [["**c**", "[d](e)"]]
  assert render.markdown_table(cells[0][0], cells[1], True) == (
    "| a | b |\n|---|---|\n| **c** | [d](e) |\n"
  )
  assert r"\*\*c" in render.markdown_table(*cells[0], cells[1])


def test_page_is_one_document():
  """Title, picture, paragraphs and tables, in order."""
  text = render.page(Report("a&b", ["<x>", MADE.parts[1]]), b"123")
  assert text.startswith(
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    "<title>a&amp;b</title><style>"
  )
  _, body = text.split("<body>\n")
  assert body == (
    '<h1>a&amp;b</h1>\n<img alt="" src="data:image/png;base64,MTIz">\n'
    "<p>&lt;x&gt;</p>\n<table><caption>t</caption><thead>\n"
    "<tr><th>a</th></tr>\n</thead><tbody>\n<tr><td>1</td></tr>\n"
    "</tbody></table>\n</body></html>\n"
  )
  assert "<img" not in render.page(MADE)


def figure():
  return plot.Figure([plot.Panel([plot.Line([1, 2], [3, 4])])], (2, 1))


def test_report_is_presented_as_requested(tmp_path, capsys):
  """Each output is independent of the others."""
  pytest.importorskip("matplotlib")
  made = Report("title", ["line"], figure)
  render.present(made, {"x": 1})
  assert capsys.readouterr().out == "line\n"
  assert not [*tmp_path.iterdir()]
  render.present(made, {"x": 1}, as_json=True)
  assert json.loads(capsys.readouterr().out) == {"x": 1}
  names = {"output": "a.json", "picture": "b.png", "document": "c.html"}
  for option, name in names.items():
    folder = tmp_path / option
    render.present(made, {"x": 1}, **{option: str(folder / name)})
    assert [path.name for path in folder.iterdir()] == [name]
    assert capsys.readouterr().out == "line\n"
  assert results.read(tmp_path / "output/a.json")["x"] == 1
  assert (tmp_path / "picture/b.png").read_bytes().startswith(b"\x89PNG")
  assert "<p>line</p>" in (tmp_path / "document/c.html").read_text()


@pytest.mark.parametrize("saved", [{}, {"y": 2}])
def test_other_data_can_be_saved(tmp_path, capsys, saved):
  path = tmp_path / "a.json"
  render.present(MADE, {"x": 1}, True, str(path), saved=saved)
  assert json.loads(capsys.readouterr().out) == {"x": 1}
  found = results.read(path)
  assert {k: v for k, v in found.items() if k in "xy"} == saved


def test_report_without_a_figure_has_no_picture(tmp_path, capsys):
  with pytest.raises(ValueError, match=r"--plot=.* has no effect, since this"):
    render.present(MADE, {}, picture=str(tmp_path / "a.png"),
                   document=str(tmp_path / "a.md"))
  assert [path.name for path in tmp_path.iterdir()] == ["a.md"]
  assert "![]" not in (tmp_path / "a.md").read_text()


def test_report_is_written_with_its_figure(tmp_path):
  pytest.importorskip("matplotlib")
  made = Report("t", ["x"], figure)
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


def test_table_by_its_title_and_columns_by_their_headings():
  first, second = (
    Table(title, "a | b | c=d", [{"a": 1, "b": 2, "c": 3}])
    for title in ("sizes of links", "sizes")
  )
  found = Report("links", ["a line", first, second])
  assert found.table("sizes of") is first
  assert found.table("siz") is first  # the first of two
  assert found.table("sizes").only("d", "a").cells() == [["3", "1"]]
  with pytest.raises(ValueError, match=r"'links'; the titles are 'sizes of"):
    found.table("links")
  with pytest.raises(ValueError, match="column of 'sizes': 'c' must be one of"):
    second.only("c")
