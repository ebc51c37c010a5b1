"""Parts of a server alone: keys, sockets, metrics, errors and responses."""

import asyncio
import collections
import dataclasses
import json
import math
import socket
import types
import typing

import numpy as np
from openai.types.chat import completion_create_params as openai_fields
from prometheus_client.parser import text_string_to_metric_families
import pytest
from starlette.requests import Request as HttpRequest

from caatnet.inference import requests as inference
from caatnet.inference.stops import Stops
from caatnet.inference.transcripts import Transcript
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import STATES, Pages
from caatnet.serving.engine.engine import Engine
from caatnet.serving.requests import FINAL_STATES, Request, State
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies import registry
from caatnet.serving.scheduler.scheduler import Scheduler
from caatnet.serving.server import api, fields, http, responses, start
from caatnet.serving.server.errors import ApiError
from caatnet.serving.server.metrics import Metrics
from caatnet.serving.server.service import Call, ChoiceEvent, WaitingChoice
from caatnet.serving.server.snapshot import describe
from tests.caatnet.serving import oracle
from tests.caatnet.serving.small_server import tokenizer


def test_key_is_that_of_the_file_or_of_the_environment(tmp_path, monkeypatch):
  monkeypatch.delenv("CAATNET_API_KEY", raising=False)
  assert start.read_api_key("") == ""
  monkeypatch.setenv("CAATNET_API_KEY", " other \n")
  assert start.read_api_key("") == "other"
  path = tmp_path / "key"
  path.write_text(" secret\n")
  assert start.read_api_key(str(path)) == "secret"
  path.write_text(" \n")
  with pytest.raises(ValueError, match=f"^--flag={path} must not be empty$"):
    start.read_api_key(str(path), "flag")
  for content in (None, b"\xff"):
    path.unlink(missing_ok=True)
    if content:
      path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^--api_key_file={path}: "):
      start.read_api_key(str(path))


def test_socket_listens_before_the_server_runs():
  with http.bind_listener("127.0.0.1", 0) as first:
    port = first.getsockname()[1]
    assert first.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ValueError, match=(
      f"--port={port} of --host=127.0.0.1: .*; --port=0 selects a free port"
    )):
      http.bind_listener("127.0.0.1", port)
  with pytest.raises(ValueError, match=r"^--host=no\.such\.host\.inv"):
    http.bind_listener("no.such.host.invalid", 0)


def test_client_is_named_by_a_hash_of_its_key():
  names = [
    api._client_id(HttpRequest({"type": "http", "headers": headers}))
    for headers in ([], [(b"authorization", b"Bearer a")],
                    [(b"authorization", b"Bearer b")])
  ]
  assert names[0] == ""
  assert names[1] != names[2]
  assert all(len(name) == 16 and name != "a" for name in names[1:])


@pytest.mark.parametrize(("status", "kind"), [
  (400, "invalid_request_error"), (401, "authentication_error"),
  (404, "invalid_request_error"), (429, "rate_limit_error"),
  (499, "invalid_request_error"), (500, "server_error"), (503, "server_error"),
])
def test_errors_have_their_type_and_a_bounded_message(status, kind):
  error = ApiError(status, "x" * 500, "code", "param", {"a": "b"})
  assert error.body == {"error": {
    "message": "x" * 500, "type": kind, "param": "param", "code": "code"
  }}
  assert (error.status, error.headers, str(error)) == (
    status, {"a": "b"}, "x" * 500
  )
  assert str(ApiError(status, "x" * 501)) == "x" * 500 + "..."
  assert str(ApiError(status, "a\nb\udfff\u00e9")) == "a\\nb\\udfff\u00e9"
  assert ApiError(status, "").headers == {}


def asked(chat=False, **changes):
  body = {"messages": [{"role": "user", "content": "a"}]} if chat else {
    "prompt": "abc"
  }
  made = (fields.parse_chat if chat else fields.parse_completion)(body, 8)
  return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(("state", "status", "code"), [
  (State.EXPIRED, 504, "deadline_exceeded"),
  (State.FAILED, 500, "not_a_number"),
  (State.REFUSED, 400, "context_length_exceeded"),
])
def test_end_without_tokens_is_an_error(state, status, code):
  error = responses.failure(state, asked(deadline_s=2.5))
  assert (error.status, error.body["error"]["code"]) == (status, code)
  assert ("deadline_s=2.5" in str(error)) == (state is State.EXPIRED)


