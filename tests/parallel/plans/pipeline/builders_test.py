"""Pipeline schedules: proven, and equal to their closed forms."""

import random

import pytest

from parallel.plans.pipeline import cost
from parallel.plans.pipeline.builders import (
  BUILDERS,
  PipelineSize,
  build,
  build_evaluation,
  check_supported,
  num_chunks_for,
)
from parallel.plans.pipeline.check import check
from parallel.plans.pipeline.pipeline_schedule import (
  Action,
  ActionKind,
  loop_placement,
  schedule_earliest,
  v_placement,
)
from parallel.plans.pipeline.table import table


def drawn(count, seed=0, stages=16, microbatches=64, chunks=4):
  """Draws names and valid sizes, equally many per builder."""
  rng, found = random.Random(seed), []
  while len(found) < count:
    name = list(BUILDERS)[len(found) % len(BUILDERS)]
    size = PipelineSize(
      rng.randint(1, stages), rng.randint(1, microbatches),
      num_chunks_for(name, rng.randint(1, chunks)),
    )
    if BUILDERS[name].in_rounds and size.chunks > 1:
      rounds = max(1, size.microbatches // size.stages)
      size = size._replace(microbatches=rounds * size.stages)
    found.append((name, size))
  return found


@pytest.mark.parametrize("part", range(10))
def test_300_schedules_are_proven_and_cost_their_closed_forms(part):
  for name, size in drawn(300)[part::10]:
    schedule = build(name, *size)
    check(schedule)
    counted = cost.cost(schedule)
    assert counted.stored == schedule.limits, (name, size)
    sent = sum(counted.forward_sends + counted.backward_sends)
    assert sent == cost.num_sends(
      size, schedule.has_backward, BUILDERS[name].placement is v_placement
    )
    # Waiting messages fit the program's buffers, and none is oversized.
    places = table(schedule)
    assert max(counted.inputs) == places.inputs.places
    assert max(counted.cotangents) == places.cotangents.places
    if schedule.has_backward:
      assert max(counted.stored) == places.residuals.places
    assert max(counted.deltas) == places.deltas.places
    assert places.chunks.min() == 0  # also where a stage is idle


# (builder, size) -> stored activations per stage, in parts of a microbatch.
STORED = [
  ("gpipe", (4, 6), (6, 6, 6, 6)),
  ("1f1b", (4, 8), (4, 3, 2, 1)),
  ("1f1b", (4, 2), (2, 2, 2, 1)),
  ("eager_1f1b", (4, 8), (7, 5, 3, 1)),
  # (1 + (p - 1) / (p v)) p v on the first stage: Narayanan et al., 2104.04473
  ("interleaved_1f1b", (4, 8, 2), (11, 9, 7, 5)),
  ("looped", (4, 8, 2), (16, 16, 16, 16)),
  ("zb_h1", (4, 8), (4, 4, 4, 4)),
  ("zb_h2", (4, 8), (7, 7, 7, 7)),
  # p microbatches, as 1F1B's first stage: Qi et al., 2405.15362
  ("zb_v", (4, 8, 2), (8, 8, 8, 8)),
  ("zb_v", (4, 3, 2), (4, 5, 6, 6)),
  # PP + 1 parts on PP / 2 devices: DeepSeek's README of DualPipe
  ("dualpipe_v", (4, 8, 2), (9, 9, 9, 9)),
  ("forward", (4, 8, 2), (0, 0, 0, 0)),
]


@pytest.mark.parametrize(("name", "size", "stored"), STORED)
def test_stored_activations_per_stage(name, size, stored):
  assert cost.cost(build(name, *size)).stored == stored


def test_costs_per_stage_of_an_interleaved_schedule():
  """The last stage sends the outputs of its first chunk to the first stage."""
  found = cost.cost(build("interleaved_1f1b", 2, 4, 2))
  assert found.forward_sends == (8, 4)
  assert found.backward_sends == (4, 8)
  assert found.sent_bytes(10) == 240
  assert found.stored_bytes(10) == 10 * max(found.stored) == 50
  assert cost.cost(build("looped", 1, 4, 2)).sent_bytes(10) == 0
  assert cost.cost(build("forward", 1, 1)).inputs == (1,)


def test_orders_that_wait_for_one_another_are_refused():
  """The message names the next actions of up to four stages."""
  forward, backward = Action(ActionKind.FORWARD, 0), Action(
    ActionKind.BACKWARD, 0
  )
  orders = [[forward], *[[backward, forward]] * 6]
  with pytest.raises(ValueError, match="mine: deadlock, since none") as error:
    schedule_earliest("mine", orders, 1, 1, [1] * 7)
  text = str(error.value)
  assert text.count("Action(") == text.count("Kind.BACKWARD") == 4


def test_bubble_fractions():
  """Equal ticks: (p - 1) / (m + p - 1), with chunks (p - 1) / (v m + p - 1).

  ZB-H1 has a third of the idle ticks of 1F1B, at 3 ticks per microbatch
  compared with 2 ticks of 1.5; in ZB-H2, no stage idles once it has started.
  """
  for p, m in ((4, 8), (2, 2), (8, 24), (1, 3)):
    for name in ("gpipe", "1f1b", "eager_1f1b", "forward"):
      bubble = cost.cost(build(name, p, m)).bubble
      assert bubble == pytest.approx((p - 1) / (m + p - 1))
      assert cost.bubble(
        name, PipelineSize(p, m), 2, 1, 1
      ) == pytest.approx(bubble)
    for name in ("interleaved_1f1b", "looped"):
      bubble = cost.cost(build(name, p, m, 3)).bubble
      assert bubble == pytest.approx((p - 1) / (3 * m + p - 1))
      assert cost.bubble(
        name, PipelineSize(p, m, 3), 2, 1, 1
      ) == pytest.approx(bubble)
    assert cost.cost(build("zb_h1", p, m)).ticks == 3 * m + p - 1
    wide = cost.cost(build("zb_h2", p, max(m, 2 * p - 1)))
    assert wide.own_bubble == 0
    assert wide.ticks == 3 * max(m, 2 * p - 1) + p - 1


def letters(schedule, stage):
  return " ".join(
    f"{kind.name[0]}{microbatch}" + (f".{chunk}" if chunk else "")
    for _, (kind, microbatch, chunk) in schedule.actions(stage)
  )


def test_orders_of_the_papers_figures():
  """Figures of the papers, counted from 0."""
  assert letters(build("1f1b", 4, 5), 2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
  assert letters(build("eager_1f1b", 4, 5), 2) == (
    "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
  )
  assert letters(build("interleaved_1f1b", 2, 4, 2), 1) == (
    "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
  )
  assert letters(build("looped", 2, 3, 2), 0) == (
    "F0 F1 F2 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0 B1 B2"
  )
  assert letters(build("zb_h1", 3, 4), 1) == (
    "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
  )
  assert letters(build("zb_h2", 3, 4), 0) == (
    "F0 F1 F2 F3 I0 W0 I1 W1 I2 W2 I3 W3"
  )
  assert letters(build("zb_v", 2, 3, 2), 1) == (
    "F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 F2.1 I1.1 W1.1 I1 I2.1 I2 W1 W2.1 W2"
  )
  assert letters(build("dualpipe_v", 2, 4, 2), 0) == (
    "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 F3 B1.1 F2.1 B0 B2.1 F3.1 B1 B3.1 I2 W2 I3 W3"
  )


def test_costs_per_stage_of_a_v():
  """The last stage sends nothing to itself; the first has both ends."""
  found = cost.cost(build("zb_v", 3, 6, 2))
  assert found.forward_sends == (6, 12, 6)
  assert found.backward_sends == (6, 12, 6)
  schedule = build("zb_v", 3, 6, 2)
  assert schedule.stage_of_part.tolist() == [0, 1, 2, 2, 1, 0]
  assert schedule.chunk_of_part.tolist() == [0, 0, 0, 1, 1, 1]
  assert schedule.directions.tolist() == [1, 1, 0, -1, -1]


def test_evaluation_has_the_placement_of_training():
  for name in BUILDERS:
    schedule = build(name, 3, 6, num_chunks_for(name, 2))
    found = build_evaluation(schedule, 4)
    check(found)
    assert found.name == "forward"
    assert found.num_microbatches == 4
    assert (found.parts == schedule.parts).all()
    assert found.is_loop == (BUILDERS[name].placement is loop_placement)


def test_v_has_the_published_bubbles_and_memory():
  """In ZB-V no stage idles once it has started, at the memory of 1F1B.

  DualPipeV stores one part more.
  """
  for p, m in ((2, 3), (4, 7), (8, 24)):
    found = cost.cost(build("zb_v", p, m, 2))
    assert found.own_bubble == 0
    assert found.ticks == 6 * m + p - 1
    assert max(found.stored) == 2 * max(cost.cost(build("1f1b", p, m)).stored)
    dual = cost.cost(build("dualpipe_v", p, max(m, 2 * p), 2))
    assert max(dual.stored) == 2 * p + 1


@pytest.mark.parametrize("name", BUILDERS)
def test_gradients_are_accumulated_in_microbatch_order(name):
  """Each part accumulates microbatches in ascending order."""
  size = PipelineSize(3, 6, num_chunks_for(name, 2))
  schedule = build(name, *size)
  for stage in range(size.stages):
    actions = [a for _, a in schedule.actions(stage)]
    for kinds in (
      (ActionKind.FORWARD,), (ActionKind.BACKWARD, ActionKind.WEIGHT)
    ):
      for chunk in range(size.chunks):
        order = [
          a.microbatch for a in actions if a.kind in kinds and a.chunk == chunk
        ]
        assert order in ([], list(range(size.microbatches)))


def test_single_chunk_schedules_have_alternative_names():
  for name, other in (
    ("interleaved_1f1b", "eager_1f1b"), ("looped", "gpipe")
  ):
    schedule, plain = build(name, 3, 5), build(other, 3, 5)
    assert schedule.name == other
    assert (schedule.kinds == plain.kinds).all()
    assert build(name, 3, 6, 2).name == name


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("1f1bb", 4, 8), "schedule='1f1bb' must be one of .*did you mean 1f1b"),
    (("1f1b", 0, 8), "stages=0 must be at least 1"),
    (("1f1b", 4, 0), "microbatches=0 must be at least 1"),
    (("looped", 4, 8, 0), "chunks=0 must be at least 1"),
    (("1f1b", 4, 2.5), "microbatches=2.5 must be an integer"),
    (("zb_h1", 4, 8, 2), "schedule='zb_h1' has one chunk per stage, but "
     "chunks=2; schedules with chunks=2 are interleaved_1f1b, looped, zb_v, "),
    (("zb_v", 4, 8, 3), "schedule='zb_v' has two chunks per stage, but "
     "chunks=3; schedules with chunks=3 are interleaved_1f1b, looped, forward"),
    (("dualpipe_v", 4, 8), "'dualpipe_v' has two chunks per stage, but "
     "chunks=1; schedules with chunks=1 are gpipe"),
    (("interleaved_1f1b", 4, 6, 2), "needs a multiple of stages=4 "
     "microbatches, but microbatches=6; use 4 or 8 microbatches, or "
     "schedule='looped'"),
    (("interleaved_1f1b", 4, 3, 2), "microbatches=3; use 4 microbatches"),
  ],
)
def test_invalid_sizes_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    check_supported(*arguments)
  with pytest.raises(ValueError, match=message):
    build(*arguments)
