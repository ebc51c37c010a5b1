"""Test files that import a source file, directly or through others.

A string that is the name of a module, or of a script in the same folder, counts
as an import: it is executed in a process, such as
"parallel.peers.emulation.peer" and "torch_step.py".
"""

import ast
import functools
import pathlib
import re

from tests.mutation.coverage_map import test_files

_TOPS = ("parallel", "caatnet", "configs", "launch")
# The name may be followed by that of a class, after a colon.
_NAME = re.compile(rf"((?:{'|'.join(_TOPS)})(?:\.\w+)+)(?::\w+)?")
_SCRIPT = re.compile(r"\w+\.py")


def _imported(root: pathlib.Path, path: pathlib.Path) -> set[str]:
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      found |= {node.module}
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      if named := _NAME.fullmatch(node.value):
        found.add(named[1])
      if _SCRIPT.fullmatch(node.value) and (path.parent / node.value).exists():
        found |= {_module(root, path.parent / node.value)}
  return found


def _module(root: pathlib.Path, path: pathlib.Path) -> str:
  return ".".join(path.relative_to(root).with_suffix("").parts)


@functools.cache
def _users(root: pathlib.Path) -> dict[str, set[str]]:
  """Imported name -> modules and test files that import it."""
  paths = {
    _module(root, path): path
    for top in _TOPS for path in (root / top).rglob("*.py")
  }
  paths |= {file: root / file for file in test_files(root)}
  found: dict[str, set[str]] = {}
  for name, path in paths.items():
    for imported in _imported(root, path):
      found.setdefault(imported, set()).add(name)
  return found


def reaching(root: pathlib.Path, file: str) -> list[str]:
  """Test files that import a source file, directly or through others.

  Those with fewer imports in between come first. Tests that name a launch
  script in a string are not among them.

  Args:
    root: Root of the repository, whose imports are read once.
    file: Path from the root.
  """
  users = _users(root)
  seen = level = {_module(root, root / file)}
  found: list[str] = []
  while level:
    level = set().union(*(users.get(name, ()) for name in level)) - seen
    seen = seen | level
    found += sorted(name for name in level if name.endswith("_test.py"))
  return found
