"""A timetable as the arrays that a program reads: buffers' places by tick.

What a part is given waits in a place of a ring buffer from the tick in which it
arrives to that of the last action which reads it. Places are handed out when
something arrives, so that no two things are in one at a time; there are as many
as the fullest stage needs, since a program has one shape on all devices.

Shape legend: T = ticks, S = stages.
"""

import dataclasses
import heapq

import numpy as np

from parallel.pipeline.timetable import Kind, Timetable


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
  """Where things that arrive are kept, and where actions find them.

  Attributes:
    places: How many there are; the number itself stands for none.
    write: Where what another stage has sent is put, int32 ``[T, S]``.
    enter: Where what comes from outside of the parts is put, int32 ``[T, S]``:
      what the first part reads, or the loss's cotangents.
    read: Where a tick's action finds what it needs, int32 ``[T, S]``.
  """

  places: int
  write: np.ndarray
  enter: np.ndarray
  read: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
  """What a program reads of a timetable.

  Attributes:
    kinds: The kind of each action, int32 ``[T, S]``.
    chunks: The chunk of each action, 0 where idle; int32 ``[T, S]``.
    inputs: Inputs of parts.
    cotangents: Cotangents of parts' outputs.
    residuals: What a forward keeps, from then until the backward's end.
    deltas: What a backward's first half keeps for the second one.
    enters: The microbatch that the first part reads in a tick, -1 for none;
      int32 ``[T]``, as the following.
    judged: The microbatch whose last part runs in a tick.
    leaves: The microbatch of which a tick computes the first part's cotangents.
  """

  kinds: np.ndarray
  chunks: np.ndarray
  inputs: Buffer
  cotangents: Buffer
  residuals: Buffer
  deltas: Buffer
  enters: np.ndarray
  judged: np.ndarray
  leaves: np.ndarray


def table(timetable: Timetable) -> Table:
  """Returns the arrays of a timetable that has been checked."""
  stages, last = timetable.num_stages, timetable.num_parts - 1
  ticks = timetable.num_ticks
  made: dict[tuple[str, int, int], int] = {}  # what is there -> since when
  used: dict[tuple[str, int, int], list[int]] = {}
  enters, judged, leaves = (np.full(ticks, -1, np.int32) for _ in range(3))
  for stage in range(stages):
    for tick, (kind, m, chunk) in timetable.actions(stage):
      part = chunk * stages + stage
      given = ("input", part, m), ("cotangent", part, m)
      # What a stage leaves for itself is there in the tick that makes it.
      if kind is Kind.FORWARD:
        made["residual", part, m] = tick
        if part == 0:
          enters[tick], made[given[0]] = m, tick
        if part == last:
          judged[tick], made["cotangent", last, m] = m, tick + 1
        else:
          made["input", part + 1, m] = tick + 1
      elif kind is not Kind.WEIGHT:
        made["delta", part, m] = tick
        if part == 0:
          leaves[tick] = m
        else:
          made["cotangent", part - 1, m] = tick + 1
      for what in given[: 1 if kind is Kind.FORWARD else 2]:
        used.setdefault(what, []).append(tick)
      if timetable.has_backward:
        used.setdefault(("residual", part, m), []).append(tick)
      if kind in (Kind.INPUT, Kind.WEIGHT):
        used.setdefault(("delta", part, m), []).append(tick)

  return Table(
    timetable.kinds.astype(np.int32),
    np.maximum(timetable.chunks, 0),
    _buffer(("input", 0), made, used, ticks, stages),
    _buffer(("cotangent", last), made, used, ticks, stages),
    _buffer(("residual", -1), made, used, ticks, stages),
    _buffer(("delta", -1), made, used, ticks, stages),
    enters, judged, leaves,
  )


def _buffer(
  outside: tuple[str, int],
  made: dict[tuple[str, int, int], int],
  used: dict[tuple[str, int, int], list[int]],
  num_ticks: int,
  num_stages: int,
) -> Buffer:
  """Hands out the places of one kind of things.

  Args:
    outside: The kind, and of which part it comes from outside of the parts;
      -1 for none.
    made: Since when each thing is there: kind, part and microbatch.
    used: In which ticks it is read.
    num_ticks: T.
    num_stages: S.
  """
  write, enter, read = (
    np.full((num_ticks, num_stages), -1, np.int32) for _ in range(3)
  )
  places = 0
  for stage in range(num_stages):
    things = sorted(
      (made[thing], ticks, thing[:2] == outside)
      for thing, ticks in used.items()
      if thing[0] == outside[0] and thing[1] % num_stages == stage
    )
    busy: list[tuple[int, int]] = []  # last use, place
    free: list[int] = []
    count = 0
    for arrival, ticks, enters in things:
      while busy and busy[0][0] < arrival:
        heapq.heappush(free, heapq.heappop(busy)[1])
      if not free:
        free, count = [count], count + 1
      place = heapq.heappop(free)
      heapq.heappush(busy, (max(ticks), place))
      (enter if enters else write)[arrival, stage] = place
      read[ticks, stage] = place
    places = max(places, count)
  for array in (write, enter, read):
    array[array < 0] = places
  return Buffer(places, write, enter, read)
