"""Benchmark of nano-batches: a rank's steps, and the predicted times."""

import concurrent.futures
import time
import types

import ml_collections
import numpy as np
import pytest

from caatnet.benchmarks.harness import timing
from caatnet.benchmarks.serving import (
  host_copies,
  nanobatch_peer,
  nanobatches,
)
from caatnet.models.transformer.module import Transformer
from caatnet.serving.engine.device import DecoderExecutor
from configs.benchmark import nanobatches as config_of
from tests.caatnet.benchmarks import unavailable
from tests.caatnet.benchmarks.printed import rows_of

MODEL = {
  "vocab_size": 32, "width": 16, "num_layers": 2, "num_heads": 4,
  "num_kv_heads": 4, "ffn_width": 24,
}


@pytest.fixture
def rank(monkeypatch):
  """A rank whose sums are those with a second rank that has its products."""
  made = nanobatch_peer.Rank.__new__(nanobatch_peer.Rank)  # without sockets
  made.me, made.links, made.sums = "p0", None, []

  def all_reduce(links, operation, x):
    made.sums.append(x.shape)
    found = concurrent.futures.Future()
    found.set_result(2 * x)
    return found

  monkeypatch.setattr(nanobatch_peer, "link_collectives", types.SimpleNamespace(
    all_reduce=all_reduce
  ))
  made.build(MODEL, 5, 20)
  return made


def test_pieces_of_a_rank_have_the_result_of_one_batch(rank):
  one = rank.step("step", 1)
  assert rank.sums == [(1, 5, 16)] * 4  # two halves of two layers
  rank.sums.clear()
  found = rank.step("step", 3)
  assert found["end"] == pytest.approx(one["end"], rel=1e-5)
  assert [shape[1] for shape in rank.sums] == [2, 2, 1] * 4
  # Without sums, half of each update is missing; nothing is sent.
  rank.sums.clear()
  start = time.perf_counter()
  products = rank.step("products", 3)
  assert products["seconds"] <= time.perf_counter() - start
  assert products["end"] == 0
  assert rank.sums == []
  assert products["attention"] + products["mlp"] <= products["seconds"]
  rank.step("sums", 2)
  assert [shape[1] for shape in rank.sums] == [3, 2] * 4


def test_a_rank_has_half_of_the_heads_and_of_the_mlp(rank):
  assert isinstance(rank.module, Transformer)
  config = rank.module.config
  assert (config.num_heads, config.num_kv_heads, config.ffn_width) == (2, 2, 12)
  assert (config.width, config.head_width) == (16, 4)
  # Five decodes of 20 positions have two pages each, and write the last place.
  assert rank.batch.tables.shape == (5, 2)
  assert rank.batch.positions.tolist() == [19] * 5
  np.testing.assert_array_equal(
    rank.batch.places, rank.batch.tables[:, 1] * 16 + 3
  )


def config(decodes):
  return ml_collections.ConfigDict({
    "model": {"num_layers": 3}, "benchmark": {"decodes": decodes},
  })


def test_prediction_without_pieces_is_the_sum_of_both_times():
  found = nanobatches._predicted(
    config(7), 1, {"attention": 2.0, "mlp": 3.0}, {"seconds": 4.0}
  )
  assert found == pytest.approx(2 + 3 + 4)


@pytest.mark.parametrize("decodes", [6, 7])
def test_prediction_of_two_pieces_hides_all_but_the_last_sum(decodes):
  # Sums are shorter than products: one of 3 x 2 x 2 remains, the last one.
  found = nanobatches._predicted(
    config(decodes), 2, {"attention": 6.0, "mlp": 6.0}, {"seconds": 1.2}
  )
  assert found == pytest.approx(6 + 6 + 0.1)


def test_more_pieces_than_decodes_are_one_line():
  own = config(2)
  own.benchmark.cuts, own.benchmark.mbit = (1, 3), (150,)
  with pytest.raises(
    ValueError, match=r"config\.benchmark\.cuts=\(1, 3\): 3 nano-batches are "
  ):
    nanobatches.run(own)


def test_benchmark_without_pieces_measures_nothing():
  own = config(2)
  own.benchmark.update({
    "cuts": (), "pieces": (), "mbit": (150,), "parts": (),
  })
  found = nanobatches.run(own)
  assert (found["rates"], found["linked"], found["copies"]) == ([], [], [])


def test_rates_of_the_engine_are_relative_to_the_first_row(capsys):
  own = config_of.get_config("test")
  own.benchmark.update({"cuts": (), "parts": ()})
  found = nanobatches.run(own)
  first, second = found["rates"]
  assert (first["nanobatches"], second["nanobatches"]) == ("1", "2")
  assert (found["linked"], found["copies"]) == ([], [])
  assert first["ratio"] == [1.0]
  assert second["ratio"] == pytest.approx(
    [second["rate"][0] / first["rate"][0]]
  )
  assert min(first["rate"] + second["rate"]) > 0
  assert f"{first['rate'][0]:,.0f} (" in capsys.readouterr().out


