"""Runs mutants on servers: own tests first, then those that cover the line.

Test files are measured when the first mutant needs them: the one with the name
of the mutant's file, then those that import it, nearest first, as long as their
tests take less time than the budget. A process that a test kills leaves no
coverage. If no test executes a line as measured, all tests of the files that
import its module or name it as a process are run.
"""

from collections.abc import Callable, Iterable, Sequence
import compileall
import dataclasses
import json
import math
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import threading
from typing import Any

from tests.mutation import coverage_map, imports
from tests.mutation.candidates import Mutant, read
from tests.mutation.child import OURS
from tests.mutation.sample import directory_of
from tests.mutation.server import Answer, Request

_MEASURE_BOUND_S = 3600.0


def copy_tree(root: pathlib.Path, target: pathlib.Path) -> None:
  """Copies the files that git tracks or would add; all if there is no git."""
  listed = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root,
    capture_output=True, text=True, check=False,
  )
  if listed.returncode:
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs")
    shutil.copytree(root, target, ignore=ignored)
  else:
    for name in filter(None, listed.stdout.split("\0")):
      if (root / name).is_file():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target / name)
  for top in OURS:
    if (target / top).is_dir():
      compileall.compile_dir(target / top, quiet=2)


class Server:
  """A server process with a copy of the tree.

  Args:
    root: Tree made by `copy_tree`, with compiled code.
    folder: Temporary folder of this server.
    programs: Folder of compiled programs, shared by servers.
    preloaded: Modules that the server imports, separated by commas, instead of
      those of this project.
  """

  def __init__(
    self, root: pathlib.Path, folder: pathlib.Path, programs: pathlib.Path,
    preloaded: str = "",
  ) -> None:
    tree = folder / "tree"
    shutil.copytree(root, tree)
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(programs),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    home = pathlib.Path(__file__).parents[2]
    self._process = subprocess.Popen(
      [sys.executable, "-m", "tests.mutation.server", str(tree), preloaded],
      cwd=home, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )
    self._ready = False

  def _read(self) -> Any:
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError("a server of mutants has ended")
    return json.loads(line)

  def run(self, request: Request) -> Answer:
    """Runs tests in a forked child, once the process has started."""
    if not self._ready:
      self._read()
      self._ready = True
    line = json.dumps(dataclasses.asdict(request))
    self._process.stdin.write(line + "\n")
    self._process.stdin.flush()
    return Answer(**self._read())

  def close(self) -> None:
    """Ends the process."""
    self._process.stdin.close()
    try:
      self._process.wait(5)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._process.stdout.close()


