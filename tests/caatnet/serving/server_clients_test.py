"""Slow, malformed and killed clients do not affect other clients."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import signal
import socket
import struct
import threading
import time

import httpx2
import jax
import numpy as np
import pytest

from caatnet.serving.requests import State
from tests.caatnet.serving import small_server
from tests.caatnet.serving.small_server import alone

READ_S = 0.5


@pytest.fixture(scope="module")
def server():
  with small_server.running(
    send_bytes=4096, read_s=READ_S, write_s=READ_S, body_bytes=2000,
    policy="vtc",
  ) as found:
    yield found


def ask(prompt, **fields):
  return {"model": "small", "prompt": prompt} | fields


def drained(server, host=False):
  """Returns the state once no request is being served or copied.

  Args:
    server: The server.
    host: Whether to wait for host pages too. Those of a cancelled request are
      free when a copy that was under way has ended.
  """
  for _ in range(500):
    state = httpx2.get(f"{server.url}/state", timeout=60).json()
    fresh = state["age_s"] < 1  # else the engine has not answered yet
    used = [state["pages"][name] for name in ("held", "shared", "leaving")]
    used.append(host and state["host_pages"]["used"])
    if fresh and not any([state["open"], *state["requests"].values(), *used]):
      return state
    time.sleep(0.02)
  pytest.fail(f"somebody is being served: {state}")


def all_is_back(server):
  drained(server, host=True)
  assert not server.api.service.calls
  scheduler = server.api.service.engine.scheduler
  scheduler.pages.check()
  assert not scheduler.swapping._busy
  assert not scheduler.swapping._turns
  assert len(scheduler.policy) == 0


async def _connect(server):
  return await asyncio.open_connection("127.0.0.1", server.port)


def _request(fields, version="1.1"):
  body = json.dumps(fields).encode()
  return (
    f"POST /v1/completions HTTP/{version}\r\nHost: here\r\n"
    f"Content-Length: {len(body)}\r\n\r\n"
  ).encode() + body


async def _killed(server, i):
  """Client whose process is killed before or after its first token."""
  reader, writer = await _connect(server)
  streams = i % 4 > 0
  writer.write(_request(ask(
    "killed"[: 1 + i % 6], max_tokens=80, stream=streams, ignore_eos=True,
    temperature=1, n=1 + i % 2, user=str(i),
    conversation=str(i) if i % 3 == 0 else None,
    **{"echo": True, "logprobs": 1} if i % 5 == 0 else {},
  )))
  await writer.drain()
  if streams:
    await reader.readuntil(b"data: ")
  else:
    await asyncio.sleep(0.01)
  _reset_at_close(writer.get_extra_info("socket"))
  writer.transport.abort()


def _reset_at_close(client):
  """Prevents the FIN, as when a process is killed."""
  client.setsockopt(
    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
  )


def test_killed_clients_leak_nothing_and_do_not_affect_others(server):
  others = [ask("other" + "abcdef"[i], max_tokens=30, seed=i)
            for i in range(6)]

  async def all_of_them():
    places = asyncio.Semaphore(20)

    async def killed(i):
      async with places:
        await _killed(server, i)

    async with httpx2.AsyncClient(timeout=300) as client:
      answers = [
        client.post(f"{server.url}/v1/completions", json=fields)
        for fields in others
      ]
      found = await asyncio.gather(*answers, *map(killed, range(60)))
    return [answer.json() for answer in found[: len(others)]]

  found = asyncio.run(all_of_them())
  for i, (fields, answer) in enumerate(zip(others, found, strict=True)):
    expected = alone(fields["prompt"], 30, temperature=1.0, seed=i)
    assert answer["choices"][0]["text"] == expected.text
  all_is_back(server)


def test_slow_and_malformed_clients_are_disconnected(server):
  """Serves a valid request meanwhile."""
  head = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"
  cases = [
    (b"", None),  # no head
    (b"POST /v1/comp", None),  # incomplete head
    (head + b"Content-Length: 50\r\n\r\n{", b"408"),  # incomplete body
    (b"\x16\x03\x01 this is no HTTP\r\n\r\n", b"400"),
    (head + b"Content-Length: x\r\n\r\n", b"400"),
    (head + b"X: " + 200_000 * b"x", b"431"),  # while it sends
    (head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
    (head + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n"
     b"2\r\n{}\r\n0\r\n\r\n", b"400"),
    (head + b"Content-Length: 9000\r\n\r\n" + 9000 * b" ", b"413"),
  ]

  async def one(content):
    reader, writer = await _connect(server)
    with contextlib.suppress(ConnectionError):
      writer.write(content)
      await writer.drain()
    found = b""
    with contextlib.suppress(ConnectionError):
      found = await asyncio.wait_for(reader.read(), 10 * READ_S)
    writer.close()
    return found

  async def all_of_them():
    async with httpx2.AsyncClient(timeout=300) as client:
      fields = ask("beside", max_tokens=60, temperature=0)
      answer = client.post(f"{server.url}/v1/completions", json=fields)
      return await asyncio.gather(answer, *(one(c) for c, _ in cases))

  answer, *found = asyncio.run(all_of_them())
  assert answer.json()["choices"][0]["text"] == alone("beside", 60).text
  for (content, status), text in zip(cases, found, strict=True):
    if status is not None:
      assert text.split(b" ")[1] == status, (content[:60], text[:200])
  all_is_back(server)


@pytest.mark.parametrize("reads", [False, True])
def test_client_that_stops_reading_is_disconnected(server, reads):
  """Sends more than the socket and the server buffer.

  A client that reads slowly receives all of it.
  """
  fields = ask(
    "slow", max_tokens=80, stream=True, n=16, ignore_eos=True, temperature=0
  )
  end = b"data: [DONE]\n\n\r\n0\r\n\r\n"
  with socket.socket() as client:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.sendall(_request(fields))
    found = client.recv(100)
    while reads and not found.endswith(end):
      time.sleep(READ_S / 250)
      found += client.recv(8192)
    # All tokens may be drawn before a client that does not read is cut off.
    end_s = time.monotonic() + 100 * READ_S
    while server.api.service.calls and time.monotonic() < end_s:
      time.sleep(0.01)
    all_is_back(server)
    with contextlib.suppress(ConnectionError):
      while not reads and (part := client.recv(1 << 20)):
        found += part
  assert found.startswith(b"HTTP/1.1 200 OK")
  assert found.endswith(end) == (len(found) > 100_000) == reads


def test_request_of_a_disconnected_client_is_cancelled(server):
  """Covers streams and whole responses; no tokens are drawn for them."""
  metrics = server.api.service.metrics
  ends = metrics._ends.labels(State.CANCELLED.value)
  before, steps = ends._value.get(), drained(server)["steps"]
  for stream in (True, False):
    with socket.create_connection(("127.0.0.1", server.port)) as client:
      client.sendall(_request(ask(
        "gone", max_tokens=90, stream=stream, n=40, ignore_eos=True
      )))
      while not server.api.service.calls:
        time.sleep(0.001)
  all_is_back(server)
  assert ends._value.get() > before + 2
  # Completing 2 x 40 responses of 90 tokens, 4 at a time, takes 1,800 steps.
  assert drained(server)["steps"] - steps < 900


def test_prompts_of_a_disconnected_client_are_not_scored(server):
  steps = drained(server)["steps"]
  with socket.create_connection(("127.0.0.1", server.port)) as client:
    _reset_at_close(client)
    client.sendall(_request(ask(
      ["gone"] * 40, echo=True, logprobs=1, max_tokens=80, ignore_eos=True
    )))
    while not server.api.service.calls:
      time.sleep(0.001)
  all_is_back(server)
  # Completing all of them, 4 at a time, takes 800 steps.
  assert drained(server)["steps"] - steps < 400


@contextlib.contextmanager
def _half_closed(server, content):
  """Context of a client that sends data and closes this direction."""
  with socket.create_connection(("127.0.0.1", server.port)) as client:
    client.settimeout(60)
    client.sendall(content)
    client.shutdown(socket.SHUT_WR)
    yield client


def _received(client):
  """Returns all that a client receives."""
  return b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_closes_its_direction_is_answered(server, version, stream):
  """Python's client discards the interim response; HTTP/1.0 has none."""
  fields = ask(
    "half", max_tokens=90, n=16, stream=stream, ignore_eos=True, temperature=0
  )
  with _half_closed(server, _request(fields, version)) as client:
    assert version != "1.0" or b"200 OK" in client.recv(15, socket.MSG_PEEK)
    with http.client.HTTPResponse(client) as answer:
      answer.begin()
      assert answer.status == 200
      body = answer.read()
  if stream:
    assert body.count(b'"finish_reason":"length"') == 16
    assert b"data: [DONE]" in body
    return
  expected = alone("half", 90)
  texts = [choice["text"] for choice in json.loads(body)["choices"]]
  assert all(text.startswith(expected.text) for text in texts)


