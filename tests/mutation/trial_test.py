"""A small project with mutants of every outcome, run from end to end."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.mutation import __main__ as command
from tests.mutation import trial

FILES = {
  "parallel/__init__.py": "",
  "parallel/room/code.py": """
import os


def grows(a, b):
  return a < b


def waits(event):
  event.set()
  event.wait()


def ends(a):
  if not a:
    os.abort()
  return a


def unseen(a):
  return -a
""",
  "parallel/room/inner.py": "def f(a):\n  return -a\n",
  "parallel/room/user.py": "from parallel.room import inner",
  "tests/parallel/room/code_test.py": """
import threading

from parallel.room import code


def test_fails_in_any_case():
  assert not code.grows(1, 2)


def test_grows():
  assert code.grows(1, 2)
  assert not code.grows(2, 2)


def test_waits():
  code.waits(threading.Event())


def test_ends():
  assert code.ends(1)


def test_unseen():
  code.unseen(1)  # nothing is asserted
""",
  "tests/parallel/other_test.py": """
from parallel.room import user


def test_other():
  assert user.inner.f(1) == -1
""",
  "tests/parallel/room/broken_test.py": "import parallel.room.code.nothing",
  "pytest.ini": """
[pytest]
python_files = *_test.py
pythonpath = .
addopts = --import-mode=importlib
""",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  root = tmp_path_factory.mktemp("project")
  for name, text in FILES.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
  return root


@pytest.fixture(scope="module")
def output(root):
  """Output of a run of all mutants of the project."""
  run = subprocess.run(
    [
      sys.executable, "-m", "tests.mutation", f"--root={root}", "--budget=20",
      "--patience=4",
    ], cwd=trial.ROOT, capture_output=True, text=True, check=False,
    env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
  )
  assert (run.returncode, run.stderr) == (1, "")  # some survive
  return run.stdout


@pytest.mark.parametrize(("place", "new", "outcome"), [
  ("code.py", "return (a <= b)", "killed"),
  ("code.py", "if (a):", "killed"),  # the process of the tests ends
  ("code.py", "event.wait()", "survived"),
  ("code.py", "event.set()", "timed out"),
  ("code.py", "return (a)", "survived"),
  ("inner.py", "return (a)", "killed"),  # by a test of its importer
])
def test_outcomes(output, place, new, outcome):
  lines = rf"  - .*\n  \+ {re.escape(new)}$"
  if new.startswith("event"):
    lines = rf"  - {re.escape(new)}\n  \+ pass$"
  pattern = rf"^(.*): parallel/room/{place}:\d+ \(\w+\)\n{lines}"
  assert re.search(pattern, output, re.MULTILINE)[1] == outcome


def test_a_killer_is_named_and_passes_without_the_mutant(output):
  test = "tests/parallel/room/code_test.py::test_"
  assert f"  + return (a <= b)\n  {test}grows" in output
  left_out = re.findall("^fails without a mutant, left out: (.*)", output, re.M)
  assert set(left_out) == {
    f"{test}fails_in_any_case", "tests/parallel/room/broken_test.py"
  }


def test_a_row_is_stored_as_drawn(root, output):
  row, = command.stored(root)
  counts = [
    len(re.findall(f"^{kind}: ", output, re.MULTILINE)) for kind in trial.KINDS
  ]
  assert list(row.values())[1:] == [
    "unknown", 0, "parallel/room", sum(counts), *counts
  ]
  cells = " +".join(map(str, [sum(counts), *counts]))
  assert re.search(f"^all +{cells}$", output, re.MULTILINE)


def test_a_resumed_run_leaves_out_what_is_stored(root, output, capsys):
  assert command.main([f"--root={root}", "--resume"]) == 0
  assert "parallel/room" not in capsys.readouterr().out
  assert len(command.stored(root)) == 1


def test_a_run_that_is_ended_leaves_nothing(root, tmp_path):
  """The tree is unchanged, and no copies and no processes remain."""
  with subprocess.Popen(
    [sys.executable, "-m", "tests.mutation", f"--root={root}", "--workers=1"],
    cwd=trial.ROOT, stdout=subprocess.PIPE, text=True,
    env=os.environ | {"TMPDIR": str(tmp_path)},
  ) as run:
    run.stdout.readline()  # the first mutant is done, the next one runs
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 143
  assert not list(tmp_path.iterdir())
  assert {
    name: (root / name).read_text() for name in FILES
  } == FILES


def test_own_tests_come_first_then_those_with_words_of_the_path():
  users = {
    "parallel/zero/shards.py": {
      "tests/a_test.py", "tests/parallel/zero_shards_test.py", "caatnet/b.py"
    },
    "caatnet/b.py": {"tests/zero_test.py", "caatnet/b.py"},
    "tests/a_test.py": set(), "tests/zero_test.py": set(),
    "tests/parallel/zero_shards_test.py": set(), "tests/other_test.py": set(),
  }
  assert trial.tests_of(users, "parallel/zero/shards.py") == [
    "tests/parallel/zero_shards_test.py", "tests/zero_test.py",
    "tests/a_test.py",
  ]


def test_users_are_importers_and_strings(tmp_path):
  for name, text in (
    ("parallel/a.py", ""), ("parallel/p/__init__.py", ""),
    ("parallel/p/b.py", "from parallel import (\n  a,\n)\n"),
    ("launch/c.py", "x = 'parallel.p.b:Class'"),
    ("tests/d_test.py", "import launch.c\nfrom parallel.p import b as c"),
  ):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  assert trial.users(tmp_path) == {
    "parallel/a.py": {"parallel/p/b.py"},
    "parallel/p/__init__.py": {"tests/d_test.py"},
    "parallel/p/b.py": {"launch/c.py", "tests/d_test.py"},
    "launch/c.py": {"tests/d_test.py"}, "tests/d_test.py": set(),
  }
