"""Entries of the experiment log, log/YYYY-MM-DD-subject.md, and their index.

An entry begins with a title and a fixed head, followed by two sections:

  # Title

  - Question: ...
  - Date: 2026-11-25
  - Machine: standard
  - Commit: 2c7e4b1e                  (which code ran)
  - Command:                          (a code block, or why there is none)

  ## Result
  ## Verdict

Results are sentences that can be read without the code, and tables with units.
The first sentence of the verdict is the entry's line in the index,
log/README.md. An entry is history: the files that it names exist at the last
commit in its head.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import decimal
import pathlib
import re

from caatnet.show.render import markdown_table
from docs.points import ROOT

FOLDER = ROOT / "log"
# Pattern of the name of an entry.
NAME_PATTERN = r"\d{4}-\d\d-\d\d(-[a-z0-9]+)+"
_REQUIRED = ("Question", "Date", "Machine", "Commit", "Command")
_HEADINGS = ["Result", "Verdict"]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_COMMIT_PATTERN = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{7,40}\b")
_FIELD = re.compile(r"^- (\w+):((?:.|\n(?=  ))*)", re.MULTILINE)

# A number with thousands separated by commas: sign, decimals, per cent.
_NUMBER = re.compile(
  r"(?<![\w.,])(?P<sign>[+-])?(?P<whole>\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))"
  r"(?:\.(?P<decimals>\d+))?(?P<percent> ?%)?(?!\d)"
)
# Text in which digits are names: code blocks, dates, targets of links.
_NO_FIGURE = re.compile(
  r"^```.*?^```$|\d{4}-\d\d-\d\d|\]\([^)]*\)", re.MULTILINE | re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Entry:
  """One experiment.

  Attributes:
    name: File name without its suffix.
    title: Subject of the experiment.
    head: Fields of the head by name; a command is an empty text if it is in a
      code block.
    commit: Last commit that the head names.
    verdict: First sentence of the verdict.
  """

  name: str
  title: str
  head: Mapping[str, str]
  commit: str
  verdict: str


def parse(name: str, text: str) -> Entry:
  r"""Reads an entry of the log.

  Args:
    name: File name without its suffix, YYYY-MM-DD-subject.
    text: Content of the file.

  Returns:
    The entry.

  Raises:
    ValueError: The name, the head or the sections do not have this form.

  Example:
    >>> text = "# Ring\n\n- Question: How fast?\n- Date: 2026-11-25\n"
    >>> text += "- Machine: standard\n- Commit: 2c7e4b1e\n"
    >>> text += "- Command: make test\n\n"
    >>> text += "## Result\n\n12 s.\n\n## Verdict\n\nFast. Very fast.\n"
    >>> parse("2026-11-25-ring", text).verdict
    'Fast.'
  """
  prose = _FENCED.sub("", text)
  title = re.match(r"# (.+)\n", prose)
  parts = re.split(r"^## (.+)\n", prose, flags=re.MULTILINE)
  if not title or parts[1::2] != _HEADINGS:
    raise ValueError(
      f"{name}: expected a title and the sections {_HEADINGS}, got "
      f"{parts[1::2]}"
    )
  head = {
    key: " ".join(value.split()) for key, value in _FIELD.findall(parts[0])
  }
  missing = [
    key for key in _REQUIRED
    if not head.get(key) and not (key == "Command" and "```" in text)
  ]
  if missing:
    raise ValueError(
      f"{name}: the head of the entry must have {', '.join(missing)}"
    )
  commits = _COMMIT_PATTERN.findall(head["Commit"])
  if not commits:
    raise ValueError(f"{name}: Commit must have a hash, got {head['Commit']!r}")
  if not re.fullmatch(NAME_PATTERN, name) or not name.startswith(head["Date"]):
    raise ValueError(
      f"{name}: the name of the entry must be {head['Date']}-subject"
    )
  verdict = " ".join(parts[4].split())
  return Entry(
    name, title[1], head, commits[-1], re.split(r"(?<=\.)\s", verdict)[0]
  )


def paths(folder: pathlib.Path = FOLDER) -> list[pathlib.Path]:
  """Returns the files of all entries, newest first, each day by subject."""
  found = [p for p in sorted(folder.glob("*.md")) if p.stem != "README"]
  return sorted(found, key=lambda path: path.stem[:10], reverse=True)


def entries(folder: pathlib.Path = FOLDER) -> Iterator[Entry]:
  """Yields all entries, newest first."""
  for path in paths(folder):
    yield parse(path.stem, path.read_text())


def path_of(name: str) -> pathlib.Path:
  """Returns the file of an entry, which may not exist."""
  return FOLDER / f"{name}.md"


def link(name: str) -> str:
  """Returns a Markdown link to an entry, for documents in the root folder."""
  path = path_of(name)
  title = parse(name, path.read_text()).title
  return f"[{title}]({path.relative_to(ROOT).as_posix()})"


def contains_figure(text: str, figure: str) -> bool:
  """Returns whether the result or the verdict of an entry has a number.

  Dates, code blocks and targets of links are ignored.

  Args:
    text: Content of the entry.
    figure: Number as another document writes it, "1,024", "+0.5" or "24%". The
      entry may have more decimals, which are rounded.

  Raises:
    ValueError: The figure is not a number.

  Example:
    >>> entry = "2.5%\\n## Result\\n1,024.38 us, 24% of 4.27 ms.\\n"
    >>> figures = ("1,024.4", "4.2", "24%", "2.5%")
    >>> [contains_figure(entry, figure) for figure in figures]
    [True, False, True, False]
  """
  _, _, body = text.partition("\n## Result\n")
  found = _NUMBER.finditer(_NO_FIGURE.sub(" ", body))
  wanted = _NUMBER.fullmatch(figure)
  if not wanted:
    raise ValueError(f"expected a number, got {figure!r}")
  return any(_rounds_to(number, wanted) for number in found)


def _rounds_to(number: re.Match[str], wanted: re.Match[str]) -> bool:
  """Returns whether a figure rounded to the decimals of another equals it."""
  decimals = len(wanted["decimals"] or "")
  if (
    bool(number["percent"]) != bool(wanted["percent"])
    or len(number["decimals"] or "") < decimals
  ):
    return False
  difference = abs(_value(number) - _value(wanted))
  return difference <= decimal.Decimal(5).scaleb(-decimals - 1)


def _value(number: re.Match[str]) -> decimal.Decimal:
  whole = number["whole"].replace(",", "")
  return decimal.Decimal(
    f"{number['sign'] or ''}{whole or 0}.{number['decimals'] or 0}"
  )


def documents_with_tables() -> tuple[str, ...]:
  """Returns the documents of the log with generated tables."""
  found = [path for path in paths() if "<!-- table:" in path.read_text()]
  return tuple(
    p.relative_to(ROOT).as_posix() for p in (FOLDER / "README.md", *found)
  )


def index_table(_: str = "") -> str:
  """Returns the index of the log: a row for each entry, newest first."""
  return markdown_table(
    ["date", "subject", "question", "verdict"],
    [
      [entry.head["Date"], f"[{entry.title}]({entry.name}.md)",
       entry.head["Question"], entry.verdict]
      for entry in entries()
    ],
    is_markdown=True,
  )