def each(
  servers: Sequence[Server], jobs: Iterable[Any],
  work: Callable[[Server, Any], None],
) -> None:
  """``work(server, job)`` for all jobs, as servers become free."""
  waiting: queue.SimpleQueue = queue.SimpleQueue()
  for job in jobs:
    waiting.put(job)
  errors: list[BaseException] = []

  def take(server: Server) -> None:
    try:
      while not errors:
        try:
          job = waiting.get_nowait()
        except queue.Empty:
          return
        work(server, job)
    except BaseException as error:
      errors.append(error)

  threads = [
    threading.Thread(target=take, args=(s,), daemon=True) for s in servers
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  if errors:
    raise errors[0]


class Runner:
  """Tries mutants.

  Args:
    root: Root of the repository.
    lines: Measured coverage.
    budget_s: Limit in seconds of the tests that a mutant runs in each phase,
      and of the tests that are measured for it; those of the file with its name
      are measured in addition.
    bound_s: Time limit of a run, plus ten times what its tests need.
    measure: Whether test files that are not measured are measured when a
      mutant needs them; otherwise only own test files
      that import its file are, and others are left out.
  """

  def __init__(
    self, root: pathlib.Path, lines: coverage_map.Map, budget_s: float,
    bound_s: float, measure: bool = True,
  ) -> None:
    self._root, self._lines = root, lines
    self._budget_s, self._bound_s = budget_s, bound_s
    self._measure_all = measure
    self._lock = threading.Lock()
    self._locks: dict[str, threading.Lock] = {}
    self._sound: dict[str, bool] = {}

  def measure(self, server: Server, test_file: str) -> float:
    """Measures a test file if it has changed since it was measured.

    Returns:
      Seconds of its tests if they were measured, else 0.
    """
    with self._lock:
      lock = self._locks.setdefault(test_file, threading.Lock())
    with lock:
      with self._lock:
        if self._lines.has(test_file):
          return 0.0
        folder = self._lines.folder_for(test_file)
      answer = server.run(
        Request([test_file], _MEASURE_BOUND_S, measured=str(folder))
      )
      passed = {
        t: s for t, s in answer.durations.items() if t not in answer.failed
      }
      with self._lock:
        self._lines.add(test_file, passed)
      return answer.seconds

  def _measured(
    self, server: Server, files: Iterable[str], limit_s: float
  ) -> tuple[list[str], float]:
    """Measures test files until their tests have taken a time.

    Returns:
      The files that have been measured, now or before, and the seconds spent.
    """
    found, spent = [], 0.0
    for file in files:
      if spent < limit_s:
        spent += self.measure(server, file)
      with self._lock:
        if self._lines.has(file):
          found.append(file)
    return found, spent

  def _planned(
    self, mutant: Mutant, files: Iterable[str], unseen: bool
  ) -> dict[str, float]:
    """Tests that may see a mutant: quick ones that run its line first.

    With `unseen`, all tests of the files, whatever they execute.
    """
    direct: dict[str, float] = {}
    rest: dict[str, float] = {}
    for file in files:
      with self._lock:
        if unseen:
          rest |= self._lines.durations(file)
          continue
        a, b = self._lines.tests(
          file, mutant.file, (mutant.lineno, mutant.end_lineno),
          mutant.function,
        )
      direct |= a
      rest |= b
    planned, total = {}, 0.0
    for tests in (direct, rest):
      for test, seconds in sorted(tests.items(), key=lambda item: item[1]):
        if total + seconds <= self._budget_s or not planned:
          planned[test] = seconds
          total += seconds
    return planned

  def _is_sound(self, server: Server, test: str) -> bool:
    """Whether a test passes without a mutant."""
    test_file = test.partition("::")[0]
    with self._lock:
      if self._lines.is_fresh(test_file):
        return True
    if test not in self._sound:
      answer = server.run(Request([test_file], 600, [test]))
      self._sound[test] = answer.outcome == "passed"
    return self._sound[test]

  def _run(
    self, server: Server, mutant: Mutant, planned: dict[str, float]
  ) -> Answer:
    """Runs planned tests; a test that fails without the mutant is left out."""
    text = mutant.apply(read(self._root, mutant.file))
    while planned:
      # Test by test file, so that fixtures of modules are made once; the file
      # with the quickest test comes first.
      files = list(dict.fromkeys(t.partition("::")[0] for t in planned))
      order = [t for f in files for t in planned if t.startswith(f"{f}::")]
      bound = self._bound_s + 10 * sum(planned.values())
      answer = server.run(Request(files, bound, order, (mutant.file, text)))
      if not answer.failed or self._is_sound(server, answer.failed[0]):
        return answer
      del planned[answer.failed[0]]
    return Answer("passed", 0.0)

  def try_mutant(self, server: Server, mutant: Mutant) -> dict[str, Any]:
    """Outcome of a mutant, as an entry of the results without a seed."""
    own = coverage_map.own_tests(self._root, directory_of(mutant.file))
    reaching = imports.reaching(self._root, mutant.file)
    with self._lock:
      covering = self._lines.covering(mutant.file)
    # Most mutants are killed by tests that are named like the file, so that
    # other files need not be measured for them.
    name = f"{pathlib.PurePosixPath(mutant.file).stem}_test.py"
    first = [f for f in own if f in covering or f.endswith(f"/{name}")]
    then = [f for f in reaching if f in own and f not in first]
    rest = [f for f in own if f not in (*first, *then)]
    others = [
      f for f in dict.fromkeys((*covering, *reaching))
      if f not in own and (self._measure_all or f in covering)
    ]
    if self._measure_all:
      others += rest
    seconds, num_tests, left_s = 0.0, 0, self._budget_s
    answer = Answer("not run", 0.0)
    importing = [f for f in (*first, *then, *others) if f in reaching]
    self._measured(server, first, math.inf)
    for files, unseen in (
      (first, False), (then, False), (others, False), (importing, True)
    ):
      if unseen and num_tests:
        break
      measured, spent = self._measured(server, files, left_s)
      left_s -= spent
      planned = self._planned(mutant, measured, unseen)
      if not planned:
        continue
      answer = self._run(server, mutant, planned)
      seconds += answer.seconds
      num_tests += len(planned)
      if answer.outcome != "passed":
        break
    outcome = answer.outcome
    if outcome in ("passed", "not run"):
      outcome = "survived"
    fields = dataclasses.asdict(mutant)
    for name in ("lineno", "end_lineno", "start", "end"):
      del fields[name]
    return {
      "directory": directory_of(mutant.file), **fields, "outcome": outcome,
      "test": answer.failed[0] if answer.failed else "", "error": answer.error,
      "tests": num_tests, "seconds": round(seconds, 1),
    }
