"""Generated tables of documents: the text between two marker lines."""

import pytest

from caatnet.show import documents

TEXT = """\
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
  text, changed = documents.rewritten(
    TEXT, {"one": lambda body: 2 * body, "two": lambda body: body}
  )
  assert text == TEXT.replace("x\n", "x\nx\n")
  assert changed == ["one"]
  text, changed = documents.rewritten(
    TEXT, {"two": lambda body: "", "one": lambda body: "z\n"}
  )
  assert text == TEXT.replace("x\n", "z\n").replace("# y\n", "")
  assert changed == ["one", "two"]


@pytest.mark.parametrize("text", [
  "# table: one\n", "# end of table\n",
  "# table: one\n# table: one\n# end of table\n",
  "# table: one\n# end of table\n# end of table\n",
  "<!-- table: one -->\n\n# table: one\n# end of table\n",
])
def test_marker_without_its_pair_is_an_error(text):
  with pytest.raises(ValueError, match="a table lacks its first or last line"):
    documents.rewritten(text, {"one": lambda body: body})


def test_unknown_table_is_an_error_that_lists_the_known_ones():
  with pytest.raises(ValueError, match="no table 'two'; known: one, three"):
    documents.rewritten(TEXT, {"one": lambda _: "", "three": lambda _: ""})
