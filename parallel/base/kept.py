"""File of results of a long computation, each stored as soon as it is known.

A file has one JSON line per result, with a hash of all inputs that the result
depends on. If an interrupted computation is started again, it reads the results
in the file instead of repeating them. Incomplete lines are ignored.
"""

from collections.abc import Callable
import contextlib
import hashlib
import json
import os
import pathlib
from typing import Any

from parallel.base import files, schema


class _Line(schema.Schema):
  """Line of a `ResultCache` file.

  Attributes:
    key: Hash of the inputs of a computation.
    result: Its result, as JSON data.
  """

  key: str
  result: Any


class ResultCache:
  """File of a computation's results, which are looked up by their inputs.

  Example:
    >>> kept = ResultCache("")  # without a file
    >>> kept.get(["batch", 8], lambda: {"loss": 0.5})
    {'loss': 0.5}
  """

  def __init__(self, path: str | os.PathLike[str], name: str = "") -> None:
    """Reads the results in a file.

    Args:
      path: File of JSON lines, created or extended; "" to store no results.
      name: Name of the argument ``path`` in error messages.

    Raises:
      ValueError: The file has lines, but no results.
    """
    self._path = pathlib.Path(path) if path else None
    self._found: dict[str, Any] = {}
    if self._path is None or not self._path.exists():
      return
    data = self._path.read_bytes()
    for text in data.splitlines():
      with contextlib.suppress(ValueError):
        line = schema.parse(_Line, text)
        self._found[line.key] = line.result
    if data.strip() and not self._found:
      raise ValueError(
        f"{name}{'=' if name else ''}{str(path)!r} has no results of an "
        "earlier run; name another file, or remove it"
      )
    if not data.endswith(b"\n"):
      self._append("")  # ends an incomplete last line

  def get(self, inputs: Any, compute: Callable[[], Any]) -> Any:
    """Returns the stored result for some inputs, or computes and stores it.

    Args:
      inputs: All inputs on which the result depends, as JSON data.
      compute: Function without arguments that returns the result, JSON data.
    """
    text = json.dumps(inputs, sort_keys=True)
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    if key not in self._found:
      # New results take the form of stored ones: a tuple becomes a list.
      result = json.loads(files.to_json(compute()))
      self._append(json.dumps({"key": key, "result": result}))
      self._found[key] = result
    return self._found[key]

  def _append(self, line: str) -> None:
    if self._path is not None:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      with self._path.open("a") as file:
        file.write(f"{line}\n")
