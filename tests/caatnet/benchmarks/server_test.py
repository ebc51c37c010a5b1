"""Benchmark of the HTTP server: a complete run with a client's process."""

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
    assert 0 < times[name]["P50"] <= times[name]["P99"]
  assert times["TTFT"]["n"] == options.streams
  assert times["TBT"]["n"] == options.streams * (options.tokens - 1)
  assert times["TTFT"]["P99"] < options.streams * options.tokens / http


def test_row_has_medians_of_rounds_and_the_share_of_each_round(capsys):
  def measures(ttft, tbt):
    return {"TTFT": {"P50": ttft}, "TBT": {"P50": tbt, "P99": 3 * tbt}}

  server._print([{
    "batch": 4, "errors": 2, "bare": [1000.0, 4000.0, 3000.0],
    "http": [900.0, 2000.0, 2400.0],
    "times": [measures(0.5, 0.02), measures(0.25, 0.01), measures(2.0, 0.04)],
  }], types.SimpleNamespace(streams=8, prompt=9, tokens=5, rounds=3))
  printed = capsys.readouterr().out
  assert "8 streams at once, 9 tokens and 5 more" in printed.replace("\n", " ")
  (line,) = (x for x in printed.splitlines() if x.startswith("│"))
  assert [x.strip() for x in line.strip("│").split("│")] == [
    "4", "3,000", "2,000", "80.0%", "0.50", "20.0", "60.0", "2"
  ]
