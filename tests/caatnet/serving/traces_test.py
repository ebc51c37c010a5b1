"""Properties of request traces: readers, errors and synthetic sessions."""

import collections
import dataclasses
import gzip
import json
import math
import time

import numpy as np
import pytest

from caatnet.serving import traces
from caatnet.serving.traces import Arrival, Sessions

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.1206440,7433,14
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
MOONCAKE = "".join(
  json.dumps({
    "timestamp": time, "input_length": len(ids) * 512 - 5, "output_length": 7,
    "hash_ids": ids,
  }) + "\n"
  for time, ids in (
    (0, [0, 1]), (0, [0, 2]), (0, [0, 1, 3]), (3000, [4]), (6000, [0])
  )
)


def test_each_trace_format_is_read_gzipped_or_not(tmp_path):
  """Detects the format by content, not by file name."""
  expected = {
    AZURE: [(0.0, 4808, 10), (0.140684, 7433, 14)],
    BURST: [(0.0, 472, 18), (113.0, 417, 276)],  # the failed request is skipped
  }
  for text, rows in expected.items():
    for data in (text.encode(), gzip.compress(text.encode())):
      path = tmp_path / "trace"
      path.write_bytes(data)
      found = traces.load(path)
      assert [a.number for a in found] == [0, 1]
      for arrival, (time_s, prompt, output) in zip(found, rows, strict=True):
        assert arrival.time_s == pytest.approx(time_s, abs=1e-6)
        assert (arrival.prompt, arrival.output) == (prompt, output)


@pytest.mark.parametrize(("text", "key"), [
  (AZURE.replace("TIMESTAMP,", "TIMESTAMP,NumImages,").replace("00,", "00,2,"),
   "NumImages"),
  (MOONCAKE.replace("{", '{"session_id": "a", '), "session_id"),
  # Bailian: times in seconds and blocks of 16 tokens, by the same names.
  ('{"chat_id": 1, "timestamp": 61.1, "input_length": 13, "output_length": 5,'
   ' "hash_ids": [1]}', "chat_id"),
])
def test_trace_of_another_format_is_refused_by_its_field(tmp_path, text, key):
  (tmp_path / "trace").write_text(text)
  with pytest.raises(ValueError, match=rf"line [12]: key '{key}' must be one"):
    traces.load(tmp_path / "trace")


def test_times_of_azure_are_utc_in_any_time_zone(tmp_path, monkeypatch):
  """Clocks of the local time zone go back between both requests."""
  path = tmp_path / "trace"
  monkeypatch.setenv("TZ", "EST5EDT,M3.2.0,M11.1.0")
  time.tzset()
  try:
    for zone in ("", "+00:00"):
      rows = [f"2023-11-05 0{hour}:30:00{zone},1,1" for hour in (0, 3)]
      path.write_text("\n".join([AZURE.splitlines()[0], *rows]))
      assert [a.time_s for a in traces.load(path)] == [0, 3 * 3600]
  finally:
    monkeypatch.undo()
    time.tzset()


def _mooncake(timestamps_ms):
  """Returns the text of a trace with a block of its own for each request."""
  return "".join(
    json.dumps({
      "timestamp": time, "input_length": 512, "output_length": 7,
      "hash_ids": [number],
    }) + "\n"
    for number, time in enumerate(timestamps_ms)
  )


def test_requests_of_a_batch_are_spread_over_the_time_to_the_next(tmp_path):
  path = tmp_path / "trace"
  path.write_text(_mooncake([0] + [9000] * 999 + [11000] * 999))
  found = traces.load(path)
  assert [a.blocks for a in found] == [(i,) for i in range(1999)]
  times = np.array([a.time_s for a in found])
  assert np.all(np.diff(times) > 0)
  for begin, end, batch in (9, 11, times[1:1000]), (11, 14, times[1000:]):
    assert begin < batch[0] < begin + 0.05
    assert end - 0.05 < batch[-1] < end
    assert np.median(batch) == pytest.approx((begin + end) / 2, abs=0.15)
  assert traces.load(path) == found
  assert traces.load(path, seed=1) != found
  assert traces.load(path, 2) == found[:2]


