"""What every stage of a pipeline runs at every tick, as data.

A model is cut into ``stages x chunks`` parts of successive layers: part
``chunk * stages + stage`` is a stage's chunk. So what follows a part lies on
the next stage, and the last stage is followed by the first one's next chunk. A
microbatch goes forward through all parts in turn, and its cotangents go back. A
part's backward is one action, or two: the cotangents of its input, for which
the part before it waits, and those of its weights, for which nobody waits.

A tick is one action of each stage, or none. What an action makes is on the next
stage one tick later; what it takes from its own stage is there one tick later,
too. A timetable is proven (`check`), priced (`cost`), timed (`simulate`) and
run (`run`): all read the same arrays.

Shape legend: T = ticks, S = stages.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import enum
import functools
from typing import NamedTuple

import numpy as np


class Kind(enum.IntEnum):
  """What a stage does in a tick.

  FORWARD: Computes a part's output. BACKWARD: Computes the cotangents of a
  part's input and weights. INPUT, WEIGHT: Compute one of the two.
  """

  IDLE = 0
  FORWARD = 1
  BACKWARD = 2
  INPUT = 3
  WEIGHT = 4


class Action(NamedTuple):
  """What is done for one microbatch.

  Attributes:
    kind: What is done.
    microbatch: Its number.
    chunk: The stage's part that does it.
  """

  kind: Kind
  microbatch: int
  chunk: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Timetable:
  """Actions by tick and stage.

  Attributes:
    name: What built it.
    num_microbatches: Microbatches of a step.
    num_chunks: Parts of a stage.
    kinds: `Kind` of each action, int8 ``[T, S]``.
    microbatches: Of which microbatch, int32 ``[T, S]``; -1 where idle.
    chunks: In which part of the stage, int32 ``[T, S]``; -1 where idle.
    limits: How many microbatches of how many parts a stage keeps activations
      of at most: from a forward to the action that last needs them, int
      ``[S]``.
  """

  name: str
  num_microbatches: int
  num_chunks: int
  kinds: np.ndarray
  microbatches: np.ndarray
  chunks: np.ndarray
  limits: tuple[int, ...]

  @property
  def num_ticks(self) -> int:
    """The number of ticks."""
    return self.kinds.shape[0]

  @property
  def num_stages(self) -> int:
    """The number of stages."""
    return self.kinds.shape[1]

  @property
  def num_parts(self) -> int:
    """The number of parts of the model."""
    return self.num_stages * self.num_chunks

  @functools.cached_property
  def splits(self) -> bool:
    """Whether backwards are two actions."""
    return bool((self.kinds == Kind.INPUT).any())

  @functools.cached_property
  def has_backward(self) -> bool:
    """Whether there is any backward: one that evaluates has none."""
    return bool((self.kinds > Kind.FORWARD).any())

  def actions(self, stage: int) -> list[tuple[int, Action]]:
    """Returns a stage's actions in turn, with their ticks."""
    ticks = np.flatnonzero(self.kinds[:, stage])
    return [
      (int(t), Action(Kind(self.kinds[t, stage]),
                      int(self.microbatches[t, stage]),
                      int(self.chunks[t, stage])))
      for t in ticks
    ]


def when(timetable: Timetable) -> np.ndarray:
  """Returns the tick of every action, int ``[kind, part, microbatch]``.

  It is -1 where there is no such action, and the tick of any one of them where
  there are several, which `check` refuses.
  """
  shape = len(Kind), timetable.num_parts, timetable.num_microbatches
  found = np.full(shape, -1)
  ticks, stages = np.nonzero(timetable.kinds)
  kinds, microbatches, chunks = (
    array[ticks, stages]
    for array in (timetable.kinds, timetable.microbatches, timetable.chunks)
  )
  found[kinds, chunks * timetable.num_stages + stages, microbatches] = ticks
  return found


def arranged(
  name: str,
  orders: Sequence[Iterable[Action]],
  num_microbatches: int,
  num_chunks: int,
  limits: Sequence[int],
) -> Timetable:
  """Gives every action the earliest tick that its stage's order allows.

  Args:
    name: What built the orders.
    orders: Each stage's actions in turn.
    num_microbatches: Microbatches of a step.
    num_chunks: Parts of a stage.
    limits: See `Timetable`.

  Raises:
    ValueError: Stages wait for each other: these are no orders of a step.
  """
  num_stages = len(orders)
  queues = [list(order) for order in orders]
  done: dict[tuple[str, int, int], int] = {}  # what is there -> from which tick
  last = num_stages * num_chunks - 1
  at = [0] * num_stages  # the next action of each stage
  rows: list[list[Action | None]] = []
  remaining = sum(map(len, queues))
  while remaining:
    row: list[Action | None] = [None] * num_stages
    made = []
    for stage, queue in enumerate(queues):
      if at[stage] == len(queue):
        continue
      action = queue[at[stage]]
      part = action.chunk * num_stages + stage
      if needed(action, part, last) <= done.keys():
        row[stage] = action
        made += produced(action, part)
        at[stage] += 1
        remaining -= 1
    if not any(row):
      stuck = [q[i] for q, i in zip(queues, at, strict=True) if i < len(q)]
      raise ValueError(f"{name}: no stage can go on with {stuck[:4]}")
    done |= dict.fromkeys(made, len(rows) + 1)
    rows.append(row)
  return from_rows(name, rows, num_microbatches, num_chunks, limits)


def needed(
  action: Action, part: int, last: int
) -> set[tuple[str, int, int]]:
  """Returns what an action waits for: what, of which part and microbatch.

  Args:
    action: The action.
    part: Its part.
    last: The number of the last part, whose cotangents are those of the loss.
  """
  m = action.microbatch
  if action.kind is Kind.FORWARD:
    return {("output", part - 1, m)} if part else set()
  if action.kind is Kind.WEIGHT:  # it takes what the other half was given
    return {("cotangent", part, m)}
  own = {("output", part, m)}
  return own | ({("cotangent", part + 1, m)} if part < last else set())


def produced(action: Action, part: int) -> list[tuple[str, int, int]]:
  """Returns what others may wait for once an action is done."""
  m = action.microbatch
  if action.kind is Kind.FORWARD:
    return [("output", part, m)]
  return [] if action.kind is Kind.WEIGHT else [("cotangent", part, m)]


def from_rows(
  name: str,
  rows: Sequence[Sequence[Action | None]],
  num_microbatches: int,
  num_chunks: int,
  limits: Sequence[int],
) -> Timetable:
  """Makes a timetable of each tick's actions, None for a stage that is idle."""
  idle = Action(Kind.IDLE, -1, -1)
  filled = np.array([[a or idle for a in row] for row in rows], np.int32)
  return Timetable(
    name, num_microbatches, num_chunks, filled[..., 0].astype(np.int8),
    filled[..., 1], filled[..., 2], tuple(limits),
  )
