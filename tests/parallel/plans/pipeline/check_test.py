"""Mutated pipeline schedules are refused with the place and the reason."""

import dataclasses
import random
import re

import numpy as np
import pytest

from parallel.plans.pipeline.builders import BUILDERS, build, num_chunks_for
from parallel.plans.pipeline.check import check
from parallel.plans.pipeline.pipeline_schedule import (
  Action,
  ActionKind,
  from_rows,
  operands_of,
  results_of,
)


def columns(schedule):
  """Returns copies of the arrays, to be modified."""
  return {
    key: getattr(schedule, key).copy()
    for key in ("kinds", "microbatches", "chunks")
  }


def replaced(schedule, **changes):
  return dataclasses.replace(schedule, **changes)


def some(rng, schedule, test=lambda *_: True):
  """Draws the tick and stage of an action that satisfies ``test``."""
  places = np.argwhere(schedule.kinds).tolist()
  rng.shuffle(places)
  return next((t, s) for t, s in places if test(t, s))


def named(schedule, tick, stage, at=None, chunk=None):
  """Returns the pattern of an action in messages, possibly at another tick."""
  kind = ActionKind(schedule.kinds[tick, stage]).name
  return re.escape(
    f"tick {tick if at is None else at}, stage {stage} ({kind} of microbatch "
    f"{schedule.microbatches[tick, stage]} in chunk "
    f"{schedule.chunks[tick, stage] if chunk is None else chunk}): "
  )


def dropped(rng, t):
  tick, stage = some(rng, t)
  new = columns(t)
  for array, idle in zip(new.values(), (0, -1, -1), strict=True):
    array[tick, stage] = idle
  return replaced(t, **new), (
    f"stage {stage} never runs {ActionKind(t.kinds[tick, stage]).name} of "
    f"microbatch {t.microbatches[tick, stage]} in chunk "
    f"{t.chunks[tick, stage]}$"
  )


def twice(rng, t):
  tick, stage = some(rng, t)
  new = {}
  for (key, array), idle in zip(columns(t).items(), (0, -1, -1), strict=True):
    row = np.full((1, t.num_stages), idle, array.dtype)
    row[0, stage] = array[tick, stage]
    new[key] = np.concatenate([array, row])
  return replaced(t, **new), (
    named(t, tick, stage) + f"it repeats tick {t.num_ticks}'s action"
  )


def another_microbatch(rng, t):
  tick, stage = some(rng, t)
  new = columns(t)
  new["microbatches"][tick, stage] += 1
  new["microbatches"][tick, stage] %= t.num_microbatches
  return replaced(t, **new), (
    rf"stage {stage} \(.*(repeats tick \d+'s action|also has a BACKWARD)"
  )


def another_chunk(rng, t):
  tick, stage = some(rng, t)
  new = columns(t)
  new["chunks"][tick, stage] = (t.chunks[tick, stage] + 1) % t.num_chunks
  if t.num_chunks == 1:
    new["chunks"][tick, stage] = 1
    return replaced(t, **new), (
      named(t, tick, stage, chunk=1) + "chunks are 0 to 0"
    )
  return replaced(t, **new), rf"stage {stage} \(.*repeats tick \d+'s action"


def another_kind(rng, t):
  tick, stage = some(rng, t)
  new = columns(t)
  kinds = [
    k for k in ActionKind if k not in (ActionKind.IDLE, t.kinds[tick, stage])
  ]
  new["kinds"][tick, stage] = rng.choice(kinds)
  return replaced(t, **new), (
    rf"stage {stage} \(.*(repeats tick \d+|also has a BACKWARD)|"
    "never runs "
  )


def moved_to_the_start(rng, t):
  """Moves an action with a dependency to a new tick before all others."""
  tick, stage = some(
    rng, t, lambda tick, stage: t.kinds[tick, stage] != ActionKind.FORWARD
    or t.parts[t.chunks[tick, stage], stage]
  )
  new = {}
  for (key, array), idle in zip(columns(t).items(), (0, -1, -1), strict=True):
    row = np.full((1, t.num_stages), idle, array.dtype)
    row[0, stage], array[tick, stage] = array[tick, stage], idle
    new[key] = np.concatenate([row, array])
  # A forward needs the previous part's; all others, at first, their own part's.
  part = t.parts[t.chunks[tick, stage], stage]
  part -= t.kinds[tick, stage] == ActionKind.FORWARD
  (chunk, maker), = np.argwhere(t.parts == part)
  return replaced(t, **new), (
    named(t, tick, stage, at=0)
    + rf"it needs the result of stage {maker}, chunk {chunk}, of tick \d+"
  )