def test_request_with_a_timestamp_of_its_own_keeps_it(tmp_path):
  """A later turn does not arrive before the previous one."""
  path = tmp_path / "trace"
  path.write_text(_mooncake([0, 700, 701, 2500, 2500, 2501]))
  found = traces.load(path)
  assert [a.blocks for a in found] == [(i,) for i in range(6)]
  times = [a.time_s for a in found]
  assert times[:3] == [0.0, 0.7, 0.701]
  assert 2.5 < times[3] < times[4] < times[5] == 2.501


@pytest.mark.parametrize(("text", "message"), [
  ("", "is empty"),
  ("a,b\n1,2\n", "TIMESTAMP"),
  (AZURE + "2023-11-16 18:17:05.1,12", "line 4"),
  (AZURE + "2023-11-16 18:17:05.1,0,3\n", 'line 4: ContextTokens="0" must'),
  (AZURE + "yesterday,1,3\n", "line 4: .*yesterday"),
  (BURST + "nan,GPT-4,1,2,3,API log\n", 'line 5: Timestamp="nan" must'),
  (MOONCAKE + '{"timestamp": 1, "inp', "line 6"),
  (MOONCAKE + '{"timestamp": 1, "input_length": 3}\n', "line 6: output_length"),
  (MOONCAKE.replace("[4]", "[4, 5]"), "line 4: hash_ids has 2 blocks"),
])
def test_invalid_line_is_named(text, message, tmp_path):
  path = tmp_path / "trace.csv"
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    traces.load(path)


def test_truncated_file_is_named(tmp_path):
  path = tmp_path / "trace.csv.gz"
  path.write_bytes(gzip.compress(AZURE.encode())[:-20])
  with pytest.raises(ValueError, match="cannot be read"):
    traces.load(path)
  with pytest.raises(ValueError, match="absent"):
    traces.load(tmp_path / "absent")


def test_tokens_agree_in_the_blocks_that_the_trace_shares(tmp_path):
  path = tmp_path / "trace"
  path.write_text(MOONCAKE)
  found = [traces.synthetic_token_ids(a, 1000) for a in traces.load(path)]
  assert [len(t) for t in found] == [1026, 1026, 1538, 514, 514]
  np.testing.assert_array_equal(found[0][:1019], found[2][:1019])
  np.testing.assert_array_equal(found[0][:512], found[1][:512])
  assert np.mean(found[0][512:1019] == found[1][512:1019]) < 0.02
  assert np.mean(found[0][1019:] == found[1][1019:]) < 0.5  # the responses
  assert min(map(np.min, found)) >= 0
  assert max(map(np.max, found)) < 1000


def test_hashes_are_those_of_splitmix64():
  """The first two numbers of the generator with seed 0."""
  gamma = np.array([0x9E3779B97F4A7C15], np.uint64)
  states = gamma * np.array([1, 2], np.uint64)
  assert traces._splitmix64(states).tolist() == [
    0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4
  ]


def test_tokens_of_sequences_differ_unless_they_share_a_name():
  """A conversation, a block and a single request of one number differ."""
  plain = Arrival(7, 0.0, 600, 40)
  kinds = [
    plain, Arrival(8, 0.0, 600, 40), Arrival(1, 0.0, 600, 40, conversation=7),
    Arrival(2, 0.0, 600, 40, blocks=(7, 8), block_size=512),
    Arrival(2, 0.0, 600, 40, blocks=(8, 7), block_size=512),
  ]
  tokens = [traces.synthetic_token_ids(a) for a in kinds]
  assert {(t.dtype.name, t.shape) for t in tokens} == {("int32", (640,))}
  for i, a in enumerate(tokens):
    assert len(set(a.tolist())) > 630
    for b in tokens[:i]:
      assert np.sum(a[:600] == b[:600]) < 3
  # Blocks of one number agree at their positions, wherever they are.
  np.testing.assert_array_equal(tokens[3][512:600], tokens[4][:88])
  # Responses are of the request; those of one conversation, of it.
  np.testing.assert_array_equal(tokens[3][600:], tokens[4][600:])
  other = Arrival(9, 5.0, 3, 700, conversation=7)
  np.testing.assert_array_equal(
    traces.synthetic_token_ids(other)[:640], tokens[2]
  )
  # Tokens modulo a vocabulary.
  np.testing.assert_array_equal(traces.synthetic_token_ids(plain, 1), 0)
  assert set(traces.synthetic_token_ids(plain, 3)) == {0, 1, 2}


