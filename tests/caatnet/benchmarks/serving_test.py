"""Benchmark of the scheduler: its load, clocks, and rows of all rounds."""

import gc
import time

import numpy as np
import pytest

from caatnet.benchmarks.serving import serving
from configs.benchmark import serving as config_of
from tests.caatnet.benchmarks.printed import rows_of


def test_requests_share_one_of_50_beginnings():
  load = serving._Load(clients=3, seed=0)
  asked = [load.request(0.5, 2.0) for _ in range(3000)]
  prompts = [np.asarray(request.prompt) for request in asked]
  beginnings = {prompt[:128].tobytes() for prompt in prompts}
  assert len(beginnings) == 50
  # Of all int32 tokens.
  assert 0 <= min(map(np.min, prompts)) < 2**21
  assert 2**31 - 2**21 < max(map(np.max, prompts)) < 2**31 - 1
  own = [len(prompt) - 128 for prompt in prompts]
  assert (min(own), max(own)) == (64, 899)
  answers = [request.max_tokens for request in asked]
  assert (min(answers), max(answers)) == (50, 399)
  assert {request.client for request in asked} == {0, 1, 2}
  assert [request.number for request in asked] == list(range(1, 3001))
  assert {(r.priority, r.arrival_s) for r in asked} == {(0.5, 2.0)}
  again = serving._Load(clients=3, seed=0).request(0.5, 2.0)
  np.testing.assert_array_equal(again.prompt, prompts[0])


def test_pages_are_those_of_an_8b_model():
  """16 positions, 32 layers, 8 heads of width 128; keys and values, 2 bytes."""
  assert serving._COPY_TIMES.page_bytes == 16 * 32 * 8 * 128 * 2 * 2
  assert serving._COPY_TIMES.ranges_per_run == 32 * 2


def test_watch_sums_both_clocks_until_it_is_read():
  watch = serving._Stopwatch()
  slow = watch(lambda seconds: time.sleep(seconds) or seconds)
  assert [slow(0.001), slow(0.002)] == [0.001, 0.002]
  wall, cpu = watch.take()  # us
  assert wall >= 3000
  assert 0 <= cpu <= wall
  assert watch.take().tolist() == [0, 0]


def test_rounds_are_one_row():
  """Columns of times: by the clock, and of the processor."""
  rounds = [
    {"policy": "x", "spent_us": np.array([[10, 1], [30, 3], [20, 2.0]]),
     "arrival_us": 4.0},
    {"policy": "x", "spent_us": np.array([[10, 5], [10, 5], [100, 9.0]]),
     "arrival_us": 6.0},
  ]
  found = serving._merge_rounds([dict(row) for row in rounds])
  assert found == {
    "policy": "x", "arrival_us": 5.0, "medians_us": [2.0, 5.0],
    "clock_us": {"median": 15.0, "p99": pytest.approx(96.5), "most": 100.0},
    "cpu_us": {"median": 4.0, "p99": pytest.approx(8.8), "most": 9.0},
  }
  rounds[1]["policy"] = "y"
  with pytest.raises(AssertionError, match="the rounds differ"):
    serving._merge_rounds(rounds)


def test_server_is_full_in_each_step(capsys):
  config = config_of.get_config("test")
  config.benchmark.policies = ("first_come",)
  before = gc.get_threshold()
  (row,) = serving.run(config)["rows"]
  assert gc.get_threshold() == before
  assert row["policy"] == "first_come"
  assert row["running"] == config.benchmark.running
  assert row["waiting"] == config.benchmark.waiting
  assert 0 <= row["found"] < 0.5
  assert len(row["medians_us"]) == config.benchmark.rounds
  for clock in ("cpu_us", "clock_us"):
    spread = row[clock]
    assert 0 < spread["median"] <= spread["p99"] <= spread["most"]
  cpu, clock = row["cpu_us"], row["clock_us"]
  assert rows_of(capsys.readouterr().out) == [[
    "first_come", f"{row['running']:.0f}", f"{row['waiting']:.0f}",
    f"{row['preempting']:.1%}", f"{row['found']:.1%}",
    f"{cpu['median']:.0f} ({clock['median']:.0f})",
    ", ".join(f"{x:.0f}" for x in row["medians_us"]),
    *(f"{cpu[k]:.0f} ({clock[k]:.0f})" for k in ("p99", "most")),
    f"{row['arrival_us']:.0f}",
  ]]


@pytest.mark.parametrize(("changes", "message"), [
  ({"policies": ("none",)}, "benchmark.policies: 'none' must be one of"),
  # 128 + 900 + 400 tokens in pages of 16.
  ({"pages": {"first_come": 89}}, "pages.first_come=89 must be at least 90"),
])
def test_invalid_options_are_named(changes, message):
  config = config_of.get_config("test")
  config.benchmark.policies = ("first_come",)
  config.benchmark.update(changes)
  with pytest.raises(ValueError, match=message):
    serving.run(config)
