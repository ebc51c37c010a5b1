"""Documents of experiments, checked in the commits that they name.

An entry of the log or a file of results is history: its command and the files
that it names need not exist any more, but `git checkout COMMIT` has them.
"""

import fnmatch
import functools
import re
import subprocess

import pytest

from docs.points import ROOT
from tests import claims_test

RESULTS = ROOT / "results"
_FILE = re.compile(r"(?<![\w/.-])((?:configs|docs|tests)/[\w/.-]+\.py)")


def faults(text: str, commit: str) -> list[str]:
  """Returns one line for each file of a text that its commit does not have.

  Those are the files that the text names, and scripts, configs and tests of
  its commands. Files of results are kept, so a later commit may have added
  them. Flags are not parsed, since the commit had a parser of its own.

  Raises:
    pytest.skip.Exception: This checkout has no history, or a part of it.
  """
  wanted = dict.fromkeys(claims_test.files(text))
  for command in claims_test.commands(text):
    script = re.search(r"-m launch\.(\w+)", command)
    wanted |= {f"launch/{script[1]}.py": None} if script else {}
    wanted |= dict.fromkeys(_FILE.findall(command))
  names = tree(commit) | {f"results/{p.name}" for p in RESULTS.iterdir()}
  missing = [name for name in wanted if not _has(names, name)]
  return [f"{name}: not in {commit}" for name in missing]


@functools.cache
def tree(commit: str) -> frozenset[str]:
  """Returns the paths of all files and folders of a commit."""
  listed = _git("ls-tree", "-r", "-t", "-z", "--name-only", commit)
  if listed.returncode:
    shallow = _git("rev-parse", "--is-shallow-repository")
    if shallow.stdout.strip() != "false":
      pytest.skip("this checkout has no history")
    raise ValueError(f"no commit {commit}")
  return frozenset(listed.stdout.split("\0"))


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
  )


def _has(names: frozenset[str], name: str) -> bool:
  pattern = claims_test.ANY_NAME.sub("*", name).rstrip("/")
  if pattern in names:
    return True
  if "/" not in name:
    pattern = f"*/{pattern}"
  return bool(fnmatch.filter(names, pattern))
