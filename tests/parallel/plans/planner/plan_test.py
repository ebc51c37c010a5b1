"""Plans: sizes, memory and time in closed form, exclusions, and optimality."""

import collections
import dataclasses
import itertools
import re

import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.models.lm.communication import tensor_reductions
from caatnet.studies.published import models
from configs.planner import gpt_11b
from parallel.plans.hardware import cluster_files
from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.pipeline import cost
from parallel.plans.pipeline.builders import PipelineSize
from parallel.plans.planner import (
  device_state,
  latency,
  message_costs,
  plan,
  space,
)
from parallel.plans.planner.latency import TimingAssumptions
from parallel.plans.planner.memory import UNFITTED, PeakMemory, memory
from parallel.plans.planner.message_costs import costs_by_term
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import Choices, Configuration
from parallel.plans.workload import TrainingStep, Transformer

MODEL = Transformer(512, 256, 8, 8, 8, 512)
STEP = TrainingStep(MODEL, 64, 128)
CHOICES = Choices(
  ("1f1b", "zb_h1"), (1,), ("ddp", "zero1"), ("psum",),
  ("none", "full"), max_microbatches=8,
)


def _even(size, rate=1e9, latency_s=0.0):
  device = cluster_files.cluster("a100:1").device
  return LinkMatrix(
    "even", device, (0,) * size, np.full((size, size), rate),
    np.full((size, size), latency_s), "a test", "drawn",
  )


def _problem(links, execution="events", **changes):
  step = dataclasses.replace(STEP, **changes)
  return Problem(step, links, TimingAssumptions(execution=execution))


def _batch(size):
  return dataclasses.replace(STEP, batch_size=size)


def test_parameters_equal_those_of_the_trained_model():
  for size in ("train", "test_train"):
    config = gpt_11b.get_config(size)
    sizes = config.model
    ours = Transformer(
      sizes.vocab_size, sizes.width, sizes.num_layers, sizes.num_heads,
      sizes.num_kv_heads, sizes.ffn_width,
    )
    if size == "train":
      assert ours.num_params == pytest.approx(11.1e9, 1e-2)
    else:
      built = experiments.build(override(config, "parallel.tensor=1"))
      assert ours.num_params == built.program.model.config.num_params
      flops = 3 * (4 * ours.layer_flops(1, 64) + ours.head_flops(1))
      theirs = built.program.model.config.flops_per_token(64)
      assert flops == pytest.approx(theirs, 1e-2)  # gains have no products


@pytest.mark.parametrize("remat", space.REMATS)
def test_tensor_ranks_reduce_the_bytes_of_the_model_formula(remat):
  """Bytes per step; other tests compare the formula with lowered programs."""
  config = gpt_11b.get_config("test_train")
  built = experiments.build(override(
    config, f"model.remat={remat} train.accumulation=4 parallel.data=1"
  ))
  formula = tensor_reductions(
    built.program.model.config, data_lanes=1, batch_size=4, seq_len=64,
    accumulation=4,
  )
  theirs = sum(
    count * np.prod(x.shape) * (2 if x.dtype == "bfloat16" else 4)
    for x, count in formula.items() if x.shape[-1] == 128 and len(x.shape) == 4
  )
  step = TrainingStep(Transformer(256, 128, 4, 8, 8, 352), 16, 64)
  c = Configuration(1, 1, 8, 4, remat=remat)
  sent = latency.messages(c, step).reductions
  assert 4 * sum(size * times for size, times in sent) == theirs


@pytest.mark.parametrize(("stages", "microbatches"), [
  (2, 4), (4, 8), (4, 11), (3, 2),
])
@pytest.mark.parametrize("rate", [1e10, 4e10])
def test_pipeline_on_equal_links_equals_the_closed_form(
  stages, microbatches, rate
):
  """1F1B without barriers: (m + p - 1)(f + b), plus exposed hops."""
  links = _even(stages, rate)
  # Layers are padded to equal parts, so that all stages are alike.
  problem = _problem(links, batch_size=microbatches)
  c = Configuration(stages, 1, 1, microbatches)
  found = problem.predict(c)
  both = (found.compute + found.again) / microbatches
  hop = STEP.boundary_bytes(1) / rate
  exposed = cost.exposed_s(PipelineSize(stages, microbatches), hop)
  assert hop < both / 2  # messages do not queue
  assert found.bubble == pytest.approx((stages - 1) * both)
  assert found.hops == pytest.approx(exposed)
  own = np.arange(stages).reshape(c.grid)
  assert costs_by_term(
    problem.traffic(c), own
  )[:2].sum() == pytest.approx(exposed)


