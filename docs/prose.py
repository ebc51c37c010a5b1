"""Check of wording: prose in code and documents against a list of patterns.

  python -m docs.prose
  python -m docs.prose parallel/outer README.md

Reads docstrings, comments, texts of errors, flags and config keys, Markdown,
and Markdown cells of notebooks. The patterns are in docs/prose.toml. A hint
asks for another sentence, not only for another word.
"""

import argparse
import ast
from collections.abc import Iterator, Sequence
import fnmatch
import io
import json
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
_DOCUMENTED = (
  ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
)
# Keyword arguments that are texts for users.
_TEXTS = {"help", "description", "doc", "epilog"}
# `name: Text` and `name (type): Text` in a section of a docstring.
_FIELD = re.compile(r"\s*\*{0,2}[a-z_][\w, *`]*(?: \([^)]*\))?: +(?=[A-Z])")


class Line(NamedTuple):
  """One line of prose.

  Attributes:
    number: Line number in the file; the cell of a notebook.
    text: The line.
    is_first: Whether a docstring begins here.
  """

  number: int
  text: str
  is_first: bool = False


class Hint(NamedTuple):
  """One place to rewrite.

  Attributes:
    path: File.
    line: The line.
    found: The words that match a pattern.
    write: Wording to consider instead.
  """

  path: pathlib.Path
  line: Line
  found: str
  write: str


def markdown_lines(text: str) -> Iterator[Line]:
  """Yields the lines of Markdown that are not code."""
  fenced = False
  for number, line in enumerate(text.splitlines(), 1):
    if line.lstrip().startswith("```"):
      fenced = not fenced
    elif line.strip() and not fenced and not line.startswith("    "):
      yield Line(number, line)


def notebook_lines(text: str) -> Iterator[Line]:
  """Yields the lines of a notebook's Markdown cells."""
  for number, cell in enumerate(json.loads(text)["cells"], 1):
    if cell["cell_type"] == "markdown":
      for line in markdown_lines("".join(cell["source"])):
        yield Line(number, line.text)


def python_prose_lines(text: str) -> Iterator[Line]:
  """Yields comments, lines of docstrings and texts for users."""
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      yield Line(token.start[0], token.string.lstrip("# "))
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, _DOCUMENTED) and (doc := ast.get_docstring(node)):
      start = node.body[0].lineno
      for offset, line in enumerate(doc.splitlines()):
        if line.strip():
          yield Line(start + offset, line, offset == 0)
    for argument in _user_texts(node):
      for part in ast.walk(argument):
        text = part.value if isinstance(part, ast.Constant) else None
        if isinstance(text, str) and " " in text:
          yield Line(part.lineno, text.replace("\n", " "))


def _user_texts(node: ast.AST) -> list[ast.expr]:
  """Returns the texts for users of an error, a flag or a config key."""
  if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
    return node.exc.args
  if not isinstance(node, ast.Call):
    return []
  found = [k.value for k in node.keywords if k.arg in _TEXTS]
  name = ast.unparse(node.func)
  if name.split(".")[-1].startswith("DEFINE_"):
    found += node.args[2:]
  elif name == "field":
    found += node.args[1:2]
  return found


_READERS = {
  ".py": python_prose_lines, ".md": markdown_lines, ".ipynb": notebook_lines
}


class ProseChecker:
  """Checks lines of prose against the patterns of a data file.

  Args:
    path: TOML file with `wording` (pattern -> what to write instead),
      `openers` (words that must not begin a text), `most_per_1000` (allowed
      hints per 1,000 lines), and `exception` (`path`, `text` and `reason`).
  """

  def __init__(self, path: pathlib.Path = ROOT / "docs/prose.toml") -> None:
    data = tomllib.loads(path.read_text())
    self.most_per_1000 = data["most_per_1000"]
    self._wording = [
      (re.compile(pattern, re.IGNORECASE), write)
      for pattern, write in data["wording"].items()
    ]
    self._opener = re.compile(rf"(?:{'|'.join(data['openers'])})\b")
    self._exceptions = [
      (e["path"], re.compile(e["text"])) for e in data.get("exception", [])
      if e["reason"]
    ]

  def hint(self, path: pathlib.Path, line: Line) -> Hint | None:
    """Returns the first hint on a line, if there is one."""
    if any(
      fnmatch.fnmatch(path.as_posix(), glob) and text.search(line.text)
      for glob, text in self._exceptions
    ):
      return None
    for pattern, write in self._wording:
      if found := pattern.search(line.text):
        return Hint(path, line, found.group(), write)
    if path.suffix != ".py":
      return None
    field = _FIELD.match(line.text)
    if not field and not line.is_first:
      return None
    found = self._opener.match(line.text, 0 if line.is_first else field.end())
    write = "begin with what the thing is or does"
    return Hint(path, line, found.group(), write) if found else None

  def read(
    self, path: pathlib.Path, root: pathlib.Path
  ) -> tuple[list[Hint], int]:
    """Returns the hints on a file, and its number of lines of prose."""
    lines = list(_READERS[path.suffix]((root / path).read_text()))
    hints = [self.hint(path, line) for line in lines]
    return [hint for hint in hints if hint], len(lines)


def files(root: pathlib.Path, paths: Sequence[str]) -> list[pathlib.Path]:
  """Returns the files with prose that git tracks below the given paths."""
  listed = subprocess.run(
    ["git", "ls-files", "--", *paths], cwd=root, check=True,
    capture_output=True, text=True,
  ).stdout.splitlines()
  found = [pathlib.Path(name) for name in listed]
  return [p for p in found if p.suffix in _READERS and (root / p).exists()]


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints hints; returns 1 if there are more than the data file allows."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("paths", nargs="*", help="files or folders; all if none")
  parser.add_argument(
    "--table", action="store_true", help="one line per directory, no hints"
  )
  options = parser.parse_args(arguments)
  check, totals = ProseChecker(), {}
  hints = 0
  for path in files(ROOT, options.paths):
    found, num_lines = check.read(path, ROOT)
    hints += len(found)
    directory = "/".join(path.parts[: min(2, len(path.parts) - 1)]) or "."
    before = totals.get(directory, (0, 0))
    totals[directory] = before[0] + len(found), before[1] + num_lines
    for hint in [] if options.table else found:
      print(
        f"{path}:{hint.line.number}: {hint.found.strip()!r}: {hint.write}: "
        f"{hint.line.text.strip()[:90]}"
      )
  if options.table:
    for directory, (num, of) in sorted(totals.items()):
      print(f"{directory:<24}{num:>6}{of:>8}{1000 * num / max(1, of):>8.1f}")
  lines = sum(of for _, of in totals.values())
  rate = 1000 * hints / max(1, lines)
  print(
    f"{hints} hints in {lines:,} lines of prose: {rate:.1f} per 1,000, at "
    f"most {check.most_per_1000:g}"
  )
  return int(rate > check.most_per_1000)


if __name__ == "__main__":
  sys.exit(main())