def first_stage_delayed(rng, t):
  """Delays the first stage by one tick, so that the second starts with it."""
  if t.num_stages == 1:
    return dropped(rng, t)
  new = columns(t)
  for array, idle in zip(new.values(), (0, -1, -1), strict=True):
    array[1:, 0], array[0, 0] = array[:-1, 0].copy(), idle
  return replaced(t, **new), r"it needs the result of stage \d+|never runs "


def exchanged_stages(rng, t):
  if t.num_stages == 1:
    return dropped(rng, t)
  order = np.arange(t.num_stages)
  one, other = rng.sample(range(t.num_stages), 2)
  order[[one, other]] = other, one
  new = {key: array[:, order] for key, array in columns(t).items()}
  return replaced(t, **new), "it needs the result of stage"


def backwards_in_time(rng, t):
  if t.num_stages * t.num_chunks == 1 and not t.has_backward:
    return dropped(rng, t)
  new = {key: array[::-1] for key, array in columns(t).items()}
  return replaced(t, **new), "it needs the result of stage"


def reduced_limit(rng, t):
  limits = list(t.limits)
  stage = rng.randrange(t.num_stages)
  limits[stage] -= 1
  message = rf"stage {stage} \(FORWARD.*: activations of {t.limits[stage]} "
  if not t.limits[stage]:
    message = "must be a number for each of"
  return replaced(t, limits=tuple(limits)), message


def number_out_of_range(rng, t):
  tick, stage = some(rng, t)
  new = columns(t)
  key, value, message = rng.choice([
    ("kinds", 7, r"kind 7 .*there is no such kind of action"),
    ("kinds", 0, r"IDLE .*an idle stage has microbatch and chunk -1"),
    ("microbatches", t.num_microbatches, "microbatches are 0 to"),
    ("microbatches", -1, "microbatches are 0 to"),
    ("chunks", t.num_chunks, "chunks are 0 to"),
  ])
  new[key][tick, stage] = value
  return replaced(t, **new), rf"tick {tick}, stage {stage} \(.*{message}"


CHANGES = (
  dropped, twice, another_microbatch, another_chunk, another_kind,
  moved_to_the_start, first_stage_delayed, exchanged_stages, backwards_in_time,
  reduced_limit, number_out_of_range,
)


