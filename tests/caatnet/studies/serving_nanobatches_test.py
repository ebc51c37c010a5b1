"""Properties of the study of nano-batches."""

import dataclasses
import itertools

import numpy as np
import pytest

from caatnet.studies.serving import (
  nanobatch_figures,
  nanobatch_pipelines,
  nanobatches,
  study,
)
from caatnet.studies.serving import report as reports
from configs.serving import nanobatches as config_file
from parallel.plans.hardware.devices import A100
from parallel.plans.nanobatches import (
  nanobatch,
  nanobatch_costs,
  nanobatch_timing,
)
from parallel.plans.nanobatches.nanobatch_costs import TokenMix
from tests.parallel.base.report_test import check

CONFIG = config_file.get_config("test").to_dict()
MIX = TokenMix(512, 1280, 1536, 512)


@pytest.fixture(scope="module")
def result():
  return study.run(CONFIG)


def timed(name="llama-2-70b", mix=MIX):
  pipeline = nanobatch_pipelines.PIPELINES[name]
  profile = nanobatch_costs.roofline(
    pipeline.model, A100, pipeline.gpus, mix.tokens, 0.7, pipeline.experts
  )
  return pipeline, nanobatch_pipelines.layer_times(pipeline, mix, profile, A100)


def test_no_plan_is_slower_than_one_batch(result):
  assert {row["tokens"] for row in result["curves"]} == {64, 512, 1024}
  for row in [*result["curves"], *result["pipelines"]]:
    for key in ("gain", "ours_gain", "ours_fitted_gain"):
      assert row.get(key, 1) >= 1
  for row in result["curves"]:
    assert sum(row["sizes"]) == row["tokens"]
    assert row["of_optimum"] < 1
    assert row["gain"] == pytest.approx(row["single_s"] / row["step_s"])
  by = {
    (r["machine"], r["end"], r["tokens"], r["interference"]): r["gain"]
    for r in result["curves"]
  }
  # The ends of the times of reductions are two curves.
  ends = [by["tpu:v5p:2x2x2", end, 1024, 0.0] for end in ("least", "greatest")]
  assert ends[0] != ends[1]
  for (machine, end, tokens, i), gain in by.items():
    assert gain <= by[machine, end, tokens, 0.0]
    assert i in (0.0, 0.5)


def test_break_even_is_the_least_size_from_which_all_gain():
  rows = [
    {"machine": "m", "end": "least", "interference": 0.0, "tokens": n,
     "gain": gain}
    for n, gain in ((1, 1.0), (2, 1.2), (4, 1.0), (8, 1.1), (16, 1.3))
  ]
  (found,) = nanobatches._break_even(rows, 0.01)
  assert found["tokens"] == 8
  assert found["gain"] == 1.3
  (never,) = nanobatches._break_even(rows, 0.5)
  assert never["tokens"] is None


def test_p_at_which_pieces_stop_paying():
  rows = [
    {"machine": "m", "tokens": 8, "bits": 16, "p": p, "nano": gain}
    for p, gain in ((1.0, 1.2), (0.5, 1.005), (0.25, 1.02), (0.1, 1.0),
                    (0.0, 1.0))
  ]
  (found,) = nanobatches._largest_p_without_gain(rows, 0.01)
  assert found["p"] == 0.1
  (always,) = nanobatches._largest_p_without_gain(rows[:1], 0.01)
  assert always["p"] is None


def test_order_of_sizes_in_a_config_does_not_matter(result):
  config = CONFIG | {"tokens": CONFIG["tokens"][::-1], "p": CONFIG["p"][::-1]}
  planner = nanobatches._Planner(config)
  name = config["joint_machines"][0]
  machine = nanobatches._machine("joint_machines", name)
  rows = list(nanobatches._joint(planner, machine, 256, config))
  assert rows == result["joint"]
  config["joint_interference"] = 1.0  # where overlap gains nothing
  slow = nanobatches._joint(planner, machine, 256, config)
  assert rows[0]["nano"] > 1 == next(iter(slow))["nano"]
  curve = nanobatches._curve(
    planner, machine, "least", config | {"interference": (0.0,)}
  )
  assert [row["tokens"] for row in curve] == [64, 512, 1024]


