"""Coordinator log: bounded size, and replay to the coordinator's state."""

import pytest

from parallel.peers.membership import coordinator, history
from parallel.peers.membership import messages as m
from parallel.peers.membership.coordinator import Rules
from parallel.peers.membership.messages import Record

pytestmark = pytest.mark.quick

_MOST = 4000


def _rounds(count):
  """Yields the messages of two peers; every seventh round fails."""
  yield from (("a", m.Hello(0, 0, "", None)), ("b", m.Hello(0, 0, "", None)))
  epoch, number = 1, 0
  yield from ((peer, m.Prepared(epoch)) for peer in "ab")
  for attempt in range(count):
    yield from ((peer, m.Ready(epoch, number)) for peer in "ab")
    yield "b", m.Vote(epoch, number, f"{attempt:04x}")
    if attempt % 7 == 6:
      yield "a", m.Vote(epoch, number, None)
      epoch += 1
      yield "c", m.Hello(0, 0, "", None)
      yield None, m.Silent("c")
      yield from ((peer, m.Prepared(epoch)) for peer in "ab")
    else:
      yield "a", m.Vote(epoch, number, f"{attempt:04x}")
      number += 1


def test_rotated_log_is_bounded_and_replays_by_itself(tmp_path):
  path, rules = tmp_path / "log", Rules(least=2)
  log = history.Log(path, _MOST)
  state, effects = coordinator.initial_state(Record())
  log.started(Record(), rules, effects)
  for sender, message in _rounds(40):
    state, effects = coordinator.step(state, sender, message, rules)
    log.log_step(sender, message, effects, state)
    files = [tmp_path / "log.1", path]
    files = [file for file in files if file.exists()]
    assert all(file.stat().st_size < _MOST + 2000 for file in files)
    lines = [list(history.read(file)) for file in files]
    for part in (lines[-1], [*lines[0], *lines[-1]] if lines[1:] else lines[0]):
      assert list(history.replay(part))[-1] == state
  assert state.record.revision == 35
  first, last = lines
  assert "state" in first[0]  # the log has been rotated at least twice
  del first[-1]
  with pytest.raises(ValueError, match="the state at the start of this log"):
    list(history.replay(first + last))


def test_reopened_log_continues_on_a_line_of_its_own(tmp_path):
  """A crash leaves an incomplete line, which is ended and skipped."""
  path, rules = tmp_path / "new" / "log", Rules()
  for count in (1, 2):
    history.Log(path).started(Record(), rules, ())
    assert path.read_bytes().count(b"\n") == count
    assert len(list(history.read(path))) == count
  complete = path.read_bytes()
  for cut in (complete[:-1], complete[:-9]):
    path.write_bytes(cut)
    history.Log(path).started(Record(), rules, ())
    assert path.read_bytes().startswith(cut + b"\n{")
    assert len(list(history.replay(history.read(path)))) == (
      3 if cut == complete[:-1] else 2
    )


@pytest.mark.parametrize("data", [
  {}, {"is": "Nothing"}, {"is": "Any"}, {"is": "Ready", "epoch": 1},
  {"is": "Leave", "more": 1},
], ids=str)
def test_entry_that_is_no_message_is_refused(data):
  with pytest.raises(ValueError, match="not a message"):
    m.from_json(data)
