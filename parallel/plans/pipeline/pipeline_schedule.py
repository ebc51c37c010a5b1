"""Pipeline schedule: the action of every stage at every tick, as data.

A model is split into ``stages x chunks`` parts of consecutive layers, and a
schedule places one part on each chunk of each stage. In a `loop_placement` the
successor of a part is on the next stage, and the last stage is followed by the
first stage's next chunk. In a V (`v_placement`) the first chunks descend from
the first stage to the last one, and the second chunks return. A microbatch
passes forward through all parts in order, and its cotangents pass back. A
part's backward is one action, or two: the cotangents of its input, which the
previous part waits for, and those of its weights, which no other action waits
for.

In a tick each stage runs one action or none. The result of an action is
available one tick later, on its own stage and on a neighbour. The same arrays
are checked (`check`), priced (`cost`), simulated (`simulate`) and executed
(`parallel.pipeline.run`).

Shape legend: T = ticks, S = stages, C = chunks.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import enum
import functools
from typing import NamedTuple

import numpy as np


class ActionKind(enum.IntEnum):
  """Kind of an action.

  FORWARD computes a part's output, BACKWARD the cotangents of its input and
  weights, INPUT only those of its input, and WEIGHT only those of its weights.
  """

  IDLE = 0
  FORWARD = 1
  BACKWARD = 2
  INPUT = 3
  WEIGHT = 4


class Action(NamedTuple):
  """One action on one microbatch.

  Attributes:
    kind: Kind of the action.
    microbatch: Index of the microbatch.
    chunk: Index of the part among its stage's parts.
  """

  kind: ActionKind
  microbatch: int
  chunk: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineSchedule:
  """Pipeline schedule: actions by tick and stage.

  Attributes:
    name: Name of the builder.
    num_microbatches: Microbatches per step.
    num_chunks: Chunks per stage, each of which is a part of the model.
    kinds: `ActionKind` of each action, int8 ``[T, S]``.
    microbatches: Microbatch of each action, int32 ``[T, S]``; -1 where idle.
    chunks: Chunk of each action, int32 ``[T, S]``; -1 where idle.
    limits: Maximum number of live activations per stage, int ``[S]``, counted
      in microbatches of one part. They are live from a forward to the last
      action that reads them.
    parts: Placement: the part of the model on each chunk of each stage, int
      ``[chunks, stages]``.
  """

  name: str
  num_microbatches: int
  num_chunks: int
  kinds: np.ndarray
  microbatches: np.ndarray
  chunks: np.ndarray
  limits: tuple[int, ...]
  parts: np.ndarray

  @property
  def num_ticks(self) -> int:
    """Number of ticks."""
    return self.kinds.shape[0]

  @property
  def num_stages(self) -> int:
    """Number of stages."""
    return self.kinds.shape[1]

  @property
  def num_parts(self) -> int:
    """Number of parts of the model."""
    return self.num_stages * self.num_chunks

  @functools.cached_property
  def stage_of_part(self) -> np.ndarray:
    """Stage of each part of the model, int ``[part]``."""
    return np.argsort(self.parts, axis=None) % self.num_stages

  @functools.cached_property
  def chunk_of_part(self) -> np.ndarray:
    """Index of each of the model's parts among its stage's, int ``[part]``."""
    return np.argsort(self.parts, axis=None) // self.num_stages

  @functools.cached_property
  def directions(self) -> np.ndarray:
    """Direction from each part of the model to the next, ``[num_parts - 1]``.

    1 leads to the next stage, and from the last one to the first; -1 leads to
    the previous stage, and 0 to the same stage.
    """
    by = np.diff(self.stage_of_part)
    looped = (by - 1) % self.num_stages == 0
    return np.ones_like(by) if looped.all() else by

  @functools.cached_property
  def is_loop(self) -> bool:
    """Whether the part after each part of the model is on the next stage.

    The stage after the last one is the first.
    """
    return bool((self.directions == 1).all())

  def part_of_actions(self) -> np.ndarray:
    """Returns each action's part of the model, int ``[ticks, stages]``.

    Where a stage is idle, it is any part.
    """
    return self.parts[self.chunks, np.arange(self.num_stages)]

  @functools.cached_property
  def splits(self) -> bool:
    """Whether any backward is split into two actions."""
    return bool((self.kinds == ActionKind.INPUT).any())

  @functools.cached_property
  def has_backward(self) -> bool:
    """Whether there is any backward; schedules for evaluation have none."""
    return bool((self.kinds > ActionKind.FORWARD).any())

  def actions(self, stage: int) -> list[tuple[int, Action]]:
    """Returns a stage's actions in order, with their ticks."""
    ticks = np.flatnonzero(self.kinds[:, stage])
    return [
      (int(t), Action(ActionKind(self.kinds[t, stage]),
                      int(self.microbatches[t, stage]),
                      int(self.chunks[t, stage])))
      for t in ticks
    ]


def loop_placement(stages: int, chunks: int) -> np.ndarray:
  """Returns the placement of a loop, ``chunk * stages + stage``, ``[C, S]``.

  Example:
    >>> loop_placement(stages=3, chunks=2).tolist()
    [[0, 1, 2], [3, 4, 5]]
  """
  return np.arange(chunks * stages).reshape(chunks, stages)


