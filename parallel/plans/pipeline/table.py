"""Arrays of a pipeline schedule that a program reads: buffer slots by tick.

An operand of a part occupies a slot of a buffer from the tick of its arrival to
that of the last action that reads it. Slots are assigned at arrival, so that
each holds one value at a time. Their number is the maximum over stages, since a
program has one shape on all devices.

In a loop, outputs arrive from the previous stage and cotangents from the next
one. In a V both arrive from either neighbour or from the stage itself.

Shape legend: T = ticks, S = stages.
"""

from collections.abc import Sequence
import dataclasses
import heapq

import numpy as np

from parallel.plans.pipeline.pipeline_schedule import (
  ActionKind,
  PipelineSchedule,
)


@dataclasses.dataclass(frozen=True, eq=False)
class BufferSlots:
  """Buffer slots of one kind of values, such as the inputs of model parts.

  Arrays have the dims ticks (T) and stages (S).

  Attributes:
    places: Number of slots; in the arrays, this number means "no slot".
    write: Slot for the value that arrives in each of the buffer's directions
      (`Table.directions`), each int32 ``[T, S]``.
    enter: Slot for a value from outside the parts, int32 ``[T, S]``: the input
      of the first part, or the loss's cotangents.
    read: Slot that a tick's action reads, int32 ``[T, S]``.
  """

  places: int
  write: tuple[np.ndarray, ...]
  enter: np.ndarray
  read: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
  """Arrays of a pipeline schedule for its execution, by ticks T and stages S.

  Attributes:
    directions: Directions in which results move: 1 to the next stage, -1 to the
      previous one, 0 within the stage. In a loop, outputs move in direction 1
      and cotangents in direction -1; otherwise both move in all directions.
    kinds: Kind of each action, int32 ``[T, S]``.
    chunks: Chunk of each action, 0 where idle; int32 ``[T, S]``.
    inputs: Slots of the inputs of parts.
    cotangents: Slots of the cotangents of parts' outputs.
    residuals: Slots of residuals, from a forward to the end of its backward.
    deltas: Slots of the values that the first half of a backward saves for the
      second.
    enters: Microbatch that the model's first part reads in each tick, -1 for
      none; int32 ``[T]``, as the next two fields.
    judged: Microbatch whose output of the last part, the operand of the loss,
      is computed in each tick.
    leaves: Microbatch whose cotangents of the first part's input are computed
      in each tick.
  """

  directions: tuple[int, ...]
  kinds: np.ndarray
  chunks: np.ndarray
  inputs: BufferSlots
  cotangents: BufferSlots
  residuals: BufferSlots
  deltas: BufferSlots
  enters: np.ndarray
  judged: np.ndarray
  leaves: np.ndarray


