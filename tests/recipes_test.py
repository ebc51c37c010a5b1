"""Recipes of ARCHITECTURE.md's table "To add something", for seven kinds.

Each file of `tests/recipes/` adds a minimal part: a new file, and rows in the
tables that ARCHITECTURE.md names for its kind. All are added to one copy of the
tree, which must still pass its structural tests, and the parts inherit the
tested properties of their kind.
"""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
COPIED = ("parallel", "caatnet", "configs", "launch", "tests", "docs", "log",
          "results", "colabs", "pyproject.toml", "setup.cfg", "setup.py",
          "Makefile", "*.md")
RECIPES = sorted((ROOT / "tests" / "recipes").glob("*.md"))
# Structural tests that a new file or row may break.
RULES = ("tests/layering_test.py", "tests/structure_test.py",
         "tests/exports_test.py", "tests/papers_test.py",
         "tests/documents_test.py", "tests/caatnet/schema/schema_test.py")


def places():
  """Returns, by kind, the paths to write or change, and the paths of tests."""
  text = (ROOT / "ARCHITECTURE.md").read_text()
  table = text.partition("\n## To add something\n")[2].partition("\n## ")[0]
  found = {}
  for line in table.splitlines():
    cells = [cell.strip() for cell in line.strip("|").split(" | ")]
    if line.startswith("|") and len(cells) == 4:
      paths = [re.findall(r"`([\w./]+/[\w./]+\.py)`", cell) for cell in cells]
      found[cells[0]] = {*paths[1], *paths[2]}, paths[3]
  return found


def read(path):
  """Returns a recipe's kind, the name of the new part, and code by path."""
  text = path.read_text()
  kind, name = re.match(r"# (.*): (\w+)\n", text).groups()
  blocks = re.findall(r"^`(\S+)`\n\n```python\n(.*?)```$", text, re.M | re.S)
  return kind, name, dict(blocks)


def merged(text, block):
  """Adds a block to a file: imports, definitions, and rows of its table."""
  tree, new = ast.parse(text), ast.parse(block)
  lines, added = text.splitlines(), block.splitlines()
  code, imports = [], []
  for node in new.body:
    first = min([node.lineno, *(d.lineno for d in getattr(
      node, "decorator_list", []))])
    source = added[first - 1 : node.end_lineno]
    if isinstance(node, ast.Import | ast.ImportFrom):
      imports += source
    elif isinstance(node, ast.Assign):
      name = node.targets[0].id
      rows = added[node.value.lineno : node.value.end_lineno - 1]
    else:
      code += [*source, "", ""]
  table = next(
    node for node in tree.body
    if isinstance(node, ast.Assign | ast.AnnAssign)
    and ast.unparse(getattr(node, "target", None) or node.targets[0]) == name
  )
  values = [n for n in ast.walk(table.value) if isinstance(n, ast.Dict)]
  end = values[0].end_lineno - 1  # line of the closing bracket
  start = table.lineno - 1
  while lines[start - 1].startswith("#"):
    start -= 1
  top = max(
    (node.end_lineno for node in tree.body
     if isinstance(node, ast.Import | ast.ImportFrom)), default=0,
  )
  return "\n".join([
    *lines[:top], *imports, *lines[top:start], *code, *lines[start:end], *rows,
    *lines[end:], "",
  ])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_changes_the_files_that_the_table_names(path):
  kind, name, blocks = read(path)
  named, tests = places()[kind]
  assert {place.replace("NAME", name) for place in named} == set(blocks)
  new = [place for place in blocks if not (ROOT / place).exists()]
  assert new == [p.replace("NAME", name) for p in named if "NAME" in p]
  assert tests
  assert all((ROOT / place).exists() for place in tests)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
  """Copy of the tree to which all recipes have been applied."""
  tree = tmp_path_factory.mktemp("recipes") / "tree"
  tree.mkdir()
  for pattern in COPIED:
    for path in ROOT.glob(pattern):
      if path.is_file():
        shutil.copy(path, tree)
      else:
        shutil.copytree(
          path, tree / path.name,
          ignore=shutil.ignore_patterns("recipes_test.py"),
        )
  for recipe in RECIPES:
    for place, block in read(recipe)[2].items():
      path = tree / place
      path.write_text(
        merged(path.read_text(), block) if path.exists() else block
      )
  run(tree, "ruff", "check", "--quiet", "--select=I", "--fix", ".")
  run(tree, "docs.tables")  # updates documents that list modules
  return tree


def run(tree, *arguments):
  """Runs a Python module in a tree, importing the code of that tree."""
  done = subprocess.run(
    [sys.executable, "-m", *arguments], cwd=tree, text=True,
    env=os.environ | {
      "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1",
      "TEST_ROWS": "all",
    },
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
  )
  assert done.returncode == 0, done.stdout[-6000:]
  return done.stdout


def test_tree_with_new_parts_passes_its_tests(tree):
  """New parts inherit the tested properties of their kind."""
  names, tests, found = [], [], places()
  for path in RECIPES:
    kind, name, _ = read(path)
    names.append(name)
    tests += found[kind][1]
  run(tree, "ruff", "check", "--quiet", ".")
  structural = [pathlib.Path(rule).name for rule in RULES]
  report = run(
    tree, "pytest", "-v", "-x", "-p", "no:cacheprovider", "-k",
    " or ".join([*structural, *names]), *dict.fromkeys([*RULES, *tests]),
  )
  for name in names:
    assert re.search(rf"\[.*{name}.*\] PASSED", report), name
  for rule in RULES:
    assert re.search(rf"^{rule}::.* PASSED", report, re.M), rule
