"""Files of results: JSON with the command, date and versions that made them."""

from collections.abc import Mapping
import datetime
import importlib.metadata
import json
import pathlib
import shlex
import sys
from typing import Any

from caatnet import commands
from caatnet.train import files

# Packages whose versions are recorded, if they are installed.
_PACKAGES = ("jax", "jaxlib", "libtpu", "numpy", "scipy")


def write(path: pathlib.Path, result: Mapping[str, Any]) -> None:
  """Writes a result, replacing an existing file atomically.

  Args:
    path: JSON file; missing directories are created.
    result: Plain data.
  """
  installed = {d.name: d.version for d in importlib.metadata.distributions()}
  now = datetime.datetime.now(datetime.UTC)
  facts = {
    "command": _command(),
    "date": now.isoformat(timespec="seconds"),
    "versions": {p: installed[p] for p in _PACKAGES if p in installed},
  }
  files.replace(path, json.dumps(facts | dict(result), indent=1) + "\n")


def read(path: pathlib.Path) -> dict[str, Any]:
  """Returns the result in a file, or ``{}`` if the file does not exist."""
  return json.loads(path.read_text()) if path.exists() else {}


def _command() -> str:
  """Returns the command line of this process, with the script's module."""
  # Scripts are run as modules (python -m), except in tests.
  spec = sys.modules["__main__"].__spec__
  script = f"-m {spec.name}" if spec else sys.argv[0]
  command = f"python {script} {shlex.join(sys.argv[1:])}".strip()
  return commands.runnable(command)
