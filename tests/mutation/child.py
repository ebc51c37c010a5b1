"""One run of pytest in a forked process."""

from collections.abc import Sequence
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

OURS = ("parallel", "caatnet", "configs", "launch", "tests", "docs")
ROOT = pathlib.Path(__file__).parents[2]


class _Reports:
  """A pytest plugin that selects tests and keeps their outcomes."""

  def __init__(self, tests: Sequence[str] | None, coverage: Any) -> None:
    self._tests = None if tests is None else {t: i for i, t in enumerate(tests)}
    self._coverage = coverage
    self.failed: list[str] = []
    self.durations: dict[str, float] = {}
    self.uncollected = ""
    self.error = ""
    self.asserted = False

  def pytest_collection_modifyitems(self, items: list[Any]) -> None:
    # After conftest.py, whose order of files does not matter here.
    if self._tests is not None:
      items[:] = [item for item in items if item.nodeid in self._tests]
      items.sort(key=lambda item: self._tests[item.nodeid])

  def pytest_runtest_logstart(self, nodeid: str) -> None:
    if self._coverage:
      self._coverage.switch_context(nodeid)

  def pytest_collectreport(self, report: Any) -> None:
    if report.failed and not self.uncollected:
      lines = str(report.longrepr).strip().splitlines()
      self.uncollected = lines[-1][:160] if lines else "not collected"

  def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
    if call.excinfo and not self.error:
      if call.excinfo.errisinstance(Skipped):
        return
      kind = call.excinfo.type.__name__
      self.asserted = kind in ("AssertionError", "Failed")
      first = (str(call.excinfo.value).strip().splitlines() or [""])[0]
      first = first.replace(os.environ["TMPDIR"], "TMPDIR")
      self.error = f"{kind}: {first}"[:160]

  def pytest_runtest_logreport(self, report: Any) -> None:
    seconds = self.durations.get(report.nodeid, 0.0) + report.duration
    self.durations[report.nodeid] = seconds
    if report.failed and report.nodeid not in self.failed:
      self.failed.append(report.nodeid)

  def outcome(self) -> dict[str, Any]:
    if self.uncollected:
      return {"outcome": "crash", "error": self.uncollected}
    outcome = "passed" if self.durations else "not run"
    if self.failed:
      outcome = "assertion" if self.asserted else "exception"
    return {
      "outcome": outcome, "failed": self.failed, "error": self.error,
      "durations": self.durations,
    }


Skipped: Any = ()  # pytest's, once it is imported in the child


def _foreign(tree: pathlib.Path) -> list[str]:
  """Modules of ours that do not come from the copy."""
  return [
    name for name, module in sys.modules.items()
    if name.split(".")[0] in OURS and getattr(module, "__file__", None)
    and tree not in pathlib.Path(module.__file__).parents
    and not name.startswith("tests.mutation.")
  ]


def _measuring(folder: pathlib.Path, context: str) -> Any:
  """Coverage of this process, and of the processes that it starts.

  Child processes read the configuration at startup, by a sitecustomize on their
  path, and attribute all lines to the test file.
  """
  import coverage

  lines = [
    "[run]", "parallel=true", f"data_file={folder / 'data'}", "sigterm=true",
    "relative_files=true", "source=parallel,caatnet", f"context={context}",
    "concurrency=multiprocessing,thread",
  ]
  settings = folder / "settings"
  settings.write_text("\n".join(lines))
  site = folder / "site"
  site.mkdir()
  (site / "sitecustomize.py").write_text(
    "import coverage\ncoverage.process_startup()\n"
  )
  os.environ["COVERAGE_PROCESS_START"] = str(settings)
  path = os.environ.get("PYTHONPATH", "")
  os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), path)))
  found = coverage.Coverage(config_file=str(settings), messages=False)
  found.start()
  return found


def main(
  tree: pathlib.Path, folder: pathlib.Path, files: Sequence[str],
  tests: Sequence[str] | None, first_only: bool, measured: str,
) -> None:
  """Runs tests and writes their outcomes to ``folder / "found"``; exits.

  Args:
    tree: Copy of the repository.
    folder: Temporary folder of this run.
    files: Test files.
    tests: Ids of the tests to run, in order, or None for all.
    first_only: Stops at the first failure.
    measured: Folder for coverage data, or empty.
  """
  os.setpgrp()
  os.chdir(tree)
  os.environ |= {
    "TMPDIR": str(folder), "NUMBA_CACHE_DIR": str(tree.parent / "numba"),
    "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree),
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
  }
  tempfile.tempdir = None
  out = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
  os.dup2(out, 1)
  os.dup2(out, 2)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  elsewhere = ("", str(ROOT), str(ROOT / "tests"))
  sys.path[:] = [str(tree), *(p for p in sys.path if p not in elsewhere)]
  sys.dont_write_bytecode = True
  for name in [n for n in sys.modules if n.split(".")[0] == "tests"]:
    del sys.modules[name]
  import pytest

  global Skipped
  Skipped = pytest.skip.Exception
  coverage = None
  if measured:
    coverage = _measuring(pathlib.Path(measured), files[0])
  reports = _Reports(tests, coverage)
  options = [
    "-q", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin",
    f"--rootdir={tree}", "--hypothesis-seed=0",
    f"--basetemp={folder / 'pytest'}", "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
  ]
  pytest.main(
    [*options, *(["-x"] if first_only else []), *files], plugins=[reports]
  )
  if coverage:
    coverage.stop()
    coverage.save()
  found = reports.outcome()
  foreign = _foreign(tree)
  if foreign:
    found = {"outcome": "not run", "error": f"not from the copy: {foreign}"}
  sys.stdout.flush()
  temporary = folder / "temporary"
  temporary.write_text(json.dumps(found))
  temporary.rename(folder / "found")
  os._exit(0)