def choice(index, prompt, text, drawn, hits=0, most=99):
  """Returns a choice that has drawn the tokens of a text, and its events."""
  letters = tokenizer()
  tokens = tuple(letters.encode(text).tolist())
  drawing = inference.Request(
    tokens, Stops(most, frozenset(letters.stop_ids)), temperature=0.0
  )
  request = Request(index, tokens, most, arrival_s=10.0)
  request.num_hits = hits
  made = WaitingChoice(
    index, prompt, request, Transcript(drawing, letters, 999), None
  )
  news = []
  for i, token in enumerate(drawn):
    offset = len(made.transcript.text)
    piece = made.transcript.push(token, -0.25 * i)
    ended = State.FINISHED if made.transcript.ended else None
    top = {token: -0.25 * i, 5: -3.0}
    news.append(
      ChoiceEvent(made, 0.0, piece, token, -0.25 * i, offset, ended, top)
    )
  return made, news


def test_prompts_with_several_responses_are_counted_once():
  choices = [
    choice(0, 0, "abc", [1, 2, 63], hits=2)[0],
    choice(1, 0, "abc", [1, 63], hits=3)[0],
    choice(2, 1, "defgh", [63], hits=1)[0],
  ]
  assert responses.usage(choices) == {
    "prompt_tokens": 8, "completion_tokens": 6, "total_tokens": 14,
    # Hits of the first choice of each prompt.
    "prompt_tokens_details": {"cached_tokens": 3},
  }


def formatter(made, prompts=()):
  return responses.ResponseFormatter(made, "small", tokenizer(), prompts)


@pytest.mark.parametrize("num_top", [0, 2])
def test_completion_has_texts_and_log_probabilities(num_top):
  (first, a), (second, b) = (
    choice(0, 0, "abc", [1, 2, 63]), choice(1, 1, "d", [3, 4], most=2)
  )
  form = formatter(asked(logprobs=True, num_top=num_top), ["abc", "d"])
  found = form.whole([first, second], [b[0], *a, *b[1:]])
  assert found.pop("id").startswith("cmpl-")
  assert isinstance(found.pop("created"), int)
  usage = responses.usage([first, second])
  assert (found.pop("usage"), found.pop("object")) == (usage, "text_completion")
  stop = tokenizer().decode([63])
  assert found == {"model": "small", "choices": [
    {"index": 0, "text": "abcbc", "finish_reason": "stop", "logprobs": {
      "tokens": ["b", "c", stop], "token_logprobs": [0, -0.25, -0.5],
      "top_logprobs": [
        {"b": 0, "f": -3}, {"c": -0.25, "f": -3}, {stop: -0.5, "f": -3}
      ] if num_top else None,
      "text_offset": [3, 4, 5],
    }},
    {"index": 1, "text": "dde", "finish_reason": "length", "logprobs": {
      "tokens": ["d", "e"], "token_logprobs": [0, -0.25],
      "top_logprobs": [{"d": 0, "f": -3}, {"e": -0.25, "f": -3}]
      if num_top else None,
      "text_offset": [1, 2],
    }},
  ]}
  plain = formatter(asked()).whole([first], a)
  assert plain["choices"] == [
    {"index": 0, "text": "bc", "finish_reason": "stop", "logprobs": None}
  ]


def test_tokens_with_equal_texts_have_separate_log_probabilities():
  form = formatter(asked(logprobs=True, num_top=2))
  own = responses.ScoredToken(63, -0.5, {99: -0.25, 63: -0.4, 1: -math.inf}, 0)
  assert form._top_logprobs_by_text(own) == {
    "": -0.5, "token_id:99": -0.25, "b": -9999
  }
  assert form._top_logprobs_by_text(own._replace(logprob=None, top={})) is None


