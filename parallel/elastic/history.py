"""A coordinator's log: every message in and effect out, as lines of JSON.

The coordinator's `step` is a function, so its log can be run again: `replay`
takes the messages and compares the effects.
"""

from collections.abc import Iterable, Iterator
import json
import os
import pathlib
import time
from typing import Any

from parallel.elastic import coordinator
from parallel.elastic import messages as m
from parallel.elastic.coordinator import Coordinator, Rules
from parallel.elastic.messages import Id, Record


class Log:
  """Writes a log; with no path it writes nothing."""

  def __init__(self, path: pathlib.Path | str | None) -> None:
    self._file = -1
    if path:
      pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
      self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
      size = os.fstat(self._file).st_size
      if size and os.pread(self._file, 1, size - 1) != b"\n":
        os.write(self._file, b"\n")  # a crash has torn the last line

  def started(self, record: Record, rules: Rules, effects: Any) -> None:
    """Writes that a coordinator has started with a journal."""
    self._write(
      record=m.to_json(record), rules=rules._asdict(), effects=effects
    )

  def stepped(self, sender: Id | None, message: Any, effects: Any) -> None:
    """Writes a message, and what the coordinator did with it."""
    self._write(sender=sender, message=m.to_json(message), effects=effects)

  def _write(self, *, effects: Any, **fields: Any) -> None:
    if self._file >= 0:
      line = {"time": time.time(), **fields}
      line["effects"] = [m.to_json(effect) for effect in effects]
      os.write(self._file, json.dumps(line).encode() + b"\n")


def read(path: pathlib.Path | str) -> Iterator[dict[str, Any]]:
  """Yields a log's lines; one that was torn by a crash is left out."""
  with open(path, "rb") as lines:
    for line in lines:
      try:
        yield json.loads(line)
      except ValueError:
        continue


def replay(lines: Iterable[dict[str, Any]]) -> Iterator[Coordinator]:
  """Runs a log again; yields the coordinator's states.

  Args:
    lines: Of the log.

  Raises:
    ValueError: The coordinator does something else than the log says.
  """
  state, rules = Coordinator(), Rules()
  for number, line in enumerate(lines, 1):
    if "record" in line:
      rules = Rules(**line["rules"])
      state, effects = coordinator.started(m.from_json(line["record"]))
    else:
      message = m.from_json(line["message"])
      state, effects = coordinator.step(state, line["sender"], message, rules)
    found = [m.to_json(effect) for effect in effects]
    if found != line["effects"]:
      raise ValueError(
        f"line {number}: the log has {line['effects']}, now it is {found}"
      )
    yield state
