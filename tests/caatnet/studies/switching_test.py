"""Properties of the studies of context switching and of fairness."""

import dataclasses
import json
import math

import numpy as np
import pytest

from caatnet.serving.traces import Arrival, Sessions
from caatnet.show import drawing, render
from caatnet.studies.serving import (
  cells,
  fairness,
  fastswitch,
  report,
  server,
  study,
  tails,
)
from configs.serving import fairness as fairness_config
from configs.serving import fastswitch as config_file
from tests.parallel.base.report_test import check

CONFIG = config_file.get_config("test").to_dict()
SESSIONS = Sessions(10, 20.0, seed=5, think_s=1.0, longest_answer=30)


def _serve(arm, machine=None, arrivals=None, kind="random"):
  machine = machine or server.machine(CONFIG["model"], CONFIG["hardware"])
  return server.serve(
    machine, CONFIG["arms"][arm] | {"found": False},
    arrivals or SESSIONS.arrivals(), CONFIG["limits"],
    {"kind": kind, "frequency": 0.3},
  )


@pytest.fixture(scope="module")
def outcomes():
  return {arm: _serve(arm) for arm in CONFIG["order"]}


def test_all_requests_are_served_and_every_token_is_counted(outcomes):
  arrivals = {a.number: a for a in SESSIONS.arrivals()}
  largest = 160 * 16
  for outcome in outcomes.values():
    assert len(outcome.requests) == len(arrivals)
    for request in outcome.requests:
      arrival = arrivals[request.number]
      fits = arrival.prompt + arrival.output - 1 <= largest
      assert len(request.tokens) == (arrival.output if fits else 0)


def test_mean_in_system_is_rate_times_mean_latency(outcomes):
  """Little's law, which is exact over a run that has drained."""
  for outcome in outcomes.values():
    found = cells.run_statistics(outcome, CONFIG["arms"]["cost"])
    rate = len(outcome.requests) / outcome.seconds
    assert found["in_system"] == pytest.approx(
      rate * found["mean_latency"], rel=1e-9
    )


@pytest.mark.parametrize("arm", ["blocks", "reuse"])
def test_columns_are_those_of_the_recorded_run(arm, monkeypatch):
  """Counts steps, copies and requests outside of scheduler and engine."""
  copies, steps = [], []

  class Recorded(server.Simulator):
    def copy(self, copy):
      copies.append(copy)
      super().copy(copy)

    def submit(self, step):
      chunks = [(chunk.start, chunk.length) for chunk in step.chunks]
      steps.append(self.costs.steps.step_s(step.positions + 1, chunks))
      super().submit(step)

  monkeypatch.setattr(server, "Simulator", Recorded)
  outcome = _serve(arm)
  found = cells.run_statistics(outcome, CONFIG["arms"][arm])
  served = [r for r in outcome.requests if r.tokens]
  ends = sorted(r.end_s for r in served)
  last = max(r.end_s for r in outcome.requests)
  assert found["seconds"] == last
  assert found["throughput"] == pytest.approx(
    sum(len(r.tokens) for r in served) / last
  )
  assert found["refused"] == len(outcome.requests) - len(served)
  # At this rate, nine tenths of the requests end when they do.
  ended = 0.9 * len(served) / found["capacity"]
  assert ends[math.floor(0.9 * (len(ends) - 1))] <= ended
  assert ended <= ends[math.ceil(0.9 * (len(ends) - 1))]
  assert found["busy"] == pytest.approx(sum(steps) / last)
  # Seconds with a request in the system: the union of all stays.
  present, until = 0.0, 0.0
  for start, end in sorted((r.arrival_s, r.end_s) for r in outcome.requests):
    present += max(0.0, end - max(start, until))
    until = max(until, end)
  assert found["stalled"] == pytest.approx((present - sum(steps)) / last)
  # Pages that are adjacent on both sides are one run.
  runs = []
  for copy in copies:
    if copy.kind != "within":
      pairs = list(zip(copy.source, copy.target, strict=True))
      breaks = [i for i in range(1, len(pairs)) if any(
        pairs[i][side] != pairs[i - 1][side] + 1 for side in (0, 1)
      )]
      runs += np.diff([0, *breaks, len(pairs)]).tolist()
  layers, pages = CONFIG["model"]["num_layers"], sum(runs)
  assert pages > 0
  page_bytes = 16 * 2 * layers * 2 * (
    CONFIG["model"]["num_kv_heads"] * CONFIG["model"]["width"]
    // CONFIG["model"]["num_heads"]
  )
  single = CONFIG["arms"][arm]["single"]
  assert {key: found[key] for key in (
    "pages", "bytes", "ranges", "single_ranges", "run_length", "calls",
  )} == pytest.approx({
    "pages": pages, "bytes": pages * page_bytes,
    "ranges": 2 * layers * (pages if single else len(runs)),
    "single_ranges": 2 * layers * pages, "run_length": pages / len(runs),
    # A call copies a power of two of pages.
    "calls": sum(bin(run).count("1") for run in runs),
  })


