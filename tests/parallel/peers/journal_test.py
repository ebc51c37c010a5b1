"""Journals that are truncated, damaged, or opened twice."""

import contextlib
import fcntl
import os

import pytest

from parallel.peers.membership import journal as journals
from parallel.peers.membership.journal import Journal
from parallel.peers.membership.messages import Record

pytestmark = pytest.mark.quick

_RECORDS = [
  Record(1, ("a", "b"), 0, 0, "00"), Record(1, ("a", "b"), 1, 1, "0a"),
  Record(2, ("a", "b", "c"), 1, 1, "0a"),
]


@pytest.fixture
def whole(tmp_path):
  """Returns a journal's bytes and the end of each of its lines."""
  ends = [0]
  with Journal(tmp_path / "whole") as journal:
    for record in _RECORDS:
      journal.append(record)
      ends.append((tmp_path / "whole").stat().st_size)
  return (tmp_path / "whole").read_bytes(), ends


def test_truncated_journal_resumes_from_its_last_whole_record(
  whole, tmp_path
):
  data, ends = whole
  for size in range(len(data) + 1):
    path = tmp_path / "cut"
    path.write_bytes(data[:size])
    count = sum(end <= size for end in ends[1:])
    with Journal(path) as journal:
      assert journal.record == [Record(), *_RECORDS][count]
      journal.append(_RECORDS[-1])
    with Journal(path) as journal:
      assert journal.record == _RECORDS[-1]
    assert path.read_bytes().startswith(data[: ends[count]])


def test_damaged_line_is_refused_with_its_number(whole, tmp_path):
  data, ends = whole
  path = tmp_path / "damaged"
  for place in range(len(data) - 1):
    path.write_bytes(
      data[:place] + bytes([data[place] ^ 1]) + data[place + 1:]
    )
    line = sum(end <= place for end in ends)
    with pytest.raises(ValueError, match=f"line {line} of .* is damaged"):
      Journal(path)
  path.write_bytes(data[: ends[1]] + data[ends[2]:])
  with pytest.raises(ValueError, match="line 2 of 2 is damaged"):
    Journal(path)


@pytest.mark.parametrize("data", [b"notes", b"\x89PNG", b"{}", b"0a1b2c3d\t{"])
def test_other_file_is_refused_and_kept(data, tmp_path):
  path = tmp_path / "other"
  path.write_bytes(data)
  with pytest.raises(ValueError, match="is not the journal"):
    Journal(path)
  assert path.read_bytes() == data


def test_journal_cannot_be_opened_by_two_coordinators(tmp_path):
  with (
    Journal(tmp_path / "one"),
    pytest.raises(ValueError, match="another coordinator"),
  ):
    Journal(tmp_path / "one")
  Journal(tmp_path / "one").close()


def num_open_files():
  return len(os.listdir("/proc/self/fd"))


def test_refused_journal_leaves_no_open_file(tmp_path):
  with Journal(tmp_path / "one"):
    before = num_open_files()
    with pytest.raises(ValueError, match="another coordinator"):
      Journal(tmp_path / "one")
    assert num_open_files() == before


def test_journal_that_is_replaced_while_it_is_opened_is_opened_again(
  tmp_path, monkeypatch
):
  path, new = tmp_path / "one", tmp_path / "new"
  with Journal(new) as journal:
    journal.append(_RECORDS[0])
  lock = fcntl.flock

  def late(file, operation):
    if new.exists():
      new.replace(path)
    lock(file, operation)

  monkeypatch.setattr(journals.fcntl, "flock", late)
  before = num_open_files()
  with Journal(path) as journal:
    assert journal.record == _RECORDS[0]
    assert num_open_files() == before + 1


def test_long_journal_is_compacted_to_its_last_record(tmp_path):
  path = tmp_path / "long"
  with Journal(path, max_bytes=1000) as journal:
    for number in range(200):
      journal.append(Record(1, ("a", "b"), number, 1, "0a"))
      assert path.stat().st_size <= 1000
      with pytest.raises(ValueError, match="another coordinator"):
        Journal(path)
  with Journal(path) as journal:
    assert journal.record == Record(1, ("a", "b"), 199, 1, "0a")
  assert [x.name for x in tmp_path.iterdir()] == ["long"]


class _Killed(BaseException):
  """Simulated end of the process."""


class _Dying:
  """System calls that raise `_Killed` after the first ``last`` calls."""

  def __init__(self, last, torn, files):
    self._left, self._torn, self.files = last, torn, files

  def call(self, name):
    real = getattr(os, name)

    def called(*arguments):
      self._left -= 1
      if self._left < 0:
        if self._torn and name == "write":
          real(arguments[0], arguments[1][:-9])
        raise _Killed
      found = real(*arguments)
      if name == "open":
        self.files.append(found)
      return found

    return called


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_kill_during_compaction_loses_no_acknowledged_record(
  tmp_path, monkeypatch, torn
):
  """Interrupts compaction at each of its system calls in turn."""
  calls = ("open", "write", "fsync", "replace", "close")
  counts = []
  for last in range(100):
    path = tmp_path / f"{last}"
    journal = Journal(path, max_bytes=150)
    journal.append(_RECORDS[0])
    dying = _Dying(last, torn, [journal._file])
    with monkeypatch.context() as patched:
      for name in calls:
        patched.setattr(journals.os, name, dying.call(name))
      try:
        journal.append(_RECORDS[1])
        ended = True
      except _Killed:
        ended = False
    known = journal.record
    for file in dying.files:  # the kernel closes files of a dead process
      with contextlib.suppress(OSError):
        os.close(file)
    with Journal(path, max_bytes=150) as again:
      # A record is acknowledged only after it is on the disk.
      assert again.record in (known, _RECORDS[1])
      counts.append(again.record == _RECORDS[1])
      again.append(_RECORDS[2])
    with Journal(path) as again:
      assert again.record == _RECORDS[2]
    if ended:
      break
  assert counts == sorted(counts)
  assert last > 6