@pytest.mark.parametrize("num_top", [0, 2])
def test_chat_has_messages_and_log_probabilities(num_top):
  made, news = choice(0, 0, "abc", [1, 63])
  if not num_top:
    news = [dataclasses.replace(item, top={}) for item in news]
  form = formatter(asked(True, logprobs=True, num_top=num_top))
  found = form.whole([made], news)
  assert found["id"].startswith("chatcmpl-")
  assert found["object"] == "chat.completion"
  first = {"token": "b", "logprob": 0, "bytes": [98]}
  (answer,) = found["choices"]
  assert answer["message"] == {
    "role": "assistant", "content": "b", "refusal": None
  }
  assert answer["logprobs"]["content"][0] == first | {
    "top_logprobs": [
      first, {"token": "f", "logprob": -3, "bytes": [102]}
    ] if num_top else []
  }
  assert len(answer["logprobs"]["content"]) == 2
  incomplete = responses.ScoredToken(1, -0.5, {}, 0)
  form = formatter(asked(True, logprobs=True))
  for known in (b"\xc3", None):  # half of a character
    form._tokenizer = types.SimpleNamespace(
      decode=lambda tokens: "\ufffd", token_bytes={1: known}.get
    )
    (token,) = form._logprobs([incomplete])["content"]
    assert token["bytes"] == (known and list(known))


def events(data):
  """Parses server-sent events."""
  assert data.endswith(b"\n\n")
  found = [part.removeprefix(b"data: ") for part in data[:-2].split(b"\n\n")]
  return [part if part == b"[DONE]" else json.loads(part) for part in found]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_stream_has_an_event_per_text(chat, usage):
  made, news = choice(3, 0, "abc", [1, 2, 63])
  form = formatter(asked(chat, include_usage=usage), () if chat else ["abc"])
  chunks = [events(form.chunk(item))[0] for item in news]
  last = events(form.last([made]))
  kind = "chat.completion.chunk" if chat else "text_completion"
  for chunk in (*chunks, *last[:-1]):
    assert (chunk["id"], chunk["object"]) == (form._head["id"], kind)
    assert chunk["model"] == "small"
  assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [
    None, None, "stop"
  ]
  assert {chunk["choices"][0]["index"] for chunk in chunks} == {3}
  assert all("logprobs" in chunk["choices"][0] for chunk in chunks)
  if chat:
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
      {"role": "assistant", "content": "b"}, {"content": "c"}, {"content": ""}
    ]
  else:
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [
      "abcb", "c", ""
    ]
  assert [chunk.get("usage", 0) for chunk in chunks] == [
    None if usage else 0
  ] * 3
  assert last.pop() == b"[DONE]"
  assert [(x["choices"], x["usage"]) for x in last] == (
    [([], responses.usage([made]))] if usage else []
  )


def test_token_without_text_sends_no_event_except_for_the_first():
  made, _ = choice(0, 0, "abc", [])
  silent, text = ChoiceEvent(made, 0.0, "", 1), ChoiceEvent(made, 0.0, "b", 1)
  form = formatter(asked())
  assert form.chunk(silent) != b""
  assert form.chunk(silent) == b""
  assert form.chunk(text) != b""
  form = formatter(asked(logprobs=True))
  for _ in range(2):  # its log-probability is sent
    (sent,) = events(form.chunk(silent))
    assert sent["choices"][0]["logprobs"]["tokens"] == ["b"]


STATE = {
  "requests": {"waiting": 3, "running": 2}, "pages": {"free": 7, "held": 5},
  "host_pages": {"all": 20, "used": 6},
  "copies": {"out": {"pages": 4, "states": 3, "runs": 2},
             "in": {"pages": 1, "states": 0, "runs": 1}},
  "preemptions": {"swap": 8, "recompute": 9},
  "prefixes": {"hits": 11, "misses": 12, "evicted": 13},
  "steps": 14, "stalls": 15, "experts": None,
}


