"""Structure of the code: sizes of files and functions, no import cycles."""

import ast
import dataclasses
import statistics
import textwrap

import pytest

from docs import structure

MODULES = structure.modules(structure.ROOT)
# A file is one idea, however long; longer ones are reviewed.
REVIEWED_LINES = 700


def test_files_are_short():
  assert statistics.median(module.lines for module in MODULES) < 200
  long = {m.name: m.lines for m in MODULES if m.lines > REVIEWED_LINES}
  assert long == {}


def test_functions_are_short():
  long = {
    f"{module.name}.{name}": lines
    for module in MODULES for name, (lines, _) in module.functions.items()
    if lines > 90
  }
  assert long == {}


def test_no_modules_import_each_other():
  assert structure.cycles(MODULES) == []


def _with_all_imports(module, root=structure.ROOT):
  """Adds imports inside functions and under ``if TYPE_CHECKING``."""
  path = root.joinpath(*module.name.split("."))
  path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
  found = set(module.imports)
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, (ast.Import, ast.ImportFrom)):
      found.update(structure._imports([node]))
  return dataclasses.replace(module, imports=frozenset(found))


def test_serving_has_no_hidden_cycle():
  """Includes imports inside functions and for types only."""
  serving = [
    _with_all_imports(module) for module in MODULES
    if module.name.startswith("caatnet.serving.")
  ]
  assert len(serving) > 30
  assert structure.cycles(serving) == []


@pytest.fixture
def tree(tmp_path):
  """Checkout with two modules that import each other."""
  for package in structure.PACKAGES:
    (tmp_path / package).mkdir()
  (tmp_path / "parallel" / "a.py").write_text(textwrap.dedent('''\
    """A docstring.

    Of three lines."""
    from parallel import b  # a comment
    # another one

    class A:
      def f(self, x, *, y):
        """One line."""
        return """
        a text"""
    '''))
  (tmp_path / "parallel" / "b.py").write_text("import parallel.a\n")
  (tmp_path / "parallel" / "c.py").write_text(
    "def f():\n  from parallel import c\n  import parallel.a\n"
  )
  return tmp_path


def test_kinds_of_lines_are_counted(tree):
  a, b, _ = structure.modules(tree)
  assert (a.lines, a.code, a.docstring, a.comment) == (11, 5, 4, 2)
  assert a.functions == {"A.f": (4, 2)}
  assert (b.code, b.functions) == (1, {})
  code = structure.code_of_directories(structure.modules(tree))
  assert code == {"parallel.a": 5, "parallel.b": 1, "parallel.c": 3}


def test_cycle_is_found(tree):
  """Ignores imports inside functions."""
  found = structure.modules(tree)
  assert structure.cycles(found) == [["parallel.a", "parallel.b"]]
  assert structure.summary(found)["import cycles"] == 1


def test_files_of_an_extension_are_counted(tree):
  (tree / "ARCHITECTURE.md").write_text(textwrap.dedent("""\
    # Title

    ## To add something

    | to add | write | add a row in | tests that it inherits |
    |---|---|---|---|
    | loop | `a/NAME.py` (`a/base.py`) | `A` of `a/b.py` and of `a/c.py` | - |
    | route | a function in `a/b.py` | `ROUTES` there | `tests/b_test.py` |
    | study | `a/NAME/`: `study.py` | - | - |

    ## Terms

    | word | `d/e.py` | `d/f.py` | - |
    """))
  assert structure.files_per_extension(tree) == {
    "loop": 3, "route": 1, "study": 1
  }


def test_hidden_cycle_is_found(tree):
  (tree / "parallel" / "a.py").write_text(
    "if TYPE_CHECKING:\n  from parallel import c\n"
  )
  (tree / "parallel" / "b.py").write_text("")
  found = structure.modules(tree)
  assert structure.cycles(found) == []
  found = [_with_all_imports(module, tree) for module in found]
  assert structure.cycles(found) == [["parallel.a", "parallel.c"]]