def v_placement(stages: int, chunks: int) -> np.ndarray:
  """Returns the placement of a V, int ``[C, S]``.

  Successive chunks have opposite directions. With two chunks, the first stage
  has the first and the last part.

  Example:
    >>> v_placement(stages=3, chunks=2).tolist()
    [[0, 1, 2], [5, 4, 3]]
  """
  parts = loop_placement(stages, chunks)
  parts[1::2] = parts[1::2, ::-1].copy()
  return parts


def ticks_of_actions(schedule: PipelineSchedule) -> np.ndarray:
  """Returns the tick of every action, int ``[kind, part, microbatch]``.

  The tick is -1 for a missing action. If an action occurs several times, which
  `check` rejects, it is the tick of one of them.
  """
  shape = len(ActionKind), schedule.num_parts, schedule.num_microbatches
  found = np.full(shape, -1)
  ticks, stages = np.nonzero(schedule.kinds)
  kinds, microbatches, chunks = (
    array[ticks, stages]
    for array in (schedule.kinds, schedule.microbatches, schedule.chunks)
  )
  # A later one of several equal actions overwrites the tick.
  found[kinds, schedule.parts[chunks, stages], microbatches] = ticks
  return found


def schedule_earliest(
  name: str,
  orders: Sequence[Iterable[Action]],
  num_microbatches: int,
  num_chunks: int,
  limits: Sequence[int],
  placement: Callable[[int, int], np.ndarray] = loop_placement,
) -> PipelineSchedule:
  """Schedules every action at the earliest tick that its stage's order allows.

  Args:
    name: Name of the builder.
    orders: Actions of each stage, in order.
    num_microbatches: Microbatches per step.
    num_chunks: Parts per stage.
    limits: See `PipelineSchedule`.
    placement: Function from stages and chunks to the placement.

  Raises:
    ValueError: The orders deadlock: each stage waits for another one.

  Example:
    Two stages run one microbatch forward and back.

    >>> order = [Action(ActionKind.FORWARD, 0), Action(ActionKind.BACKWARD, 0)]
    >>> orders = [order, order]
    >>> schedule_earliest("mine", orders, 1, 1, limits=(1, 1)).kinds.tolist()
    [[1, 0], [0, 1], [0, 2], [2, 0]]
  """
  num_stages = len(orders)
  queues = [list(order) for order in orders]
  done: set[tuple[str, int, int]] = set()  # results of earlier ticks
  parts = placement(num_stages, num_chunks)
  last = num_stages * num_chunks - 1
  at = [0] * num_stages  # the next action of each stage
  rows: list[list[Action | None]] = []
  remaining = sum(map(len, queues))
  # One tick per iteration: each stage runs its next action if possible.
  while remaining:
    row: list[Action | None] = [None] * num_stages
    made = []  # results of this tick, available from the next one
    for stage, queue in enumerate(queues):
      if at[stage] == len(queue):
        continue
      action = queue[at[stage]]
      part = int(parts[action.chunk, stage])
      if operands_of(action, part, last) <= done:
        row[stage] = action
        made += results_of(action, part)
        at[stage] += 1
        remaining -= 1
    if not any(row):
      stuck = [q[i] for q, i in zip(queues, at, strict=True) if i < len(q)]
      raise ValueError(
        f"{name}: deadlock, since none of the next actions {stuck[:4]} can run"
      )
    # Added after all stages: a result is not available within its tick.
    done.update(made)
    rows.append(row)
  return from_rows(name, rows, num_microbatches, num_chunks, limits, parts)


def operands_of(
  action: Action, part: int, last: int
) -> set[tuple[str, int, int]]:
  """Returns an action's operands: ("output" or "cotangent", part, microbatch).

  Args:
    action: The action.
    part: Its part.
    last: Index of the last part, whose cotangents come from the loss.
  """
  m = action.microbatch
  if action.kind is ActionKind.FORWARD:
    return {("output", part - 1, m)} if part else set()
  # WEIGHT also reads the operands of INPUT, the first half of the backward.
  if action.kind is ActionKind.WEIGHT:
    return {("cotangent", part, m)}  # produced by the INPUT action
  # A backward needs its forward, and the cotangents of the next part.
  own = {("output", part, m)}
  return own | ({("cotangent", part + 1, m)} if part < last else set())


def results_of(action: Action, part: int) -> list[tuple[str, int, int]]:
  """Returns the results of an action that other actions may need.

  They are ("output" or "cotangent", part, microbatch); ``part`` is the action's
  part of the model.
  """
  m = action.microbatch
  if action.kind is ActionKind.FORWARD:
    return [("output", part, m)]
  return [] if action.kind is ActionKind.WEIGHT else [("cotangent", part, m)]


def from_rows(
  name: str,
  rows: Sequence[Sequence[Action | None]],
  num_microbatches: int,
  num_chunks: int,
  limits: Sequence[int],
  parts: np.ndarray | None = None,
) -> PipelineSchedule:
  """Builds a schedule from the actions of all stages at each tick.

  ``rows`` are ``[tick][stage]``, None where a stage is idle. Parts of the model
  are in a `loop_placement` unless ``parts`` places them. Other arguments are
  attributes of `PipelineSchedule`.
  """
  if parts is None:
    parts = loop_placement(len(rows[0]), num_chunks)
  idle = Action(ActionKind.IDLE, -1, -1)
  # [T, S, 3]: kind, microbatch, chunk.
  filled = np.array([[a or idle for a in row] for row in rows], np.int32)
  return PipelineSchedule(
    name, num_microbatches, num_chunks, filled[..., 0].astype(np.int8),
    filled[..., 1], filled[..., 2], tuple(limits), parts,
  )