def test_ranks_have_the_sizes_of_the_config_and_take_turns(monkeypatch):
  """Ranks without a model, of which the second is a second slower."""
  monkeypatch.setattr(
    nanobatches, "_KIND", "tests.caatnet.benchmarks.stand_in_rank:Rank"
  )
  checked, found = nanobatches._checked, []
  monkeypatch.setattr(
    nanobatches, "_checked",
    lambda ranks: found.extend(ranks) or checked(ranks)
  )
  own = config_of.get_config("test")
  own.benchmark.update({"cuts": (1, 2), "rounds": 2})
  try:
    one, two = nanobatches._linked(own, 200)
  except ValueError as error:
    unavailable.skip(error)
  assert (one["mbit"], one["pieces"], two["pieces"]) == (200, 1, 2)
  for row in (one, two):
    for what, seconds in (("products", 1), ("sums", 10), ("step", 100)):
      assert row[what] == [seconds + row["pieces"] + 1] * 2
  assert two["gain"] == pytest.approx([102 / 103] * 2)
  options, model = own.benchmark, own.model
  names = ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads",
           "ffn_width")
  given = [
    sorted([name, model[name]] for name in names), options.decodes,
    options.context,
  ]
  assert all(each["given"] == given for each in found)
  # Two ranks, two numbers of pieces, three kinds and a discarded round.
  assert len(found) == 2 * 2 * 3 * 3


def test_rows_are_times_of_all_rounds_and_gains_over_the_first_cut():
  own = config(4)
  own.benchmark.cuts = (1, 2)

  def rounds(*seconds):
    return [
      {"seconds": s, "attention": s / 2, "mlp": s / 2, "end": 5.0}
      for s in seconds
    ]

  found = {
    ("products", 1): rounds(2.0, 3.0), ("sums", 1): rounds(1.0, 1.5),
    ("step", 1): rounds(4.0, 6.0), ("products", 2): rounds(2.5, 3.5),
    ("sums", 2): rounds(0.5, 0.7), ("step", 2): rounds(2.0, 4.0),
  }
  one, two = nanobatches._rows(own, found)
  assert one == {
    "pieces": 1, "step": [4, 6], "products": [2, 3], "sums": [1, 1.5],
    "predicted": pytest.approx([3, 4.5]), "gain": [1, 1],
  }
  assert two == {
    "pieces": 2, "step": [2, 4], "products": [2.5, 3.5], "sums": [0.5, 0.7],
    "predicted": [
      nanobatches._predicted(own, 2, *pair)
      for pair in zip(found["products", 2], found["sums", 2], strict=True)
    ],
    "gain": [2, 1.5],
  }
  found["step", 2][0]["end"] = 5.004
  nanobatches._rows(own, found)
  found["step", 2][0]["end"] = 5.006
  with pytest.raises(
    RuntimeError, match=r"pieces change .* step: \{1: 5\.0, 2: 5\.006\}"
  ):
    nanobatches._rows(own, found)


def test_copies_are_measured_in_parts_of_the_given_size(monkeypatch, capsys):
  copies = []
  copy = DecoderExecutor.copy

  def noted(self, asked):
    assert len(asked.source) == self.host.num_pages
    copies.append(asked.kind)
    copy(self, asked)

  monkeypatch.setattr(DecoderExecutor, "copy", noted)
  own = config_of.get_config("test")
  layers = own.model.num_layers = 2
  own.benchmark.parts = (0, 65536)
  layer, whole = host_copies.run(own)
  # One of each kind in each round of both sizes, the discarded one included;
  # "out" also during steps.
  rounds = 2 * (own.benchmark.rounds + 1)
  assert sorted(copies) == ["in"] * rounds + ["out"] * 2 * rounds
  row, _ = rows_of(capsys.readouterr().out)
  assert row == [
    "0", str(layers), f"{layer['staged_bytes'] / 1024:,.0f}", *(
      timing.range_text(1e3 * np.array(layer[key]), ".1f")
      for key in ("out", "in", "during")
    ), *(timing.range_text(layer[key], ".3f") for key in ("longest", "slower"))
  ]
  assert (layer["parts"], whole["parts"]) == (layers, 1)
  pointers = 64  # XLA:CPU counts the tuple of the results
  assert whole["staged_bytes"] == pytest.approx(
    layers * layer["staged_bytes"], abs=layers * pointers
  )
  own.benchmark.parts = (whole["staged_bytes"] // 1024 + 1,)
  assert host_copies.run(own)[0]["parts"] == 1
  for row in (layer, whole):
    assert min(row["out"] + row["in"] + row["during"]) > 0


def test_steps_during_a_copy_are_compared_with_those_of_the_same_round():
  found = host_copies.summary({
    "none": [(0.0, [1, 1]), (0.0, [4, 4])], "out": [(5, []), (6, [])],
    "in": [(7, []), (8, [])], "during": [(9, [1, 1, 4]), (10, [2, 2, 2])],
  })
  assert found == {
    "out": [5, 6], "in": [7, 8], "during": [9, 10],
    "longest": [4, 1], "slower": [2, 0.5],
  }


def test_slower_rank_counts_and_results_must_be_equal():
  found = [{"seconds": 1.0, "end": 5.0}, {"seconds": 2.0, "end": 5.0}]
  assert nanobatches._checked(found)["seconds"] == 2.0
  found[0]["end"] = 6.0
  with pytest.raises(RuntimeError, match="ranks have different results"):
    nanobatches._checked(found)


def test_table_of_two_processes_is_in_ms_and_has_ratios(capsys):
  nanobatches._show_linked([{
    "mbit": 150, "pieces": 2, "products": [0.002], "sums": [0.001, 0.003],
    "step": [0.004, 0.008], "predicted": [0.002, 0.006], "gain": [1.5, 1.0],
  }], 256)
  printed = capsys.readouterr().out
  assert "ms of a step of 256 decodes" in printed
  assert rows_of(printed) == [[
    "150", "2", "2.0 (2.0 to 2.0)", "2.0 (1.0 to 3.0)", "6.0 (4.0 to 8.0)",
    "4.0 (2.0 to 6.0)", "0.62 (0.50 to 0.75)", "1.25 (1.00 to 1.50)",
  ]]
