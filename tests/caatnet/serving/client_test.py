"""Load generator: order of requests, measured times and their statistics."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import socket
import time

import numpy as np
import pytest

from caatnet.serving import traces
from caatnet.serving.server import client, load
from caatnet.serving.server.client import Outcome, TimedRequest
from caatnet.serving.traces import Arrival

CARD = {"id": "small", "max_model_len": 20, "vocab_size": 50}


def test_requests_of_a_trace_have_its_tokens_and_lengths():
  arrivals = [Arrival(0, 0.0, 12, 8), Arrival(1, 1.5, 13, 8),
              Arrival(2, 2.5, 3, 4)]
  found = client.requests_of_trace(arrivals, CARD)
  # 13 + 8 tokens exceed the context of 20.
  assert [(q.time_s, q.after, q.think_s) for q in found] == [
    (0.0, -1, 0.0), (2.5, -1, 0.0)
  ]
  for question, arrival in zip(found, arrivals[::2], strict=True):
    assert question.body == {
      "model": "small", "max_tokens": arrival.output, "temperature": 0,
      "ignore_eos": True,
      "prompt": traces.synthetic_token_ids(arrival, 50)[
        : arrival.prompt
      ].tolist(),
    }
  with pytest.raises(ValueError, match=(
    "none of 1 requests fits into the server's context of 20 tokens"
  )):
    client.requests_of_trace(arrivals[1:2], CARD)


def test_load_of_a_trace_has_its_rate_and_longest_answer():
  arrivals = [Arrival(0, 0.0, 5, 8), Arrival(1, 2.0, 13, 9),
              Arrival(2, 4.0, 6, 3), Arrival(3, 6.0, 2, 7)]
  found, left_out = load.Load(arrivals, rate=2.0).questions(CARD)
  assert [q.time_s for q in found] == [0, 4 / 3, 2]  # the second is too long
  assert left_out == 1
  found, left_out = load.Load(
    arrivals, max_tokens=6, num_requests=3
  ).questions(CARD)
  assert [(q.time_s, q.body["max_tokens"]) for q in found] == [
    (0.0, 6), (2.0, 6), (4.0, 3)
  ]
  assert left_out == 0


@pytest.mark.parametrize("seed", range(5))
def test_conversations_of_a_load_fit_into_the_context(seed):
  given = load.Load(sessions=30, rate=4.0, think_s=0.5, seed=seed)
  found, left_out = given.questions(CARD)
  assert left_out == 0
  # At most half of the context of 20 tokens.
  assert max(q.body["max_tokens"] for q in found) == 10
  assert all(len(q.body["prompt"]) + q.body["max_tokens"] <= 20 for q in found)


def test_conversations_of_a_load_have_its_rate_and_times_of_thinking():
  card = CARD | {"max_model_len": 4000}

  def drawn(**changes):
    made = load.Load(sessions=30, rate=4.0, think_s=0.5)
    found, _ = dataclasses.replace(made, **changes).questions(card)
    begins = sorted(q.time_s for q in found if q.after < 0)
    thinking = sorted(q.think_s for q in found if q.after >= 0)
    return begins, thinking, max(q.body["max_tokens"] for q in found)

  begins, thinking, longest = drawn()
  assert longest > 3
  assert len(begins) == 30
  np.testing.assert_allclose(drawn(rate=1.0)[0], 4 * np.array(begins))
  np.testing.assert_allclose(drawn(think_s=1.5)[1], 3 * np.array(thinking))
  assert 0.4 < np.mean(thinking) < 0.6
  assert drawn(max_tokens=3)[2] == 3


def test_turns_wait_for_the_turns_before_them():
  """A turn whose predecessor was left out is sent at its time."""
  turn = {"conversation": 7, "more": True}
  found = client.requests_of_trace([
    Arrival(0, 0.0, 2, 2, **turn), Arrival(1, 1.0, 2, 2),
    Arrival(2, 2.0, 6, 2, think_s=0.5, context=4, **turn),
    Arrival(3, 3.0, 9, 2, think_s=0.25, context=8, **turn),
    Arrival(4, 4.0, 90, 2, conversation=8),
    Arrival(5, 5.0, 9, 2, think_s=0.75, conversation=8),
    Arrival(6, 6.0, 9, 2, conversation=7),
  ], CARD)
  assert [(q.time_s, q.after, q.think_s) for q in found] == [
    (0.0, -1, 0.0), (1.0, -1, 0.0), (0.0, 0, 0.5), (0.0, 2, 0.25),
    (5.0, -1, 0.0), (6.0, -1, 0.0),
  ]


def test_outcomes_without_tokens_have_no_times():
  assert math.isnan(Outcome(1.0).ttft_s)
  assert math.isnan(Outcome(1.0, [2.0], 1).tpot_s)
  assert math.isnan(Outcome(1.0, [2.0], 2).tpot_s)  # one has no text
  assert math.isnan(Outcome(1.0, [2.0, 3.0], 1).tpot_s)
  assert Outcome(1.0, [2.0, 3.0], 2).tpot_s == 1
  assert Outcome(1.5, [2.0, 4.0], 9).ttft_s == 0.5
  assert Outcome(1.5, [2.0, 4.0], 9).tpot_s == 0.25


def test_summary_is_that_of_the_good_outcomes():
  outcomes = [
    Outcome(1.0, [2.0, 2.5, 4.0], 5), Outcome(2.0, [2.25], 1),
    Outcome(0.5, [0.75, 1.5], 7, error="lost"), Outcome(3.0, [], 2),
  ]
  found = client.summary(outcomes)
  # From 0.5 s, when the failed request was sent, to 4 s.
  assert found["tokens_per_second"] == 8 / 3.5
  assert found["sent_per_second"] == 3 / 2.5
  assert (found["requests"], found["tokens"], found["errors"]) == (
    4, 8, ["lost"]
  )
  for name, values in (
    ("TTFT", [1.0, 0.25]), ("TBT", [0.5, 1.5]), ("TPOT", [0.5])
  ):
    assert found["measures"][name] == {
      "n": len(values), "mean": np.mean(values),
      **{f"P{p}": np.percentile(values, p) for p in (50, 90, 95, 99, 99.9)},
    }
  found = client.summary([Outcome(0.0, [], 0, "lost")])
  assert math.isnan(found["tokens_per_second"])
  assert math.isnan(found["sent_per_second"])
  for row in found["measures"].values():
    assert row.pop("n") == 0
    assert all(map(math.isnan, row.values()))
    assert len(row) == 6


class Served:
  """HTTP server in the running loop.

  Attributes:
    seen: Head, body and end of each request, in order of arrival.
  """

  def __init__(self, answer):
    self.seen, self._answer = [], answer

  async def _serve(self, reader, writer):
    with contextlib.suppress(ConnectionError), contextlib.closing(writer):
      head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
      size = int(head.partition("content-length: ")[2].split("\r")[0] or 0)
      body = json.loads(await reader.readexactly(size) or "null")
      seen = {"head": head, "body": body, "time": time.perf_counter()}
      self.seen.append(seen)
      status, parts, *headers = self._answer(body)
      lines = [f"HTTP/1.1 {status} x", "Connection: close", *headers, "", ""]
      writer.write("\r\n".join(lines).encode())
      for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.005)
      seen["end"] = time.perf_counter()

  async def __aenter__(self):
    self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
    port = self._server.sockets[0].getsockname()[1]
    self.url = f"http://127.0.0.1:{port}"
    return self

  async def __aexit__(self, *_):
    self._server.close()


def streamed(num):
  """Returns a stream of two tokens with text, of one without, and usage."""
  text = b'data: {"choices":[{"text":"a"}],"usage":null}\n\n'
  usage = json.dumps(
    {"choices": [], "usage": {"completion_tokens": num}}, separators=(",", ":")
  ).encode()
  # Parts need not end where events do.
  return [text[:9], text[9:] + text, b"data: " + usage + b"\n\n",
          b"data: [DONE]\n\n"]


def run(answer, questions, **options):
  async def all_of_it():
    async with Served(answer) as served:
      return await client.send_requests(
        served.url, questions, **options
      ), served.seen

  return asyncio.run(all_of_it())


def test_responses_are_streamed_and_their_tokens_timed():
  ended = []
  (outcome,), (seen,) = run(
    lambda body: (200, streamed(3)), [TimedRequest(0.0, {"prompt": "a"})],
    key="secret", on_end=lambda: ended.append(1),
  )
  assert seen["body"] == {
    "prompt": "a", "stream": True, "stream_options": {"include_usage": True}
  }
  assert seen["head"].startswith("post /v1/completions ")
  assert "authorization: bearer secret\r\n" in seen["head"]
  assert (outcome.error, outcome.tokens, len(outcome.times_s)) == ("", 3, 2)
  assert outcome.sent_s < seen["time"] < outcome.times_s[0]
  assert ended == [1]


def test_requests_follow_their_times_and_predecessors():
  """Lower bounds only: a loaded machine delays all of them."""
  questions = [
    TimedRequest(0.1, {"i": 0}), TimedRequest(0.02, {"i": 1}),
    TimedRequest(0.0, {"i": 2}, after=0, think_s=0.02),
    TimedRequest(0.0, {"i": 3}, after=1),
  ]
  start = time.perf_counter()
  outcomes, seen = run(lambda body: (200, streamed(body["i"])), questions)
  assert [outcome.tokens for outcome in outcomes] == [0, 1, 2, 3]
  by_number = {s["body"]["i"]: s for s in seen}
  assert "authorization" not in by_number[0]["head"]
  assert by_number[1]["time"] - start >= 0.02
  assert by_number[0]["time"] - start >= 0.1
  assert by_number[2]["time"] > by_number[0]["end"] + 0.019
  assert by_number[3]["time"] > by_number[1]["end"]


@pytest.mark.parametrize(("status", "parts", "error"), [
  (429, [b"too much" + b"x" * 300], "429: too much" + "x" * 192),
  # A body that looks like a stream.
  (503, [b"no room\n\n", b"data: {}\n\n"], "503: no room\n\ndata: {}\n\n"),
  (200, [b"data: {}\n\n"], "KeyError: 'usage': b'data: {}'"),
  (200, [], "JSONDecodeError: Expecting value"),
])
def test_failed_response_has_its_reason(status, parts, error):
  ended = []
  outcomes, _ = run(
    lambda body: (status, parts) if body["bad"] else (200, streamed(1)),
    [TimedRequest(0.0, {"bad": True}), TimedRequest(0.0, {"bad": False}, 0)],
    on_end=lambda: ended.append(1),
  )
  assert outcomes[0].error.startswith(error)
  assert len(outcomes[0].error) == len(error) or status == 200
  assert (outcomes[1].error, outcomes[1].tokens) == ("", 1)
  assert ended == [1, 1]


def test_chunks_of_a_response_need_not_end_where_data_does():
  """An interim response is skipped."""
  whole = b"".join(streamed(2))
  cuts = [0, 1, 50, 51, len(whole)]
  chunks = [whole[a:b] for a, b in itertools.pairwise(cuts)]
  wire = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in [*chunks, b""])
  (outcome,), _ = run(
    lambda body: ("100 x\r\n\r\nHTTP/1.1 200", [
      wire[i : i + 7] for i in range(0, len(wire), 7)
    ], "Transfer-Encoding: chunked"), [TimedRequest(0.0, {})],
  )
  assert (outcome.error, outcome.tokens, len(outcome.times_s)) == ("", 2, 2)


def test_head_of_a_response_may_have_as_many_bytes_as_for_httpx():
  """A head of 60,000 bytes arrives in parts, after an interim response."""
  head = [b"HTTP/1.1 200 x\r\nCookie: ", *[b"x" * 10_000] * 6, b"\r\n\r\n"]
  (outcome,), _ = run(
    lambda body: (100, head + streamed(3)), [TimedRequest(0.0, {})]
  )
  assert (outcome.error, outcome.tokens) == ("", 3)


@pytest.mark.parametrize(("answer", "error"), [
  ((200, streamed(3), "Content-Length: 999"), "RemoteProtocolError: peer clos"),
  ((200, [b"no chunk"], "Transfer-Encoding: chunked"), "RemoteProtocolError"),
  ((200, [b""] * 100), "TimeoutError: the server sent nothing for 0.1 s"),
  (("x", []), "RemoteProtocolError: "),
])
def test_broken_or_silent_response_is_an_error(answer, error):
  # Only the silent server is waited for.
  timeout_s = 0.1 if error.startswith("TimeoutError") else 60.0
  (outcome,), _ = run(
    lambda body: answer, [TimedRequest(0.0, {})], timeout_s=timeout_s
  )
  assert outcome.error.startswith(error)
  assert not outcome.tokens


def test_unreachable_server_is_an_error():
  async def ask():
    async with Served(None) as served:
      url = served.url
    return await client.send_requests(url, [TimedRequest(0.0, {})])

  (outcome,) = asyncio.run(ask())
  assert outcome.error.startswith("ConnectionRefusedError: ")


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
def test_server_that_never_answers_a_handshake_is_named(scheme):
  with socket.create_server(("127.0.0.1", 0)) as server:  # accepts nothing
    place = f"127.0.0.1:{server.getsockname()[1]}"
    (outcome,) = asyncio.run(client.send_requests(
      f"{scheme}://{place}", [TimedRequest(0.0, {})], timeout_s=0.05
    ))
  assert outcome.error == (
    f"TimeoutError: no connection to {place} within 0.05 s"
  )


def card(answer, key=""):
  async def ask():
    async with Served(answer) as served:
      return await client.read_model_card(served.url, key), served.seen

  return asyncio.run(ask())


def test_description_of_the_model_is_its_first_card():
  first = {"id": "a", "max_model_len": 8, "vocab_size": 64}
  answer = json.dumps({"data": [first, {"id": "b"}]}).encode()
  found, (seen,) = card(lambda _: (200, [answer]), "secret")
  assert found == first
  assert seen["head"].startswith("get /v1/models ")
  assert "authorization: bearer secret\r\n" in seen["head"]


@pytest.mark.parametrize(("status", "body", "message"), [
  (401, b"{}", "401"), (200, b'{"data": []}', "list index"),
  (200, b"no JSON", "Expecting value"), (200, b"[]", "indices must be"),
  (200, b'{"data": [{"id": "a", "max_model_len": 8}]}', "vocab_size is"),
  (200, b'{"data": [{"id": "a", "max_model_len": "8"}]}', "_len is missing"),
  (200, b'{"data": ["a"]}', "has no attribute"),
])
def test_server_without_a_description_is_named(status, body, message):
  with pytest.raises(ValueError, match=rf"^--url=http://127.*: .*{message}"):
    card(lambda _: (status, [body]))


def test_invalid_address_is_named():
  with pytest.raises(ValueError, match=r"^--url=http://127.*:x: "):
    asyncio.run(client.read_model_card("http://127.0.0.1:x", ""))


def test_user_in_an_address_is_refused():
  url = "http://me:secret@127.0.0.1:1"
  with pytest.raises(ValueError, match=r"^--url=http.*: a user and password"):
    asyncio.run(client.read_model_card(url, ""))
  with pytest.raises(ValueError, match=r"^a user and password in"):
    asyncio.run(client.send_requests(url, [TimedRequest(0.0, {})]))