def test_next_turn_arrives_after_the_thinking_time(outcomes):
  arrivals = {a.number: a for a in SESSIONS.arrivals()}
  by = {r.number: r for r in outcomes["reuse"].requests}
  later = [a for a in arrivals.values() if a.think_s is not None]
  for arrival in later:
    before = next(
      a for a in arrivals.values() if a.conversation == arrival.conversation
      and a.prompt + a.output == arrival.context
    )
    assert by[arrival.number].arrival_s == pytest.approx(
      by[before.number].end_s + arrival.think_s
    )


def test_arms_are_ordered_by_ranges_and_bytes(outcomes):
  """Groups copy fewer ranges than pages, reuse moves fewer bytes per swap."""
  found = {
    arm: cells.run_statistics(outcome, CONFIG["arms"][arm])
    for arm, outcome in outcomes.items()
  }
  assert found["recompute"]["ranges"] == found["recompute"]["swapped"] == 0
  assert found["blocks"]["ranges"] == found["blocks"]["single_ranges"] > 0
  for arm in ("groups", "asynchronous", "reuse"):
    assert 0 < found[arm]["ranges"] < found[arm]["single_ranges"], arm
    assert found[arm]["swapped"] == found[arm]["able"] > 0
  out = {
    arm: outcomes[arm].scheduler.counts.pages["out"]
    for arm in ("asynchronous", "reuse")
  }
  turned = sum(r.more for r in outcomes["reuse"].requests)
  assert out["reuse"] < out["asynchronous"] + turned * 160
  assert found["cost"]["able"] == found["cost"]["cheaper"] > 0


def test_reuse_copies_fewer_bytes_on_one_schedule():
  """Swaps one request out repeatedly: only new pages are copied."""
  # An urgent request arrives while it runs, three times.
  long = [Arrival(0, 0.0, 1200, 200)]
  urgent = [Arrival(n, 1.5 * n, 2000, 4) for n in (1, 2, 3)]
  clients = {a.number: ("", 0.0 if a in urgent else 1.0) for a in long + urgent}
  moved = {}
  for arm in ("asynchronous", "reuse"):
    machine = server.machine(CONFIG["model"], CONFIG["hardware"])
    outcome = server.serve(
      machine, CONFIG["arms"][arm] | {"found": False}, long + urgent,
      CONFIG["limits"], {"kind": "none"}, clients=clients,
    )
    assert outcome.requests[0].num_preempted == 3
    moved[arm] = outcome.scheduler.counts.pages
  assert moved["asynchronous"]["out"] >= 3 * 75
  assert 75 <= moved["reuse"]["out"] <= 75 + 2 + 200 // 16 + 1
  assert moved["reuse"]["in"] == moved["asynchronous"]["in"]


def test_steps_wait_for_synchronous_copies_only(outcomes):
  counts = {arm: o.scheduler.counts for arm, o in outcomes.items()}
  copies = {
    arm: sum(c.runs["out"].values()) for arm, c in counts.items()
  }
  assert copies["groups"]
  assert counts["groups"].waited > 0
  assert counts["asynchronous"].waited < counts["groups"].waited


