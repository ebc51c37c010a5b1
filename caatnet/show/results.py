"""Files of results: JSON with command, date, commit, versions and a digest."""

from collections.abc import Mapping
import datetime
import hashlib
import importlib.metadata
import json
import pathlib
import platform
import shlex
import sys
from typing import Any

from caatnet import commands
from parallel.base import files

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
    "commit": commands.current_commit(),
    "versions": {"python": platform.python_version()}
    | {p: installed[p] for p in _PACKAGES if p in installed}
    | result.get("versions", {}),  # a compiler's, for another platform
  }
  content = json.loads(files.to_json(facts | dict(result) | facts))
  content["sha256"] = digest(content)
  files.replace(path, json.dumps(content, indent=1) + "\n")


def digest(content: Mapping[str, Any]) -> str:
  """Returns a result's SHA-256 in hexadecimal, which reveals later edits.

  Args:
    content: Content of the file; its key ``sha256`` is left out.

  Example:
    >>> digest({"loss": 2.5, "sha256": "?"}) == digest({"loss": 2.5})
    True
  """
  rest = {key: value for key, value in content.items() if key != "sha256"}
  return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read(path: pathlib.Path) -> dict[str, Any]:
  """Returns the result in a file, or ``{}`` if the file does not exist.

  Raises:
    ValueError: The file is damaged; the message names it.
  """
  return files.read_json(path) if path.exists() else {}


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the rows of the result in a file; [] if the file does not exist.

  Raises:
    ValueError: The file is damaged; the message names it.
  """
  found = read(path).get("rows", [])
  if not isinstance(found, list) or not all(isinstance(x, dict) for x in found):
    raise ValueError(f"{path} is damaged: its rows must be JSON objects")
  return found


def _command() -> str:
  """Returns a command line that runs this process again."""
  # Scripts are run as modules (python -m), except in tests.
  spec = sys.modules["__main__"].__spec__
  script = f"-m {spec.name}" if spec else sys.argv[0]
  command = f"python {script} {shlex.join(sys.argv[1:])}".strip()
  return commands.rewrite_commands(command)
