"""All mutants of a source file.

Docstrings, comments, annotations, decorators, assertions, f-strings, messages
of errors and logging are not mutated.
"""

import ast
import collections
from collections.abc import Iterator
import dataclasses
import pathlib
import types

from tests.mutation.operators import OPERATORS

_LOGGING = (
  "logging", "log", "LOG", "logger", "warnings", "print", "console"
)
_UNMUTATED = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)


@dataclasses.dataclass(frozen=True)
class Mutant:
  """A change of one node of one file.

  The first seven fields identify it and do not depend on line numbers.

  Attributes:
    file: Path from the root of the repository.
    function: Qualified name of the function or class, or "<module>".
    operator: Name in `OPERATORS`.
    line: Text of the first line of the node, stripped.
    before, after: Source of the node and of its replacement.
    occurrence: Number among the mutants that equal it in all of these.
    lineno, end_lineno: Lines of the node, from 1.
    start, end: Its first byte and the one after its last.
  """

  file: str
  function: str
  operator: str
  line: str
  before: str
  after: str
  occurrence: int
  lineno: int
  end_lineno: int
  start: int
  end: int

  @property
  def identity(self) -> tuple[str | int, ...]:
    """Fields that identify it in any version of the file."""
    return dataclasses.astuple(self)[:7]

  def apply(self, source: str) -> str:
    """Source with the change; all other lines keep their numbers."""
    text = source.encode()
    after = self.after + "\n" * (self.end_lineno - self.lineno)
    if self.operator != "removed_statement" and not self._is_statement():
      after = f"({after})"
    changed = text[: self.start] + after.encode() + text[self.end :]
    return changed.decode()

  def _is_statement(self) -> bool:
    node = ast.parse(self.before.strip()).body[0]
    return not isinstance(node, ast.Expr)


def _is_message(node: ast.AST) -> bool:
  """Whether a statement logs, or is a docstring."""
  if not isinstance(node, ast.Expr):
    return False
  if isinstance(node.value, ast.Constant):
    return True
  called = node.value.func if isinstance(node.value, ast.Call) else None
  while isinstance(called, ast.Attribute | ast.Call):
    called = called.value if isinstance(called, ast.Attribute) else called.func
  return isinstance(called, ast.Name) and called.id in _LOGGING


def _is_guard(node: ast.AST) -> bool:
  """``if TYPE_CHECKING`` and ``if __name__ == "__main__"``."""
  if not isinstance(node, ast.If):
    return False
  test = ast.unparse(node.test)
  return "TYPE_CHECKING" in test or "__name__" in test


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
  """Nodes that may be mutated, each with the function it belongs to."""
  if isinstance(node, _UNMUTATED) or _is_message(node) or _is_guard(node):
    return
  if isinstance(node, ast.keyword) and node.arg == "strict":
    return  # an assertion of zip
  inner = function
  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
    inner = node.name if function == "<module>" else f"{function}.{node.name}"
  yield inner, node
  if isinstance(node, ast.Raise | ast.match_case):
    children = node.body if isinstance(node, ast.match_case) else []
    for child in children:
      yield from _nodes(child, inner)
    return
  for name, value in ast.iter_fields(node):
    if name in ("annotation", "returns", "decorator_list"):
      continue
    for child in value if isinstance(value, list) else [value]:
      if isinstance(child, ast.AST):
        yield from _nodes(child, inner)


def candidates(source: str, file: str) -> list[Mutant]:
  """All mutants of a file, in the order of its nodes.

  Args:
    source: Content of the file.
    file: Path from the root of the repository.
  """
  lines = source.encode().splitlines(keepends=True)
  starts = [0]
  for line in lines:
    starts.append(starts[-1] + len(line))
  found, seen = [], set()
  counts: collections.Counter[tuple] = collections.Counter()
  for function, node in _nodes(ast.parse(source), "<module>"):
    for name, operator in OPERATORS.items():
      for old, new in operator(node):
        start = starts[old.lineno - 1] + old.col_offset
        end = starts[old.end_lineno - 1] + old.end_col_offset
        after = ast.unparse(ast.fix_missing_locations(new))
        if (start, end, after) in seen:
          continue
        seen.add((start, end, after))
        text = lines[old.lineno - 1].decode().strip()
        key = (file, function, name, text, ast.unparse(old), after)
        found.append(
          Mutant(*key, counts[key], old.lineno, old.end_lineno, start, end)
        )
        counts[key] += 1
  return found


def _instructions(code: types.CodeType) -> tuple:
  """Compiled code without its positions in the source."""
  constants = tuple(
    _instructions(c) if isinstance(c, types.CodeType) else (type(c), repr(c))
    for c in code.co_consts
  )
  return (
    code.co_code, code.co_exceptiontable, code.co_names, code.co_varnames,
    code.co_freevars, code.co_cellvars, code.co_argcount,
    code.co_kwonlyargcount, code.co_flags, constants,
  )


def is_distinct(source: str, mutant: Mutant) -> bool:
  """Whether the change compiles to other code, and compiles at all."""
  try:
    changed = compile(mutant.apply(source), mutant.file, "exec")
  except (SyntaxError, ValueError):
    return False
  unchanged = compile(source, mutant.file, "exec")
  return _instructions(changed) != _instructions(unchanged)


def functions(source: str) -> dict[str, tuple[int, int]]:
  """First and last line of every function and class, decorators included."""
  found = {}

  def visit(node: ast.AST, prefix: str) -> None:
    for child in ast.iter_child_nodes(node):
      name = prefix
      if isinstance(
        child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
      ):
        name = f"{prefix}.{child.name}" if prefix else child.name
        first = min(n.lineno for n in (child, *child.decorator_list))
        found[name] = (first, child.end_lineno)
      visit(child, name)

  visit(ast.parse(source), "")
  return found


def read(root: pathlib.Path, file: str) -> str:
  """Content of a file of the repository."""
  return (root / file).read_text()
