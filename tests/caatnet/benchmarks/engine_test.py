"""Benchmark of the serving engine: a complete run, arrivals and profiles."""

import types

import numpy as np
import pytest

from caatnet.benchmarks.harness import timing
from caatnet.benchmarks.serving import engine
from caatnet.inference import batches
from caatnet.inference.decoder import Capacity
from caatnet.serving.engine.simulator import Simulator
from configs.benchmark import engine as config_of
from tests.caatnet.benchmarks.printed import rows_of


def test_only_decode_steps_are_timed():
  """A step that reads prompts still runs when the first one is submitted."""
  marks = [(0.0, 0.0), (85.0, 150.0), (105.0, 190.0), (125.0, 230.0)]
  np.testing.assert_allclose(engine._per_step(marks), (20, 40))


def test_run_compares_engine_loop_and_simulator(capsys):
  config = config_of.get_config("test")
  config.model.num_layers = 1
  config.benchmark.rounds = 2
  found = engine.run(config)
  (rates,) = found["rates"]
  assert rates["batch"] == 2
  for loop, driven, ratio in zip(
    rates["loop"], rates["engine"], rates["ratio"], strict=True
  ):
    assert ratio == pytest.approx(driven / loop)
  assert len(rates["cpu_ratio"]) == 2
  served = found["served"]
  assert list(served) == [
    f"{name} {what}" for name in ("TTFT", "TPOT")
    for what in ("mean", "P50", "P90")
  ]
  for pairs in served.values():
    assert len(pairs) == 2
    for pair in pairs:
      assert min(pair) > 0
  for name in ("TTFT", "TPOT"):
    for middle, high in zip(
      served[f"{name} P50"], served[f"{name} P90"], strict=True
    ):
      assert np.all(np.less_equal(middle, high))
  printed = capsys.readouterr().out
  assert "ms of 4 requests" in printed
  first, *others = rows_of(printed)
  assert first == ["2", *(
    timing.range_text(rates[key], spec) for key, spec in (
      ("loop", ",.0f"), ("engine", ",.0f"), ("ratio", ".2f"),
      ("cpu_ratio", ".2f"),
    )
  )]
  assert [row[0] for row in others] == list(served)


def test_table_of_requests_compares_runs_with_the_ones_before_them(capsys):
  options = types.SimpleNamespace(requests=7, rounds=3)
  engine._show_served({
    "TTFT mean": [(2.0, 1.0), (4.0, 3.0), (1.0, 2.0)], "TPOT P90": [(5.0, 6.0)],
  }, options, 1.25)
  printed = capsys.readouterr().out
  assert "ms of 7 requests: median (range) of 3 runs" in printed
  assert "1.2 jobs wanted" in printed
  assert rows_of(printed) == [
    ["TTFT mean", "2.0 (1.0 to 4.0)", "2.0 (1.0 to 3.0)", "0.75 (0.50 to 2.00)",
     "1.12 (0.25 to 2.00)"],
    ["TPOT P90", "5.0 (5.0 to 5.0)", "6.0 (6.0 to 6.0)", "1.20 (1.20 to 1.20)",
     "-"],
  ]


def test_requests_arrive_at_random_at_the_given_rate():
  config = types.SimpleNamespace(
    model=types.SimpleNamespace(vocab_size=7),
    benchmark=types.SimpleNamespace(requests=400),
  )
  found = list(engine._arrivals(config, 5.0))
  assert [request.number for request in found] == list(range(400))
  gaps = np.diff([0.0, *(request.arrival_s for request in found)])
  assert gaps.min() > 0
  assert gaps.mean() == pytest.approx(1 / 5, rel=0.1)
  lengths = [len(request.prompt) for request in found]
  assert (min(lengths), max(lengths)) == (1, 127)
  answers = [request.max_tokens for request in found]
  assert (min(answers), max(answers)) == (8, 63)
  assert {int(x) for r in found for x in r.prompt} == set(range(7))


def test_rate_is_a_fraction_of_that_of_a_full_batch():
  """A request generates 36 tokens on average, and reads 1.5 chunks."""
  profile = types.SimpleNamespace(
    mean_s=lambda contexts, chunks: 0.5 if chunks else 0.1 * (
      len(contexts) == 4
    )
  )
  options = types.SimpleNamespace(slots=4, load=0.5)
  assert engine._rate(profile, options) == pytest.approx(
    0.5 / (36 * 0.1 / 4 + 1.5 * 0.4)
  )


def test_metrics_are_means_and_percentiles_in_ms():
  requests = [
    types.SimpleNamespace(ttft_s=0.001 * i, tpot_s=0.01 * i)
    for i in (1, 2, 3, 4, 10)
  ]
  found = engine._looked_at(requests)
  assert found == pytest.approx({
    "TTFT mean": 4, "TTFT P50": 3, "TTFT P90": 7.6,
    "TPOT mean": 40, "TPOT P50": 30, "TPOT P90": 76,
  })


class Rehearsed(Simulator):
  """Simulator that records the sizes of steps, of which each takes a second."""

  def __init__(self, capacity, num_pages):
    super().__init__(
      types.SimpleNamespace(step_s=lambda contexts, chunks: 1.0), most=10**6
    )
    self.seconds = {}
    self.decoder = types.SimpleNamespace(
      capacity=capacity,
      cache_shape=types.SimpleNamespace(num_pages=num_pages),
    )

  def submit(self, step):
    sizes = self.sizes_of(step.positions + 1, [
      (chunk.start, chunk.length) for chunk in step.chunks
    ])
    self.seconds.setdefault(sizes, []).append(1.0)
    super().submit(step)

  def sizes_of(self, contexts, chunks):
    return batches.sizes_of(self.decoder.capacity, contexts, chunks)


@pytest.mark.parametrize("batch", [1, 3, 6, 8])
def test_rehearsal_has_steps_of_all_sizes_that_requests_need(batch):
  """Any number of decodes, with a part of any prompt or without one."""
  capacity = Capacity(
    batch=batch, context=3 * engine._CHUNK, chunk=engine._CHUNK, page_size=16
  )
  pages = batch * capacity.pages_per_sequence
  executor = Rehearsed(capacity, pages)
  found = engine._rehearse(executor, 2)
  chunks = [[], *([(0, n)] for n in (1, 16, 17, 32, 33, engine._CHUNK))]
  assert {
    executor.sizes_of(np.full(decodes, context), read)
    for decodes in range(batch + 1) for context in (1, 3 * engine._CHUNK)
    for read in chunks if 0 < decodes + len(read) <= batch
  } <= found.keys()
