"""A small project with mutants of every outcome, run from end to end."""

import json
import textwrap

import pytest

from tests.mutation import __main__ as command
from tests.mutation import candidates, coverage_map
from tests.mutation.runner import Runner
from tests.mutation.server import Answer

SOURCE = """
import os

LIMIT = True


def grows(a):
  return a < 2


def waits(event):
  event.set()
  event.wait()


def ends(a):
  if not a:
    os.abort()
  return a


def unseen(a):
  return -a


def spawned(a):
  return -a
"""

TESTS = """
import subprocess
import sys
import threading

from parallel.room import code


def test_grows():
  assert code.grows(1)
  assert not code.grows(2)


def test_waits():
  code.waits(threading.Event())


def test_ends():
  assert code.ends(1)


def test_unseen():
  code.unseen(1)  # nothing is asserted


def test_spawned():
  call = "from parallel.room import code; print(code.spawned(2))"
  command = [sys.executable, "-c", call]
  assert subprocess.check_output(command, text=True) == "-2\\n"


def test_killed():
  with subprocess.Popen(
    [sys.executable, "-m", "parallel.room.worker"], stdin=subprocess.PIPE,
    stdout=subprocess.PIPE, text=True,
  ) as process:
    assert process.stdout.readline() == "-2\\n"
    process.kill()
"""

