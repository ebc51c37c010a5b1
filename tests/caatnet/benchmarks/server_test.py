"""Benchmark of the HTTP server: a complete run with a client's process."""

import http.server
import json
import threading
import types

from caatnet.benchmarks.serving import server
from configs.benchmark import server as config_of


def test_all_streams_end_with_and_without_http():
  """Without capsys: uvicorn closes handlers of absl, and these their stream."""
  config = config_of.get_config("test")
  config.inference.update({"context": 16, "chunk": 16})  # few programs
  options = config.benchmark
  (row,) = server.run(config)["rows"]
  assert (row["batch"], row["streams"], row["errors"]) == (4, 8, 0)
  (bare,), (http,), (times,) = row["bare"], row["http"], row["times"]
  assert min(bare, http) > 0
  for name in ("TTFT", "TBT"):
    # Several tokens may arrive in one read, so a time between them may be 0.
    assert 0 <= times[name]["P50"] <= times[name]["P99"] > 0
  assert times["TTFT"]["P50"] > 0
  assert times["TTFT"]["n"] == options.streams
  # Lengths of responses are 2 to 7 tokens, not all equal.
  assert options.tokens == 5
  total = times["TBT"]["n"] + options.streams
  assert 2 * options.streams < total < 7 * options.streams
  assert times["TTFT"]["P99"] < total / http


def test_client_asks_for_the_same_tokens_as_the_engine():
  """A server that refuses all requests, and keeps them."""
  bodies = []

  class Refusal(http.server.BaseHTTPRequestHandler):

    def do_POST(self):
      size = int(self.headers["Content-Length"])
      bodies.append(json.loads(self.rfile.read(size)))
      self.send_error(503)

    def log_message(self, *_):
      pass

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as refusal:
    thread = threading.Thread(target=refusal.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{refusal.server_port}"
    found = server.ask(url, [[1, 2], [3]], [5, 7])
    refusal.shutdown()
    thread.join()
  assert len(found["errors"]) == found["requests"] == 2
  assert sorted((body["prompt"], body["max_tokens"]) for body in bodies) == [
    ([1, 2], 5), ([3], 7)
  ]
  for body in bodies:
    # Greedy, never ends early, and an event for each token.
    assert (body["temperature"], body["logprobs"]) == (0, 0)
    assert body["ignore_eos"]


def test_row_has_medians_of_rounds_and_the_share_of_each_round(capsys):
  def measures(ttft, tbt):
    return {"TTFT": {"P50": ttft}, "TBT": {"P50": tbt, "P99": 3 * tbt}}

  server._print([{
    "batch": 4, "errors": 2, "bare": [1000.0, 4000.0, 3000.0],
    "http": [900.0, 2000.0, 2400.0],
    "times": [measures(0.5, 0.02), measures(0.25, 0.01), measures(2.0, 0.04)],
  }], types.SimpleNamespace(streams=8, prompt=9, tokens=5, rounds=3))
  printed = capsys.readouterr().out
  assert "8 streams at once, 9 tokens and 5 more on average" in (
    printed.replace("\n", " ")
  )
  (line,) = (x for x in printed.splitlines() if x.startswith("│"))
  assert [x.strip() for x in line.strip("│").split("│")] == [
    "4", "3,000", "2,000", "80.0%", "0.50", "20.0", "60.0", "2"
  ]
