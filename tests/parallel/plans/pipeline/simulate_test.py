"""Pipeline simulator compared with closed forms and sums by hand."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from parallel.plans.network import trace
from parallel.plans.pipeline import cost, simulate
from parallel.plans.pipeline.builders import (
  BUILDERS,
  PipelineSize,
  build,
  check_supported,
)
from parallel.plans.pipeline.pipeline_schedule import operands_of, results_of
from parallel.plans.pipeline.simulate import (
  PartTimes,
  StageLinks,
  even_part_times,
  even_stage_links,
)

# Seconds of a forward and of a backward's halves.
SECONDS = [
  (1.0, 1.0, 1.0), (1.0, 0.5, 0.5), (2.0, 0.5, 0.5), (1.0, 2.0, 0.5),
  (1.0, 0.2, 1.5), (0.5, 2.0, 2.0), (1.0, 1.0, 0.5), (1.0, 1.0, 1.5),
]


def step_s(name, size, seconds, **hops):
  schedule = build(name, *size)
  return simulate.events(
    schedule, even_part_times(size, *seconds, parts=schedule.parts),
    even_stage_links(size.stages, **hops),
  ).finish_s


def sizes(name):
  for p, v in itertools.product((1, 2, 3, 5), (1, 2, 3)):
    for m in {1, p - 1, p, p + 1, 2 * p - 1, 3 * p, 3 * p + 1} - {0}:
      try:
        check_supported(name, p, m, v)
      except ValueError:
        continue
      yield PipelineSize(p, m, v)


def has_closed_form(name):
  try:
    cost.step_s(name, PipelineSize(1, 8), 1, 1, 1)
  except ValueError:
    return False
  return True


# Conditions of the closed forms that do not hold for all sizes and times.
CONDITIONS = {
  "zb_h1": lambda p, m, f, i, w: m >= p,
  "zb_h2": lambda p, m, f, i, w: m >= 2 * p - 1,
  "zb_v": lambda p, m, f, i, w: m >= 2 * p - 1 and i >= max(f, w),
  "dualpipe_v": lambda p, m, f, i, w: m >= 2 * p and f == i,
}


@pytest.mark.parametrize("name", [*filter(has_closed_form, BUILDERS)])
def test_steps_without_hops_take_their_closed_forms(name):
  known = 0
  for size, seconds in itertools.product(sizes(name), SECONDS):
    built = build(name, *size).name
    if name in CONDITIONS and not CONDITIONS[name](*size[:2], *seconds):
      with pytest.raises(ValueError, match="has no closed form"):
        cost.step_s(built, size, *seconds)
      continue
    known += 1
    expected = cost.step_s(built, size, *seconds)
    assert step_s(name, size, seconds) == pytest.approx(expected, 1e-9)
    if size.stages == 1:  # has no bubble
      both = seconds[0] if name == "forward" else sum(seconds)
      assert expected == pytest.approx(size.microbatches * both)
  assert known >= (25 if name in ("zb_v", "dualpipe_v") else 60)


def test_zero_bubble_equals_the_paper_for_equal_times():
  """Table 1 of Qi et al.: H1 (p - 1) (F + B - W); H2 keeps (p - 1) F."""
  for p in (2, 4, 8):
    size = PipelineSize(p, 3 * p)
    assert cost.step_s("1f1b", size, 1, 1, 1) == 3 * (3 * p + p - 1)
    for name in ("zb_h1", "zb_h2"):
      assert cost.step_s(name, size, 1, 1, 1) == 3 * 3 * p + p - 1
    # Cheaper weight gradients fill less of the bubble.
    assert cost.step_s("zb_h1", size, 1, 1, 0.5) == 7.5 * p + 1.5 * (p - 1)
    assert cost.step_s("zb_h2", size, 1, 1, 0.5) == 7.5 * p + (p - 1)


def test_dualpipe_v_equals_the_published_bubble_with_single_pairs():
  """On PP / 2 = p devices (p - 1) (F&B + B - 3 W), of chunks.

  Source: DeepSeek's README of DualPipe, with F&B = F + B. Pairs of two actions
  idle less, since the second one does not delay the first one's result.
  """
  for p, m in ((2, 4), (3, 6), (4, 9), (8, 17)):
    schedule = build("dualpipe_v", p, m, 2)
    for f, w in ((1.0, 1.0), (1.0, 0.5), (2.0, 2.0)):
      b = f + w
      found = paired_s(schedule, f, f, w) - 2 * m * (f + b)
      assert found == pytest.approx((p - 1) * (f + b + b - 3 * w))
      ours = cost.step_s(
        "dualpipe_v", PipelineSize(p, m, 2), 2 * f, 2 * f, 2 * w
      )
      assert ours - 2 * m * (f + b) < found


def paired_s(schedule, forward_s, input_s, weight_s):
  """Returns the seconds of a step whose pairs F&B are single actions.

  Independent of the simulator. A pair is a forward that a whole backward
  follows, except for the last stage's first one.
  """
  queues = []
  for stage in range(schedule.num_stages):
    units = []
    for _, action in schedule.actions(stage):
      kinds = [a.kind.name for a in units[-1]] if units else []
      if kinds == ["FORWARD"] and action.kind.name == "BACKWARD" and (
        stage < schedule.num_stages - 1
        or any(a.kind.name == "BACKWARD" for unit in units for a in unit)
      ):
        units[-1].append(action)
      else:
        units.append([action])
    queues.append(units)
  seconds = {
    "FORWARD": forward_s, "BACKWARD": input_s + weight_s, "INPUT": input_s,
    "WEIGHT": weight_s,
  }
  last, free = schedule.num_parts - 1, [0.0] * schedule.num_stages
  done = {}
  while any(queues):
    for stage, units in enumerate(queues):
      needs = [
        x for a in units[:1] for action in a
        for x in operands_of(
          action, int(schedule.parts[action.chunk, stage]), last
        )
      ]
      if not units or not set(needs) <= set(done):
        continue
      unit = units.pop(0)
      free[stage] = max([free[stage], *(done[x] for x in needs)]) + sum(
        seconds[action.kind.name] for action in unit
      )
      for action in unit:
        part = int(schedule.parts[action.chunk, stage])
        done |= dict.fromkeys(results_of(action, part), free[stage])
  return max(free)


@pytest.mark.parametrize("name", BUILDERS)
def test_batched_simulation_equals_single_cases(name):
  rng = np.random.default_rng(0)
  for size in itertools.islice(sizes(name), 0, None, 5):
    schedule, parts = build(name, *size), size.stages * size.chunks
    work, hops = rng.uniform(0, 3, (5, parts, 4)), rng.uniform(
      0, 2, (2, size.stages, 4)
    )
    found = simulate.batched_finish_s(schedule, work, *hops)
    for i, seconds in enumerate(found):
      own = simulate.events(
        schedule, PartTimes(*(tuple(x) for x in work[1:, :, i])),
        StageLinks(*(tuple(x) for x in hops[..., i])),
      )
      assert seconds == pytest.approx(own.finish_s)


@pytest.mark.parametrize("stages", range(1, 7))
def test_exposed_hops_of_1f1b(stages):
  """Includes fewer microbatches than stages, and hops longer than a step."""
  for m, seconds, hop_s in itertools.product(
    range(1, 4 * stages + 2), SECONDS[:3], (0.01, 0.7, 5.0)
  ):
    size = PipelineSize(stages, m)
    expected = cost.step_s("1f1b", size, *seconds) + (
      cost.exposed_s(size, hop_s)
    )
    assert step_s("1f1b", size, seconds, latency_s=hop_s) == (
      pytest.approx(expected, 1e-9)
    )
    if hop_s <= sum(seconds):  # messages do not queue
      assert step_s("1f1b", size, seconds, busy_s=hop_s) == (
        pytest.approx(expected, 1e-9)
      )


@pytest.mark.parametrize("hop_s", [0.1, 1.0, 1.5, 1.6, 4.0])
def test_eager_1f1b_hides_hops_of_half_a_microbatch(hop_s):
  for p, seconds in itertools.product((2, 3, 4), ((1, 1, 1), (2, 0.5, 0.5))):
    if hop_s <= sum(seconds) / 2:
      for m in (1, p, 3 * p + 1):
        size = PipelineSize(p, m)
        # All except the first microbatch's way to the last stage and back.
        assert step_s("eager_1f1b", size, seconds, latency_s=hop_s) == (
          pytest.approx((m + p - 1) * sum(seconds) + 2 * (p - 1) * hop_s)
        )
    # The pattern of all stages is periodic in this number of microbatches.
    period = math.lcm(*(2 * (p - s) - 1 for s in range(p)))
    first = period * -(-40 // period)
    short, long = (
      step_s("eager_1f1b", PipelineSize(p, m), seconds, latency_s=hop_s)
      for m in (first, first + period)
    )
    both_s = sum(seconds)
    expected = max(
      ((p - s) * both_s + 2 * (p - s - 1) * hop_s) / (2 * (p - s) - 1)
      for s in range(p)
    )
    assert (long - short) / period == pytest.approx(expected)


WORK = PartTimes((1.0, 2.0), (3.0, 4.0), (1.5, 1.0), (1.5, 3.0))


@pytest.mark.parametrize(
  ("name", "microbatches", "overlap", "expected"),
  [
    # Forward through both stages and back: 1 + 0.5 + 2 + 4 + 0.25 + 3.
    ("1f1b", 1, True, 10.75),
    # Stage 1: 1.5 to 3.5 and 7.5; 7.5 to 9.5, 13.5; stage 0: 13.75 to 16.75.
    ("1f1b", 2, True, 16.75),
    # Its second forward waits for cotangents to leave: 7.75 to 13.75; 14 to 17.
    ("1f1b", 2, False, 17.0),
    # Stage 1: F to 3.5, I to 4.5, F to 6.5, I to 7.5, then W twice to 13.5;
    # stage 0 is finished at 10.75.
    ("zb_h2", 2, True, 13.5),
  ],
)
def test_step_times_by_hand(name, microbatches, overlap, expected):
  hops = StageLinks((0.5, 0.0), (0.0, 0.25), overlap=overlap)
  schedule = build(name, 2, microbatches)
  timeline = simulate.events(schedule, WORK, hops)
  assert timeline.finish_s == pytest.approx(expected)


def test_each_action_of_a_backward_repeats_one_forward():
  """By kind: 2 + 3 + 4, 2 + 4 and 3 + 4 s, in halves for two chunks."""
  found = even_part_times(
    PipelineSize(1, 1, 2), 1.0, 2.0, 3.0, again_s=4.0
  ).by_kind()
  assert found.T.tolist() == [[0.0, 0.5, 4.5, 3.0, 3.5]] * 2


def test_factors_are_those_of_the_stage_of_a_part():
  schedule = build("zb_v", 3, 5, 2)
  work = even_part_times(
    PipelineSize(3, 5, 2), 2.0, 1.0, 1.0, (1.0, 2.0, 3.0), schedule.parts
  )
  assert work.forward_s == (1.0, 2.0, 3.0, 3.0, 2.0, 1.0)
  assert even_part_times(
    PipelineSize(3, 5, 2), 2.0, 1.0, 1.0, (1.0, 2.0, 3.0)
  ).forward_s == (
    1.0, 2.0, 3.0, 1.0, 2.0, 3.0
  )


def test_lockstep_times_by_hand():
  """A tick costs its longest part, then its longest hop."""
  hops = StageLinks((0.5, 0.0), (0.0, 0.25), latency_s=1.0)
  # F | F F | B | B: 1 + 1.5, 2, 4 + 1.25, 3
  assert simulate.lockstep_s(build("1f1b", 2, 1), WORK, hops) == (
    pytest.approx(2.5 + 2 + 5.25 + 3)
  )
  for p, m in ((2, 4), (4, 4), (4, 9)):
    size = PipelineSize(p, m)
    work, none = even_part_times(size, 1.0, 1.0, 1.0), even_stage_links(p)
    # GPipe's ticks are all forwards or all backwards; in 1F1B, each tick after
    # the first p has a whole backward on some stage.
    assert simulate.lockstep_s(build("gpipe", *size), work, none) == (
      cost.step_s("gpipe", size, 1, 1, 1)
    )
    assert simulate.lockstep_s(build("1f1b", *size), work, none) == (
      p + 2 * (2 * m + p - 2)
    )
    for name in ("zb_h1", "zb_h2"):  # equal ticks: lockstep loses nothing
      schedule = build(name, *size)
      assert simulate.lockstep_s(schedule, work, none) == (
        schedule.num_ticks
      )


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_stages_of_a_device_run_one_after_another_in_lockstep(lanes):
  """A tick lasts until the device with the most work is done."""
  factors, seconds = (1.0, 2.0, 5.0, 3.0), {"forward": 1.0, "backward": 2.0}
  schedule = build("1f1b", 4, 6)
  work = even_part_times(PipelineSize(4, 6), 1.0, 1.5, 0.5, factors)
  unequal_s = equal_s = 0.0
  for row in schedule.kinds:
    actions_s = [(0.0, 1.0, 2.0)[kind] for kind in row]
    devices = range(0, 4, lanes)
    equal_s += max(sum(actions_s[d : d + lanes]) for d in devices)
    slowed_s = np.multiply(actions_s, factors)
    unequal_s += max(slowed_s[d : d + lanes].sum() for d in devices)
  hops = even_stage_links(4)
  assert simulate.lockstep_s(schedule, work, hops, lanes) == (
    pytest.approx(unequal_s)
  )
  if lanes == 1:
    assert simulate.lockstep_s(schedule, work, hops) == (
      pytest.approx(unequal_s)
    )
  # A device has 6 microbatches of 3 s for each of its stages.
  assert simulate.lockstep_waiting_s(schedule, seconds, lanes) == (
    pytest.approx(equal_s - 6 * 3 * lanes)
  )


def test_actions_without_a_time_are_free_in_lockstep():
  """The first stage waits during the second one's backwards."""
  schedule = build("gpipe", 2, 3)
  backward = (schedule.kinds == 2).any(1).sum()
  assert simulate.lockstep_waiting_s(schedule, {"backward": 2.0}) == (
    2.0 * (backward - 3)
  )


