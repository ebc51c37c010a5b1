"""One mutant, tried: the tests that may notice it, run in a copy of the tree.

The module is also the pytest plugin of these runs: it writes the ids of failed
tests, and ends a run between two tests when its time is up.
"""

from collections.abc import Collection, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from tests.mutation.operators import Mutant

ROOT = pathlib.Path(__file__).parents[2]
# Folders of the modules that import each other.
TOPS = ("parallel", "caatnet", "configs", "docs", "launch", "tests")
_NAME = re.compile(rf"\b(?:{'|'.join(TOPS)})(?:\.\w+)+")
_FROM = re.compile(r"\bfrom ([\w.]+) import (\([^)]*\)|.*)")
# Test files of a run: pytest imports all of them before the first test.
_FILES = 8

KINDS = ("killed", "survived", "timed out")
_FAILED, _BUDGET_S = "MUTATION_FAILED", "MUTATION_BUDGET_S"


def pytest_runtest_logreport(report: Any) -> None:
  """Notes a test that fails, or a file that cannot be imported."""
  if report.failed:
    pathlib.Path(os.environ[_FAILED]).write_text(report.nodeid)


pytest_collectreport = pytest_runtest_logreport


def pytest_collection_finish(session: Any) -> None:
  """Starts the clock: importing the test files does not count."""
  session.end = time.monotonic() + float(os.environ[_BUDGET_S])


def pytest_runtest_teardown(item: Any) -> None:
  """Ends the run if its time is up."""
  if time.monotonic() > item.session.end:
    item.session.shouldstop = "time is up"


