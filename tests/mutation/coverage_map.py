"""Map from source lines to the tests that execute them.

Each test file is measured once, test by test, and kept in a folder of its own
until the test file or a conftest.py changes. Where a source file has changed
since, its functions are found by name; in a function that is new, all tests of
the source file count, and in a source file that is new or was not executed
before it changed, all tests of the test file. Lines that run at import count
for all tests of the source file, too.
"""

import contextlib
import hashlib
import json
import pathlib
import re
import shutil
from typing import Any

from tests.mutation import candidates

EXCLUDED = ("tpu", "gpu", "eval", "browser", "mutation")


def _hash(*contents: str) -> str:
  return hashlib.sha256("\0".join(contents).encode()).hexdigest()[:16]


def _from_root(file: str) -> str:
  """Path from the root; a process in another folder writes absolute paths."""
  return re.sub(r"^/.*/tree/(?=parallel/|caatnet/)", "", file)


def test_files(root: pathlib.Path) -> list[str]:
  """Test files that run everywhere."""
  found = []
  for path in sorted((root / "tests").rglob("*_test.py")):
    parts = path.relative_to(root).parts
    if parts[1] not in EXCLUDED:
      found.append("/".join(parts))
  return found


def own_tests(root: pathlib.Path, directory: str) -> list[str]:
  """Test files that mirror a directory such as parallel/outer."""
  inside = f"tests/{directory}"
  return [
    file for file in test_files(root)
    if (
      file.startswith(f"{inside}/") and (
        "/" in directory or file.count("/") == 2
      )
    ) or file == f"{inside}_test.py"
  ]


class Map:
  """Measured coverage of test files.

  Args:
    root: Root of the repository.
    folder: Folder of the data.
  """

  def __init__(self, root: pathlib.Path, folder: pathlib.Path) -> None:
    self._root, self._folder = root, folder
    self._cache: dict[str, Any] = {}
    self._known: dict[str, str] = {}
    self._measured: set[str] = set()  # test files of which `has` is true

  def _of(self, test_file: str) -> pathlib.Path:
    return self._folder / test_file.replace("/", "+")

  def _key(self, test_file: str) -> str:
    parents = (self._root / test_file).relative_to(self._root).parents
    paths = [self._root / p / "conftest.py" for p in parents]
    paths = [self._root / test_file, *(p for p in paths if p.exists())]
    return _hash(*(p.read_text() for p in paths))

  def _hashes(self) -> dict[str, str]:
    """Hashes of all source files, which must not change meanwhile."""
    if not self._known:
      for top in ("parallel", "caatnet"):
        for path in (self._root / top).rglob("*.py"):
          name = path.relative_to(self._root).as_posix()
          self._known[name] = _hash(path.read_text())
    return self._known

  def has(self, test_file: str) -> bool:
    """Whether a test file has been measured since it changed last."""
    described = self._of(test_file) / "about.json"
    if test_file not in self._measured and described.exists() and (
      json.loads(described.read_text())["key"] == self._key(test_file)
    ):
      self._measured.add(test_file)
    return test_file in self._measured

  def covering(self, file: str) -> list[str]:
    """Measured test files that execute a source file, e.g. in a process."""
    return [f for f in test_files(self._root) if self.has(f) and (
      file in self._read(f)[1]["sources"]
    )]

  def folder_for(self, test_file: str) -> pathlib.Path:
    """An empty folder that a run of the test file writes its data to."""
    folder = self._of(test_file)
    shutil.rmtree(folder, ignore_errors=True)
    self._measured.discard(test_file)
    folder.mkdir(parents=True)
    return folder

  def add(self, test_file: str, durations: dict[str, float]) -> None:
    """Combines the data of a run.

    Args:
      test_file: A file, measured into `folder_for` it.
      durations: Tests that passed -> seconds.
    """
    import coverage

    folder = self._of(test_file)
    data = coverage.CoverageData(basename=str(folder / "lines"))
    for part in sorted(folder.glob("data*")):
      of_process = coverage.CoverageData(basename=str(part))
      # A process that a test kills leaves an empty or incomplete file.
      with contextlib.suppress(coverage.exceptions.DataError):
        of_process.read()
        data.update(of_process, map_path=_from_root)
      part.unlink()
    data.write()
    sources = {}
    for file in data.measured_files():
      if file in self._hashes():
        sources[file] = {
          "hash": self._hashes()[file],
          "functions": candidates.functions(candidates.read(self._root, file)),
        }
    about = {
      "key": self._key(test_file), "durations": durations, "sources": sources,
      "files": self._hashes(),
    }
    (folder / "about.json").write_text(json.dumps(about))
    self._cache.pop(test_file, None)

  def _read(self, test_file: str) -> tuple[Any, dict[str, Any]]:
    import coverage

    if test_file in self._cache:
      return self._cache[test_file]
    data = coverage.CoverageData(basename=str(self._of(test_file) / "lines"))
    data.read()
    about = json.loads((self._of(test_file) / "about.json").read_text())
    self._cache[test_file] = data, about
    return data, about

  def is_fresh(self, test_file: str) -> bool:
    """Whether all that the tests execute is as it was when they passed."""
    _, about = self._read(test_file)
    return all(
      self._hashes().get(file) == known["hash"]
      for file, known in about["sources"].items()
    )

  def durations(self, test_file: str) -> dict[str, float]:
    """Seconds of all tests of a measured test file."""
    return self._read(test_file)[1]["durations"]

  def tests(
    self, test_file: str, file: str, lines: tuple[int, int], function: str
  ) -> tuple[dict[str, float], dict[str, float]]:
    """Tests of a measured test file that can see a change.

    Args:
      test_file: A measured test file.
      file: Source file.
      lines: First and last line of the change.
      function: Qualified name of its function.

    Returns:
      Tests that execute one of the lines -> seconds, and the other tests of
      the file, which may use what the former have traced or cached; both are
      empty if no test executes a line.
    """
    data, about = self._read(test_file)
    durations = about["durations"]
    known, now = about["sources"].get(file), self._hashes()[file]
    if known is None:
      return {}, {} if about["files"].get(file) == now else durations
    contexts = data.contexts_by_lineno(file)
    span: tuple[int, int] | None = lines
    if known["hash"] != now:
      span = known["functions"].get(function)
    every = {c for found in contexts.values() for c in found}
    found = {
      c for line, those in contexts.items()
      if span and span[0] <= line <= span[1] for c in those
    }
    at_import = found <= {test_file} and bool(found)
    if span is None or at_import or function == "<module>":
      found = every
    names = {c.partition("|")[2] or c.partition("|")[0] for c in found}
    direct = {t: s for t, s in durations.items() if t in names}
    rest = {t: s for t, s in durations.items() if t not in direct}
    if not names:
      return {}, {}
    return direct, rest
