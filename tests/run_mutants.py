"""Runs the table of `tests.mutants`: does each broken line fail its test?

The tests run in temporary copies of the source tree, two at a time. A server
process per copy has imported what is not ours (jax above all) and forks a child
for each mutant, which imports our modules from the copy with the broken line in
it. A forked child has no module of ours from before, so mutants cannot see each
other, and none pays for the import of jax. Compiled programs that a mutant does
not change come from a cache that the servers share.

Before that the tests run once without any mutant: a test that fails anyway
says nothing.
"""

import argparse
import collections
from collections.abc import Callable, Iterable, Sequence
import compileall
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
OURS = ("parallel", "caatnet", "configs", "launch", "tests")
NUM_SERVERS = 2

# Imported before a fork. No name of ours; what cannot be imported is left out.
_PRELOADED = (
  "jax", "jax.experimental.pallas.tpu", "jax.experimental.pallas.triton",
  "jax._src.pallas.mosaic.interpret.interpret_pallas_call", "numpy", "scipy",
  "scipy.sparse.csgraph", "networkx", "flax.nnx", "optax", "chex",
  "orbax.checkpoint", "grain", "ml_collections", "tensorboardX", "rich.console",
  "rich.progress", "rich.table", "hypothesis", "hypothesis.extra.numpy",
  "pytest",
)


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What became of a run of tests.

  Attributes:
    word: "passed", "failed", "not run" (no such test, or its file cannot be
      imported), "crashed" or "out of time".
    seconds: How long it took.
    failed: Ids of the tests that failed.
    durations: Id of a test -> its seconds.
    error: The first line of the first failed test's error.
    output: What pytest printed, its end.
  """

  word: str
  seconds: float
  failed: tuple[str, ...] = ()
  durations: tuple[tuple[str, float], ...] = ()
  error: str = ""
  output: str = ""


# The server -------------------------------------------------------------------


def serve(tree: pathlib.Path) -> None:
  """Answers requests on stdin, one JSON a line, until stdin ends."""
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # whatever prints goes elsewhere
  for name in _PRELOADED:
    with contextlib.suppress(ImportError):
      importlib.import_module(name)
  print(json.dumps("ready"), file=answers, flush=True)
  for line in sys.stdin:
    request = json.loads(line)
    change = request.get("change")
    with _changed(tree, change) if change else contextlib.nullcontext():
      found = _forked(tree, request["tests"], request["bound"], bool(change))
    print(json.dumps(dataclasses.asdict(found)), file=answers, flush=True)


@contextlib.contextmanager
def _changed(tree: pathlib.Path, change: Sequence[str]):
  """The tree with a text of a file replaced."""
  file, text, replacement = change
  path = tree / file
  before = path.read_text()
  path.write_text(before.replace(text, replacement))
  # Compiled code is told apart by seconds and size, which may be equal.
  for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
    compiled.unlink()
  try:
    yield
  finally:
    path.write_text(before)


def _forked(
  tree: pathlib.Path, tests: Sequence[str], bound: float, first_only: bool
) -> Outcome:
  """Runs tests in a child; ends it when time is up or the runner has gone."""
  started = time.monotonic()
  folder = pathlib.Path(tempfile.mkdtemp(dir=tree.parent))
  child = os.fork()
  if not child:
    try:
      _child(tree, tests, folder, first_only)
    finally:
      os._exit(1)
  gone = late = False
  while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
    # The runner writes nothing before it has an answer: readable is its end.
    gone = bool(select.select([sys.stdin], [], [], 0.02)[0])
    late = time.monotonic() - started > bound
    if gone or late:
      break
  with contextlib.suppress(ProcessLookupError):
    os.killpg(child, signal.SIGKILL)  # and what the tests have started
  os.waitpid(child, 0)
  if gone:
    sys.exit(1)
  seconds = time.monotonic() - started
  output, found = folder / "output", folder / "found"
  text = output.read_text(errors="replace")[-4000:] if output.exists() else ""
  if late:
    return Outcome("out of time", seconds, output=text)
  if not found.exists():
    return Outcome("crashed", seconds, output=text)
  word, failed, durations, error = json.loads(found.read_text())
  shutil.rmtree(folder)
  return Outcome(word, seconds, tuple(failed), tuple(durations), error, text)


def _child(
  tree: pathlib.Path, tests: Sequence[str], folder: pathlib.Path,
  first_only: bool,
) -> None:
  os.setpgrp()
  os.chdir(tree)
  os.environ["TMPDIR"] = str(folder)
  tempfile.tempdir = None
  out = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
  os.dup2(out, 1)
  os.dup2(out, 2)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  elsewhere = ("", str(ROOT), str(ROOT / "tests"))
  sys.path[:] = [str(tree), *(p for p in sys.path if p not in elsewhere)]
  sys.dont_write_bytecode = True
  import pytest

  reports = _Reports()
  options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tree}",
             "--hypothesis-seed=0", f"--basetemp={folder / 'pytest'}",
             "-W", "ignore::pytest.PytestAssertRewriteWarning"]
  pytest.main(
    [*options, *(["-x"] if first_only else []), *tests], plugins=[reports]
  )
  strangers = [
    name for name, module in sys.modules.items()
    if name.split(".")[0] in OURS and getattr(module, "__file__", None)
    and tree not in pathlib.Path(module.__file__).parents
  ]
  word = "failed" if reports.failed else "passed"
  if strangers:
    print("not from the copy:", *strangers)
    word = "not run"
  elif reports.not_collected or not reports.durations:
    word = "not run"
  sys.stdout.flush()
  durations = sorted(reports.durations.items())
  temporary = folder / "temporary"
  temporary.write_text(
    json.dumps([word, reports.failed, durations, reports.error])
  )
  temporary.rename(folder / "found")
  os._exit(0)


class _Reports:
  """A pytest plugin that keeps what became of each test."""

  def __init__(self) -> None:
    self.failed: list[str] = []
    self.durations: collections.Counter[str] = collections.Counter()
    self.not_collected = False
    self.error = ""

  def pytest_collectreport(self, report: Any) -> None:
    self.not_collected |= report.failed

  def pytest_runtest_logreport(self, report: Any) -> None:
    self.durations[report.nodeid] += report.duration
    if report.failed and report.nodeid not in self.failed:
      self.failed.append(report.nodeid)
      crash = getattr(report.longrepr, "reprcrash", None)
      if crash and not self.error:
        self.error = " ".join(crash.message.split())[:100]


# The runner -------------------------------------------------------------------


class Server:
  """A server process with a copy of the tree."""

  def __init__(self, tree: pathlib.Path, cache: pathlib.Path) -> None:
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    self._process = subprocess.Popen(
      [sys.executable, __file__, f"--serve={tree}"], cwd=ROOT,
      env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )
    self._read()

  def _read(self) -> Any:
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError("a server of mutants has died")
    return json.loads(line)

  def run(
    self, tests: Sequence[str], bound: float,
    change: Sequence[str] | None = None,
  ) -> Outcome:
    """Runs tests, after a change to a file."""
    request = {"tests": list(tests), "bound": bound, "change": change}
    self._process.stdin.write(json.dumps(request) + "\n")
    self._process.stdin.flush()
    return Outcome(**self._read())

  def close(self) -> None:
    self._process.stdin.close()
    try:
      self._process.wait(5)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()


def copy_tree(target: pathlib.Path) -> None:
  """Copies what git knows or would add, or all but caches without git."""
  listed = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT,
    capture_output=True, text=True, check=False,
  )
  if listed.returncode:
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs")
    shutil.copytree(ROOT, target, ignore=ignored)
  else:
    for name in filter(None, listed.stdout.split("\0")):
      if (ROOT / name).is_file():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
  for top in OURS:
    compileall.compile_dir(target / top, quiet=2)


def _file_of(test: str) -> str:
  return test.partition("::")[0]


def _is_of(name: str, test: str) -> bool:
  """Whether an id is that of a test, or of one of its cases."""
  return name == test or name.startswith(f"{test}[")


def _last_line(output: str) -> str:
  return (output.strip().splitlines() or [""])[-1]


def of_changed_files(mutants: Iterable[Any]) -> list[Any]:
  """Mutants of files that are not as in the last commit but one."""
  names: set[str] = set()
  for command in (
    ["diff", "--name-only", "HEAD~1"],
    ["ls-files", "--others", "--exclude-standard"],
  ):
    listed = subprocess.run(
      ["git", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
      sys.exit(f"error: --changed: git {command[0]}: {listed.stderr.strip()}")
    names |= set(listed.stdout.split())
  return [m for m in mutants if names & {m.file, _file_of(m.test)}]


class Run:
  """A run of some mutants on all servers.

  Attributes:
    problems: (mutant, why it is not killed), in no order.
    killed: How many mutants failed their tests.
  """

  def __init__(
    self, mutants: Sequence[Any], servers: Sequence[Server],
    say: Callable[[str], None],
  ) -> None:
    self._mutants, self._servers, self._say = mutants, servers, say
    self.problems: list[tuple[Any, str]] = []
    self.killed = 0
    self._seconds: dict[str, float] = {}
    self._unsound: dict[str, str] = {}

  def _each(self, jobs: Iterable[Any], work: Any, done: Any) -> None:
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
          done(job)
      except BaseException as error:
        errors.append(error)

    threads = [
      threading.Thread(target=take, args=(s,), daemon=True)
      for s in self._servers
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    if errors:
      raise errors[0]

  def check_tests(self, done: Any) -> None:
    """Runs all named tests without mutants, file by file."""
    files: dict[str, list[str]] = {}
    for m in self._mutants:
      of_file = files.setdefault(_file_of(m.test), [])
      if m.test not in of_file:
        of_file.append(m.test)

    def work(server: Server, tests: list[str]) -> None:
      found = server.run(tests, 900)
      if found.word == "not run" and len(tests) > 1:
        for test in tests:  # pytest runs nothing if one of them is missing
          work(server, [test])
        return
      durations = dict(found.durations)
      for test in tests:
        own = [s for name, s in durations.items() if _is_of(name, test)]
        self._seconds[test] = sum(own)
        if found.word not in ("passed", "failed"):
          self._unsound[test] = f"{found.word}: {_last_line(found.output)}"
        elif any(_is_of(name, test) for name in found.failed):
          self._unsound[test] = "fails without the mutant"

    most_first = sorted(files.values(), key=len, reverse=True)
    self._each(most_first, work, lambda tests: done(len(tests)))

  def try_mutants(self, done: Any) -> None:
    """Runs the test of each mutant, the longest tests first."""
    def work(server: Server, m: Any) -> None:
      if m.test in self._unsound:
        self.problems.append((m, f"its test {self._unsound[m.test]}"))
        return
      bound = 60 + 10 * self._seconds[m.test]
      change = (m.file, m.text, m.replacement)
      found = server.run([m.test], bound, change)
      if found.word == "failed":
        self.killed += 1
        self._say(f"{m.file}: {m.what}\n    {found.error}")
      else:
        why = f"{found.word}: {_last_line(found.output)}"
        self.problems.append((m, "survives" if found.word == "passed" else why))

    order = sorted(self._mutants, key=lambda m: -self._seconds[m.test])
    self._each(order, work, lambda _: done(1))


def main() -> int:
  parser = argparse.ArgumentParser(
    prog="python -m tests.mutants", description=__doc__.splitlines()[0]
  )
  parser.add_argument(
    "--changed", action="store_true",
    help="only mutants of files that differ from the last commit but one",
  )
  parser.add_argument(
    "--only", default="", metavar="TEXT",
    help="only mutants with this in their file, test or description",
  )
  parser.add_argument("--list", action="store_true", help="runs nothing")
  parser.add_argument(
    "--verbose", action="store_true", help="says how each mutant is noticed"
  )
  parser.add_argument("--serve", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.serve:
    serve(pathlib.Path(options.serve))
    return 0
  from tests.mutants import MUTANTS, problem

  chosen = [
    m for m in MUTANTS
    if any(options.only in part for part in (m.file, m.test, m.what))
  ]
  if options.changed:
    chosen = of_changed_files(chosen)
  if options.list:
    for m in chosen:
      print(f"{m.file}: {m.what}\n    {m.test}")
    print(f"{len(chosen)} mutants")
    return 0
  rotten = [(m, why) for m in chosen if (why := problem(m))]
  applying = [m for m in chosen if not problem(m)]
  return _run(applying, rotten, options.verbose)


def _run(
  mutants: Sequence[Any], rotten: Sequence[tuple[Any, str]], verbose: bool
) -> int:
  from rich.console import Console
  from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
  )
  from rich.table import Table

  console = Console()
  started = time.monotonic()
  servers: list[Server] = []
  with tempfile.TemporaryDirectory(
    prefix="mutants_", ignore_cleanup_errors=True
  ) as folder:
    for number in range(min(NUM_SERVERS, len(mutants))):
      tree = pathlib.Path(folder, str(number), "tree")
      copy_tree(tree)
      servers.append(Server(tree, pathlib.Path(folder, "programs")))
    run = Run(mutants, servers, console.print if verbose else lambda _: None)
    try:
      with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), console=console,
      ) as progress:
        num_tests = len({m.test for m in mutants})
        tests = progress.add_task("tests without mutants", total=num_tests)
        tried = progress.add_task("mutants", total=len(mutants))
        run.check_tests(lambda n: progress.advance(tests, n))
        run.try_mutants(lambda n: progress.advance(tried, n))
    finally:
      for server in servers:
        server.close()
  problems = [*rotten, *run.problems]
  if problems:
    grid = Table("file", "mutant", "test", "", title="not killed")
    for m, why in sorted(problems, key=lambda p: p[0]):
      grid.add_row(m.file, m.what, m.test, why)
    (console if console.is_terminal else Console(width=160)).print(grid)
  minutes = (time.monotonic() - started) / 60
  console.print(
    f"{run.killed} of {len(mutants) + len(rotten)} mutants killed in "
    f"{minutes:.1f} minutes"
  )
  return 1 if problems else 0


if __name__ == "__main__":
  sys.exit(main())