def copy_tree(root: pathlib.Path, target: pathlib.Path) -> None:
  """Copies the files that git tracks or would add; all if there is no git."""
  listed = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root,
    capture_output=True, text=True, check=False,
  )
  if listed.returncode:
    ignored = shutil.ignore_patterns(".*", "__pycache__")
    shutil.copytree(root, target, ignore=ignored)
  for name in filter(None, listed.stdout.split("\0")):
    if (root / name).is_file():
      (target / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(root / name, target / name)


def users(root: pathlib.Path) -> dict[str, set[str]]:
  """Returns the files that import each file, or name its module in a string."""
  files, modules = {}, {}
  for top in TOPS:
    for path in (root / top).rglob("*.py"):
      file = path.relative_to(root)
      files[file.as_posix()] = path.read_text()
      module = file.parent if file.name == "__init__.py" else file
      modules[".".join(module.with_suffix("").parts)] = file.as_posix()
  found: dict[str, set[str]] = {file: set() for file in files}
  for file, text in files.items():
    names = set(_NAME.findall(text))
    for module, those in _FROM.findall(text):
      names |= {f"{module}.{name}" for name in re.findall(r"\w+", those)}
    for name in names:
      while name and name not in modules:
        name = name.rpartition(".")[0]
      if name:
        found[modules[name]].add(file)
  return found


def tests_of(users: Mapping[str, Collection[str]], file: str) -> list[str]:
  """Returns the test files that import a file, directly or through others.

  Its own come first, then those that have more words of its path, such as
  "zero", and among these those with fewer imports in between.
  """
  distance, level = {file: 0}, {file}
  while level:
    level = {user for f in level for user in users[f]} - set(distance)
    distance |= dict.fromkeys(level, max(distance.values()) + 1)
  words = {*re.split(r"[/_.]", file)} - {*TOPS, "py"}

  def order(test: str) -> tuple:
    common = len(words & {*re.split(r"[/_.]", test)})
    return not _is_own(test, file), -common, distance[test], test

  return sorted((f for f in distance if f.endswith("_test.py")), key=order)


def _is_own(test: str, file: str) -> bool:
  """Whether a test file mirrors a source file, with or without its folder."""
  folder, _, name = file.removesuffix(".py").rpartition("/")
  while folder:
    if test == f"tests/{folder}/{name}_test.py":
      return True
    folder, _, last = folder.rpartition("/")
    name = f"{last}_{name}"
  return False


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Result of the tests of a mutant.

  Attributes:
    kind: One of `KINDS`.
    test: Test that failed; empty if the process of the tests died.
  """

  kind: str
  test: str = ""


class Trials:
  """Tries mutants in copies of the tree, from several threads.

  Args:
    users: Files that import each file, from `users`.
    budget_s: Time in seconds of the tests of a run, which ends after the test
      that exceeds it.
    patience_s: A run that takes so much longer, imports included, has timed
      out.
  """

  def __init__(
    self, users: Mapping[str, Collection[str]], budget_s: float,
    patience_s: float,
  ) -> None:
    self._users = users
    self._budget_s, self._patience_s = budget_s, patience_s
    self._lock = threading.Lock()
    self._sound: dict[tuple[str, ...], bool] = {}
    self._processes: set[subprocess.Popen] = set()
    self._closed = False

  def close(self) -> None:
    """Ends the tests that run; no others begin."""
    with self._lock:
      self._closed = True
      for process in self._processes:
        os.killpg(process.pid, signal.SIGKILL)

  def run(self, tree: pathlib.Path, mutant: Mutant) -> Outcome:
    """Runs tests on a mutant, until one fails or the time is up."""
    path = tree / mutant.file
    source, times = path.read_text(), os.stat(path)
    # Compiled code is told apart by size and time, so each mutant has its own.
    late = times.st_mtime + 1 + abs(hash(mutant)) % 2**20
    files = tests_of(self._users, mutant.file)
    own = [f for f in files if _is_own(f, mutant.file)]
    others = files[len(own):]
    waiting = [own, *(others[i:i + _FILES] for i in (0, _FILES))]
    while waiting:
      tests = waiting.pop(0)
      if not tests:
        continue
      path.write_text(mutant.apply(source))
      os.utime(path, (late, late))
      try:
        outcome = self._pytest(tree, tests)
      finally:
        path.write_text(source)
        os.utime(path, (times.st_atime, times.st_mtime))
      if outcome.kind == "survived":
        continue
      failed = (outcome.test,) if outcome.test else tuple(tests)
      if self._is_sound(tree, failed):
        return outcome
      waiting.insert(0, [test for test in tests if test not in failed])
    return Outcome("survived")

  def _is_sound(self, tree: pathlib.Path, tests: tuple[str, ...]) -> bool:
    """Whether tests pass without a mutant."""
    if tests not in self._sound:
      outcome = self._pytest(tree, tests)
      self._sound[tests] = outcome.kind == "survived"
      if not self._sound[tests]:
        print("fails without a mutant, left out:", *tests, flush=True)
    return self._sound[tests]

  def _pytest(self, tree: pathlib.Path, tests: Sequence[str]) -> Outcome:
    """Runs tests but those that are known to fail without a mutant."""
    folder = tree.parent / f"{tree.name}_temporary"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = os.environ | {
      _FAILED: str(folder / "failed"), _BUDGET_S: str(self._budget_s),
      "TMPDIR": str(folder), "NUMBA_CACHE_DIR": str(tree.parent / "numba"),
      "JAX_COMPILATION_CACHE_DIR": str(tree.parent / "programs"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
      "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}", "ELASTIC_PATIENCE_S": "60",
    }
    left_out = [
      f"--deselect={those[0]}" for those, sound in list(self._sound.items())
      if not sound and those != tuple(tests) and len(those) == 1
    ]
    command = [
      sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
      "-p", "tests.mutation.trial", *left_out, *tests,
    ]
    none = subprocess.DEVNULL
    with self._lock:
      if self._closed:
        raise RuntimeError("closed")
      process = subprocess.Popen(
        command, cwd=tree, env=environment, stdin=none, stdout=none,
        stderr=none, start_new_session=True,
      )
      self._processes.add(process)
    try:
      process.wait(self._budget_s + self._patience_s)
    except subprocess.TimeoutExpired:
      return Outcome("timed out")
    finally:
      with self._lock:
        self._processes.discard(process)
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and what tests have started
      process.wait()
    failed = folder / "failed"
    if failed.exists():
      return Outcome("killed", failed.read_text())
    # All passed, time is up, no tests are left.
    return Outcome("survived" if process.returncode in (0, 2, 5) else "killed")