def test_cost_terms_of_an_order_are_those_of_the_step():
  links = cluster_files.cluster("pipette-a100:2,uneven=1")
  c = Configuration(2, 2, 4, 4)
  problem = _problem(links, "lockstep")
  order = np.random.default_rng(0).permutation(16).reshape(c.grid)
  _, hop, ring, reduce = costs_by_term(problem.traffic(c), order)
  found = problem.predict(c, order)
  assert (ring, reduce) == pytest.approx((found.data, found.tensor))
  # In lockstep, hops and the stages' sums are combined in one bound.
  assert hop >= found.hops > 0


def test_ring_of_every_stage_counts():
  """A slow link between two devices of the last stage delays the step."""
  links = _even(8)
  c, rate = Configuration(2, 4, 1, 4), links.bandwidth.copy()
  rate[6, 7] /= 100
  slow = dataclasses.replace(links, bandwidth=rate)
  before, after = (_problem(x).predict(c) for x in (links, slow))
  assert after.data == pytest.approx(100 * before.data)
  order = np.arange(8).reshape(c.grid)
  published_s = [
    models.pipette_s(c, _problem(x), order) for x in (links, slow)
  ]
  assert published_s[0] == published_s[1]  # Pipette ignores it


@pytest.mark.parametrize(("microbatches", "theirs", "truth"), [
  (19, 69.0, 82.0), (16, 69.0, 71.0),
])
def test_pipette_drops_the_remainder_of_a_division(microbatches, theirs, truth):
  """Four stages, f + b = 3 and hops of half a second."""
  links = _even(4)
  c = Configuration(4, 1, 1, microbatches)
  problem = _problem(links, batch_size=microbatches)
  unit = models.stage_s(c, problem) / 3
  links = _even(4, STEP.boundary_bytes(1) / (unit / 2))
  problem = _problem(links, batch_size=microbatches)
  order = np.arange(4).reshape(c.grid)
  assert models.pipette_s(c, problem, order) / unit == pytest.approx(theirs)
  step = (microbatches + 3) * 3 + cost.exposed_s(
    PipelineSize(4, microbatches), 0.5
  )
  assert step == truth


def test_pipette_annealing_moves_whole_nodes():
  links = cluster_files.cluster("pipette-a100:4,uneven=2")
  c, problem = Configuration(4, 1, 8, 8), _problem(links)
  order = models.pipette_order(c, problem, steps=300)
  nodes = np.array(links.nodes)[order]
  assert (nodes == nodes[..., :1]).all()
  assert sorted(order.ravel()) == list(range(32))
  own = np.arange(32).reshape(c.grid)
  assert models.pipette_s(c, problem, order) <= models.pipette_s(
    c, problem, own
  )


@pytest.mark.parametrize("data", [2, 4])
def test_memory_decreases_with_every_sharded_part(data):
  base = Configuration(2, data, 2, 4)
  total = {
    scheme: memory(
      dataclasses.replace(base, scheme=scheme), STEP, UNFITTED
    )
    for scheme in space.SCHEMES
  }
  # ddp has no second copy of its weights in fewer bits.
  state = [x.gradients + x.optimizer for x in total.values()]
  assert state == sorted(state, reverse=True)
  assert total["zero3"].weights < total["zero2"].weights
  offloaded = memory(
    dataclasses.replace(base, offload=True), STEP, UNFITTED
  )
  assert total["ddp"].total - offloaded.total == total["ddp"].optimizer
  kept = [
    memory(
      dataclasses.replace(base, remat=remat), STEP, UNFITTED
    ).activations
    for remat in space.REMATS
  ]
  assert kept == sorted(kept, reverse=True)


def test_state_takes_four_floats_per_parameter():
  """Weights, gradients and two moments, float32, on one device."""
  found = memory(Configuration(1, 1, 1, 1), STEP, UNFITTED)
  assert found.weights == found.gradients == 4 * MODEL.num_params
  assert found.optimizer == 8 * MODEL.num_params
  assert found.total == sum(dataclasses.asdict(found).values())


def test_residuals_trade_memory_for_time():
  """Saves recomputed forwards and reductions; takes memory per slot."""
  problem = _problem(cluster_files.cluster("pipette-a100:1"))
  base = Configuration(4, 1, 2, 8)
  kept = dataclasses.replace(base, keep="residuals")
  slow, fast = (problem.predict(c) for c in (base, kept))
  assert fast.again == 0
  assert slow.again == pytest.approx(slow.compute / 3)
  assert fast.tensor < slow.tensor
  assert fast.total < slow.total
  few, many = (
    memory(c, STEP, UNFITTED).activations for c in (base, kept)
  )
  assert many == pytest.approx((4 + 1) * few)  # 1F1B stores p microbatches
  halves = dataclasses.replace(kept, schedule="zb_h1")
  assert space.violated_constraint(halves, STEP, CHOICES) is None
  again = space.violated_constraint(
    dataclasses.replace(halves, remat="full"), STEP, CHOICES
  )
  assert again[0] == "keep"


