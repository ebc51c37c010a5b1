"""Virtual environments with other projects' packages, each created once."""

from collections.abc import Mapping, Sequence
import fcntl
import os
import pathlib
import shutil
import subprocess
import sys
from types import MappingProxyType

# Variables by which pip finds packages, after PIP_; uv's begin with UV_.
_SOURCES = ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS")


def create(
  folder: pathlib.Path, packages: Sequence[str], python: str = ""
) -> pathlib.Path:
  """Returns the Python of a virtual environment; creates it if it is missing.

  A call waits while another process makes the same environment.

  Args:
    folder: Folder of the environment.
    packages: Requirements, as pip and uv take them.
    python: Python that creates the environment; "" for the running one.

  Raises:
    ValueError: The Python cannot be run, or the packages cannot be installed.
  """
  done, wanted = folder / "installed", "\n".join(packages)
  folder.parent.mkdir(parents=True, exist_ok=True)
  with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not done.exists() or done.read_text() != wanted:
      shutil.rmtree(folder, ignore_errors=True)
      own = str(folder / "bin/python")
      execute([python or sys.executable, "-m", "venv", str(folder)])
      # uv resolves in seconds what pip has not resolved after 9 minutes.
      execute([own, "-m", "pip", "install", "-q", "uv"])
      execute(
        [own, "-m", "uv", "pip", "install", "-q", "--python", own, *packages],
        _uv_variables(os.environ),
      )
      done.write_text(wanted)
  return folder / "bin/python"


def _uv_variables(environment: Mapping[str, str]) -> dict[str, str]:
  """Returns uv's variables for pip's package sources, unless already set.

  Example:
    >>> _uv_variables({"PIP_FIND_LINKS": "a b", "UV_INDEX_URL": "c"})
    {'UV_FIND_LINKS': 'a,b', 'UV_INDEX_STRATEGY': 'unsafe-best-match'}
  """
  found = {
    f"UV_{name}": environment[f"PIP_{name}"].replace(
      " ", "," if name == "FIND_LINKS" else " "
    ) for name in _SOURCES if f"PIP_{name}" in environment
  }
  # Like pip, uv then takes the best version of all indexes.
  found |= {"UV_INDEX_STRATEGY": "unsafe-best-match"}
  return {k: v for k, v in found.items() if k not in environment}


def execute(
  command: Sequence[str],
  environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
  """Runs a command, and returns its standard output.

  Args:
    command: Program and its arguments.
    environment: Variables in addition to those of this process.

  Raises:
    ValueError: The command cannot be run, or fails; the message has its error.
  """
  try:
    ended = subprocess.run(
      command, capture_output=True, text=True, check=False,
      env=os.environ | dict(environment),
    )
  except OSError as error:
    raise ValueError(f"{command[0]}: {error.strerror}") from error
  if ended.returncode:
    lines = ended.stderr.strip().splitlines() or ["no message"]
    # The last line may be a notice of pip; pyenv's first line is its error.
    last = next((x for x in reversed(lines) if "error" in x.lower()), lines[0])
    raise ValueError(f"{' '.join(command)[:200]}: {last}")
  return ended.stdout
