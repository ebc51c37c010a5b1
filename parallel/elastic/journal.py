"""What a coordinator must not forget: a file of its records.

A record is a line: a checksum and JSON. The checksum goes on from that of the
line before, so a line that is changed, lost or moved is seen. A line is on the
disk before `Journal.append` returns. What was torn when the machine went down
is a last line without its end; nobody was told of it, so it is dropped.
"""

import fcntl
import json
import os
import pathlib
from typing import Any
import zlib

from parallel.elastic import messages
from parallel.elastic.messages import Record

_CRC_CHARS = 8


class Journal:
  """A journal, which one process at a time has open.

  Attributes:
    record: The last record; the empty one if there is none yet.
  """

  def __init__(self, path: pathlib.Path | str) -> None:
    """Opens a journal, or makes a new one.

    Args:
      path: Its file, whose folder is made if need be.

    Raises:
      ValueError: The file is damaged, or another process has it.
    """
    self._path = pathlib.Path(path)
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
      self._lock()
      self._crc, self.record, size = self._read()
      os.ftruncate(self._file, size)
      os.fsync(self._file)
      self._sync_folder()
    except BaseException:
      os.close(self._file)
      raise

  def append(self, record: Record) -> None:
    """Writes a record, which is on the disk when this returns."""
    data = json.dumps(messages.to_json(record), separators=(",", ":")).encode()
    self._crc = zlib.crc32(data, self._crc)
    line = b"%08x %s\n" % (self._crc, data)
    while line:
      line = line[os.write(self._file, line):]
    os.fsync(self._file)
    self.record = record

  def close(self) -> None:
    """Closes the file, which lets others open it."""
    os.close(self._file)

  def __enter__(self) -> "Journal":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _lock(self) -> None:
    # The kernel drops it with the process, however that ends.
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(
        f"{self._path}: another coordinator has this journal; two would decide "
        "against each other"
      ) from error

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