def test_memory_of_1f1b_does_not_grow_with_microbatches():
  few, many = (
    memory(Configuration(4, 1, 1, m), _batch(2 * m), UNFITTED) for m in (8, 32)
  )
  assert few.kept == many.kept
  gpipe = memory(Configuration(4, 1, 1, 32, "gpipe"), _batch(64), UNFITTED)
  assert gpipe.kept > 3 * many.kept


def _memory(total, cause="weights"):
  sizes = dict.fromkeys(
    ("weights", "gradients", "optimizer", "kept", "activations", "gathered",
     "logits", "buffers"), 0.0,
  )
  return PeakMemory(**sizes | {cause: total})


LEVELS = [
  dataclasses.replace(
    Configuration(2, 1, 1, 4), remat=remat, offload=offload, keep=keep
  )
  for remat in space.REMATS for offload in (False, True)
  for keep in space.KEEPS
]


@pytest.mark.parametrize("seed", range(8))
def test_levels_that_take_more_time_are_tried_only_if_needed(seed):
  """A level is dropped if one with no more of anything fits, too."""
  rng = np.random.default_rng(seed)
  fits = [(c, None) for c in LEVELS if seed == 0 or rng.random() < 0.5]

  def level(c):
    return np.array([
      space.REMATS.index(c.remat), c.offload, space.KEEPS.index(c.keep)
    ])

  expected = [
    (c, needs) for c, needs in fits
    if not any(c != x and (level(x) <= level(c)).all() for x, _ in fits)
  ]
  assert plan._drop_dominated(fits) == expected
  if seed == 0:
    assert [c for c, _ in expected] == [LEVELS[0]]


def _candidate(seconds, total, **fields):
  causes = dict.fromkeys(
    ("again", "tensor", "bubble", "hops", "vocabulary", "data", "offload"), 0.0
  )
  return plan.Candidate(
    Configuration(1, 1, 1, 1), _memory(total),
    latency.Latency(compute=seconds, **causes), np.zeros((1, 1, 1), int), 0.0,
    **fields,
  )


def test_front_trades_time_for_memory():
  points = [(1, 9), (1, 8), (2, 8), (3, 9), (3, 2), (4, 2), (5, 1)]
  rng = np.random.default_rng(0)
  for _ in range(4):
    found = plan.pareto_front(
      _candidate(*points[i]) for i in rng.permutation(7)
    )
    assert [(x.latency.total, x.memory.total) for x in found] == [
      (1, 8), (3, 2), (5, 1)
    ]


def test_gap_is_a_share_of_the_step():
  assert _candidate(8.0, 1.0).gap is None
  assert _candidate(8.0, 1.0, bound_s=0.0).gap == 0
  assert _candidate(8.0, 1.0, bound_s=1.0, order_s=3.0).gap == 0.25
  assert _candidate(8.0, 1.0, bound_s=3.0, order_s=3.0 - 1e-9).gap == 0


def test_excluded_configurations_are_counted_by_constraint():
  problem = _problem(cluster_files.cluster("pipette-v100:1"), "lockstep")
  # A configuration that needs exactly as much memory as there is fits.
  most = problem.memory(Configuration(1, 8, 1, 4, scheme="zero1")).total
  device = dataclasses.replace(problem.links.device, memory_bytes=most)
  problem = dataclasses.replace(
    problem, links=dataclasses.replace(problem.links, device=device)
  )
  counts = collections.Counter()
  fitting = []
  for c in space.all_configurations(64, 8, CHOICES):
    refused = space.violated_constraint(c, problem.step, CHOICES)
    if refused is not None:
      counts[refused[0]] += 1
    elif problem.memory(c).total > most:
      counts["memory"] += 1
    else:
      fitting.append(c)
  found = plan.plan(problem, CHOICES, count=2, ordered=3)
  assert {name: n for name, (n, _) in found.excluded.items()} == counts
  assert counts["memory"] > 0
  assert 0 < found.priced <= len(fitting)
  assert len(found.best) == len({x.configuration.grid for x in found.best}) == 2
  for x in (*found.best, *found.front):
    assert x.configuration in fitting
    assert x.memory == problem.memory(x.configuration)
  for x in found.best:
    assert x.latency == problem.predict(x.configuration, x.order)
    assert x.own_s == problem.predict(x.configuration).total
    costs = problem.traffic(x.configuration)
    assert x.order_s == message_costs.cost(costs, x.order)
    assert x.bound_s <= x.order_s * (1 + 1e-9)