@pytest.mark.parametrize("name", BUILDERS)
def test_times_respect_bounds_on_unequal_stages(name):
  """Covers lower bounds, waiting times and slower parts."""
  size = PipelineSize(3, 6, 2 if BUILDERS[name].chunked else 1)
  schedule = build(name, *size)
  work = even_part_times(
    size, 1.0, 0.8, 0.6, factors=(1.0, 1.7, 1.2), parts=schedule.parts
  )
  hops = even_stage_links(3, busy_s=2.0, latency_s=0.2)  # messages queue
  timeline = simulate.events(schedule, work, hops)
  stage_s = 1.7 * (1.0 if name == "forward" else 2.4)
  assert timeline.finish_s > 6 * stage_s
  assert timeline.finish_s <= simulate.lockstep_s(schedule, work, hops)
  waiting = simulate.events(
    schedule, work, dataclasses.replace(hops, overlap=False)
  )
  assert waiting.finish_s > timeline.finish_s
  # A stage's own work is that of its factor, wherever its parts are placed.
  busy_s = np.nansum(timeline.end_s - timeline.start_s, 0)
  assert busy_s[1:] == pytest.approx(busy_s[0] * np.array([1.7, 1.2]))
  # Stages and links are exclusive resources, and dependencies are respected.
  ahead, back = cost.sends_by_direction(schedule)
  for start, end in (
    (timeline.start_s, timeline.end_s), (timeline.leave_s, timeline.sent_s)
  ):
    for stage in range(3):
      if start is timeline.start_s:
        here = schedule.kinds[:, stage] > 0
        assert (start[here, stage][1:] >= end[here, stage][:-1]).all()
      for ways in (ahead, back) if start is timeline.leave_s else ():
        here = ways[:, stage]
        assert not np.isnan(start[here, stage]).any()
        assert (start[here, stage][1:] >= end[here, stage][:-1]).all()
  busy_s = np.nansum(timeline.end_s - timeline.start_s)
  assert timeline.bubble == pytest.approx(
    1 - busy_s / (3 * timeline.finish_s)
  )