def test_single_pages_cost_a_call_for_each_range():
  machine = server.machine(CONFIG["model"], CONFIG["hardware"])
  # 1,000 tokens of 131,072 bytes: 63 pages, 4,032 copies of 32 KiB.
  assert machine.copies.page_bytes == 16 * 131072
  call = CONFIG["hardware"]["copy_call_s"]
  together = machine.copies.seconds("out", 1, 63)
  object.__setattr__(machine.copies, "single", True)
  alone = machine.copies.seconds("out", 1, 63)
  assert alone - together == pytest.approx((4032 - 64) * call)


def test_percentiles_lie_in_their_intervals():
  """Equal samples have intervals of zero width."""
  same = tails.summary([np.full(3, 2.0)] * 5)
  assert same["99.9"] == [2.0, 2.0, 2.0]
  assert same["n"] == 15
  rng = np.random.default_rng(0)
  groups = [rng.exponential(size=rng.integers(1, 30)) for _ in range(400)]
  found = tails.summary(groups)
  pooled = np.concatenate(groups)
  for p in tails.PERCENTILES:
    value, low, high = found[f"{p:g}"]
    assert value == np.percentile(pooled, p)
    assert low <= value <= high
  one = found["50"][2] - found["50"][1]
  # 5,800 samples of density 1/2 at the median: 4 / 2 / sqrt(n) x 1 / 0.5
  assert one == pytest.approx(4 / math.sqrt(len(pooled)), rel=0.35)
  alike = tails.summary([np.full(20, g[0]) for g in groups])
  assert alike["50"][2] - alike["50"][1] > 2 * one  # fewer independent samples


def test_killed_study_resumes_after_its_last_cell(tmp_path, monkeypatch):
  arrivals = SESSIONS.arrivals()[:3]
  machine = server.machine(CONFIG["model"], CONFIG["hardware"])
  made = [
    cells.SimulationCell(
      {"n": n}, machine, CONFIG["arms"]["cost"] | {"found": False},
      arrivals[: n + 1], CONFIG["limits"], {"kind": "none"},
    ) for n in range(3)
  ]
  path = tmp_path / "kept" / "cells.jsonl"
  first = cells.run(made[:2], str(path))
  killed = path.read_text()[:-30]  # during a write
  path.write_text("\n".join([killed, "5", '{"key": 1}', "[" * 100_000]))
  simulated = []
  real = cells.SimulationCell.simulate
  monkeypatch.setattr(
    cells.SimulationCell, "simulate",
    lambda cell: simulated.append(cell.where["n"]) or real(cell),
  )
  found = cells.run(made, str(path))
  assert simulated == [1, 2]
  assert found[:2] == first
  assert cells.run(made, str(path)) == found
  assert simulated == [1, 2]


@pytest.mark.parametrize(("change", "message"), [
  ({"order": ("reuse", "magic")}, r"config\.order='magic'"),
  ({"seeds_trace": "none"}, r"config\.seeds_trace"),
  ({"hardware": CONFIG["hardware"] | {"device": "a11"}}, "did you mean a10"),
  ({"hardware": CONFIG["hardware"] | {"memory_share": 0.5, "pages": 0}},
   r"config\.hardware\.device='a10' has no memory left for a cache"),
  ({"kinds": (), "ranks_device": "a11"}, r"config\.ranks_device='a11' must"),
  ({"kinds": (), "ranks": 7}, r"config\.ranks=7: .* not measured"),
  ({"arms": {k: v for k, v in CONFIG["arms"].items() if k != "groups"},
    "order": ("reuse",)}, r"config\.arms must have the arm 'groups'"),
  ({"kinds": (), "hardware": CONFIG["hardware"] | {"pages": 1}},
   r"config\.hardware\.pages=1 are too few for any of the requests"),
  ({"traces": {"azure_conv": {"path": "absent.csv"}}, "kinds": ()},
   "absent.csv"),
  ({"traces": {"azure_chat": {"path": ""}}, "kinds": (),
    "seeds_trace": "azure_chat"},
   r"config\.traces: sample 'azure_chat' must be one of"),
])
def test_invalid_value_is_named(change, message):
  with pytest.raises(ValueError, match=message):
    study.run(CONFIG | change)


