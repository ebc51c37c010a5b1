"""Benchmark of experts: requests, latencies and memory limits."""

import asyncio
import http.server
import json
import string
import subprocess
import sys
import threading
import time
import types

import httpx2
import numpy as np
import pytest

from caatnet.benchmarks.harness import memory_limits
from caatnet.benchmarks.serving import experts
from caatnet.serving.experts import Library
from caatnet.serving.server import client
from caatnet.serving.server.client import Outcome
from configs.benchmark import experts as config_of
from tests.caatnet.benchmarks.printed import rows_of


@pytest.fixture
def library(tmp_path):
  made = Library.create(tmp_path / "experts")
  for number in range(5):
    name = f"e{number}"
    made.add(name, {"w": np.full(3, number, np.float32)}, kind=name)
  return made


def test_streams_have_their_orders_and_rate(library):
  config = config_of.get_config("test")
  config.benchmark.seconds = 100.0
  words = experts._vocabularies(5, 0)
  given = config, library, experts._router(library, words), words
  for kind in ("zipf", "uniform", "bursty", "cyclic"):
    found = experts._questions(*given, kind)
    assert len(found) == 800
    assert 80 < found[-1].time_s < 120
    assert {q.body["max_tokens"] for q in found} == {5}
    assert all(len(q.body["prompt"]) == 9 for q in found)
    again = experts._questions(*given, kind)
    assert [q.body for q in again] == [q.body for q in found]
  # One expert more than there are slots, in turn.
  names = [q.body["model"] for q in found]
  assert names == [f"e{i % 3}" for i in range(800)]


def test_router_finds_the_vocabulary_of_a_prompt():
  """For as many experts as the benchmark has, and prompts as long."""
  config = config_of.get_config().benchmark
  words = experts._vocabularies(config.number, config.seed)
  names = tuple(f"e{i}" for i in range(config.number))
  router = experts._router(types.SimpleNamespace(names=names), words)
  rng = np.random.default_rng(1)
  for number in range(config.number):
    drawn = b" ".join(rng.choice(words[number], config.prompt))
    assert router.kind(drawn[: config.prompt]) == names[number]


def test_words_are_of_all_lowercase_letters():
  words = experts._vocabularies(40, 0)
  assert {len(word) for some in words for word in some} == {4}
  assert {*b"".join(b"".join(some) for some in words)} == {
    *string.ascii_lowercase.encode()
  }


def test_library_whose_experts_have_no_kinds_is_refused(library):
  experts._check_kinds(library)
  library.add("e5", {"w": np.zeros(3, np.float32)})
  with pytest.raises(ValueError, match=r"'e5' has the kind ''.*delete"):
    experts._check_kinds(library)


def test_latencies_count_from_the_time_of_sending():
  good = [Outcome(1.0, [1.5, 2.0], 2), Outcome(3.0, [3.25, 4.0], 2)]
  found = experts._summary([*good, Outcome(0.0, error="500: x")])
  assert found["requests"] == 3
  assert found["errors"] == ["500: x"]
  assert found["ttft_p50_s"] == 0.375
  assert found["latency_p50_s"] == 1.0


def test_processes_of_a_group_have_a_memory_limit():
  with memory_limits.limited(0) as none:
    assert none.limit_bytes == 0
  with memory_limits.limited(64 << 20) as group:
    if not group.limit_bytes:
      pytest.skip("needs root and cgroups of version 1")
    assert group.limit_bytes == 64 << 20
    for size, killed in ((16 << 20, False), (256 << 20, True)):
      with subprocess.Popen(
        [sys.executable, "-c", f"input(); bytearray(b'x' * {size})"],
        stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
      ) as process:
        group.add(process.pid)
        process.communicate(b"\n")
      assert (process.returncode == -9) == killed
    assert 16 << 20 < group.peak_bytes() <= 64 << 20


def test_linked_expert_is_a_library(library, tmp_path):
  (library.path / "config.json").write_text("{}")
  experts._link(library, "e3", tmp_path / "one")
  one = Library(tmp_path / "one")
  assert one.names == ("e3",)
  assert one.read("e3").load()["w"].tolist() == [3, 3, 3]


def test_stream_has_a_largest_number_of_requests():
  config = config_of.get_config("test")
  config.benchmark.rate = 1e30
  with pytest.raises(ValueError, match=r"^config\.benchmark\.rate=1e\+30 for"):
    experts.run(config)


