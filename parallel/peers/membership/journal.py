"""Write-ahead journal of the coordinator's records.

Each line is a CRC-32 and a JSON record. The checksum continues that of the
previous line, so changed, lost and reordered lines are detected. A line is on
disk (fsync) before `Journal.append` returns. A crash can leave an incomplete
last line; no peer was notified of its record, so opening the journal drops it.

Only the last record is needed. A journal that exceeds its size limit is
replaced by one with that record only. It is written to a second file, which is
locked, synced and renamed, so that the path always names a complete journal.

Example:
  >>> import tempfile
  >>> from parallel.peers.membership.journal import Journal
  >>> from parallel.peers.membership.messages import Record
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   with Journal(f"{folder}/journal") as journal:
  ...     journal.append(Record(epoch=1, members=("a", "b")))
  ...   with Journal(f"{folder}/journal") as journal:  # after a restart
  ...     print(journal.record.members)
  ('a', 'b')
"""

import fcntl
import json
import os
import pathlib
import re
from typing import Any
import zlib

from parallel.peers.membership import messages
from parallel.peers.membership.messages import Record

_CRC_CHARS = 8
# Beginning of a line: a checksum, a space and a JSON object.
_INCOMPLETE = re.compile(rb"[0-9a-f]{0,8}|[0-9a-f]{8} (\{.*)?", re.DOTALL)
_MAX_BYTES = 1 << 20  # some thousand rounds


class Journal:
  """Journal file, which one process has locked exclusively.

  Attributes:
    record: Last record; the default `Record` if the journal is empty.
  """

  def __init__(
    self, path: pathlib.Path | str, max_bytes: int = _MAX_BYTES
  ) -> None:
    """Opens a journal, or creates a new one.

    Args:
      path: Path of the file. Missing folders are created.
      max_bytes: Size above which the file is compacted to its last record.

    Raises:
      ValueError: The file is damaged, or another process has locked it.
    """
    self._path = pathlib.Path(path)
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._max_bytes = max_bytes
    self._file = self._open_locked()
    try:
      self._crc, self.record, self._size = self._read()
      # Drop the incomplete last line, so that the next record starts a line.
      os.ftruncate(self._file, self._size)
      os.fsync(self._file)
      self._sync_folder()
    except BaseException:
      os.close(self._file)
      raise

  def append(self, record: Record) -> None:
    """Writes a record, which is on disk when this function returns."""
    self._crc, line = _line(self._crc, record)
    _write(self._file, line)
    self._size += len(line)
    self.record = record
    if self._size > self._max_bytes:
      self._compact()

  def close(self) -> None:
    """Closes the file and releases its lock."""
    os.close(self._file)

  def __enter__(self) -> "Journal":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _open_locked(self) -> int:
    """Opens and locks the file; the kernel unlocks it when the process ends."""
    while True:
      file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        os.close(file)
        raise ValueError(
          f"{self._path}: another coordinator has locked this journal; two "
          "coordinators would make contradictory decisions"
        ) from error
      try:
        # The lock is on the opened file; check that the path still names it.
        if os.path.samestat(os.fstat(file), os.stat(self._path)):
          return file
      except FileNotFoundError:
        pass
      os.close(file)  # compaction replaced the path between open and lock

  def _compact(self) -> None:
    """Replaces the journal with one that has only the last record."""
    # In the same folder, so that the rename is atomic.
    new = self._path.with_name(self._path.name + ".new")
    file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      crc, line = _line(0, self.record)  # the checksum chain starts anew
      _write(file, line)
      # It is locked and on disk already, so the path names a complete journal.
      os.replace(new, self._path)
    except BaseException:
      os.close(file)
      raise
    # The lock of the new file is held before that of the old one ends.
    old, self._file = self._file, file
    os.close(old)
    self._crc, self._size = crc, len(line)
    self._sync_folder()

  def _sync_folder(self) -> None:
    """Syncs the folder, so that the file's name is on disk, too."""
    folder = os.open(self._path.parent, os.O_RDONLY)
    try:
      os.fsync(folder)
    finally:
      os.close(folder)

  def _read(self) -> tuple[int, Record, int]:
    """Returns (last checksum, last record, size of all complete lines)."""
    lines = self._path.read_bytes().split(b"\n")
    crc, record, size = 0, Record(), 0
    for number, line in enumerate(lines[:-1], 1):
      # The record follows the checksum and a space.
      data = line[_CRC_CHARS + 1:]
      crc = zlib.crc32(data, crc)
      if line[: _CRC_CHARS + 1] != b"%08x " % crc:
        raise ValueError(
          f"{self._path}: line {number} of {len(lines) - 1} is damaged, so "
          "later lines cannot be trusted: restore a copy of the file, or "
          "start a new run from the peers' checkpoints with a new journal"
        )
      record = messages.from_json(json.loads(data))
      size += len(line) + 1
    # An incomplete last line is dropped if it is the beginning of a record.
    if not _INCOMPLETE.fullmatch(lines[-1]):
      raise ValueError(
        f"{self._path} is not the journal of a coordinator; use another path"
      )
    return crc, record, size


def _line(crc: int, record: Record) -> tuple[int, bytes]:
  """Returns (checksum that continues ``crc``, journal line of a record)."""
  data = json.dumps(messages.to_json(record), separators=(",", ":")).encode()
  crc = zlib.crc32(data, crc)
  return crc, b"%08x %s\n" % (crc, data)


def _write(file: int, data: bytes) -> None:
  """Appends to a file, and returns when the data is on disk."""
  while data:  # os.write may write only a part
    data = data[os.write(file, data):]
  os.fsync(file)
