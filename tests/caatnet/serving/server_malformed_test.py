"""Malformed requests: each gets one JSON error with a 4xx status."""

import http.client
import json
import socket

import pytest

from tests.caatnet.serving import small_server

ASK = {"model": "small", "prompt": "abc", "max_tokens": 1}
CHAT = {
  "model": "small", "messages": [{"role": "user", "content": "a"}],
  "max_tokens": 1,
}
BODY_BYTES = 250_000


@pytest.fixture(scope="module")
def server():
  with small_server.running(
    body_bytes=BODY_BYTES, choices=4, read_s=0.5
  ) as found:
    yield found
    # After all of them, it still serves, and no request is left.
    assert answer(found, posted(ASK))[0] == 200
    assert answer(found, posted(CHAT, "/v1/chat/completions"))[0] == 200
  # The server has stopped.
  assert not found.api.service.calls
  assert found.api.service.error is None


def posted(body, path="/v1/completions"):
  """Returns a POST request as bytes."""
  if isinstance(body, dict):
    body = json.dumps(body).encode()
  lines = [
    f"POST {path} HTTP/1.1".encode(), b"Host: here",
    b"Content-Length: %d" % len(body),
  ]
  return b"\r\n".join(lines) + b"\r\n\r\n" + body


def answer(server, content):
  """Returns the status, headers and body of the response to raw bytes."""
  with socket.create_connection(("127.0.0.1", server.port)) as client:
    client.settimeout(60)
    client.sendall(content)
    with http.client.HTTPResponse(client) as found:
      found.begin()
      return found.status, found.headers, found.read()


