"""A process that runs tests in forked children, in a copy of the tree.

The process has imported what is not ours (jax above all) and forks a child for
each request; the child imports our modules from the copy. No child sees the
modules of another, and none pays for the import of jax.

Compiled programs: XLA's persistent cache is shared, because its key is the
program, so a mutant that changes a program misses it. Numba's folder is shared,
because its key is the file of a function with its time and size, and a function
that numba caches calls only functions of its own file. A mutant in such a file
compiles it anew.

    python -m tests.mutation.server TREE    # requests on stdin, one JSON a line
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import select
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

from tests.mutation import child

# Imported before a fork, if installed. No module of ours.
_PRELOADED = (
  "jax", "jax.experimental.pallas.tpu", "jax.experimental.pallas.triton",
  "jax._src.pallas.mosaic.interpret.interpret_pallas_call", "numpy", "scipy",
  "scipy.sparse.csgraph", "networkx", "flax.nnx", "optax", "chex",
  "orbax.checkpoint", "grain", "ml_collections", "tensorboardX", "rich.console",
  "rich.progress", "rich.table", "hypothesis", "hypothesis.extra.numpy",
  "pytest", "coverage",
)
# Modules that pytest imports in any case.
_PYTEST = (
  "_hypothesis_pytestplugin", "_pytest.assertion.rewrite", "_pytest.capture",
  "_pytest.doctest", "_pytest.junitxml", "_pytest.logging", "_pytest.pastebin",
  "_pytest.python", "_pytest.terminal", "_pytest.unittest",
  "_pytest.threadexception", "_pytest.debugging", "_pytest.faulthandler",
  "unittest.mock", "pdb", "xml.etree.ElementTree",
)


@dataclasses.dataclass(frozen=True)
class Request:
  """Tests to run.

  Attributes:
    files: Test files, in order.
    bound_s: Time limit.
    tests: Ids of the tests to run, in order; None for all of the files.
    change: File of the tree and its content for this run.
    measured: Folder that receives the coverage data of the run.
  """

  files: list[str]
  bound_s: float
  tests: list[str] | None = None
  change: tuple[str, str] | None = None
  measured: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
  """Outcome of a run of tests.

  Attributes:
    outcome: "passed", "assertion" (a test's assertion failed), "exception" (a
      test failed by another exception), "crash" (the process died, or a test
      file could not be imported), "timeout" or "not run" (no such test).
    seconds: Duration, imports included.
    failed: Ids of the tests that failed.
    durations: Id of each test that ran -> seconds.
    error: First line of the first error.
    output: End of pytest's output.
  """

  outcome: str
  seconds: float
  failed: tuple[str, ...] = ()
  durations: dict[str, float] = dataclasses.field(default_factory=dict)
  error: str = ""
  output: str = ""


@contextlib.contextmanager
def _changed(tree: pathlib.Path, change: tuple[str, str] | None):
  if change is None:
    yield
    return
  path = tree / change[0]
  before = path.read_text()
  path.write_text(change[1])
  # Compiled code is told apart by seconds and size, which may be equal.
  for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
    compiled.unlink()
  try:
    yield
  finally:
    path.write_text(before)


def _ended(pid: int, bound_s: float) -> str:
  """Waits for a child: "" if it ended, "late", or "gone" for the runner."""
  start = time.monotonic()
  while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
    # The runner writes nothing before it has an answer: readable is its end.
    if select.select([sys.stdin], [], [], 0.02)[0]:
      return "gone"
    if time.monotonic() - start > bound_s:
      return "late"
  return ""


def forked(tree: pathlib.Path, request: Request) -> Answer:
  """Runs tests in a child; ends it when time is up or the runner has gone."""
  start = time.monotonic()
  folder = pathlib.Path(tempfile.mkdtemp(dir=tree.parent))
  pid = os.fork()
  if not pid:
    try:
      child.main(
        tree, folder, request.files, request.tests, bool(request.change),
        request.measured,
      )
    finally:
      os._exit(1)
  ended = _ended(pid, request.bound_s)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(pid, signal.SIGKILL)  # and processes that the tests have started
  os.waitpid(pid, 0)
  if ended == "gone":
    sys.exit(1)
  seconds = time.monotonic() - start
  output, found = folder / "output", folder / "found"
  text = output.read_text(errors="replace")[-4000:] if output.exists() else ""
  try:
    if ended == "late":
      return Answer("timeout", seconds, output=text)
    if not found.exists():
      return Answer("crash", seconds, error="the process died", output=text)
    values = json.loads(found.read_text())
    return Answer(seconds=seconds, output=text, **values)
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def serve(tree: pathlib.Path, preloaded: Sequence[str]) -> None:
  """Answers requests on stdin until it ends."""
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # other output does not mix with the answers

  def answer(value: Any) -> None:
    print(json.dumps(value), file=answers, flush=True)

  for name in (*preloaded, *_PYTEST):
    with contextlib.suppress(ImportError):
      importlib.import_module(name)
  answer("ready")
  for line in sys.stdin:
    request = Request(**json.loads(line))
    with _changed(tree, request.change):
      found = forked(tree, request)
    answer(dataclasses.asdict(found))


if __name__ == "__main__":
  named = sys.argv[2].split(",") if sys.argv[2:] and sys.argv[2] else _PRELOADED
  serve(pathlib.Path(sys.argv[1]), named)
