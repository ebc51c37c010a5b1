"""Generated tables in documents, from files of results.

A table is between two marker lines, in Markdown

  <!-- table: NAME -->
  <!-- end of table -->

and in Python the same text after a "#". `rewrite_tables` replaces the lines
between them with the table of that name.
"""

from collections.abc import Callable, Mapping
import re

# Function from the current text between the marker lines to the new text.
TableFunction = Callable[[str], str]

_TABLE = re.compile(
  r"(?P<first>^(?:<!--|#) table: (?P<name>\w+)(?: -->)?\n)"
  r"(?P<body>.*?)"
  r"(?P<last>^(?:<!--|#) end of table(?: -->)?$)",
  re.MULTILINE | re.DOTALL,
)


def rewrite_tables(
  text: str, tables: Mapping[str, TableFunction]
) -> tuple[str, list[str]]:
  r"""Regenerates all tables of a document.

  Args:
    text: The document.
    tables: Functions that generate tables, by name.

  Returns:
    The new document, and the names of the tables that have changed.

  Raises:
    ValueError: A name is unknown, or a table has only one of its marker lines.

  Example:
    >>> text = "# table: sum\nold\n# end of table\n"
    >>> print(rewrite_tables(text, {"sum": lambda body: "1 + 1 = 2\n"}))
    ('# table: sum\n1 + 1 = 2\n# end of table\n', ['sum'])
  """
  changed = []

  def write(match: re.Match[str]) -> str:
    name = match["name"]
    if name not in tables:
      raise ValueError(
        f"the table {name!r} is unknown; use one of {', '.join(tables)}"
      )
    body = tables[name](match["body"])
    if body != match["body"]:
      changed.append(name)
    return match["first"] + body + match["last"]

  # Each pair of markers must match, or the count differs.
  marks = re.findall(r"^(?:<!--|#) (table: \w+|end of table)", text, re.M)
  if len(marks) != 2 * len(_TABLE.findall(text)):
    raise ValueError(
      f"each table must have a first and a last line, got {marks}"
    )
  return _TABLE.sub(write, text), changed