def test_turn_begins_with_the_previous_turns():
  arrivals = Sessions(40, seed=3).arrivals()
  times = [a.time_s for a in arrivals]
  assert times == sorted(times)
  before: dict[int | None, Arrival] = {}
  for arrival in arrivals:
    last = before.get(arrival.conversation)
    assert (last is None) == (arrival.think_s is None)
    if last is not None:
      assert last.more
      assert arrival.context == last.prompt + last.output < arrival.prompt
      np.testing.assert_array_equal(
        traces.synthetic_token_ids(arrival)[: arrival.context],
        traces.synthetic_token_ids(last)
      )
    assert arrival.prompt + arrival.output <= 16384
    before[arrival.conversation] = arrival
  assert not any(a.more for a in before.values())


def test_sessions_have_their_declared_statistics():
  """ShareGPT: responses of 324 tokens on average, 999 at P99; turns; rate."""
  arrivals = Sessions(2000, rate=2.0, seed=1).arrivals()
  questions = np.log([a.prompt - a.context for a in arrivals])
  answers = np.array([a.output for a in arrivals])
  assert questions.mean() == pytest.approx(4.01, abs=0.1)
  assert questions.std() == pytest.approx(1.72, abs=0.1)
  assert answers.mean() == pytest.approx(324, rel=0.05)
  assert np.percentile(answers, 99) == pytest.approx(999, rel=0.01)
  assert len(arrivals) / 2000 == pytest.approx(5.5, rel=0.1)
  first = np.array([a.time_s for a in arrivals if a.think_s is None])
  assert np.diff(first).mean() == pytest.approx(5.5 / 2.0, rel=0.05)


def test_scaled_and_poisson_arrivals_have_the_given_rate():
  arrivals = Sessions(300).arrivals()
  scaled = traces.scaled(arrivals, 4.0)
  assert len(scaled) / scaled[-1].time_s == pytest.approx(4.0)
  drawn = traces.poisson(arrivals, 4.0, seed=1)
  assert len(drawn) / drawn[-1].time_s == pytest.approx(4.0, rel=0.1)
  assert [a.prompt for a in drawn] == [a.prompt for a in arrivals]
  assert drawn[0].time_s == 0
  gaps = np.diff([a.time_s for a in drawn])
  assert gaps.mean() == pytest.approx(1 / 4, rel=0.1)
  assert gaps.std() == pytest.approx(1 / 4, rel=0.1)
  assert drawn == traces.poisson(arrivals, 4.0, seed=1)
  assert drawn != traces.poisson(arrivals, 4.0, seed=2)
  assert traces.poisson([], 4.0, seed=1) == []


def test_requests_that_arrive_at_one_time_have_no_rate():
  one = traces.Arrival(0, 0.0, 8, 8)
  assert traces.scaled([one], 4.0) == [one]
  assert traces.scaled([], 4.0) == []
  with pytest.raises(ValueError, match="rate=4 cannot be applied, since all 2"):
    traces.scaled([one, one], 4.0)
  later = dataclasses.replace(one, time_s=2.0)
  with pytest.raises(ValueError, match="all 3 requests arrive at the same"):
    traces.scaled([later, later, later], 4.0)
  with pytest.raises(ValueError, match="rate=nan must be positive"):
    traces.scaled([one, dataclasses.replace(one, time_s=1.0)], float("nan"))