@pytest.mark.parametrize("key", ["prompt", "tokens"])
def test_request_that_exceeds_the_context_is_refused(key):
  config = config_of.get_config("test")
  config.benchmark[key] = config.inference.context
  with pytest.raises(ValueError, match=r"exceed config\.inference\.context="):
    experts.run(config)


def test_tables_have_the_counts_of_streams_and_of_processes(capsys):
  row = {
    "stream": "zipf", "eviction": "lru", "requests": 12, "errors": ["x"],
    "loads": 3.0, "load_s": 0.125, "ttft_p50_s": 0.25, "ttft_p99_s": 0.5,
    "latency_p99_s": 0.75, "peak_bytes": 1.5e9,
  }
  ours = row | {"misses": 4.0, "least_misses": 2, "exposed_s": 0.06}
  experts._say(row)
  assert capsys.readouterr().out == (
    "zipf, lru: 12 requests, 1 errors, 3 loads, TTFT P50 0.250 s, P99 0.500 s\n"
  )
  experts._print([ours, row], 2_500_000, 3_000_000_000)
  printed = capsys.readouterr().out
  assert "experts of 2.5 MB in files, limit 3.00 GB" in printed
  common = ["0.250", "0.500", "0.750", "1.50"]
  assert rows_of(printed) == [
    ["zipf", "lru", "12", "1", "4", "2", "3", "0.125", "0.06", *common],
    ["zipf", "lru", "12", "1", "", "", "3", "0.125", "", *common],
  ]
  experts._print([row], 1, 0)
  assert "no memory limit" in capsys.readouterr().out


class Server(http.server.BaseHTTPRequestHandler):
  """Server of experts: notes the models of requests, counts state requests."""

  models: tuple[str, ...] = ()
  states = 0

  def do_GET(self):
    if self.path == "/state":
      Server.states += 1
      self._send(json.dumps({"experts": {
        "load_s": 0.5, "counters": {
          name: dict.fromkeys(experts._COUNTERS, factor * Server.states)
          for name, factor in (("e0", 1), ("e1", 10))
        },
      }}))
    else:
      self._send("{}")

  def do_POST(self):
    asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    Server.models += (asked["model"],)
    used = {"usage": {"completion_tokens": asked["max_tokens"]}}
    self._send("".join(f"data: {x}\n\n" for x in (
      '{"choices":[{"text":"a"}]}', json.dumps(used), "[DONE]"
    )))

  def _send(self, text):
    self.send_response(200)
    self.end_headers()
    self.wfile.write(text.encode())

  def log_message(self, *_):
    pass


@pytest.fixture
def url():
  Server.models, Server.states = (), 0
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


def _asked(*names):
  body = {"prompt": "x", "max_tokens": 1}
  return [
    client.Question(0.01 * i, body | {"model": name})
    for i, name in enumerate(names)
  ]


def test_served_stream_asks_the_router_and_counts_what_has_changed(url):
  config = config_of.get_config("test")
  config.experts.slots = 2
  found = experts._served(
    config, url, _asked("e0", "e1", "e0", "e2"), "zipf", "lru"
  )
  assert Server.models == ("auto",) * 4
  assert (found["stream"], found["eviction"]) == ("zipf", "lru")
  assert (found["requests"], found["errors"]) == (4, [])
  # Counters of both experts, of the second request of them less the first.
  assert {found[key] for key in experts._COUNTERS} == {11}
  assert found["load_s"] == 0.5
  assert found["least_misses"] == 3


def test_processes_are_swapped_when_requests_under_way_have_ended(
  library, url
):
  """Without processes: a switch takes a while, and notes its requests."""
  config = config_of.get_config("test")

  class Swapped(experts._Swapped):
    def _switch(self, name):
      assert not self._num_open
      time.sleep(0.05)
      self._url, self._expert = url, name
      self.starts_s.append(len(Server.models))

  swapped = Swapped(config, library, None)
  names = ["e0", "e0", "e1", "e1", "e1", "e0"]
  outcomes = asyncio.run(swapped.ask_all(_asked(*names)))
  assert sorted(Server.models) == sorted(names)
  # Switches: at first, after the first two, and before the last one.
  assert swapped.starts_s == [0, 2, 5]
  assert not any(outcome.error for outcome in outcomes)
  # The wait for a process counts.
  latencies = [o.times_s[0] - o.sent_s for o in outcomes]
  assert latencies[0] >= 0.05
  assert latencies[-1] >= 0.05


