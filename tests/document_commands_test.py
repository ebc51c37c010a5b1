"""Commands of the documents run: quick ones always, some others for a commit.

Each command runs in a folder with links to the repository, so that its outputs
do not remain.
"""

import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest

from tests.claims_test import commands as commands_of

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Each takes less than 5 s of processor time.
QUICK = (
  "launch.sends docs/examples/mlp.py:step --devices=8",
  "configs/inference/decode.py", "configs/diloco/utilisation.py",
  "configs/graphs/alignment.py", "configs/datacentre/hundred_billion.py",
  "configs/zero/frontier.py", "configs/memory/12b_32k.py",
)
# Cannot run alone: they need a server or another role, a folder or a file that
# another command writes, a recipe's file, or a download.
MORE = re.compile(
  r"make |pytest|launch\.train$|serve|coordinator|replay|--elastic|--role|"
  r"easgd|hypercube|FOLDER|DUMP|SmolLM2|my_app|evaluate|generate|"
  r"target=[tg]pu|peers\.py|calibration_cluster|placement\.json"
)
SECONDS = 60  # after these a command is ended; it has printed no error so far
PART = 2  # commands of a commit


def commands():
  """Returns the commands of all documents that run alone, each once."""
  found = [c for path in PAGES for c in commands_of(path.read_text())]
  return [c for c in dict.fromkeys(found) if not MORE.search(c)]


def is_quick(command):
  return any(part in command for part in QUICK)


def of_commit():
  """Returns commands that are not quick: another part for each commit."""
  others = [c for c in commands() if not is_quick(c)]
  found = subprocess.run(
    ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True,
    check=False,
  )
  first = int(found.stdout or "0", 16)
  return [others[(first + i) % len(others)] for i in range(PART)]


def run(command, folder):
  """Runs a command; returns its exit code and output, None if it was ended."""
  for path in ROOT.iterdir():
    if path.name[0] != "." and path.name not in ("runs", "site"):
      (folder / path.name).symlink_to(path)
  _, *words = shlex.split(command, comments=True)
  with open(folder / "log.txt", "w") as log:
    process = subprocess.Popen(
      [sys.executable, *words], cwd=folder, stdout=log, stderr=log,
      start_new_session=True, env=os.environ | {"XLA_FLAGS": ""},
    )
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(SECONDS)
  code = process.poll()
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()
  return code, (folder / "log.txt").read_text()


@pytest.mark.parametrize("command", [*filter(is_quick, commands())])
def test_quick_command_runs(command, tmp_path):
  code, output = run(command, tmp_path)
  assert code == 0, output


def test_every_quick_command_is_in_a_document():
  assert all(any(part in c for c in commands()) for part in QUICK)
  assert len(commands()) > 40


@pytest.mark.skipif(os.environ.get("CI") != "true", reason="for .ci/run")
@pytest.mark.parametrize("command", of_commit())
def test_command_of_this_commit_runs(command, tmp_path):
  code, output = run(command, tmp_path)
  assert code in (0, None), output
