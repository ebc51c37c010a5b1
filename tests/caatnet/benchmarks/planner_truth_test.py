"""Benchmark of planned steps with processes: messages, sums and errors."""

import collections
import json

import ml_collections
import numpy as np
import pytest

from caatnet.benchmarks.harness import namespaces, processes
from caatnet.benchmarks.planner import planner_truth
from configs.benchmark import planner_truth as config_of
from parallel.planner import latency
from parallel.planner.space import Configuration

OPTIONS = config_of.get_config("test").benchmark
CONFIGURATIONS = [
  Configuration(1, 2, 2, 2), Configuration(4, 1, 1, 4, "zb_h1"),
  Configuration(2, 2, 1, 2, "gpipe"), Configuration(2, 1, 2, 4, "eager_1f1b"),
]


def _problem(size=4):
  links = np.full((size, size), 1e9)
  return planner_truth.problem_of(OPTIONS, links, 1e-4 * np.ones((size, size)))


@pytest.mark.parametrize("c", CONFIGURATIONS, ids=str)
def test_messages_are_received_in_the_order_of_sending(c):
  order = np.random.default_rng(0).permutation(4).reshape(c.grid)
  given = planner_truth.jobs(c, _problem(), order, 0.0)
  sent, received = collections.defaultdict(list), collections.defaultdict(list)
  for me, job in enumerate(given):
    assert me in job["tensor"]
    assert me in job["data"]
    for source, into, _, _, target, out in job["actions"]:
      if source is not None:
        received[source, me].append(into)
      if target is not None:
        sent[me, target].append(out)
  assert sent == received
  assert len(sent) == 2 * (c.stages - 1) * c.data * c.tensor


@pytest.mark.parametrize(("schedule", "programs"), [
  ("gpipe", 1), ("zb_h1", 2)
])
def test_each_device_computes_forwards_and_backwards(schedule, programs):
  """Each program of a backward computes the forward again."""
  c = Configuration(4, 1, 1, 4, schedule, remat="full")
  problem = _problem()
  seconds, again_s = latency.stage(c, problem.step, problem.links.device, 1.0)
  assert again_s > 0
  for job in planner_truth.jobs(c, problem, np.arange(4).reshape(c.grid), 0.0):
    assert sum(action[2] for action in job["actions"]) == pytest.approx(
      c.microbatches * (3 * seconds + programs * again_s)
    )


def test_processes_send_the_predicted_bytes_and_reduce_sums():
  problem = _problem()
  with planner_truth._peers(OPTIONS, 0) as peers:
    for c in CONFIGURATIONS:
      order = np.random.default_rng(1).permutation(4).reshape(c.grid)
      given = planner_truth.jobs(c, problem, order, 0.05)
      answers = peers.do("run", lambda i, given=given: {"job": given[i]}).found
      for job, answer in zip(given, answers, strict=True):
        assert answer["sum"] == sum(1 + other for other in job["data"])
        computing = sum(action[2] for action in job["actions"])
        assert answer["end"] - answer["start"] >= computing
      formula, m = latency.messages(c, problem.step), c.microbatches
      hops = 2 * (c.stages - 1) * m * c.data * c.tensor * formula.boundary
      reduced = sum(size * times for size, times in formula.reductions)
      ranks = 2 * (c.tensor - 1) / c.tensor * m * reduced if c.tensor > 1 else 0
      expected = hops + 4 * (ranks + formula.exchanges[0])
      # Arrays that do not divide are cut into parts that differ by an element.
      assert sum(a["sent"] for a in answers) == pytest.approx(expected, 1e-3)


def test_drawn_configurations_are_within_a_factor_of_the_best():
  options = config_of.get_config("test").benchmark
  options.drawn = 8
  problem = _problem()
  found = planner_truth.picked(problem, options, seed=0)
  again = planner_truth.picked(problem, options, seed=0)
  assert [x[0] for x in found] == [x[0] for x in again]
  seconds = [x[-1] for x in found]
  assert len(found) == options.drawn
  assert min(seconds) == seconds[0] >= max(seconds) / options.within
  options.drawn, options.within = 10_000, 1e9
  every = sorted(x[-1] for x in planner_truth.picked(problem, options, seed=0))
  options.within = (every[0] + every[-1]) / 2 / every[0]
  near = [x for x in every if x <= options.within * every[0]]
  assert 1 < len(near) < len(every)
  found = planner_truth.picked(problem, options, seed=0)
  assert sorted(x[-1] for x in found) == near


