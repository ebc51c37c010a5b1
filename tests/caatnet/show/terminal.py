"""Terminal in memory, and tables that were printed."""

import io
import re

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
  """Text stream whose ``isatty`` is true."""

  def isatty(self) -> bool:
    return True

  @property
  def text(self) -> str:
    """All output without escape sequences."""
    return _ESCAPE.sub("", self.getvalue())


def attach(monkeypatch, stream: str = "stderr", width: int = 100) -> Terminal:
  """Replaces a stream of `sys` by a terminal with colours for one test."""
  for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
    monkeypatch.delenv(name, raising=False)
  for name, value in (("TERM", "xterm"), ("COLUMNS", width), ("LINES", 40)):
    monkeypatch.setenv(name, str(value))
  made = Terminal()
  monkeypatch.setattr(f"sys.{stream}", made)
  return made


def tables(text: str) -> dict[str, list[list[str]]]:
  """Returns the rows of printed tables, headings first, by their titles.

  Args:
    text: Output whose lines outside of tables are titles; a title that is
      wrapped is joined, and cells are not wrapped.
  """
  found: dict[str, list[list[str]]] = {}
  title: list[str] = []
  for line in text.splitlines():
    if line.startswith("┏"):
      rows = found[" ".join(title)] = []
      title = []
    elif line[:1] and line[0] in "┃│":
      cells = line[1:-1].replace("┃", "│").split("│")
      rows.append([cell.strip() for cell in cells])
    elif line[:1] not in ("┡", "└"):
      title += line.split()
  return found