def test_requests_before_the_end_of_data_are_answered(server):
  quick = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
  # An incomplete head or body is not a request.
  part = _request(ask("part"))[:-1]
  for content, count in (
    (quick * 3, 3), (b"", 0), (quick[:-1], 0), (part, 0), (quick + part, 1),
  ):
    with _half_closed(server, content) as client:
      assert _received(client).count(b"200 OK") == count


@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_client_that_closes_is_cancelled(server, stream):
  metrics = server.api.service.metrics
  ends = metrics._ends.labels(State.CANCELLED.value)
  before = ends._value.get()
  request = _request(ask(
    "gone", max_tokens=90, n=40, stream=stream, ignore_eos=True
  ))
  with _half_closed(server, request) as client:
    client.recv(1)  # the interim response, or the stream
  all_is_back(server)
  assert ends._value.get() > before


def test_conversation_turns_reuse_the_kept_prefix(server):
  first = httpx2.post(f"{server.url}/v1/completions", timeout=300, json=ask(
    "conversation", max_tokens=20, temperature=0, conversation="one",
    ignore_eos=True,
  )).json()
  prompt = "conversation" + first["choices"][0]["text"] + "?"
  second = httpx2.post(f"{server.url}/v1/completions", timeout=300, json=ask(
    prompt, max_tokens=10, temperature=0, conversation="one",
  )).json()
  assert second["choices"][0]["text"] == alone(prompt, 10).text
  cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
  assert cached >= 16