def test_reason_states_the_difference_by_cause():
  problem = _problem(_even(8, 1e8))
  best = plan.plan(problem, CHOICES, count=1, ordered=1).best[0]
  c = Configuration(1, 1, 8, 1)
  found = plan.reorder_devices(
    plan._make_candidate(c, problem.memory(c), problem.predict(c)), problem
  ).latency
  more = {
    cause: seconds - getattr(best.latency, cause)
    for cause, seconds in vars(found).items()
  }
  cause, seconds = max(more.items(), key=lambda item: item[1])
  assert cause == "tensor"
  assert plan.why_not(c, problem, CHOICES, best) == (
    f"it fits, but takes {found.total:.4g} s, "
    f"{100 * (found.total / best.latency.total - 1):.1f}% more than the best; "
    f"most of that in tensor: {seconds:+.4g} s"
  )
  device = dataclasses.replace(problem.links.device, memory_bytes=3e9)
  small = dataclasses.replace(
    problem, links=dataclasses.replace(problem.links, device=device)
  )
  needs = problem.memory(c)
  exact = dataclasses.replace(
    problem, links=dataclasses.replace(problem.links, device=(
      dataclasses.replace(device, memory_bytes=needs.total)
    ))
  )
  assert "it fits, but" in plan.why_not(c, exact, CHOICES, best)
  assert plan.why_not(c, small, CHOICES, best) == (
    f"{c} does not fit: it needs {needs.total / 1e9:.1f} GB, "
    f"{(needs.total - 3e9) / 1e9:.1f} GB more than a device has, most of it "
    f"for buffers ({needs.buffers / 1e9:.1f} GB)"
  )


def test_best_plan_is_no_slower_than_any_that_fits():
  problem = _problem(_even(4, 1e10, 1e-6), "lockstep")
  found = plan.plan(problem, CHOICES, ordered=4)
  best, tried = found.best[0], 0
  for c in space.all_configurations(STEP.batch_size, 4, CHOICES):
    if space.violated_constraint(c, STEP, CHOICES) is None:
      tried += 1
      assert problem.predict(c).total >= best.latency.total * (1 - 1e-9)
  assert tried > found.priced > 20
  for a, b in itertools.pairwise(found.front):
    assert a.latency.total <= b.latency.total
    assert a.memory.total > b.memory.total


def test_device_order_helps_on_uneven_links():
  even = _even(6)
  rate = np.random.default_rng(0).uniform(1e8, 1e10, (6, 6))
  problem = _problem(dataclasses.replace(even, bandwidth=rate), batch_size=24)
  c = Configuration(3, 1, 2, 8)
  row = plan.reorder_devices(
    plan._make_candidate(c, problem.memory(c), problem.predict(c)), problem
  )
  assert row.latency.total < row.own_s


def test_explanation_of_configurations_that_are_not_the_best():
  problem = _problem(cluster_files.cluster("pipette-a100:1"))
  best = plan.plan(problem, CHOICES, count=1, ordered=1).best[0]
  for c, reason in (
    (Configuration(2, 2, 4, 4), "takes 16 devices; the cluster has 8"),
    (Configuration(1, 8, 1, 16), r"cannot run \(batch\): a batch of 64"),
    (Configuration(8, 1, 1, 64), r"cannot run \(microbatches\)"),
    (Configuration(8, 1, 1, 4, "zb_h2x"), r"cannot run \(schedule\)"),
    (Configuration(2, 4, 1, 4), "it fits, but takes .* more than the best"),
    (best.configuration, "it is at least as fast as the best"),
  ):
    found = plan.why_not(c, problem, CHOICES, best)
    assert re.search(reason, found), found


