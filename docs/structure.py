"""Prints sizes of the code, import cycles, and the files of an extension.

  python -m docs.structure
  python -m docs.structure --root=OTHER_CHECKOUT
"""

import argparse
import ast
import collections
from collections.abc import Iterator
import dataclasses
import io
import pathlib
import re
import statistics
import sys
import tokenize

import networkx as nx

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("parallel", "caatnet", "configs", "launch", "docs")
LONG_FUNCTION = 60
MANY_PARAMETERS = 7
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)
_NO_CODE = (
  tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
  tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
)


@dataclasses.dataclass(frozen=True)
class Module:
  """Sizes and imports of one Python module.

  Attributes:
    name: Its dotted name.
    lines: Number of all lines.
    code: Number of lines with code: not blank, no comments or docstrings.
    docstring: Number of lines of docstrings.
    comment: Number of lines with a comment.
    functions: Name -> (lines, parameters) of each function.
    imports: Dotted names that it imports when it is imported.
  """

  name: str
  lines: int
  code: int
  docstring: int
  comment: int
  functions: dict[str, tuple[int, int]]
  imports: frozenset[str]


def read(path: pathlib.Path, root: pathlib.Path) -> Module:
  """Reads a module of a source tree."""
  text = path.read_text()
  tree = ast.parse(text)
  docstring = set(_docstring_lines(tree))
  code, comment = set(), set()
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    lines = range(token.start[0], token.end[0] + 1)
    if token.type == tokenize.COMMENT:
      comment.update(lines)
    elif token.type not in _NO_CODE:
      code.update(lines)
  parts = path.relative_to(root).with_suffix("").parts
  name = ".".join(part for part in parts if part != "__init__")
  return Module(
    name, len(text.splitlines()), len(code - docstring), len(docstring),
    len(comment), dict(_functions(tree)), frozenset(_imports(tree.body)),
  )


def _docstring_lines(tree: ast.AST) -> Iterator[int]:
  for node in ast.walk(tree):
    if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
      yield from range(node.body[0].lineno, node.body[0].end_lineno + 1)


def _functions(
  tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, tuple[int, int]]]:
  for node in ast.iter_child_nodes(tree):
    named = isinstance(node, (ast.ClassDef, *_FUNCTIONS))
    name = f"{prefix}{node.name}" if named else prefix
    if isinstance(node, _FUNCTIONS):
      arguments = node.args
      names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
      parameters = [a for a in names if a.arg not in ("self", "cls")]
      yield name, (node.end_lineno - node.lineno + 1, len(parameters))
    yield from _functions(node, f"{name}." if named else prefix)


def _imports(body: list[ast.stmt]) -> Iterator[str]:
  """Yields what a module imports when it is itself imported.

  Imports inside functions are left out: they delay the import of heavy packages
  until a function needs them.
  """
  for node in body:
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
      yield node.module
      yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Try):
      yield from _imports(node.body)


def modules(root: pathlib.Path) -> list[Module]:
  """Reads all modules of a checkout that are not tests."""
  return [
    read(path, root)
    for package in PACKAGES for path in sorted((root / package).rglob("*.py"))
    if path.read_text().strip()
  ]


def code_of_directories(found: list[Module]) -> collections.Counter[str]:
  """Returns the number of code lines by top-level file or directory."""
  counts = collections.Counter[str]()
  for module in found:
    counts[".".join(module.name.split(".")[:2])] += module.code
  return counts


def cycles(found: list[Module]) -> list[list[str]]:
  """Returns the groups of modules that import each other."""
  names = {module.name for module in found}
  graph = nx.DiGraph(
    (module.name, imported)
    for module in found for imported in module.imports & names
    # A package that imports its own names does so when they are used.
    if imported != module.name
  )
  return [
    sorted(group) for group in nx.strongly_connected_components(graph)
    if len(group) > 1
  ]


def summary(found: list[Module]) -> dict[str, int | float | str]:
  """Returns the sizes of the code by name, as `main` prints them."""
  functions = {
    f"{module.name}.{name}": size
    for module in found for name, size in module.functions.items()
  }
  longest_file = max(found, key=lambda module: module.lines)
  longest = max(functions, key=lambda name: functions[name][0])
  return {
    "files with code": len(found),
    "lines": sum(m.lines for m in found),
    "code lines": sum(m.code for m in found),
    "docstring lines": sum(m.docstring for m in found),
    "comments per code line": round(
      sum(m.comment for m in found) / sum(m.code for m in found), 3
    ),
    "median file, lines": statistics.median(m.lines for m in found),
    "longest file": f"{longest_file.name}, {longest_file.lines} lines",
    f"functions over {LONG_FUNCTION} lines": sum(
      lines > LONG_FUNCTION for lines, _ in functions.values()
    ),
    "longest function": f"{longest}, {functions[longest][0]} lines",
    f"functions with more than {MANY_PARAMETERS} parameters": sum(
      parameters > MANY_PARAMETERS for _, parameters in functions.values()
    ),
    "import cycles": len(cycles(found)),
  }


def files_per_extension(root: pathlib.Path) -> dict[str, int]:
  """Returns the number of files to write or change for each kind of extension.

  ARCHITECTURE.md names these files. For some kinds, tests/recipes_test.py adds
  an extension in exactly these files.

  Args:
    root: A checkout.
  """
  text = (root / "ARCHITECTURE.md").read_text()
  table = text.partition("\n## To add something\n")[2].partition("\n## ")[0]
  found = {}
  for line in table.splitlines():
    cells = line.strip("|").split(" | ")
    if len(cells) == 4 and "`" in line:
      # Paths in parentheses are documentation.
      named = re.sub(r"\(.*?\)", "", " ".join(cells[1:3]))
      paths = re.findall(r"`([\w./-]+/(?:\w+\.\w+)?)`", named)
      found[cells[0].strip()] = len(set(paths))
  return found


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--root", type=pathlib.Path, default=ROOT,
                      help="another checkout of this repository")
  parser.add_argument("--list", action="store_true",
                      help="also list long functions, cycles, directories")
  options = parser.parse_args(argv)
  found = modules(options.root)
  for name, value in summary(found).items():
    print(f"{name:40} {value:,}" if isinstance(value, int) else
          f"{name:40} {value}")
  for kind, number in files_per_extension(options.root).items():
    print(f"{f'files of a new {kind}':40} {number}")
  if options.list:
    for module in found:
      for name, (lines, parameters) in module.functions.items():
        if lines > LONG_FUNCTION or parameters > MANY_PARAMETERS:
          print(f"{module.name}.{name}: {lines} lines, {parameters} parameters")
    for group in cycles(found):
      print("cycle:", ", ".join(group))
    for name, lines in code_of_directories(found).most_common():
      print(f"{name}: {lines:,} code lines")


if __name__ == "__main__":
  main(sys.argv[1:])