def test_failed_engine_returns_500_and_blocks_no_client(monkeypatch):
  with small_server.running() as server:
    def broken(step):
      raise RuntimeError("the device is on fire")

    monkeypatch.setattr(server.api.service.engine.executor, "submit", broken)
    for stream in (True, False):
      answer = httpx2.post(
        f"{server.url}/v1/completions", json=ask("a", stream=stream)
      )
      assert answer.status_code == 500
      assert "on fire" in answer.json()["error"]["message"]
    health = httpx2.get(f"{server.url}/health", timeout=60)
    assert health.status_code == 503
    assert health.json()["status"] == "broken"
    state = httpx2.get(f"{server.url}/state", timeout=60)
    assert state.status_code == 200


def test_prompt_that_cannot_be_scored_fails_alone(server, monkeypatch):
  def large(rows, **how):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9.9G, please")

  monkeypatch.setattr(server.api.service._scorer, "score", large)
  url = f"{server.url}/v1/completions"
  for stream in (True, False):
    answer = httpx2.post(url, timeout=60, json=ask(
      ["large", "also"], echo=True, logprobs=1, stream=stream
    ))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "out_of_memory"
  answer = httpx2.post(url, json=ask("other", temperature=0), timeout=60)
  assert answer.json()["choices"][0]["text"] == alone("other", 16).text
  drained(server)


def test_nan_fails_only_its_own_sequence(monkeypatch):
  """Sets the embedding of one letter to NaN, and thereby what follows it."""
  model = small_server.decoder()
  params = dict(model.weights.params)
  rank, row = divmod(small_server.LETTERS.index("Z"), 16)
  params["embedding"] = params["embedding"].at[rank, row].set(np.nan)
  model.weights = dataclasses.replace(model.weights, params=params)
  monkeypatch.setattr(small_server, "decoder", lambda: model)
  with small_server.running() as server:
    async def all_at_once():
      async with httpx2.AsyncClient(timeout=60) as client:
        return await asyncio.gather(*(
          client.post(f"{server.url}/v1/completions", json=ask(
            prompt, max_tokens=9, stream=stream, temperature=0
          ))
          for prompt in ("abc", "aZc", "bcd", "Z" * 20, "aZ")
          for stream in (False, True)
        ))

    answers = asyncio.run(all_at_once())
    codes = [answer.status_code for answer in answers]
    assert codes == [200, 200, 500, 500, 200, 200, 500, 500, 500, 500]
    for prompt, code in (("aZc", 500), ("abc", 200)):
      answer = httpx2.post(f"{server.url}/v1/completions", timeout=60, json=ask(
        prompt, max_tokens=0, echo=True, logprobs=0
      ))
      assert answer.status_code == code
    assert "NaN" in answers[2].json()["error"]["message"]
    assert answers[0].json()["choices"][0]["text"] == alone("abc", 9).text
    all_is_back(server)
    assert httpx2.get(f"{server.url}/health").status_code == 200
    metrics = httpx2.get(f"{server.url}/metrics").text
    assert 'caatnet_requests_total{end="failed"} 7.0' in metrics


def test_first_signal_refuses_new_requests_and_lets_others_finish():
  fields = ask("long", max_tokens=60, stream=True, ignore_eos=True, n=16)
  threads = set(threading.enumerate())
  with small_server.running(drain_s=60) as running:
    url = f"{running.url}/v1/completions"
    with httpx2.stream("POST", url, json=fields, timeout=300) as answer:
      lines = filter(None, answer.iter_lines())
      next(lines)
      running.server.handle_exit(signal.SIGTERM, None)
      refused = httpx2.post(url, json=ask("late"))
      health = httpx2.get(f"{running.url}/health")
      *_, last = lines
  assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
  assert refused.json()["error"]["code"] == "draining"
  assert (health.status_code, health.json()) == (503, {"status": "draining"})
  assert last == "data: [DONE]"
  assert running.server.exit_code == 0
  assert set(threading.enumerate()) <= threads


def test_responses_are_cut_off_after_the_drain_time():
  with small_server.running(drain_s=0.1) as running:
    fields = ask("long", max_tokens=90, stream=True, ignore_eos=True, n=40)
    url = f"{running.url}/v1/completions"
    with httpx2.stream("POST", url, json=fields, timeout=300) as answer:
      lines = filter(None, answer.iter_lines())
      next(lines)
      running.server.handle_exit(signal.SIGINT, None)
      *_, last = lines
    assert "the server has shut down" in last
  assert running.server.exit_code == 1