def drawn(rng):
  """Draws a schedule with a few stages and at least two microbatches."""
  name = rng.choice(list(BUILDERS))
  stages = rng.randint(1, 5)
  chunks = num_chunks_for(name, rng.randint(1, 3))
  microbatches = rng.randint(2, 9)
  if BUILDERS[name].in_rounds:
    microbatches = stages * max(2, microbatches // stages)
  return build(name, stages, microbatches, chunks)


@pytest.mark.parametrize("change", CHANGES)
def test_mutated_schedule_is_refused(change):
  """Checks 19 schedules per mutation, 209 in total."""
  rng = random.Random(CHANGES.index(change))
  for _ in range(19):
    schedule = drawn(rng)
    check(schedule)
    changed, message = change(rng, schedule)
    with pytest.raises(ValueError, match=message) as refused:
      check(changed)
    assert str(refused.value).startswith(schedule.name)


def replays(schedule):
  """Returns whether a schedule is a valid step, by replaying it with sets."""
  last, stages = schedule.num_parts - 1, schedule.num_stages
  there, done = set(), set()
  stored = [set() for _ in range(stages)]
  rows = [dict(schedule.actions(stage)) for stage in range(stages)]
  for tick in range(schedule.num_ticks):
    made = []
    for stage, actions in enumerate(rows):
      if tick not in actions:
        continue
      action = actions[tick]
      part = schedule.parts[action.chunk, stage]
      if (action.kind, part, action.microbatch) in done:
        return False
      done.add((action.kind, part, action.microbatch))
      if not operands_of(action, part, last) <= there:
        return False
      made += results_of(action, part)
      if action.kind is ActionKind.FORWARD and schedule.has_backward:
        stored[stage].add((part, action.microbatch))
      if len(stored[stage]) > schedule.limits[stage]:
        return False
      if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
        stored[stage].discard((part, action.microbatch))
    there |= set(made)
  return all(
    (ActionKind.FORWARD, part, m) in done
    and (not schedule.has_backward or (ActionKind.BACKWARD, part, m) in done
         or {(ActionKind.INPUT, part, m), (ActionKind.WEIGHT, part, m)} <= done)
    for part in range(last + 1) for m in range(schedule.num_microbatches)
  )


def test_proof_agrees_with_a_replay():
  """Swaps two successive actions; some of the resulting orders are valid."""
  rng, verdicts = random.Random(0), {True: 0, False: 0}
  for _ in range(250):
    schedule = drawn(rng)
    stage, new = rng.randrange(schedule.num_stages), columns(schedule)
    one, other = sorted(
      rng.sample([t for t, _ in schedule.actions(stage)], 2)
    )
    if rng.random() < 0.7:
      other = one + 1  # possibly an idle tick
    for array in new.values():
      array[[one, other], stage] = array[[other, one], stage]
    changed = replaced(schedule, **new)
    verdicts[replays(changed)] += 1
    if replays(changed):
      check(changed)
    else:
      with pytest.raises(ValueError, match="tick"):
        check(changed)
  assert min(verdicts.values()) > 25, verdicts


def test_wrong_placements_are_refused():
  schedule = build("zb_v", 3, 5, 2)
  for parts, message in (
    ([[0, 1, 2], [5, 4, 4]], "each once, as 2 rows (chunks) of 3 stages"),
    ([[0, 1, 2, 3, 4, 5]], "must be the parts 0 to 5"),
    ([[0, 2, 1], [5, 4, 3]], "place part 0 on stage 0 and part 1 on stage 2, "
     "which must be neighbours"),
    # A loop's placement has other dependencies.
    ([[0, 1, 2], [3, 4, 5]], "it needs the result of stage"),
  ):
    with pytest.raises(ValueError, match="zb_v: .*" + re.escape(message)):
      check(replaced(schedule, parts=np.array(parts)))


def test_wrong_shapes_are_refused():
  schedule = build("1f1b", 2, 3)
  with pytest.raises(ValueError, match=r"must be \[ticks, stages\], not"):
    check(replaced(schedule, chunks=schedule.chunks[1:]))
  with pytest.raises(ValueError, match=r"limits=\(2,\) must be a number for"):
    check(replaced(schedule, limits=(2,)))
  flat = {key: array[:, 0] for key, array in columns(schedule).items()}
  with pytest.raises(ValueError, match=r"must be \[ticks, stages\], not \(8,"):
    check(replaced(schedule, **flat))
  none = {key: array[:, :0] for key, array in columns(schedule).items()}
  with pytest.raises(ValueError, match=r"limits=\(\) .* for each of 0 stages"):
    check(replaced(schedule, limits=(), **none))


@pytest.mark.parametrize("kinds", [
  (ActionKind.BACKWARD,), (ActionKind.INPUT, ActionKind.WEIGHT),
])
def test_cotangents_of_the_next_part_are_available_a_tick_later(kinds):
  forward = Action(ActionKind.FORWARD, 0)
  start = [[forward, None], [None, forward]]
  first, *rest = (Action(kind, 0) for kind in kinds)

  def schedule(*rows):
    return from_rows("mine", [*start, *rows], 1, 1, (1, 1))

  both = [[one, one] for one in rest]
  check(schedule([None, first], [first, None], *both))
  with pytest.raises(ValueError) as error:
    check(schedule([first, first], *both))
  assert str(error.value) == (
    f"mine: tick 2, stage 0 ({kinds[0].name} of microbatch 0 in chunk 0): it "
    "needs the result of stage 1, chunk 0, of tick 2, which is not earlier"
  )


def test_first_of_several_errors_is_named():
  """Ordered by tick, or by kind, part and microbatch."""
  schedule = build("1f1b", 3, 4)

  def message(limits=schedule.limits, **changes):
    with pytest.raises(ValueError) as error:
      check(replaced(schedule, limits=limits, **changes))
    return str(error.value)

  new = columns(schedule)
  new["kinds"][1, 0] = new["kinds"][4, 1] = 7
  assert message(**new).startswith("1f1b: tick 1, stage 0 (kind 7 of micro")
  again = {k: np.concatenate([x, x]) for k, x in columns(schedule).items()}
  assert message(**again) == (
    "1f1b: tick 0, stage 0 (FORWARD of microbatch 0 in chunk 0): it repeats "
    "tick 12's action"
  )
  assert message((1, 1, 0)) == (
    "1f1b: tick 1, stage 0 (FORWARD of microbatch 1 in chunk 0): activations "
    "of 2 microbatches are stored, the limit is 1"
  )
  assert message(**{k: x[::-1] for k, x in columns(schedule).items()}) == (
    "1f1b: tick 10, stage 1 (FORWARD of microbatch 0 in chunk 0): it needs the "
    "result of stage 0, chunk 0, of tick 11, which is not earlier"
  )
  cut = columns(schedule)
  for array, idle in zip(cut.values(), (0, -1, -1), strict=True):
    array[5:] = idle
  assert message(**cut) == (
    "1f1b: stage 0 never runs FORWARD of microbatch 3 in chunk 0"
  )


def test_whole_and_split_backward_of_a_microbatch_are_refused():
  schedule = build("zb_h1", 2, 3)
  tick, stage = np.argwhere(schedule.kinds == ActionKind.WEIGHT)[0]
  new = columns(schedule)
  new["kinds"][tick, stage] = ActionKind.BACKWARD
  with pytest.raises(ValueError, match=r"INPUT .*also has a BACKWARD"):
    check(replaced(schedule, **new))