def test_model_is_that_of_the_options_and_devices_compute_at_their_rate():
  problem = _problem()
  w, layers = OPTIONS.width, OPTIONS.layers
  # An MLP of twice the width: ten matrices per layer; gains; both embeddings.
  assert problem.step.model.num_params == (
    layers * (10 * w**2 + 2 * w) + w + 2 * w**2
  )
  assert (problem.step.batch_size, problem.step.seq_len) == (
    OPTIONS.batch_size, OPTIONS.positions
  )
  slow = ml_collections.ConfigDict(OPTIONS)
  slow.flops = OPTIONS.flops / 2
  links = problem.links
  half = planner_truth.problem_of(slow, links.bandwidth, links.latency_s)
  for c in CONFIGURATIONS:
    seconds, twice = (
      latency.stage(c, problem.step, x.links.device, 1.0)[0]
      for x in (problem, half)
    )
    assert twice == pytest.approx(2 * seconds)


def test_summary_compares_predicted_and_measured_steps(capsys):
  def matrix(*pairs, left=0):
    return {"left": left, "rows": [
      {"configuration": "c", "order": "own", "predicted_s": predicted,
       "measured_s": measured} for predicted, measured in pairs
    ]}

  found = planner_truth._shown({
    "0": matrix((1.0, 1.1), (2.0, 2.2), (3.0, 2.7)),
    "1": matrix((1.0, 1.5), (4.0, 1.2), left=2),
  })
  assert [row["seed"] for row in found["rows"]] == ["0"] * 3 + ["1"] * 2
  assert found["left"] == 2
  assert found["loss"] == pytest.approx({"0": 0, "1": 0.25})
  # Ranks 1.5, 3, 4, 1.5, 5 and 1, 4, 5, 3, 2.
  ranks = np.corrcoef([1.5, 3, 4, 1.5, 5], [1, 4, 5, 3, 2])[0, 1]
  assert found["rank_correlation"] == pytest.approx(ranks)
  printed = capsys.readouterr().out
  assert "error: median 10.0%, most 70.0%" in printed
  assert "0.0%, 25.0%" in printed
  assert "0.900" in printed


def test_complete_file_is_read_and_an_interrupted_run_continues(
  tmp_path, monkeypatch
):
  config, path = config_of.get_config("test"), tmp_path / "rows.json"
  config.benchmark.results = str(path)
  found = planner_truth.run(config)
  assert found["left"] == 0
  assert len(found["rows"]) == config.benchmark.drawn
  for row in found["rows"]:
    assert min(row["all_s"]) <= row["measured_s"] <= max(row["all_s"])
    assert row["sent_bytes"] > 0
  seconds = [row["predicted_s"] for row in found["rows"]]
  assert seconds[0] == min(seconds)
  kept = json.loads(path.read_text())
  with monkeypatch.context() as patch:
    patch.setattr(processes, "Peers", None)  # no process is started
    assert planner_truth.run(config) == found
  assert json.loads(path.read_text()) == kept
  # Without its last row, that row is measured and no other.
  matrix = kept["matrices"]["0"]
  del matrix["rows"][-1]
  matrix["left"] = 1
  path.write_text(json.dumps(kept))
  again = planner_truth.run(config)
  assert again["rows"][:-1] == found["rows"][:-1]
  for key in ("configuration", "order", "predicted_s", "sent_bytes"):
    assert again["rows"][-1][key] == found["rows"][-1][key]


def test_rows_of_another_config_are_not_mixed(tmp_path):
  config = config_of.get_config("test")
  config.benchmark.results = str(tmp_path / "rows.json")
  (tmp_path / "rows.json").write_text('{"config": "{}", "matrices": {}}')
  with pytest.raises(ValueError, match="has rows of another config"):
    planner_truth.run(config)


def test_error_if_links_cannot_be_shaped(monkeypatch, tmp_path):
  monkeypatch.setenv("PATH", str(tmp_path))
  with (
    pytest.raises(ValueError, match="shaped here: there is no 'ip'"),
    namespaces.shaped(np.ones((2, 2))),
  ):
    pass
  (tmp_path / "ip").write_text("#!/bin/sh\necho not permitted >&2\nexit 1\n")
  (tmp_path / "ip").chmod(0o755)
  with (
    pytest.raises(ValueError, match=r"not permitted.*this needs root"),
    namespaces.shaped(np.ones((2, 2))),
  ):
    pass
