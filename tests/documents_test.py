"""Tables and figures of documents, compared with the files in results/."""

import itertools
import re
import types

import pytest

from docs import documents, log, tables
from docs.points import ROOT, loss_differences, read
from parallel.kernels import evidence

TEXTS = {name: (ROOT / name).read_text() for name in tables.DOCUMENTS}
TABLE = re.compile(r"(?:<!--|#) table: (\w+).*?end of table", re.DOTALL)


@pytest.mark.quick
@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_tables_equal_the_results(name):
  _, changed = documents.rewrite_tables(TEXTS[name], tables.TABLES)
  assert changed == [], "make tables"


def test_every_table_is_in_a_document():
  found = [t for text in TEXTS.values() for t in TABLE.findall(text)]
  assert sorted(found) == sorted(tables.TABLES)


def numbers():
  """Yields a document, a table in it, and the position of its last number."""
  for name, text in TEXTS.items():
    for match in TABLE.finditer(text):
      # "p = 1" of a head or ".0" of a key may be words: requires a figure.
      figures = [*re.finditer(r"\d\.\d\d+", match[0])]
      if figures:  # a table of words has no figure
        place = match.start() + figures[-1].end() - 1
        yield pytest.param(name, match[1], place, id=match[1])


@pytest.mark.parametrize(("name", "table", "place"), list(numbers()))
def test_changed_figure_is_named_and_corrected(name, table, place):
  text = TEXTS[name]
  wrong = str((int(text[place]) + 1) % 10)
  wrong = text[:place] + wrong + text[place + 1 :]
  right, changed = documents.rewrite_tables(wrong, tables.TABLES)
  assert changed == [table]
  assert right == text


MARKED = """\
a <!-- table: one -->
<!-- table: one -->
x
<!-- end of table -->
b
# table: two
# y
# end of table
c"""


def test_only_lines_between_markers_are_replaced():
  """Each table receives its present lines; markers within a line are text."""
  text, changed = documents.rewrite_tables(
    MARKED, {"one": lambda body: 2 * body, "two": lambda body: body}
  )
  assert text == MARKED.replace("x\n", "x\nx\n")
  assert changed == ["one"]
  text, changed = documents.rewrite_tables(
    MARKED, {"two": lambda body: "", "one": lambda body: "z\n"}
  )
  assert text == MARKED.replace("x\n", "z\n").replace("# y\n", "")
  assert changed == ["one", "two"]


@pytest.mark.parametrize("text", [
  "# table: one\n", "# end of table\n",
  "# table: one\n# table: one\n# end of table\n",
  "# table: one\n# end of table\n# end of table\n",
  "<!-- table: one -->\n\n# table: one\n# end of table\n",
])
def test_marker_without_its_pair_is_an_error(text):
  with pytest.raises(ValueError, match="each table must have a first and a"):
    documents.rewrite_tables(text, {"one": lambda body: body})


def test_unknown_table_is_an_error_that_lists_the_known_ones():
  with pytest.raises(ValueError, match="the table 'two' is unknown; use one"):
    documents.rewrite_tables(
      MARKED, {"one": lambda _: "", "three": lambda _: ""}
    )


def test_command_names_differences_and_writes_them(tmp_path, monkeypatch):
  copy = tmp_path / "README.md"
  wrong = TEXTS["README.md"].replace("nats/byte ┃", "nats/bite ┃")
  copy.write_text(wrong)
  monkeypatch.setattr(tables, "DOCUMENTS", (str(copy),))
  monkeypatch.setattr(tables, "FLAGS", types.SimpleNamespace(check=True))
  with pytest.raises(ValueError, match=r"demo in .* differ from results/; run"):
    tables.main()
  assert copy.read_text() == wrong
  tables.FLAGS.check = False
  tables.main()
  assert copy.read_text() == TEXTS["README.md"]


SPREAD = r"(?<![\d.])[-+]?0\.\d{3} \([-+]?0\.\d{3}\s+to\s+[-+]?0\.\d{3}\)"


@pytest.mark.parametrize("name", ["docs/strategies.md", "CLAIMS.md", "log"])
def test_differences_of_losses_are_those_of_a_sweep(name):
  """Each "mean (least to most)" belongs to two points of one file."""
  known = set()
  for path in (ROOT / "results").glob("*.csv"):
    for point, other in itertools.permutations(read(path.stem), 2):
      known.add(tables.format_mean_and_range(loss_differences(point, other)))
  paths = log.paths() if name == "log" else [ROOT / name]
  text = "\n".join(path.read_text() for path in paths)
  found = {" ".join(spread.split()) for spread in re.findall(SPREAD, text)}
  assert len(found) > 10
  assert {s for s in found if _signed(s) not in known} == set()


def _signed(text):
  """Formats a difference like `tables.spread`."""
  return re.sub(
    r"[-+]?0\.\d{3}",
    lambda m: tables.format_signed(float(m[0])) if float(m[0]) else "0.000",
    text,
  )


def test_kernels_are_used_where_they_make_a_step_faster(monkeypatch):
  steps = {("chip", "op"): {1.0: 0.9, 0.5: 1.1, 0.25: 0.95}}
  monkeypatch.setattr(evidence, "STEP_WITH_KERNEL", steps)
  helps = [
    evidence.is_step_faster("chip", "op", p) for p in (1.0, 0.99, 0.4, 0.3, 0.0)
  ]
  # p = 1 is a separate case; other values use the nearest measured one.
  assert helps == [True, False, False, True, True]
  assert evidence.is_step_faster("chip", "another", 0.5)
  assert evidence.is_step_faster("another", "op", 0.5)
