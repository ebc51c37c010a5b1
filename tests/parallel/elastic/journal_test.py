"""Journals that are cut off, damaged, or opened twice."""

import pytest

from parallel.elastic.journal import Journal
from parallel.elastic.messages import Record

pytestmark = pytest.mark.quick

_RECORDS = [
  Record(1, ("a", "b"), 0, 0, "00"), Record(1, ("a", "b"), 1, 1, "0a"),
  Record(2, ("a", "b", "c"), 1, 1, "0a"),
]


@pytest.fixture
def whole(tmp_path):
  """The bytes of a journal with the records, and where its lines end."""
  ends = [0]
  with Journal(tmp_path / "whole") as journal:
    for record in _RECORDS:
      journal.append(record)
      ends.append((tmp_path / "whole").stat().st_size)
  return (tmp_path / "whole").read_bytes(), ends


def test_what_is_cut_off_anywhere_goes_on_with_the_last_whole_record(
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


def test_damage_is_refused_with_its_line(whole, tmp_path):
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


def test_two_coordinators_cannot_have_one_journal(tmp_path):
  with (
    Journal(tmp_path / "one"),
    pytest.raises(ValueError, match="another coordinator"),
  ):
    Journal(tmp_path / "one")
  Journal(tmp_path / "one").close()
