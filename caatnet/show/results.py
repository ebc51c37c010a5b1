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

# Of these, what is installed made the result.
_PACKAGES = ("jax", "jaxlib", "libtpu", "numpy", "scipy")


def write(path: pathlib.Path, result: Mapping[str, Any]) -> None:
  """Writes a result, in place of what is at the path as soon as it is whole.

  Args:
    path: The JSON file; folders on the way are made.
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
  """Returns the result that a file holds; ``{}`` if there is no file."""
  return json.loads(path.read_text()) if path.exists() else {}


def _command() -> str:
  """Returns the command line of this process, with the script's module."""
  spec = sys.modules["__main__"].__spec__
  script = f"-m {spec.name}" if spec else sys.argv[0]
  command = f"python {script} {shlex.join(sys.argv[1:])}".strip()
  return commands.runnable(command)