def test_sessions_respect_their_limits():
  """A first turn is truncated to fit; a later one ends its session."""
  sessions = Sessions(
    50, rate=4.0, turns=3.0, think_s=2.0, question=(4.0, 1.0),
    answer=(4.0, 1.0), longest_answer=90, longest=150,
  )
  arrivals = sessions.arrivals()
  assert [a.number for a in arrivals] == list(range(len(arrivals)))
  assert arrivals[0].time_s == 0
  assert max(a.output for a in arrivals) == 90
  assert max(a.prompt + a.output for a in arrivals) == 150
  assert min(a.prompt - a.context for a in arrivals) >= 1
  turns = {}
  for arrival in arrivals:
    turns.setdefault(arrival.conversation, []).append(arrival)
  assert set(turns) == set(range(50))
  for first, *later in turns.values():
    assert (first.context, first.think_s) == (0, None)
    for before, turn in zip([first, *later], later, strict=False):
      assert turn.time_s == pytest.approx(before.time_s + turn.think_s)
  thinks = [a.think_s for a in Sessions(400).arrivals() if a.think_s]
  assert np.mean(thinks) == pytest.approx(30, rel=0.1)
  tiny = Sessions(20, question=(-9.0, 1.0), answer=(-9.0, 1.0)).arrivals()
  assert {(a.prompt - a.context, a.output) for a in tiny} == {(1, 1)}


@pytest.mark.parametrize(("row", "message"), [
  ({"timestamp": -1}, "timestamp=-1 must be greater than or equal to 0"),
  ({"timestamp": float("inf")}, "timestamp=Infinity must be a finite number"),
  ({"input_length": 0, "hash_ids": []}, "input_length=0 must be greater"),
  ({"output_length": 0}, "output_length=0 must be greater than or equal to 1"),
  ({"output_length": 2**24 + 1}, "output_length=16777217 must be less than"),
  ({"hash_ids": [1, 2**48]}, r"hash_ids\[1\]=281474976710656 must be less"),
  ({"hash_ids": [1, -1]}, r"hash_ids\[1\]=-1 must be greater"),
  ({"hash_ids": [1]}, "hash_ids has 1 blocks of 512 tokens, but input_length"),
  ({"hash_ids": [1, 2.5]}, r"hash_ids\[1\]=2.5 must be a valid integer"),
  ({"hash_ids": "ab"}, 'hash_ids="ab" must be a valid array'),
  ({"hash_ids": [1, True]}, r"hash_ids\[1\]=true must be a valid integer"),
  ({"input_length": "513"}, 'input_length="513" must be a valid integer'),
  ({"output_length": True}, "output_length=true must be a valid integer"),
  ({"output_length": 1.5}, "output_length=1.5 must be a valid integer"),
])
def test_invalid_line_of_mooncake_is_refused(tmp_path, row, message):
  path = tmp_path / "trace"
  good = {"timestamp": 1500, "input_length": 513, "output_length": 1,
          "hash_ids": [3, 4]}
  path.write_text(json.dumps(good) + "\n" + json.dumps(good | row) + "\n")
  with pytest.raises(ValueError, match=f"line 2: {message}"):
    traces.load(path)
  path.write_text(json.dumps(good) + "\n")
  (arrival,) = traces.load(path)
  assert arrival == Arrival(0, 0.0, 513, 1, blocks=(3, 4), block_size=512)
  path.write_text(json.dumps(good | {"hash_ids": [3], "input_length": 512}))
  assert traces.load(path)[0].prompt == 512


def test_file_of_failed_requests_is_refused(tmp_path):
  path = tmp_path / "trace"
  path.write_text("\n".join(BURST.splitlines()[::2]))
  with pytest.raises(ValueError, match="has no requests"):
    traces.load(path)


def test_conversations_fill_the_context_and_do_not_exceed_it():
  """A first turn is cut; a later one that fits exactly is the last."""
  exact = (math.log(16), 0.0)
  for question, turns, prompt in ((exact, 2, 48), ((9.0, 0.0), 1, 48)):
    found = Sessions(
      40, turns=9.0, question=question, answer=exact, longest=64
    ).arrivals()
    longest = {a.conversation: a for a in found if not a.more}.values()
    assert max(a.prompt + a.output for a in longest) == 64
    counts = collections.Counter(a.conversation for a in found)
    assert max(counts.values()) == turns
    assert max(a.prompt for a in found) == prompt
