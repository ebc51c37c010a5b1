"""What a coordinator must not forget: a file of its records.

A record is a line: a checksum and JSON. The checksum goes on from that of the
line before, so a line that is changed, lost or moved is seen. A line is on the
disk before `Journal.append` returns. What was torn when the machine went down
is a last line without its end; nobody was told of it, so it is dropped.

Only the last record is needed, so a journal that has grown long is replaced by
one of that record: written beside it, locked, put on the disk, and renamed. At
every moment the name belongs to a whole journal.
"""

import fcntl
import json
import os
import pathlib
from typing import Any
import zlib

from parallel.elastic.membership import messages
from parallel.elastic.membership.messages import Record

_CRC_CHARS = 8
_MOST_BYTES = 1 << 20  # some thousand rounds


class Journal:
  """A journal, which one process at a time has open.

  Attributes:
    record: The last record; the empty one if there is none yet.
  """

  def __init__(
    self, path: pathlib.Path | str, most_bytes: int = _MOST_BYTES
  ) -> None:
    """Opens a journal, or makes a new one.

    Args:
      path: Its file, whose folder is made if need be.
      most_bytes: A longer file is replaced by one of its last record.

    Raises:
      ValueError: The file is damaged, or another process has it.
    """
    self._path = pathlib.Path(path)
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._most_bytes = most_bytes
    self._file = self._opened()
    try:
      self._crc, self.record, self._size = self._read()
      os.ftruncate(self._file, self._size)
      os.fsync(self._file)
      self._sync_folder()
    except BaseException:
      os.close(self._file)
      raise

  def append(self, record: Record) -> None:
    """Writes a record, which is on the disk when this returns."""
    self._crc, line = _line(self._crc, record)
    _write(self._file, line)
    self._size += len(line)
    self.record = record
    if self._size > self._most_bytes:
      self._compact()

  def close(self) -> None:
    """Closes the file, which lets others open it."""
    os.close(self._file)

  def __enter__(self) -> "Journal":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _opened(self) -> int:
    """Opens the file and locks it; the kernel unlocks it with the process."""
    while True:
      file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError as error:
        os.close(file)
        raise ValueError(
          f"{self._path}: another coordinator has this journal; two would "
          "decide against each other"
        ) from error
      try:
        if os.path.samestat(os.fstat(file), os.stat(self._path)):
          return file
      except FileNotFoundError:
        pass
      os.close(file)  # it was replaced before it was locked

  def _compact(self) -> None:
    """Puts a journal of the last record in this one's place."""
    beside = self._path.with_name(self._path.name + ".new")
    file = os.open(
      beside, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
    )
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      crc, line = _line(0, self.record)
      _write(file, line)
      os.replace(beside, self._path)
    except BaseException:
      os.close(file)
      raise
    old, self._file = self._file, file
    os.close(old)
    self._crc, self._size = crc, len(line)
    self._sync_folder()

  def _sync_folder(self) -> None:
    """Sees to it that the file's name is on the disk, too."""
    folder = os.open(self._path.parent, os.O_RDONLY)
    try:
      os.fsync(folder)
    finally:
      os.close(folder)

  def _read(self) -> tuple[int, Record, int]:
    """Returns the last checksum and record, and the bytes of whole lines."""
    lines = self._path.read_bytes().split(b"\n")
    crc, record, size = 0, Record(), 0
    for number, line in enumerate(lines[:-1], 1):
      data = line[_CRC_CHARS + 1:]
      crc = zlib.crc32(data, crc)
      if line[: _CRC_CHARS + 1] != b"%08x " % crc:
        raise ValueError(
          f"{self._path}: line {number} of {len(lines) - 1} is damaged. What "
          "follows it cannot be trusted: bring back a copy of the file, or "
          "begin a new run from the peers' checkpoints with a new journal"
        )
      record = messages.from_json(json.loads(data))
      size += len(line) + 1
    return crc, record, size


def _line(crc: int, record: Record) -> tuple[int, bytes]:
  """Returns a record's checksum after another one's, and its line."""
  data = json.dumps(messages.to_json(record), separators=(",", ":")).encode()
  crc = zlib.crc32(data, crc)
  return crc, b"%08x %s\n" % (crc, data)


def _write(file: int, data: bytes) -> None:
  """Appends to a file; the data is on the disk when this returns."""
  while data:
    data = data[os.write(file, data):]
  os.fsync(file)
