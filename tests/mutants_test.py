"""The table of mutants applies to the code as it is."""

import ast
import collections
import functools
import pathlib

from tests.mutants import MUTANTS, ROOT, problem


@functools.cache
def top_level(file):
  """(first line, last line, node) of each statement of a file, from 1."""
  return [
    (min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", []))]),
     n.end_lineno, n)
    for n in ast.parse((ROOT / file).read_text()).body
  ]


def is_other_code(mutant):
  """Whether the statement with the mutant is Python still, and another one."""
  source = (ROOT / mutant.file).read_text()
  line = source[: source.index(mutant.text)].count("\n") + 1
  first, last, node = next(x for x in top_level(mutant.file) if x[1] >= line)
  statement = "".join(source.splitlines(keepends=True)[first - 1 : last])
  broken = statement.replace(mutant.text, mutant.replacement)
  return ast.dump(ast.parse(broken).body[0]) != ast.dump(node)


def test_every_mutant_applies():
  """Once, to code that stays Python, with a test that is there."""
  wrong = []
  for mutant in MUTANTS:
    why = problem(mutant)
    if not why and not is_other_code(mutant):
      why = "the code means the same"
    file, _, test = mutant.test.partition("::")
    if not (ROOT / file).is_file():
      why = f"there is no {file}"
    elif test.partition("[")[0] not in {
      getattr(node, "name", "") for _, _, node in top_level(file)
    }:
      why = f"there is no {mutant.test}"
    if why:
      wrong.append(f"{mutant.file}: {mutant.what}: {why}")
  assert not wrong, "\n".join(wrong)


def test_every_room_has_mutants():
  """Folders of `parallel` and `caatnet`, and files at their roots."""
  rooms = collections.Counter(
    "/".join(pathlib.PurePath(m.file).parts[:2]) for m in MUTANTS
    if m.file.startswith(("parallel/", "caatnet/"))
  )
  expected = {
    f"{top}/{path.name}"
    for top in ("parallel", "caatnet")
    for path in (ROOT / top).iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
  } - {f"{top}/{name}" for top in ("parallel", "caatnet")
       for name in ("__init__.py", "checks.py")}
  assert expected <= set(rooms)
  assert len(set(MUTANTS)) == len(MUTANTS) >= 60