def test_snapshot_describes_requests_pages_and_copies():
  """Lists 100 of 104 requests, while two of them preempt two others."""
  pages = Pages(30, 4)
  executor = oracle.Oracle(30, 9, 4, lambda copy: 0.0)
  scheduler = Scheduler(
    Limits(slots=2, preempt="swap"), registry.make("strict_priority", pages),
    pages, HostCache(9, 4, reserve=False), executor.costs,
  )
  engine = Engine(scheduler, executor)
  requests = [
    Request(i, [i] * (5 + i % 3), 20, priority=float(i < 102))
    for i in range(104)
  ]
  steps = 0
  for request in requests[:102]:
    scheduler.add(request)
  for i in range(40):
    if i == 9:
      for request in requests[102:]:
        scheduler.add(request)
    steps += engine.step() is not None
  found = describe(engine)
  assert found["experts"] is None
  number = collections.Counter(r.state.value for r in scheduler.requests)
  assert found["requests"] == {
    name: number[name]
    for name in ("waiting", "running", "leaving", "swapped", "arriving")
  }
  assert number["running"] == 2
  assert found["listed"] == [
    {
      "number": r.number, "state": r.state.value, "prompt": len(r.prompt),
      "drawn": len(r.tokens), "most": 20, "pages": len(r.pages),
      "preempted": r.num_preempted, "priority": r.priority,
    }
    for r in scheduler.requests[:100]
  ]
  assert (found["slots"], found["page_size"]) == (2, 4)
  assert (found["steps"], found["stalls"]) == (steps, scheduler.counts.stalls)
  assert [STATES[int(digit)] for digit in found["map"]] == [
    STATES[state] for state in pages.states()
  ]
  assert found["page_states"] == list(STATES)
  assert found["pages"] == {
    name: found["map"].count(str(i)) for i, name in enumerate(STATES)
  }
  held = {page for r in requests for page in r.pages.tolist()}
  assert found["pages"]["held"] + found["pages"]["shared"] == len(held) > 0
  preempted = sum(r.num_preempted for r in requests)
  assert found["preemptions"] == {"swap": preempted, "recompute": 0}
  assert preempted == 2
  copies = [c for c in executor.moved if c.kind == "out"]
  assert found["copies"]["out"] == {
    "pages": sum(len(c.source) for c in copies), "states": 0,
    "runs": sum(len(c.runs) for c in copies),
  }
  assert found["copies"]["out"]["pages"] == found["host_pages"]["used"] > 0
  assert found["host_pages"]["all"] == 9
  counts = pages.counts
  assert found["prefixes"] == {
    "hits": counts.hits, "misses": counts.misses, "evicted": counts.evicted
  }
  assert counts.misses > 0


def scraped(metrics, state=STATE):
  text = metrics.text(state).decode()
  return {
    (s.name.removeprefix("caatnet_"), *s.labels.values()): s.value
    for family in text_string_to_metric_families(text)
    for s in family.samples if not s.name.endswith("_created")
  }


def test_metrics_of_the_state_are_those_of_the_snapshot():
  found = scraped(Metrics(100, 1000))
  for key, value in {
    ("sequences", "waiting"): 3, ("sequences", "running"): 2,
    ("pages", "free"): 7, ("pages", "held"): 5, ("host_pages_used",): 6,
    ("copied_bytes_total", "out"): 3400, ("copied_bytes_total", "in"): 100,
    ("copied_runs_total", "out"): 2, ("copied_runs_total", "in"): 1,
    ("preemptions_total", "swap"): 8, ("preemptions_total", "recompute"): 9,
    ("prefix_pages_total", "hits"): 11, ("prefix_pages_total", "misses"): 12,
    ("steps_total",): 14, ("stalls_total",): 15,
    **{("requests_total", state.value): 0 for state in FINAL_STATES},
  }.items():
    assert found[key] == value, key
  assert ("prefix_pages_total", "evicted") not in found
  assert scraped(Metrics(100))["copied_bytes_total", "out"] == 400


def test_metrics_of_experts_are_those_of_the_snapshot():
  names = ("hits", "misses", "loads", "failures", "bytes", "files", "exposed_s")
  found = scraped(Metrics(1), STATE | {"experts": {
    "counters": {
      expert: {name: first + i for i, name in enumerate(names)}
      for expert, first in (("a", 1), ("b", 11))
    },
    "slots": [{"state": s} for s in ("ready", "loading", "ready", "ready")],
    "host": ["a", "b"], "load_s": 0.25,
  }})
  for i, name in enumerate(names):
    key = "expert_" + name.replace("exposed_s", "exposed_seconds") + "_total"
    assert (found[key, "a"], found[key, "b"]) == (1 + i, 11 + i), name
  assert [
    found["expert_slots", state] for state in ("empty", "loading", "ready")
  ] == [0, 1, 3]
  assert found["host_experts",] == 2
  assert found["expert_load_seconds",] == 0.25