POST = b"POST /v1/completions HTTP/1.1\r\n"
HEAD = POST + b"Host: here\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MESSAGES = {
  "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
  "no HTTP": b"hello\r\n\r\n",
  "HTTP/0.9": b"GET /health\r\n\r\n",
  "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
  "version": b"GET /health HTTP/x\r\nHost: here\r\n\r\n",
  "method": b"G@T /health HTTP/1.1\r\nHost: here\r\n\r\n",
  "unknown method": b"BREW /health HTTP/1.1\r\nHost: here\r\n\r\n",
  "CONNECT": b"CONNECT here:80 HTTP/1.1\r\nHost: here\r\n\r\n",
  "OPTIONS": b"OPTIONS * HTTP/1.1\r\nHost: here\r\n\r\n",
  "space in target": b"GET /a b HTTP/1.1\r\nHost: here\r\n\r\n",
  "target beyond ASCII": b"GET /\xff HTTP/1.1\r\nHost: here\r\n\r\n",
  "escaped bytes": b"GET /v1/models/%00%ff HTTP/1.1\r\nHost: here\r\n\r\n",
  "absolute target": b"GET http://here/x HTTP/1.1\r\nHost: here\r\n\r\n",
  "empty target": b"GET  HTTP/1.1\r\nHost: here\r\n\r\n",
  "no host": b"GET /health HTTP/1.1\r\n\r\n",
  "two hosts": HEAD + b"Host: there\r\n\r\n",
  "header without colon": HEAD + b"nothing\r\n\r\n",
  "header without name": HEAD + b": nothing\r\n\r\n",
  "space in name": HEAD + b"X Y: z\r\n\r\n",
  "space after name": HEAD + b"X : z\r\n\r\n",
  "continued first line": POST + b" Host: here\r\n\r\n",
  "zero in header": HEAD + b"X: a\x00b\r\n\r\n",
  "carriage return in header": HEAD + b"X: a\rb\r\n\r\n",
  "long header": HEAD + b"X: " + 200_000 * b"x",
  "long target": b"GET /" + 200_000 * b"x",
  "many headers": HEAD + 20_000 * b"X: y\r\n" + b"\r\n",
  "length in words": HEAD + b"Content-Length: ten\r\n\r\n",
  "negative length": HEAD + b"Content-Length: -1\r\n\r\n",
  "signed length": HEAD + b"Content-Length: +1\r\n\r\n{",
  "length with exponent": HEAD + b"Content-Length: 1e3\r\n\r\n",
  "hexadecimal length": HEAD + b"Content-Length: 0x10\r\n\r\n",
  "huge length": HEAD + b"Content-Length: " + 30 * b"9" + b"\r\n\r\n",
  "unequal lengths":
    HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
  "list of lengths": HEAD + b"Content-Length: 1, 2\r\n\r\n{}",
  "short body": HEAD + b"Content-Length: 50\r\n\r\n{",
  "length and chunks": HEAD + b"Content-Length: 2\r\nTransfer-Encoding: "
    b"chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
  "gzip coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
  "two codings": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
  "chunked twice":
    HEAD + 2 * b"Transfer-Encoding: chunked\r\n" + b"\r\n0\r\n\r\n",
  "chunk size in letters": CHUNKED + b"zz\r\n{}\r\n",
  "negative chunk": CHUNKED + b"-1\r\n{}\r\n",
  "huge chunk": CHUNKED + 40 * b"f" + b"\r\n{}\r\n",
  "chunk without end": CHUNKED + b"2\r\n{}}}\r\n0\r\n\r\n",
  "long chunk extension": CHUNKED + b"2;" + 100_000 * b"x",
  "no chunk": CHUNKED + b"0\r\n\r\n",
  "no body": HEAD + b"\r\n",
}
DEEP = 100_000
JSON = {
  "empty": b"",
  "incomplete": b'{"model": "small", "prompt": "a',
  "two values": b"{} {}",
  "single quotes": b"{'model': 'small', 'prompt': 'a'}",
  "comma at the end": b'{"model": "small", "prompt": "a",}',
  "comment": b'{"model": "small" /* here */}',
  "array": b"[]",
  "null": b"null",
  "number": b"5",
  "string": b'"small"',
  "NaN": b"NaN",
  "nested arrays": b"[" * DEEP,
  "closed nested arrays": b"[" * DEEP + b"]" * DEEP,
  "nested objects": b'{"a":' * (DEEP // 3),
  "nested in a field":
    b'{"model": "small", "prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
  "invalid UTF-8": b'{"model": "small", "prompt": "\xff\xfe\xfa"}',
  "surrogate": b'{"model": "small", "prompt": "\\ud800"}',
  "surrogate as a name": b'{"model": "small", "prompt": "a", "\\udfff": 1}',
  "lines as a name": b'{"model": "small", "prompt": "a", "b\\nc\\r": 1}',
  "control character": b'{"model": "small", "prompt": "a\nb"}',
  "compressed": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab\xae\x05\x00",
  "repeated field": b'{"model": "small", "prompt": "a", "prompt": "b"}',
  "long integer": b'{"model": "small", "prompt": "a", "seed": '
    + 10_000 * b"9" + b"}",
  "overflow": b'{"model": "small", "prompt": "a", "temperature": 1e999}',
  "infinity": b'{"model": "small", "prompt": "a", "temperature": Infinity}',
  "too long": b"{" + BODY_BYTES * b" ",
}
FIELDS = [
  {"model": None}, {"model": "gpt-5"}, {"model": 5}, {"model": ["small"]},
  {"prompt": None}, {"prompt": 5}, {"prompt": {}}, {"prompt": []},
  {"prompt": ""}, {"prompt": [[]]}, {"prompt": ["a", 5]}, {"prompt": [1.5]},
  {"prompt": [-1]}, {"prompt": [64]}, {"prompt": [2**31]}, {"prompt": [True]},
  {"prompt": [[1], "a", [None]]}, {"prompt": "a" * 96}, {"prompt": ["a"] * 5},
  {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1.5},
  {"max_tokens": "5"}, {"max_tokens": 94}, {"max_tokens": 10**30},
  {"n": 0}, {"n": -1}, {"n": 5}, {"n": 10**30}, {"n": "1"}, {"n": False},
  {"best_of": 0}, {"best_of": 2}, {"temperature": -0.1},
  {"temperature": float("nan")}, {"temperature": 1e10},
  {"temperature": "hot"}, {"temperature": True}, {"top_p": 0},
  {"top_p": 1.1}, {"top_p": [1]}, {"top_k": -2}, {"top_k": 1.5},
  {"top_k": 2**31}, {"min_p": -0.1}, {"min_p": float("-inf")},
  {"seed": 1.5}, {"seed": 2**63}, {"seed": "one"}, {"stop": 5},
  {"stop": [5]}, {"stop": ""}, {"stop": ["a"] * 17}, {"stop": "a" * 257},
  {"stop": {"a": 1}}, {"stream": "yes"}, {"stream": 1},
  {"stream_options": {}}, {"stream": True, "stream_options": 5},
  {"stream": True, "stream_options": {"x": 1}},
  {"stream": True, "stream_options": {"include_usage": 1}},
  {"logprobs": -1}, {"logprobs": 21}, {"logprobs": 1.5}, {"logprobs": True},
  {"echo": "yes"}, {"echo": 1}, {"suffix": "b"}, {"logit_bias": {"5": 1}},
  {"logit_bias": []}, {"presence_penalty": 1}, {"frequency_penalty": "no"},
  {"user": 5}, {"user": "a" * 257}, {"priority": "high"},
  {"priority": float("nan")}, {"conversation": 5}, {"deadline_s": -1},
  {"deadline_s": "soon"}, {"ignore_eos": 1}, {"unknown": 1}, {"": 1},
  {"messages": []}, {"max_completion_tokens": 5},
]
CHAT_FIELDS = [
  {"messages": None}, {"messages": "a"}, {"messages": []}, {"messages": [5]},
  {"messages": [{}]}, {"messages": [{"role": "user"}]},
  {"messages": [{"role": 5, "content": "a"}]},
  {"messages": [{"role": "user", "content": 5}]},
  {"messages": [{"role": "user", "content": [5]}]},
  {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
  {"messages": [{"role": "user", "content": "a", "x": 1}]},
  {"prompt": "a"}, {"logprobs": 1}, {"top_logprobs": 1},
  {"logprobs": True, "top_logprobs": 21}, {"max_tokens": 0},
  {"max_tokens": 1, "max_completion_tokens": 2}, {"tools": [{}]},
  {"tools": 5}, {"tool_choice": "required"},
  {"response_format": {"type": "json_object"}}, {"modalities": ["audio"]},
  {"chat_template_kwargs": 5}, {"reasoning_effort": "high"},
  {"prompt_cache_key": 5}, {"safety_identifier": "a" * 257},
  {"moderation": {}}, {"metadata": {"a": 1}}, {"store": "yes"},
  {"service_tier": 5}, {"prompt_cache_retention": 24},
  {"prompt_cache_options": "30m"},
]
TOKENS = [
  {"tokens": "a"}, {"tokens": [-1]}, {"tokens": [1.5]}, {"tokens": None},
  {"tokens": [1], "model": "gpt-5"}, {"tokens": [1], "prompt": "a"},
]
REQUESTS = [
  *(pytest.param(content, id=name) for name, content in MESSAGES.items()),
  *(pytest.param(posted(body), id=name) for name, body in JSON.items()),
  *(pytest.param(posted(ASK | fields), id=f"{fields}"[:40])
    for fields in FIELDS),
  *(pytest.param(posted(fields, "/detokenize"), id=f"{fields}")
    for fields in TOKENS),
  *(pytest.param(posted(CHAT | fields, "/v1/chat/completions"),
                 id=f"chat {fields}"[:40]) for fields in CHAT_FIELDS),
]


@pytest.mark.parametrize("content", REQUESTS)
def test_malformed_request_is_answered_by_one_error(server, content):
  status, headers, body = answer(server, content)
  assert 400 <= status < 500, body
  assert headers["Content-Type"] == "application/json"
  found = json.loads(body)
  assert set(found) == {"error"}
  assert set(found["error"]) == {"message", "type", "param", "code"}
  message = found["error"]["message"]
  assert message.isprintable()  # one line
  assert 0 < len(message) < 510