def table(schedule: PipelineSchedule) -> Table:
  """Returns the arrays of a checked schedule.

  Args:
    schedule: Schedule that `parallel.plans.pipeline.check.check` accepts.

  Example:
    The first stage of 1F1B with two stages holds two microbatches: it needs two
    slots for inputs.

    >>> from parallel.plans.pipeline.builders import build
    >>> found = table(build("1f1b", stages=2, microbatches=4))
    >>> found.inputs.places, found.enters.tolist()
    (2, [0, 1, -1, -1, 2, -1, 3, -1, -1, -1])
  """
  stages, last = schedule.num_stages, schedule.num_parts - 1
  ticks = schedule.num_ticks
  # (value, part, microbatch) -> tick of its arrival, and ticks of its reads.
  made: dict[tuple[str, int, int], int] = {}
  used: dict[tuple[str, int, int], list[int]] = {}
  enters, judged, leaves = (np.full(ticks, -1, np.int32) for _ in range(3))
  for stage in range(stages):
    for tick, (kind, m, chunk) in schedule.actions(stage):
      part = int(schedule.parts[chunk, stage])
      given = ("input", part, m), ("cotangent", part, m)
      # Values that a stage saves for itself exist in the tick that computes
      # them; values that it sends arrive one tick later.
      if kind is ActionKind.FORWARD:
        made["residual", part, m] = tick
        if part == 0:  # its input comes from the batch, in this tick
          enters[tick], made[given[0]] = m, tick
        if part == last:  # the loss's cotangent is ready one tick later
          judged[tick], made["cotangent", last, m] = m, tick + 1
        else:
          made["input", part + 1, m] = tick + 1
      elif kind is not ActionKind.WEIGHT:
        made["delta", part, m] = tick
        if part == 0:  # its cotangents leave the parts
          leaves[tick] = m
        else:
          made["cotangent", part - 1, m] = tick + 1
      # A forward reads its input; all others read the cotangent, too.
      for what in given[: 1 if kind is ActionKind.FORWARD else 2]:
        used.setdefault(what, []).append(tick)
      # Without a backward no residuals are saved.
      if schedule.has_backward:
        used.setdefault(("residual", part, m), []).append(tick)
      if kind in (ActionKind.INPUT, ActionKind.WEIGHT):
        used.setdefault(("delta", part, m), []).append(tick)

  directions = (1, -1) if schedule.is_loop else (1, -1, 0)
  # Index of the direction in which a part's input and cotangent arrive, [part].
  along = [0, *(directions.index(by) for by in schedule.directions)]
  against = [*(directions.index(-by) for by in schedule.directions), 0]
  if schedule.is_loop:  # each buffer receives from one direction
    along = against = [0] * schedule.num_parts

  def buffer(outside: tuple[str, int], arrivals: Sequence[int]) -> BufferSlots:
    return _assign_slots(
      schedule, outside, made, used, arrivals,
      1 if schedule.is_loop else len(directions),
    )

  nowhere = [0] * schedule.num_parts  # not sent
  return Table(
    directions,
    schedule.kinds.astype(np.int32),
    np.maximum(schedule.chunks, 0),
    buffer(("input", 0), along),
    buffer(("cotangent", last), against),
    buffer(("residual", -1), nowhere),
    buffer(("delta", -1), nowhere),
    enters, judged, leaves,
  )


def _assign_slots(
  schedule: PipelineSchedule,
  outside: tuple[str, int],
  made: dict[tuple[str, int, int], int],
  used: dict[tuple[str, int, int], list[int]],
  arrivals: Sequence[int],
  num_directions: int,
) -> BufferSlots:
  """Returns the buffer slots of the values of one kind, such as "input".

  Args:
    schedule: The schedule.
    outside: The kind, and the part of the model whose values come from outside
      the pipeline (-1 for none).
    made: (kind, part, microbatch) -> tick at which the value arrives.
    used: (kind, part, microbatch) -> ticks at which the value is read.
    arrivals: For each part, the index of the direction its values arrive from.
    num_directions: Number of directions.
  """
  enter, read, *write = (
    np.full(schedule.kinds.shape, -1, np.int32)
    for _ in range(2 + num_directions)
  )
  places = 0
  for stage in range(schedule.num_stages):
    things = sorted(
      # (tick of arrival, ticks of reads, direction of arrival or -1: outside)
      (made[thing], ticks, -1 if thing[:2] == outside else arrivals[thing[1]])
      for thing, ticks in used.items()
      if thing[0] == outside[0] and schedule.stage_of_part[thing[1]] == stage
    )
    busy: list[tuple[int, int]] = []  # (tick of the last read, slot)
    free: list[int] = []
    count = 0
    for arrival, ticks, direction in things:
      # Slots whose last read is before this tick are free again.
      while busy and busy[0][0] < arrival:
        heapq.heappush(free, heapq.heappop(busy)[1])
      if not free:
        free, count = [count], count + 1
      place = heapq.heappop(free)  # the lowest free slot
      heapq.heappush(busy, (max(ticks), place))
      (enter if direction < 0 else write[direction])[arrival, stage] = place
      read[ticks, stage] = place
    places = max(places, count)
  for array in (*write, enter, read):
    array[array < 0] = places  # one past the last slot means no slot
  return BufferSlots(places, tuple(write), enter, read)