def test_joint_rows_multiply_both_gains(result):
  base = result["joint"][0]
  assert (base["p"], base["bits"], base["single"]) == (1.0, 16, 1.0)
  assert len(result["joint"]) == 4
  for row in result["joint"]:
    assert row["both"] == pytest.approx(row["single"] * row["nano"])
  for less, more in itertools.pairwise(result["joint"][:2]):
    assert more["single"] > less["single"]


@pytest.mark.parametrize("name", nanobatch_pipelines.PIPELINES)
def test_published_pipelines_have_each_token_once(name):
  size = nanobatch_pipelines.PIPELINES[name].tokens
  pipeline, layer = timed(
    name, TokenMix(size // 4, 1280, size - size // 4, 512)
  )
  made = nanobatch_pipelines.operations(pipeline, layer)
  covered = [o for o in made if o.kind != "gather"]
  nanobatch_timing.check(covered, size)
  # Two all-gathers of the first piece send the bytes of its all-reduce.
  gathers = [o for o in made if o.kind == "gather"]
  sums = [o for o in made if o.kind == "sum_1" and o.start == 0]
  assert [o.seconds for o in gathers] == [o.seconds for o in sums]
  assert len({o.kind for o in covered}) == (5 if pipeline.gpus == 1 else 7)


def test_pipeline_whose_sizes_do_not_add_up_is_rejected():
  pipeline, layer = timed()
  for attention, message in (
    (((256, 384), (768,)), r"operation qkv: tokens \[1408, 2048\) are missing"),
    (((256, 384), (768, 641)), "qkv: tokens .2048, 2049. are in two ranges"),
  ):
    wrong = dataclasses.replace(pipeline, attention=attention)
    longer = dataclasses.replace(
      layer, attend=np.zeros(3000), sums=np.zeros(3000)
    )
    with pytest.raises(ValueError, match=message):
      nanobatch_pipelines.operations(wrong, longer)


def test_order_of_llama_2_is_that_of_the_repository():
  pipeline, layer = timed()
  made = nanobatch_pipelines.operations(pipeline, layer)

  def of(resource):
    return [(o.kind, o.start, o.stop) for o in made if o.resource == resource]

  quarters = [(0, 256), (256, 640), (640, 1408), (1408, 2048)]
  assert of("memory") == [("attend", *r) for r in quarters]
  assert of("compute") == [
    *(("qkv", *r) for r in quarters), ("out", 0, 640), ("out", 640, 2048),
    ("up", 0, 640), ("down", 0, 640), ("up", 640, 2048), ("down", 640, 2048),
  ]
  assert of("network") == [
    ("gather", 0, 640), ("sum_1", 0, 640), ("sum_1", 640, 2048),
    ("sum_2", 0, 640), ("sum_2", 640, 1408), ("sum_2", 1408, 2048),
  ]


def test_products_wait_for_what_their_tokens_need():
  pipeline, layer = timed()
  made = nanobatch_pipelines.operations(pipeline, layer)
  needs = nanobatch_timing.dependencies(made)

  def of(kind, start):
    (i,) = (
      i for i, o in enumerate(made) if (o.kind, o.start) == (kind, start)
    )
    return [
      (made[n % len(made)].kind, made[n % len(made)].start, n < 0)
      for n in needs[i]
    ]

  assert of("qkv", 256) == [("sum_2", 0, True)]
  assert of("qkv", 1408) == [("sum_2", 1408, True)]
  assert of("gather", 0) == [("attend", 0, False), ("attend", 256, False)]
  assert of("out", 0) == [("gather", 0, False)]
  assert of("out", 640) == [("attend", 640, False), ("attend", 1408, False)]
  assert of("up", 640) == [("sum_1", 640, False)]


def test_active_parameters_count_the_experts_of_a_token():
  sizes = {
    name: p.active_parameters / 1e9
    for name, p in nanobatch_pipelines.PIPELINES.items()
  }
  assert sizes == pytest.approx({
    "llama-2-70b": 68.98, "llama-3-8b": 8.03, "qwen2-72b": 72.7,
    "mixtral-8x7b": 12.88,
  }, rel=1e-3)


def test_overlap_gains_at_most_what_it_hides():
  pipeline, layer = timed()
  whole = nanobatch_timing.sequential_seconds(
    nanobatch_pipelines.sequential(layer, [2048]), 80
  )
  kinds = {
    kind: 80 * layer.seconds(kind, 0, 2048)
    for kind in ("qkv", "attend", "out", "sum_1", "up", "down", "sum_2")
  }
  assert whole == pytest.approx(sum(kinds.values()))
  products = whole - kinds["sum_1"] - kinds["sum_2"] - kinds["attend"]
  network, both = (
    nanobatch_timing.step_seconds(
      nanobatch_pipelines.operations(pipeline, layer, memory), 80
    ) for memory in (False, True)
  )
  assert products < both < network < whole


def test_planner_and_pipeline_have_the_same_times_without_overlap():
  pipeline, layer = timed()
  costs = nanobatch_pipelines.costs("m", pipeline, layer)
  assert nanobatch.plan(costs, 2048).single_s == pytest.approx(
    nanobatch_timing.sequential_seconds(
      nanobatch_pipelines.sequential(layer, [2048]), 80
    )
  )


def test_interference_is_fitted_to_the_published_gains(result):
  for row in result["ablation"]:
    found = nanobatch_figures._make_pipeline_timer(
      nanobatch_figures.WORKLOADS[nanobatch_figures.FITTED_ON], row["end"]
    )
    for kind, memory, gain in (
      ("network", False, 1.07), ("memory", True, 1.17)
    ):
      seconds = found.overlapped(row[f"{kind}_interference"], memory)
      assert row["step_s"] / seconds == pytest.approx(gain, abs=1e-4)
    assert row["split"] < 0
    assert row["step_s"] / (1 + row["split"]) == pytest.approx(
      found.sequential(1024, 1024)
    )
  assert nanobatch_figures.fit_interference(lambda i: 1 + i, 3.0) is None
  assert nanobatch_figures.fit_interference(
    lambda i: 1 + i, 1.25
  ) == pytest.approx(
    0.25, abs=1e-4
  )


def test_fits_give_the_published_gains_of_the_fitted_pipeline(result):
  rows = [r for r in result["pipelines"] if r["model"] == "llama-2-70b"]
  assert len(rows) == 2
  for row in rows:
    assert row["network_fitted"] == pytest.approx(1.07, abs=1e-4)
    assert row["memory_fitted"] == pytest.approx(1.17, abs=1e-4)
    # Our plan is slowed by the interference of the network alone.
    (fit,) = (r for r in result["ablation"] if r["end"] == row["end"])
    pipeline = nanobatch_pipelines.PIPELINES[row["model"]]
    timed = nanobatch_figures._make_pipeline_timer(
      nanobatch_figures.WORKLOADS[nanobatch_figures.FITTED_ON], row["end"]
    )
    plan = nanobatch.plan(
      nanobatch_pipelines.costs("m", pipeline, timed.layer), 2048,
      interference=fit["network_interference"],
    )
    assert row["ours_fitted_gain"] == pytest.approx(plan.gain)


def test_steps_of_workloads_have_their_share_of_decodes(result):
  mix = nanobatch_figures.mix(
    nanobatch_figures.WORKLOADS["512 in, 1024 out"], 2048
  )
  assert (mix.decodes, mix.prefills) == (1365, 683)
  assert (mix.context, mix.prefill_context) == (1024.5, 256.5)
  assert len(result["workloads"]) == 12
  for row in result["workloads"]:
    assert row["sequential"] < row["fitted"] < row["ideal"] < row["optimum"]
    assert abs(row["error"]) < 0.1


def test_published_ratios_and_optimum_are_arithmetic(result):
  assert result["speedups"]["mean"]["trtllm"] == pytest.approx(1.91, abs=0.005)
  assert result["optimum"][0]["rate"] == pytest.approx(260e12, rel=1e-3)
  assert result["optimum"][2]["tokens"] == pytest.approx(2000)
  shares = [row["peak_share"] for row in result["optimum"]]
  assert shares == pytest.approx(
    [260 / 312, 256.2 / 312, 280 / 312, 1], rel=1e-3
  )
  assert result["speedups"]["least"] == pytest.approx(1212 / 1857)
  assert result["speedups"]["most"] == pytest.approx(1286 / 1857)
  assert result["offload"]["optimum_rate"] == pytest.approx(4.868e9, rel=1e-3)
  offload = result["offload"]
  assert offload["turns"] == pytest.approx(5.04)
  # A rate at which copies take 3.0% of a step.
  assert offload["rate"] / 8 / offload["cost_rate"] == pytest.approx(0.03)
  for share, rate in zip(offload["exposed"], (32e9, 25e9), strict=True):
    assert share == pytest.approx(offload["rate"] / 8 / rate)


def test_pipelines_are_compared_with_the_optimum_of_the_paper(result):
  for row in result["pipelines"]:
    pipeline = nanobatch_pipelines.PIPELINES[row["model"]]
    assert row["optimal"] == pytest.approx(
      row["throughput"] * 2 * pipeline.active_parameters / 260e12, rel=1e-3
    )
    assert row["ours_fitted_gain"] <= row["ours_gain"]
    assert (row["ours_fitted_gain"] < row["ours_gain"]) == (pipeline.gpus > 1)


def test_steps_of_curves_have_a_bounded_number_of_decodes(result):
  found = nanobatches.mix(1000, CONFIG)
  assert (found.decodes, found.prefills) == (256, 744)
  assert (found.context, found.prefill_context) == (1024, 512)
  assert nanobatches.mix(9, CONFIG) == TokenMix(9, 1024, 0, 512)
  for row in result["curves"]:
    ranks = 8
    assert row["rate"] == pytest.approx(row["tokens"] / ranks / row["step_s"])
    assert row["optimum_rate"] * row["of_optimum"] == pytest.approx(
      row["rate"]
    )


def test_report_shows_the_same_cells_in_each_format(result):
  made = reports.report(result)
  assert len(made.tables) == 10
  check(made)
  shown = {
    (panel.title, mark.label, x): y for panel in made.figure().panels
    for mark in panel.marks for x, y in zip(mark.x, mark.y, strict=True)
  }
  least = [row for row in result["curves"] if row["end"] == "least"]
  joint = [row for row in result["joint"] if row["tokens"] == 256]
  assert shown == {
    (f"interference, {row['interference']:g}", row["machine"], row["tokens"]):
    row["gain"] for row in least
  } | {
    (f"256 tokens, bits, {row['machine']}", f"{row['bits']}, {name}", row["p"]):
    row[key] for row in joint
    for name, key in (("nano-batches", "both"), ("one batch", "single"))
  }
  figures = config_file.get_config("figures").to_dict()
  few = reports.report(study.run(figures))
  assert len(few.tables) == 6
  assert few.figure is None


def test_invalid_machine_is_one_line():
  with pytest.raises(ValueError, match=r"config\.machines: .*h300") as error:
    study.run(CONFIG | {"machines": ("gpu:h300:1x8",)})
  with pytest.raises(ValueError, match=r"config\.joint_machines: .*h300"):
    study.run(
      CONFIG | {"machines": (), "joint_machines": ("gpu:h300:1x8",)}
    )
  assert "\n" not in str(error.value)
  none = {"machines": (), "joint_machines": ()}
  for key, changed in (("tokens", "machines"),
                       ("joint_tokens", "joint_machines")):
    with pytest.raises(
      ValueError, match=rf"config\.{key} has 5000: .*measured"
    ):
      study.run(CONFIG | none | {key: (5000,), changed: ("gpu:h100:1x8",)})
  with pytest.raises(ValueError, match="sizes are all, figures, test"):
    config_file.get_config("small")