WORKER = """
import sys


def works(a):
  return -a


if __name__ == "__main__":
  print(works(2), flush=True)
  sys.stdin.read()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """A tree with one directory and its tests."""
  root = tmp_path_factory.mktemp("project")
  for name, text in (
    ("parallel/room/code.py", SOURCE), ("parallel/room/worker.py", WORKER),
    ("tests/parallel/room/code_test.py", TESTS),
    ("caatnet/empty.py", ""), ("configs/empty.py", ""),
    ("launch/empty.py", ""),
    ("pytest.ini", "[pytest]\npython_files = *_test.py\npythonpath = .\n"
     "addopts = --import-mode=importlib\n"),
  ):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(textwrap.dedent(text))
  return root


def arguments(root):
  return [
    f"--root={root}", "--num=100", "--workers=2", "--bound=4",
    "--preload=pytest,coverage,hypothesis",
  ]


@pytest.fixture(scope="module")
def entries(root):
  """All mutants of the project, by function and change."""
  returned = command.main(arguments(root))
  assert returned == 1  # some survive
  written = json.loads((root / "results/mutants.json").read_text())
  assert all(run["finished"] for run in written["runs"].values())
  return {(e["function"], e["before"], e["after"]): e
          for e in written["mutants"]}


@pytest.mark.parametrize(("function", "change", "outcome"), [
  ("grows", ("a < 2", "a <= 2"), "assertion"),
  ("grows", ("2", "3"), "assertion"),
  ("waits", ("event.set()", "pass"), "timeout"),
  ("waits", ("event.wait()", "pass"), "survived"),
  ("ends", ("not a", "a"), "crash"),
  ("unseen", ("-a", "a"), "survived"),
  ("spawned", ("-a", "a"), "assertion"),
  ("works", ("-a", "a"), "assertion"),
  ("<module>", ("True", "False"), "survived"),
])
def test_outcomes(entries, function, change, outcome):
  assert entries[function, *change]["outcome"] == outcome


def test_a_killer_is_named(entries):
  entry = entries["grows", "a < 2", "a <= 2"]
  assert entry["test"] == "tests/parallel/room/code_test.py::test_grows"
  assert entry["error"].startswith("AssertionError")


def test_tests_are_selected_by_line(root, entries):
  lines = coverage_map.Map(root, root / ".cache/mutation/lines")
  line = SOURCE.splitlines().index("  return a < 2") + 1
  direct, rest = lines.tests(
    "tests/parallel/room/code_test.py", "parallel/room/code.py", (line, line),
    "grows",
  )
  file = "tests/parallel/room/code_test.py"
  assert set(direct) == {f"{file}::test_grows"}
  assert len(rest) == 5


class Slow:
  """Server on which the tests of each file take 5 s and pass."""

  def __init__(self):
    self.measured = []

  def run(self, request):
    if request.measured:
      self.measured += request.files
    return Answer("passed", 5.0)


def test_files_are_measured_until_they_have_taken_their_time(root, entries):
  """One that was measured before is used in any case."""
  lines = coverage_map.Map(root, root / ".cache/mutation/lines")
  known = "tests/parallel/room/code_test.py"
  runner = Runner(root, lines, 60.0, 4.0)
  for limit_s, count in ((4.0, 1), (6.0, 2), (60.0, 3)):
    files = [f"tests/parallel/room/{limit_s:g}_{i}_test.py" for i in range(3)]
    for file in files:
      (root / file).write_text("")
    server = Slow()
    found, spent = runner._measured(server, [*files, known], limit_s)
    assert server.measured == files[:count]
    assert found == [*files[:count], known]
    assert spent == 5.0 * count
    for file in files:
      (root / file).unlink()


def test_test_files_with_fewer_imports_in_between_are_measured_first(
  tmp_path
):
  for name, text in (
    ("parallel/room/code.py", "def f(a):\n  return -a\n"),
    ("parallel/room/user.py", "from parallel.room import code"),
    ("tests/parallel/room/a_test.py", "from parallel.room import user"),
    ("tests/parallel/room/z_test.py", "from parallel.room import code"),
  ):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  lines, server = coverage_map.Map(tmp_path, tmp_path / "lines"), Slow()
  mutant = candidates.candidates(
    candidates.read(tmp_path, "parallel/room/code.py"), "parallel/room/code.py"
  )[0]
  Runner(tmp_path, lines, 4.0, 4.0).try_mutant(server, mutant)
  assert server.measured == ["tests/parallel/room/z_test.py"]
  Runner(tmp_path, lines, 4.0, 4.0).try_mutant(server, mutant)
  assert server.measured[1:] == ["tests/parallel/room/a_test.py"]


def test_a_run_that_was_killed_resumes(root, entries):
  path = root / "results/mutants.json"
  before = json.loads(path.read_text())
  lost = entries["grows", "a < 2", "a <= 2"]
  kept = [e for e in before["mutants"] if e != lost]
  runs = {c: run | {"finished": False} for c, run in before["runs"].items()}
  # A kept entry that no run would write shows that it was not run again.
  kept[0] = kept[0] | {"error": "kept"}
  path.write_text(json.dumps({"runs": runs, "mutants": kept}))
  command.main(arguments(root))
  after = json.loads(path.read_text())["mutants"]
  assert len(after) == len(before["mutants"])
  assert [e["error"] for e in after].count("kept") == 1
  again, = (e for e in after if e["before"] == "a < 2" and
            e["after"] == "a <= 2")
  assert again["outcome"] == lost["outcome"]


def test_equivalents_are_not_drawn(
  root, entries, capsys
):
  equivalent = entries["unseen", "-a", "a"]
  names = ("file", "function", "operator", "line", "before", "after")
  lines = [f"{name} = {json.dumps(equivalent[name])}" for name in names]
  folder = root / "tests/mutation"
  folder.mkdir(exist_ok=True)
  (folder / "equivalent.toml").write_text(
    "\n".join(["[[equivalent]]", *lines, 'reason = "nothing is asserted"'])
  )
  assert command.main([f"--root={root}", "--num=100", "--list"]) == 0
  listed = capsys.readouterr().out
  (folder / "equivalent.toml").unlink()
  assert "a < 2 -> a <= 2" in listed
  assert "unseen (sign)" not in listed
  assert "spawned (sign)" in listed


def test_code_that_has_changed_is_found_by_name(root, entries):
  """New functions and new files count as executed by all that may."""
  folder, file = root / ".cache/mutation/lines", "parallel/room/code.py"
  test_file = "tests/parallel/room/code_test.py"
  path = root / file
  before = path.read_text()

  def tests(file, line, function):
    return [
      {name.partition("::")[2] for name in names} for names in
      coverage_map.Map(root, folder).tests(
        test_file, file, (line, line), function
      )
    ]

  assert coverage_map.Map(root, folder).is_fresh(test_file)
  try:
    path.write_text("NEW = 1\n\n\n" + before)
    (root / "parallel/room/new.py").write_text("")
    everything = {
      "test_grows", "test_waits", "test_ends", "test_unseen", "test_spawned",
      "test_killed",
    }
    assert tests(file, 1, "grows") == [
      {"test_grows"}, everything - {"test_grows"}
    ]
    # Lines of a process that a test starts are attributed to its file.
    processes = {"test_spawned", "test_killed"}
    assert tests(file, 1, "new") == [everything - processes, processes]
    assert tests("parallel/room/new.py", 1, "f") == [set(), everything]
    assert tests("caatnet/empty.py", 1, "f") == [set(), set()]
    assert not coverage_map.Map(root, folder).is_fresh(test_file)
  finally:
    path.write_text(before)


def test_survivors_are_tried_again(root, entries):
  """With a test that sees one of them; another's code has gone."""
  path, test = root / "results/mutants.json", root / "tests/parallel/room"
  source, before = root / "parallel/room/code.py", path.read_text()
  test, text = test / "code_test.py", source.read_text()
  old_test = test.read_text()
  try:
    test.write_text(old_test + "\n\ndef test_seen():\n"
                    "  assert code.unseen(1) == -1\n")
    source.write_text(text.replace("  event.wait()\n", ""))
    command.main([*arguments(root), "--survivors"])
    found = {
      (e["function"], e["before"], e["after"]): e["outcome"]
      for e in json.loads(path.read_text())["mutants"]
    }
    assert found.pop(("unseen", "-a", "a")) == "assertion"
    assert ("waits", "event.wait()", "pass") not in found
    assert found == {
      key: e["outcome"] for key, e in entries.items() if key in found
    }
    assert len(found) == len(entries) - 2
  finally:
    test.write_text(old_test)
    source.write_text(text)
    path.write_text(before)