def test_cost_model_is_compared_with_the_better_alternative():
  """For each seed and measure; it is beyond by more than half its interval."""
  def row(arm, ttft, tbt):
    return {
      "load": 0.9, "seed": 7, "arm": arm, "able": 5, "cheaper": 3, "swapped": 2,
      "ttft": {"99": ttft}, "tbt": {"99": tbt},
    }

  found = fastswitch._compare_cost_model([
    row("recompute", (4.0, 3.0, 5.0), (1.0, 0.9, 1.1)),
    row("reuse", (3.0, 2.0, 4.0), (2.0, 1.9, 2.1)),
    row("cost", (3.5, 3.0, 5.0), (1.5, 1.4, 1.8)),
  ])
  without_gaps = fastswitch._compare_cost_model([
    row(arm, (3.0, 2.0, 4.0), (None, None, None))
    for arm in ("recompute", "reuse", "cost")
  ])
  assert [r["measure"] for r in without_gaps] == ["ttft"]
  assert [r["measure"] for r in found] == ["ttft", "tbt"]
  assert [r["worse"] for r in found] == [0.5, 0.5]  # than 3.0 and 1.0
  assert [r["width"] for r in found] == pytest.approx([1.0, 0.2])
  assert [r["beyond"] for r in found] == [False, True]
  assert {r["seed"] for r in found} == {7}


def test_study_prints_and_draws(capsys, tmp_path):
  config = CONFIG | {"order": ("recompute", "blocks", "reuse", "cost")}
  config["num_requests"] = 8
  config["sessions"] = config["sessions"] | {"num_sessions": 3}
  result = study.run(config)
  json.dumps(result)
  capacity = result["loads"][0]["capacity"]
  rates = {row["load"]: row["requests"] for row in result["traces"]}
  assert capacity > 0
  assert set(rates) == {0.9}
  made = report.report(result)
  check(made)
  render.show(made)
  printed = capsys.readouterr().out
  for text in ("assumed", "P99.9 rests on", "pages found", "larger than",
               "copies at 25 GB/s each way"):
    assert text in printed, text
  *curves, copies, size = made.figure().panels
  rows = {row["arm"]: row for row in result["sessions"]}
  for panel, measure in zip(curves, ("ttft", "tbt"), strict=True):
    assert {mark.label: (mark.x, mark.y) for mark in panel.marks} == {
      arm: (row[measure]["curve"], result["above"])
      for arm, row in rows.items()
    }
  moved = [row for row in rows.values() if row["ranges"]]
  assert [*copies.marks[0].lengths] == [row["ranges"] for row in moved]
  assert [*size.marks[0].lengths] == [row["bytes"] / 1e9 for row in moved]
  seeds = [dict(result["seeds"][0], beyond=x) for x in (True, False, True)]
  (title,) = (
    table.title for table in report.report(result | {"seeds": seeds}).tables
    if table.title.startswith("the cost model")
  )
  assert title.endswith("half the bootstrap interval: 2 of 3")
  pytest.importorskip("matplotlib")
  drawing.write(made.figure(), tmp_path / "all.png")
  assert (tmp_path / "all.png").stat().st_size > 10_000


def test_difference_is_that_of_the_worst_window():
  """Evaluates the definition over all windows in which both clients wait."""
  rng = np.random.default_rng(2)
  times = np.arange(30.0)
  curves = [(times, rng.integers(0, 5, 30).cumsum()) for _ in "ab"]
  lines = [(times, (rng.random(30) > 0.2).astype(float)) for _ in "ab"]
  ahead = curves[0][1] - curves[1][1]
  both = (lines[0][1] > 0) & (lines[1][1] > 0)
  worst = max(
    abs(ahead[j] - ahead[i]) for i in range(30) for j in range(i, 30)
    if both[i : j + 1].all()
  )
  assert fairness.max_service_difference(*curves, *lines) == worst