def test_server_that_ends_is_an_error_with_its_last_line(url, tmp_path):
  with open(tmp_path / "log", "w+b") as log:
    log.write(b"first\nlast line\n")
    with subprocess.Popen(["true"]) as ended:
      ended.wait()
      with pytest.raises(ValueError, match=r"has not started: last line$"):
        experts._wait(url, ended, log)
    with subprocess.Popen(["sleep", "60"]) as running:
      experts._wait(url, running, log)
      running.kill()
    log.truncate(0)
    with subprocess.Popen(["true"]) as ended:
      ended.wait()
      with pytest.raises(ValueError, match=r"has not started: killed$"):
        experts._wait(url, ended, log)


# Command that serves as `launch.serve` does, until it is terminated.
SERVE = """
import http.server, json, sys
options = dict(x[2:].split("=", 1) for x in sys.argv[1:])
asked = []
class Server(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    if self.path == "/health":
      self.answer(json.dumps(options))
    else:
      counters = dict.fromkeys(COUNTERS, len(asked))
      self.answer(json.dumps(
        {"experts": {"load_s": 0.5, "counters": {"one": counters}}}
      ))
  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    asked.append(body)
    used = {"usage": {"completion_tokens": body["max_tokens"]}}
    self.answer("".join(f"data: {x}\\n\\n" for x in (
      '{"choices":[{"text":"a"}]}', json.dumps(used), "[DONE]"
    )))
  def answer(self, text):
    self.send_response(200)
    self.end_headers()
    self.wfile.write(text.encode())
  def log_message(self, *_):
    pass
http.server.ThreadingHTTPServer(
  ("127.0.0.1", int(options["port"])), Server
).serve_forever()
""".replace("COUNTERS", repr(experts._COUNTERS))


@pytest.fixture
def programs(monkeypatch):
  """Arguments of the servers that are started, which are stand-ins."""
  found = []

  def spawned(program, *arguments):
    assert program == "serve"
    found.append(arguments)
    return [sys.executable, "-c", SERVE, *arguments]

  monkeypatch.setattr(experts.commands, "spawned", spawned)
  return found


def test_server_has_the_options_of_the_benchmark_and_is_ended(
  library, programs
):
  joined = []
  config = config_of.get_config("test")
  group = memory_limits.Group(0, joined.append, lambda: 0)
  for changes, slots in (({}, config.experts.slots), ({"num_slots": 1}, 1)):
    with experts._server(
      config, library.path, group, "belady", **changes
    ) as url:
      options = httpx2.get(f"{url}/health").json()
    with pytest.raises(httpx2.ConnectError):
      httpx2.get(url)
    assert options["config.experts.path"] == str(library.path)
    assert options["config.experts.eviction"] == "belady"
    assert options["config.experts.random"] == "0"
    assert options["config.experts.slots"] == str(slots)
    assert options["warm_up"] == "True"
    for section in ("inference", "serving"):
      for key, value in config[section].items():
        assert options[f"config.{section}.{key}"] == str(value)
  assert len(programs) == len(set(joined)) == 2


def test_streams_are_sent_to_one_server_and_to_one_per_expert(
  programs, tmp_path, capsys
):
  """The stream is cyclic: the next request is for another expert."""
  config = config_of.get_config("test")
  config.experts.path = str(tmp_path / "experts")
  config.benchmark.seconds = 0.5
  # For Python processes, which are larger than the experts.
  config.benchmark.memory = 1000
  found = experts.run(config)
  size = found["expert_bytes"]
  assert size == Library(tmp_path / "experts").size_bytes("random-000")
  ours, swapped = found["rows"]
  assert (ours["stream"], ours["eviction"]) == ("cyclic", "lookahead")
  assert (swapped["stream"], swapped["eviction"]) == ("cyclic", "processes")
  # Half a second of eight requests per second, and two of them.
  assert (ours["requests"], swapped["requests"]) == (4, 2)
  assert ours["errors"] == swapped["errors"] == []
  assert {ours[key] for key in experts._COUNTERS} == {4}
  assert (ours["load_s"], swapped["loads"]) == (0.5, 2)
  assert swapped["load_s"] > 0
  first, *others = programs
  assert "--warm_up=True" in first
  assert f"--config.experts.path={tmp_path}/experts" in first
  assert len(others) == 2
  for arguments in others:
    assert {"--warm_up=False", "--config.experts.slots=1"} <= {*arguments}
  if found["limit_bytes"]:  # of whole pages
    assert 0 <= 1000 * size - found["limit_bytes"] < 4096
    assert min(row["peak_bytes"] for row in found["rows"]) > 0
  assert "cyclic, processes: 2 requests, 0 errors" in capsys.readouterr().out