def test_metrics_count_tokens_and_ends():
  metrics = Metrics(1)
  request = Request(0, [1, 2, 3], 9, arrival_s=10.0)
  request.num_hits = 2
  for time_s, before_s in ((10.75, None), (11.0, 10.75), (13.0, 11.0)):
    metrics.token(request, time_s, before_s)
  request.end_s = 14.5
  for state in (State.FINISHED, State.CANCELLED, State.CANCELLED):
    metrics.ended(request, state)
  metrics.ended(Request(1, [1], 1), State.FINISHED)  # without a time
  metrics.answered(200)
  found = scraped(metrics)
  for key, value in {
    "drawn_tokens_total": 3, "prompt_tokens_total": 3,
    "cached_prompt_tokens_total": 2, "ttft_seconds_count": 1,
    "ttft_seconds_sum": 0.75, "tbt_seconds_count": 2, "tbt_seconds_sum": 2.25,
    "request_seconds_count": 1, "request_seconds_sum": 4.5,
  }.items():
    assert found[key,] == value, key
  assert found["requests_total", "finished"] == 2
  assert found["requests_total", "cancelled"] == 2
  assert found["http_responses_total", "200"] == 1


def test_buckets_of_latencies_grow_steadily():
  for name, first, last in (("ttft", 5e-3, 120), ("tbt", 1e-3, 10),
                            ("request", 5e-2, 600)):
    bounds = [
      float(key[1]) for key in scraped(Metrics(1))
      if key[0] == f"{name}_seconds_bucket"
    ][:-1]
    assert (bounds[0], bounds[-1]) == (first, last)
    ratios = np.divide(bounds[1:], bounds[:-1])
    assert np.all((ratios >= 1.5) & (ratios <= 2.5))


@pytest.mark.parametrize(("name", "good", "bad"), [
  ("n", (1, 8), (0, 9, 1.0, True)),
  ("max_tokens", (1, 2**31 - 1), (0, 2**31)),
  ("seed", (-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63)),
  ("temperature", (0, 1e9), (-0.1, 1.1e9, math.inf)),
  ("priority", (-1e9, 1e9), (-1.1e9, 1.1e9)),
  ("deadline_s", (0, 86400), (-1, 86401)),
  ("user", ("", "x" * 256), ("x" * 257, 5)),
  ("conversation", ("x" * 256,), ("x" * 257,)),
  ("stop", ("", ["x"] * 16, "x" * 256, [])[1:],
   ("", ["x"] * 17, "x" * 257, [5])),
  ("logprobs", (0, 20), (-1, 21)), ("best_of", (1,), (2, 0)),
  ("stream", (True, False), (1, "yes")),
  ("prompt", ("a", ["a"] * 8, [0, 2**31 - 1], [[1], "a"]),
   (["a"] * 9, [2**31], [-1], [1, "a"], None)),
  ("frequency_penalty", (0, None), (0.1,)), ("suffix", ("",), ("a",)),
])
def test_fields_of_completions_have_their_ranges(name, good, bad):
  for value in good:
    fields.parse_completion({"prompt": "a", name: value}, 8)
  for value in bad:
    with pytest.raises(ApiError, match=name) as caught:
      fields.parse_completion({"prompt": "a", name: value}, 8)
    assert caught.value.status == 400
    assert caught.value.body["error"]["param"] == name


def chat(**more):
  return fields.parse_chat(
    {"messages": [{"role": "user", "content": "a"}]} | more, 8
  )


def official(name):
  """Returns the values of a field in the types of OpenAI's client."""
  hints = typing.get_type_hints(openai_fields.CompletionCreateParamsBase)
  return {
    value for part in typing.get_args(hints[name])
    for value in typing.get_args(part)
  }


@pytest.mark.parametrize(("name", "good", "bad"), [
  ("metadata", ({}, None, {"a" * 64: "b" * 512}, dict.fromkeys("abc", "")),
   ([], {"a": 1}, {"a" * 65: ""}, {"a": "b" * 513},
    {str(i): "" for i in range(17)})),
  ("store", (True, False, None), (1, "yes")),
  ("service_tier", official("service_tier"), (1,)),
  ("prompt_cache_key", ("", "a"), (5,)),
  ("prompt_cache_options", ({"mode": "explicit", "ttl": "30m"},), ("30m",)),
  ("prompt_cache_retention", official("prompt_cache_retention"), (24,)),
  ("safety_identifier", ("a" * 128,), (5, "x" * 257)),
])
def test_official_fields_without_effect_are_checked(name, good, bad):
  for value in good:
    assert chat(**{name: value}) == chat()
  for value in bad:
    with pytest.raises(ApiError, match=f"^{name}.* must be") as caught:
      chat(**{name: value})
    assert caught.value.body["error"]["param"] == name


