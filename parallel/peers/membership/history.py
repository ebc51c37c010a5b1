"""Event log of a coordinator: all messages and effects, as JSON lines.

The coordinator's `step` is a pure function, so a run can be repeated from its
log: `replay` processes the logged messages and compares the effects.

A log that exceeds its size limit is renamed to ``PATH.1``, which overwrites an
older ``PATH.1``, and a new log begins with the coordinator's whole state. So at
most two files exist. Each can be replayed by itself, or both in order.
"""

from collections.abc import Iterable, Iterator
import json
import os
import pathlib
import time
from typing import Any

from parallel.peers.membership import coordinator
from parallel.peers.membership import messages as m
from parallel.peers.membership.coordinator import CoordinatorState, Phase, Rules
from parallel.peers.membership.messages import Id, Record

_MAX_BYTES = 1 << 26  # about ten thousand rounds


class Log:
  """Writer of an event log; without a path it writes nothing."""

  def __init__(
    self, path: pathlib.Path | str | None, max_bytes: int = _MAX_BYTES
  ) -> None:
    """Opens a log and appends to it.

    Args:
      path: Path of the file; missing folders are created. None disables the
        log.
      max_bytes: Size in bytes above which a new file is started.
    """
    self._file, self._size, self._max_bytes = -1, 0, max_bytes
    if path:
      self._path = pathlib.Path(path)
      self._path.parent.mkdir(parents=True, exist_ok=True)
      self._open()
      if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
        os.write(self._file, b"\n")  # end the incomplete last line of a crash

  def started(self, record: Record, rules: Rules, effects: Any) -> None:
    """Logs that a coordinator has started from the last journal record."""
    self._rules = rules._asdict()
    self._write(record=m.to_json(record), rules=self._rules, effects=effects)

  def log_step(
    self, sender: Id | None, message: Any, effects: Any, after: CoordinatorState
  ) -> None:
    """Logs a message and the effects of the step that processed it.

    Args:
      sender: Peer that sent the message; None for the host.
      message: Message that was processed.
      effects: Effects that the step returned.
      after: State after the step, with which a new file starts.
    """
    self._write(sender=sender, message=m.to_json(message), effects=effects)
    if self._size > self._max_bytes:
      os.close(self._file)
      # Rename, then start the new file with the whole state.
      self._path.replace(f"{self._path}.1")
      self._open()
      self._write(state=_to_json(after), rules=self._rules, effects=())

  def _open(self) -> None:
    self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    self._size = os.fstat(self._file).st_size

  def _write(self, *, effects: Any, **fields: Any) -> None:
    if self._file >= 0:
      line = {"time": time.time(), **fields}
      line["effects"] = [m.to_json(effect) for effect in effects]
      self._size += os.write(self._file, json.dumps(line).encode() + b"\n")


def _to_json(state: CoordinatorState) -> dict[str, Any]:
  return {
    # Sorted, so that equal states have equal JSON.
    key: m.to_json(tuple(sorted(x)) if isinstance(x, frozenset) else x)
    for key, x in state._asdict().items()
  }


def _from_json(data: dict[str, Any]) -> CoordinatorState:
  state = CoordinatorState(**{key: m.from_json(x) for key, x in data.items()})
  return state._replace(
    # JSON has neither enums nor sets: they are stored as integers and tuples.
    phase=Phase(state.phase), **{
      key: frozenset(getattr(state, key))
      for key, default in CoordinatorState()._asdict().items()
      if isinstance(default, frozenset)
    }
  )


def read(path: pathlib.Path | str) -> Iterator[dict[str, Any]]:
  """Yields the entries of a log; skips lines that a crash left incomplete."""
  with open(path, "rb") as lines:
    for line in lines:
      try:
        yield json.loads(line)
      except ValueError:  # incomplete after a crash
        continue


def replay(lines: Iterable[dict[str, Any]]) -> Iterator[CoordinatorState]:
  """Replays a log; yields the coordinator's state after each entry.

  Args:
    lines: Entries of a log, as `read` yields them, or of two logs in order.

  Raises:
    ValueError: The coordinator's effects differ from the logged ones.
  """
  state, rules = CoordinatorState(), Rules()
  for number, line in enumerate(lines, 1):
    if "state" in line:
      # The first line of a file after the first one.
      before, state = state, _from_json(line["state"])
      rules, effects = Rules(**line["rules"]), []
      if number > 1 and before != state:
        raise ValueError(
          f"line {number}: the state at the start of this log must equal the "
          "state at the end of the previous one"
        )
    elif "record" in line:
      rules = Rules(**line["rules"])
      # The coordinator was started or restarted here.
      state, effects = coordinator.initial_state(m.from_json(line["record"]))
    else:
      message = m.from_json(line["message"])
      state, effects = coordinator.step(state, line["sender"], message, rules)
    # The replay must have equal effects in the same order.
    found = [m.to_json(effect) for effect in effects]
    if found != line["effects"]:
      raise ValueError(
        f"line {number}: the log has the effects {line['effects']}, but its "
        f"replay has {found}"
      )
    yield state
