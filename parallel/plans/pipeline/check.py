"""Proof that a pipeline schedule is a training step within its limits.

Every microbatch passes forward through every part, once and in order, and its
cotangents pass back through all of them, or through none. The operands of an
action were produced at least one tick earlier, and no stage stores more
activations than its limit at any tick. The arrays themselves ensure that a
stage runs at most one action per tick.
"""

import numpy as np

from parallel.plans.pipeline.cost import count_live_activations
from parallel.plans.pipeline.pipeline_schedule import (
  ActionKind,
  PipelineSchedule,
  ticks_of_actions,
)


def check(schedule: PipelineSchedule) -> None:
  """Proves that a schedule is a training step and respects its limits.

  Args:
    schedule: The schedule.

  Raises:
    ValueError: The schedule is wrong. The message names the tick, stage and
      action.

  Example:
    1F1B stores two microbatches on its first stage; a limit of one is
    rejected.

    >>> import dataclasses
    >>> from parallel.plans.pipeline.builders import build
    >>> schedule = build("1f1b", stages=2, microbatches=4)
    >>> check(schedule)
    >>> check(dataclasses.replace(schedule, limits=(1, 1)))
    Traceback (most recent call last):
      ...
    ValueError: 1f1b: tick 1, stage 0 (FORWARD of microbatch 1 in chunk 0):
    activations of 2 microbatches are stored, the limit is 1
  """
  _check_fields(schedule)
  _check_placement(schedule)
  _check_once(schedule)
  _check_complete(schedule)
  _check_order(schedule)
  _check_stored(schedule)


def _check_fields(schedule: PipelineSchedule) -> None:
  """Checks the arrays' shapes, and that their entries are within range."""
  t, name = schedule, schedule.name
  shape = t.kinds.shape
  if not shape == t.microbatches.shape == t.chunks.shape or len(shape) != 2:
    raise ValueError(
      f"{name}: kinds, microbatches and chunks must be [ticks, stages], not "
      f"{shape}, {t.microbatches.shape} and {t.chunks.shape}"
    )
  if len(t.limits) != t.num_stages or min(t.limits, default=-1) < 0:
    raise ValueError(
      f"{name}: limits={t.limits} must be a number for each of "
      f"{t.num_stages} stages, at least 0"
    )
  # Each condition marks wrong entries, [T, S].
  idle = t.kinds == ActionKind.IDLE
  for wrong, why in (
    (~np.isin(t.kinds, list(ActionKind)), "there is no such kind of action"),
    (idle & ((t.microbatches != -1) | (t.chunks != -1)),
     "an idle stage has microbatch and chunk -1"),
    (~idle & ((t.microbatches < 0) | (t.microbatches >= t.num_microbatches)),
     f"microbatches are 0 to {t.num_microbatches - 1}"),
    (~idle & ((t.chunks < 0) | (t.chunks >= t.num_chunks)),
     f"chunks are 0 to {t.num_chunks - 1}"),
  ):
    if wrong.any():
      raise _tick_error(t, *np.argwhere(wrong)[0], why)


def _check_placement(schedule: PipelineSchedule) -> None:
  """Checks that each part occurs once, within one stage of its successor."""
  t = schedule
  shape = t.num_chunks, t.num_stages
  if t.parts.shape != shape or (
    sorted(t.parts.ravel().tolist()) != list(range(t.num_parts))
  ):
    raise ValueError(
      f"{t.name}: parts={t.parts.tolist()} must be the parts 0 to "
      f"{t.num_parts - 1}, each once, as {t.num_chunks} rows (chunks) of "
      f"{t.num_stages} stages"
    )
  far = np.flatnonzero(abs(t.directions) > 1)
  if len(far):
    part = int(far[0])
    raise ValueError(
      f"{t.name}: parts={t.parts.tolist()} place part {part} on stage "
      f"{t.stage_of_part[part]} and part {part + 1} on stage "
      f"{t.stage_of_part[part + 1]}, which must be neighbours"
    )


def _check_once(schedule: PipelineSchedule) -> None:
  """Checks that no action occurs twice."""
  found = ticks_of_actions(schedule)
  ticks, stages = np.nonzero(schedule.kinds)
  parts = schedule.part_of_actions()[ticks, stages]
  kinds = schedule.kinds[ticks, stages]
  # `ticks_of_actions` holds one tick per action; one of two equal actions has
  # another tick.
  again = found[kinds, parts, schedule.microbatches[ticks, stages]] != ticks
  if again.any():
    place = np.flatnonzero(again)[0]
    tick, stage = ticks[place], stages[place]
    other = found[
      kinds[place], parts[place], schedule.microbatches[tick, stage]
    ]
    raise _tick_error(
      schedule, tick, stage, f"it repeats tick {other}'s action"
    )