def test_refusal_states_the_memory_that_would_fit():
  large = dataclasses.replace(
    MODEL, width=16_384, num_layers=48, num_heads=128, num_kv_heads=128,
    head_width=128, ffn_width=45_056,
  )
  links = cluster_files.cluster("pipette-v100:1")
  choices = dataclasses.replace(
    CHOICES, schemes=space.SCHEMES, offload=False
  )
  problem = _problem(links, model=large)
  with pytest.raises(ValueError) as error:
    plan.plan(problem, choices)
  smallest = min(
    (c for c in space.all_configurations(64, 8, choices)
     if space.violated_constraint(c, problem.step, choices) is None),
    key=lambda c: problem.memory(c).total,
  )
  needs = problem.memory(smallest)
  whole, excess, cause, gigabytes, enough, count = re.fullmatch(
    r"no configuration fits. The smallest: .* does not fit: it needs (.*) GB, "
    r"(.*) GB more .* most of it for (\w+) \((.*) GB\). Devices of (.*) GB "
    r"suffice, or about (\d+) of these devices", str(error.value)
  ).groups()
  most = problem.memory_bytes
  assert float(whole) == pytest.approx(needs.total / 1e9, abs=0.05)
  assert float(excess) == pytest.approx((needs.total - most) / 1e9, abs=0.06)
  assert float(enough) == pytest.approx(needs.total / 1e9, abs=0.5)
  assert (cause, float(gigabytes)) == (
    needs.binding, pytest.approx(getattr(needs, needs.binding) / 1e9, abs=0.05)
  )
  # The training state is divided by more devices; the rest is not.
  state = needs.weights + needs.gradients + needs.optimizer
  state *= problem.fit(smallest).upper
  for n, fits in ((int(count), True), (int(count) - 1, False)):
    assert fits == (needs.total - state + 8 * state / n <= most)


def test_refusal_suggests_a_smaller_model_where_no_device_count_suffices():
  problem = _problem(cluster_files.cluster("pipette-v100:1"), seq_len=2**22)
  with pytest.raises(ValueError, match=(
    "It does not fit even without training state: use shorter sequences"
  )):
    plan.plan(problem, CHOICES)
  with pytest.raises(ValueError, match=(
    "no configuration of 8 devices can run: tensor: tensor=2 does not divide 1 "
    r"heads; batch: a batch of 1 is .*; layers: stages=8 x chunks=1 are more"
  )):
    plan.plan(_problem(problem.links, batch_size=1, model=dataclasses.replace(
      MODEL, num_layers=1, num_heads=1, num_kv_heads=1
    )), CHOICES)


def test_keys_of_a_plan_build_a_run():
  """Builds the best plans and the one with the least memory as runs."""
  model = Transformer(256, 128, 4, 8, 8, 352, dtype="float32")
  choices = Choices(chunks=(1, 2), max_microbatches=2, offload=False)
  links = cluster_files.cluster("pipette-a100:1,uneven=2")
  found = plan.plan(
    Problem(TrainingStep(model, 16, 64), links), choices, count=2, ordered=2
  )
  chosen = {x.configuration for x in (*found.best, found.front[-1])}
  chosen.add(Configuration(2, 2, 2, 4, "interleaved_1f1b", 2, "zero2"))
  for c in chosen:
    config = gpt_11b.get_config("test_train")
    built = experiments.build(
      override(config, f"model.dtype=float32 {c.overrides()}")
    )
    layout = built.program.layout
    assert layout.tensor.size == c.tensor
    stages = layout.stages.axis.size if layout.stages else 1
    assert (stages, layout.mesh.devices.size) == (c.stages, 8)
    if c.scheme != "ddp":
      partition = device_state.partition(c)
      assert layout.partition.weights == partition.weights
      assert layout.partition.gradients == partition.gradients
      assert layout.partition.optimizer == partition.optimizer


def test_device_order_becomes_the_mesh_of_a_run():
  """Assigns devices to coordinates for any order of the axes."""
  c = Configuration(2, 2, 2, 4)
  order = np.random.default_rng(0).permutation(8).reshape(c.grid)
  text = f"{c.overrides()} parallel.device_order={c.device_order(order)}"
  config = gpt_11b.get_config("test_train")
  layout = experiments.build(
    override(config, text.replace(", ", ","))
  ).program.layout
  for place, device in np.ndenumerate(layout.mesh.devices):
    at = dict(zip(layout.mesh.axis_names, place, strict=True))
    assert device.id == order[at["stage"], at["data"], at["tensor"]]
  own = np.arange(8).reshape(2, 2, 2)
  assert c.device_order(own) == (0, 1, 4, 5, 2, 3, 6, 7)
  assert c.device_order(np.moveaxis(own, 0, 1)) == ()


def test_faster_links_make_no_step_slower():
  problem = _problem(cluster_files.cluster("pipette-a100:1"))
  c = Configuration(2, 2, 2, 4, scheme="zero1")
  order = np.arange(8).reshape(c.grid)
  found = problem.sensitivity(c, order)
  assert found[2.0] < problem.predict(c).total < found[0.5]