def test_values_of_vllms_clients_are_accepted():
  """For top_k, -1 stands for all tokens."""
  completion = fields.parse_completion({"prompt": "a", "top_k": -1}, 8)
  for made in (chat(top_k=-1), completion):
    assert made.drawing["top_k"] == 0
  for wrong in (-2, True, -1.0):
    with pytest.raises(ApiError, match="top_k"):
      chat(top_k=wrong)
  given = {"enable_thinking": False}
  assert chat(chat_template_kwargs=given).template == given
  assert chat().template == {}
  with pytest.raises(ApiError, match="chat_template_kwargs must be a JSON"):
    chat(chat_template_kwargs=[1])


def test_defaults_are_those_of_openai():
  made = fields.parse_completion({"prompt": "a"}, 8)
  assert (made.max_tokens, made.n, made.stream, made.echo, made.logprobs,
          made.num_top, made.stop, made.user, made.conversation, made.seed) == (
    16, 1, False, False, False, 0, (), "", "", None
  )
  assert made.drawing["temperature"] == 1
  assert (made.deadline_s, made.priority) == (math.inf, 0)
  assert not made.ignore_eos
  assert chat().max_tokens is None


def test_old_and_new_names_of_limits_are_equivalent():
  assert chat(max_tokens=5).max_tokens == 5
  assert chat(max_completion_tokens=6).max_tokens == 6
  assert chat(max_tokens=7, max_completion_tokens=7).max_tokens == 7
  with pytest.raises(ApiError, match="max_tokens=5 is not"):
    chat(max_tokens=5, max_completion_tokens=6)


def test_number_of_most_probable_tokens_is_that_of_the_field():
  for made, num_top in (
    (chat(logprobs=True, top_logprobs=20), 20), (chat(logprobs=True), 0),
    (fields.parse_completion({"prompt": "a", "logprobs": 3}, 8), 3),
    (fields.parse_completion({"prompt": "a", "logprobs": 0}, 8), 0),
  ):
    assert (made.logprobs, made.num_top) == (True, num_top)
  with pytest.raises(ApiError, match="top_logprobs=21 must be an integer"):
    chat(logprobs=True, top_logprobs=21)


def test_stream_options_need_a_stream():
  options = {"include_usage": True}
  assert chat(stream=True, stream_options=options).include_usage
  assert not chat(stream=True, stream_options={}).include_usage
  assert not chat(stream=True).include_usage
  for more, message in (
    ({"stream_options": options}, "needs stream=true"),
    ({"stream": True, "stream_options": {"x": 1}}, "x is not a field"),
    ({"stream": True, "stream_options": {"include_usage": 1}},
     "include_usage=1 must be true or false"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "include_obfuscation=True is not supported"),
    ({"stream": True, "stream_options": 5}, "stream_options=5 must be a JSON"),
  ):
    with pytest.raises(ApiError, match=message):
      chat(**more)


def test_events_of_a_call_precede_its_error():
  """A client that has disconnected gets none."""
  async def calls():
    call = Call()
    made, news = choice(0, 0, "abc", [1, 63])
    call.choices = [made, choice(1, 0, "abc", [])[0]]
    call.choices[1].ended = True
    assert (call.num_open, call.failed, call.gone) == (1, False, False)
    call.push(news[0])
    call.push(news[1])
    assert list(await call.next()) == news
    call.push(news[0])
    call.fail(ApiError(500, "broken"))
    assert call.failed
    assert list(await call.next()) == news[:1]
    with pytest.raises(ApiError, match="broken"):
      await call.next()
    left = Call()
    left.push(news[0])
    left.leave()
    assert left.gone
    assert list(await left.next()) == []

  asyncio.run(asyncio.wait_for(calls(), 20))