def _check_complete(schedule: PipelineSchedule) -> None:
  """Checks that no required action is missing; backwards may be split."""
  done = ticks_of_actions(schedule) >= 0  # [kind, part, microbatch]
  both = done[ActionKind.BACKWARD] & (
    done[ActionKind.INPUT] | done[ActionKind.WEIGHT]
  )
  if both.any():
    part, m = np.argwhere(both)[0]
    kind = ActionKind.INPUT if done[
      ActionKind.INPUT, part, m
    ] else ActionKind.WEIGHT
    raise _action_error(
      schedule, kind, part, m,
      "its microbatch also has a BACKWARD, which includes this work; use one "
      "of them",
    )
  # All forwards must be there. If there is any backward, so must both halves of
  # every backward, where a whole backward counts as both.
  needed = {ActionKind.FORWARD: done[ActionKind.FORWARD]}
  if schedule.has_backward:
    for kind in (ActionKind.INPUT, ActionKind.WEIGHT):
      needed[kind] = done[ActionKind.BACKWARD] | done[kind]
  for kind, present in needed.items():
    if not present.all():
      part, m = np.argwhere(~present)[0]
      if not (
        kind is ActionKind.FORWARD or done[ActionKind.INPUT:, part, m].any()
      ):
        kind = ActionKind.BACKWARD  # both halves are missing
      raise ValueError(
        f"{schedule.name}: stage {schedule.stage_of_part[part]} never runs "
        f"{kind.name} of microbatch {m} in chunk "
        f"{schedule.chunk_of_part[part]}"
      )


def _check_order(schedule: PipelineSchedule) -> None:
  """Checks that the operands of each action are produced at an earlier tick."""
  ticks = ticks_of_actions(schedule)
  forward = ticks[ActionKind.FORWARD]
  # Tick of the input's cotangents, by BACKWARD or INPUT, [part, microbatch].
  back = np.maximum(ticks[ActionKind.BACKWARD], ticks[ActionKind.INPUT])
  # Batch and loss are available from the start (-1): they are not results of an
  # action.
  given = np.full((1, schedule.num_microbatches), -1)
  before = np.concatenate([given, forward[:-1]])
  after = np.concatenate([back[1:], given])
  # Kind of action, tick of an operand, offset of the part that produces it.
  for kind, needed, maker in (
    (ActionKind.FORWARD, before, -1),
    (ActionKind.BACKWARD, forward, 0), (ActionKind.BACKWARD, after, 1),
    (ActionKind.INPUT, forward, 0), (ActionKind.INPUT, after, 1),
    (ActionKind.WEIGHT, back, 0),
  ):
    # A result is available one tick after its action.
    early = (ticks[kind] >= 0) & (ticks[kind] <= needed)
    if early.any():
      part, m = np.argwhere(early)[0]
      stage, chunk = (
        places[part + maker]
        for places in (schedule.stage_of_part, schedule.chunk_of_part)
      )
      raise _action_error(
        schedule, kind, part, m,
        f"it needs the result of stage {stage}, chunk {chunk}, of tick "
        f"{needed[part, m]}, which is not earlier",
      )


def _check_stored(schedule: PipelineSchedule) -> None:
  """Checks that the activations on each stage are within its limit."""
  # [T, S], [S]
  kept, limits = count_live_activations(schedule), np.array(schedule.limits)
  over = kept > limits
  if over.any():
    tick, stage = np.argwhere(over)[0]
    raise _tick_error(
      schedule, tick, stage,
      f"activations of {kept[tick, stage]} microbatches are stored, the limit "
      f"is {limits[stage]}",
    )


def _action_error(
  schedule: PipelineSchedule, kind: ActionKind, part: int, microbatch: int,
  why: str
) -> ValueError:
  """Returns an error that names an action of the schedule and its tick.

  ``part`` is the action's part of the model, ``why`` the fault.
  """
  tick = ticks_of_actions(schedule)[kind, part, microbatch]
  return _tick_error(schedule, tick, schedule.stage_of_part[part], why)


def _tick_error(
  schedule: PipelineSchedule, tick: int, stage: int, why: str
) -> ValueError:
  """Returns an error that names the action of a stage at a tick.

  ``why`` is the fault.
  """
  number = int(schedule.kinds[tick, stage])
  kind = (
    ActionKind(number).name if number in list(ActionKind) else f"kind {number}"
  )
  return ValueError(
    f"{schedule.name}: tick {tick}, stage {stage} ({kind} of microbatch "
    f"{schedule.microbatches[tick, stage]} in chunk "
    f"{schedule.chunks[tick, stage]}): {why}"
  )