def test_vtc_keeps_its_bound_and_others_do_not(capsys, tmp_path):
  config = fairness_config.get_config("test").to_dict()
  config["limits"]["slots"] = 2
  config["policies"] = ("first_come", "strict_priority", "vtc")
  for client in config["clients"].values():
    client |= {"requests": client["requests"] // 3, "prompt": 16, "shared": 16,
               "output": client["output"] // 8}
  result = study.run(config)
  # Two slots hold at most two of the longest requests.
  arrivals, _ = fairness.draw_arrivals(config["clients"], config["seed"])
  assert result["batch"] == 2 * max(a.prompt + a.output for a in arrivals)
  rows = {row["policy"]: row for row in result["rows"]}
  assert rows["vtc"]["largest"] <= result["bound"]
  assert rows["vtc"]["jain"] > 0.98 > rows["strict_priority"]["jain"]
  assert rows["strict_priority"]["largest"] > result["bound"]
  made = report.report(result)
  check(made)
  render.show(made)
  assert "bound" in capsys.readouterr().out
  for panel, row in zip(made.figure().panels, result["rows"], strict=True):
    assert {mark.label: (mark.x, mark.y) for mark in panel.marks} == {
      name: (row["grid"], pytest.approx([y / 1e3 for y in curve]))
      for name, curve in row["service"].items()
    }
  changed = [
    row | {"throughput": throughput, "largest": largest}
    for row, throughput, largest in zip(
      result["rows"], (60, 75, 45), (100, 250, 1500), strict=True
    )
  ]
  table = report.report(result | {"bound": 1000.0, "rows": changed}).tables[0]
  assert "\n1,000 = 2 x 2 x" in table.title
  assert [[row[i] for i in (1, 2, 6)] for row in table.cells()] == [
    ["100", "0.10", "+0.0%"], ["250", "0.25", "+25.0%"],
    ["1,500", "1.50", "-25.0%"],
  ]
  pytest.importorskip("matplotlib")
  drawing.write(made.figure(), tmp_path / "fair.png")
  assert (tmp_path / "fair.png").stat().st_size > 10_000


def test_a_load_is_a_share_of_the_capacity():
  machine = server.machine(CONFIG["model"], CONFIG["hardware"])
  config = CONFIG | {"loads": (0.5, 2.0)}
  arrivals = SESSIONS.arrivals()
  found = fastswitch._CellBuilder(config, machine).loads(
    "x", arrivals, capacity=4.0
  )
  assert len(found) == 2 * len(CONFIG["order"])
  for cell in found:
    last_s = max(arrival.time_s for arrival in cell.arrivals)
    assert len(arrivals) / last_s == pytest.approx(4 * cell.where["load"])


def test_sums_of_an_outcome_start_at_zero():
  outcome = server.Outcome([], None, None)
  sums = dataclasses.asdict(outcome)
  for name in ("requests", "scheduler", "copies"):
    del sums[name]
  assert set(sums.values()) == {0}


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_pages_of_a_rank_fill_the_memory_that_its_weights_leave(ranks):
  """Llama 3.1 8B has 8,030,261,248 parameters and 8 key-value heads of 128."""
  hardware = CONFIG["hardware"] | {
    "device": "h100", "pages": 0, "page_size": 4, "memory_share": 0.8,
    "memory_fraction": 0.5, "host_bytes": 1e9, "copy_rate": 3e9,
  }
  made = server.machine(CONFIG["model"], hardware, ranks, 0.25)
  page_bytes = 2 * 32 * 4 * (8 // ranks) * 128 * 2
  weights = 2 * 8_030_261_248 / ranks
  device = server.device_of(hardware)
  assert made.copies.page_bytes == page_bytes
  # Norms, of a page or less, are not counted.
  assert made.pages == pytest.approx(
    (0.8 * device.memory_bytes - weights) // page_bytes, abs=2
  )
  assert made.tokens == 4 * made.pages
  assert made.host_pages == 1e9 // page_bytes
  assert (made.copies.in_rate, made.copies.out_rate) == (3e9, 3e9)
  assert made.copies.within_rate == device.memory_bandwidth * 0.5 / 2
  assert made.steps.p == 0.25
  assert bool(made.steps.machine) == (ranks > 1)