def test_trace_has_a_bar_for_every_action_and_message():
  schedule = build("interleaved_1f1b", 2, 4, 2)
  timeline = simulate.events(
    schedule, even_part_times(PipelineSize(2, 4, 2), 1e-3, 1e-3, 1e-3),
    even_stage_links(2, busy_s=2e-4, latency_s=1e-5),
  )
  _, found = trace.action_bars(timeline)
  bars = list(found)
  actions = [x for x in bars if x.row.startswith("stage")]
  hops = [x for x in bars if x not in actions]
  assert len(actions) == (schedule.kinds > 0).sum()
  assert len(hops) == cost.num_sends(PipelineSize(2, 4, 2))
  assert {x.row for x in actions} == {"stage 0", "stage 1"}
  # Two links per stage: outputs are on one, cotangents on the other.
  for x in hops:
    assert x.row.endswith("next") == x.name.startswith("forward")
    assert x.end_s - x.start_s == pytest.approx(2e-4)
    assert x.details["arrival_s"] == pytest.approx(x.start_s + 2.1e-4)
  assert max(x.end_s for x in actions) == pytest.approx(timeline.finish_s)


def test_trace_of_a_v_has_messages_on_the_links_that_carry_them():
  """Outputs of the second chunk use the links to the previous stage."""
  schedule = build("zb_v", 3, 5, 2)
  timeline = simulate.events(
    schedule, even_part_times(PipelineSize(3, 5, 2), 1e-3, 1e-3, 1e-3),
    even_stage_links(3, 1e-5)
  )
  _, found = trace.action_bars(timeline)
  hops = [
    (x.name.split()[0], x.details["chunk"], 1 if x.row.endswith("next") else 2)
    for x in found if not x.row.startswith("stage")
  ]
  assert len(hops) == cost.num_sends(PipelineSize(3, 5, 2), v_shaped=True)
  assert set(hops) == {
    ("forward", 0, 1), ("input", 0, 2), ("forward", 1, 2), ("input", 1, 1)
  }


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (
      lambda: even_part_times(PipelineSize(2, 2), 0.0, 1, 1),
      "forward_s=0 must be positive"
    ),
    (lambda: even_part_times(PipelineSize(2, 2), 1, 1, 1, (1.0,)),
     r"factors=\(1.0,\) must be one for each of 2 stages"),
    (
      lambda: even_part_times(PipelineSize(2, 2), 1, 1, 1, (1.0, -1.0)),
      "factors=-1 must"
    ),
    (lambda: even_stage_links(2, busy_s=-1.0), "busy_s=-1 must be at least 0"),
    (lambda: even_stage_links(2, latency_s=math.inf), "latency_s=inf must be"),
  ],
)
def test_invalid_times_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
