"""Tables in documents that are written from files of results.

A table stands between two lines of its own, in Markdown

  <!-- table: NAME -->
  <!-- end of table -->

and in Python the same after a "#". `rewritten` puts the table of that name
between them.
"""

from collections.abc import Callable, Mapping
import re

# Takes what stands between the two lines, returns what should.
Table = Callable[[str], str]

_TABLE = re.compile(
  r"(?P<first>^(?:<!--|#) table: (?P<name>\w+)(?: -->)?\n)"
  r"(?P<body>.*?)"
  r"(?P<last>^(?:<!--|#) end of table(?: -->)?$)",
  re.MULTILINE | re.DOTALL,
)


def rewritten(
  text: str, tables: Mapping[str, Table]
) -> tuple[str, list[str]]:
  """Writes all tables of a document anew.

  Args:
    text: The document.
    tables: The tables by name.

  Returns:
    The document, and the names of the tables that differ from what stood there.

  Raises:
    ValueError: A name is unknown, or a table has only one of its two lines.
  """
  changed = []

  def write(match: re.Match[str]) -> str:
    name = match["name"]
    if name not in tables:
      raise ValueError(f"no table {name!r}; known: {', '.join(tables)}")
    body = tables[name](match["body"])
    if body != match["body"]:
      changed.append(name)
    return match["first"] + body + match["last"]

  marks = re.findall(r"^(?:<!--|#) (table: \w+|end of table)", text, re.M)
  if len(marks) != 2 * len(_TABLE.findall(text)):
    raise ValueError(f"a table begins or ends, but not both: {marks}")
  return _TABLE.sub(write, text), changed
