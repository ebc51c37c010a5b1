"""Lines of the user's code behind a program's equations."""

import ast
from collections.abc import Collection, Iterable
import functools
import linecache
import pathlib
import sysconfig
from typing import Any

# Folders and files whose lines are not the user's.
_LIBRARIES = (
  *{f"{sysconfig.get_path(name)}/" for name in (
    "stdlib", "platstdlib", "purelib", "platlib"
  )},
  f"{pathlib.Path(__file__).parent}/",
)


def is_library(text: str) -> bool:
  """Returns whether a text names a file of a library."""
  return any(prefix in text for prefix in _LIBRARIES)


def source_lines(eqn: Any) -> tuple[str, ...]:
  """Returns FILE:LINE of the user's code that made an equation, and callers."""
  traceback = eqn.source_info.traceback
  return tuple(
    f"{frame.file_name}:{frame.line_num}"
    for frame in (() if traceback is None else traceback.frames)
    if not frame.file_name.startswith((*_LIBRARIES, "<"))
  )


@functools.cache
def _parsed(file: str) -> ast.Module:
  try:
    return ast.parse("".join(linecache.getlines(file)))
  except SyntaxError:  # a cell of a notebook with commands, for example
    return ast.Module([], [])


def python_lines(
  lines: Iterable[str], operations: Collection[str]
) -> tuple[str, ...]:
  """Returns lines without an operation that assign what given statements read.

  A number of ranks, a size or a flag of Python has no value on a device that
  could be compared, and neither has an assignment in which an operation is
  missing. The last assignments of the names that the statements read are
  followed within the enclosing functions.

  Args:
    lines: FILE:LINE of statements.
    operations: FILE:LINE of all operations on arrays: their statements are not
      followed.
  """
  found: dict[str, None] = {}
  queue = list(lines)
  while queue:
    file, _, number = queue.pop(0).rpartition(":")
    for start, stop in _assignments(file, int(number)):
      line = f"{file}:{start}"
      if line not in found and not any(
        f"{file}:{i}" in operations for i in range(start, stop + 1)
      ):
        found[line] = None
        queue.append(line)
  return tuple(found)


def _assignments(file: str, number: int) -> list[tuple[int, int]]:
  """Returns the lines, from and to, that assign what a statement reads."""
  around = [
    x for x in ast.walk(_parsed(file)) if isinstance(x, ast.stmt)
    and x.lineno <= number <= (x.end_lineno or x.lineno)
  ]
  functions = [x for x in around if isinstance(x, ast.FunctionDef)]
  if not functions or around[-1] is functions[-1]:
    return []
  statement, found = around[-1], []
  names = {
    x.id for x in ast.walk(statement)
    if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)
  }
  for name in sorted(names):
    before = statement.lineno
    for function in reversed(functions):
      if name in {x.arg for x in ast.walk(function.args)
                  if isinstance(x, ast.arg)}:
        break
      places = [
        (x.lineno, x.end_lineno or x.lineno) for x in ast.walk(function)
        if isinstance(x, ast.Assign | ast.AnnAssign | ast.AugAssign)
        and x.lineno < before and name in {
          y.id for y in ast.walk(x)
          if isinstance(y, ast.Name) and isinstance(y.ctx, ast.Store)
        }
      ]
      if places:
        found.append(max(places))
        break
      before = function.lineno
  return found
