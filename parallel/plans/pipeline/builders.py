"""Builders of pipeline schedules, by their names in configs.

Each builder defines the order of a stage's actions;
`pipeline_schedule.schedule_earliest` schedules every action at the earliest
possible tick. A step has p stages, m microbatches and v chunks per stage. All
orders except those with split backwards follow one rule: first some forwards
(the *warm-up*), then a forward before every backward, then the rest. Backwards
process microbatches in the order of forwards, so all schedules sum gradients in
the same order, part by part.

Sources: GPipe (Huang et al., 1811.06965), here with backwards in the order of
forwards; 1F1B (PipeDream-Flush: Narayanan et al., 2006.09503); interleaved 1F1B
(Megatron-LM: Narayanan et al., 2104.04473); eager 1F1B (Zhuang et al.,
2211.05322), whose warm-up is twice as long, which hides hops that take up to
half of a microbatch's time; looped (breadth-first: Lamy-Poirier, 2211.05953);
ZB-H1 and ZB-H2, the handcrafted orders of Qi et al., 2401.10241; ZB-V (Qi et
al., 2405.15362), with no bubble at the peak memory of 1F1B; DualPipeV, half of
DualPipe (DeepSeek-V3, 2412.19437) on half of the devices. The last two place
the parts in a V.
"""

import collections
from collections.abc import Callable, Iterable
import dataclasses
from typing import NamedTuple

import numpy as np

from parallel.base import checks
from parallel.plans.pipeline.pipeline_schedule import (
  Action,
  ActionKind,
  PipelineSchedule,
  loop_placement,
  schedule_earliest,
  v_placement,
)


class PipelineSize(NamedTuple):
  """Size of a pipeline schedule.

  Attributes:
    stages: p, the stages of the pipeline.
    microbatches: m, the microbatches per step.
    chunks: v, the chunks per stage, each of which is a part of the model.
  """

  stages: int
  microbatches: int
  chunks: int = 1


@dataclasses.dataclass(frozen=True)
class Builder:
  """Rule of a pipeline schedule, and the sizes that it supports.

  Attributes:
    order: Function from size and stage to the stage's actions in order.
    stored: Function from size and stage to the maximum number of live
      activations on the stage, counted in microbatches of one chunk.
    chunked: Whether stages may have several chunks.
    in_rounds: Whether the microbatches must be a multiple of the stages if
      there are several chunks.
    one_chunk: Builder that replaces this one for one chunk per stage; "" for
      none.
    num_chunks: Chunks per stage that the schedule requires; 0 if it has no such
      requirement (any number if ``chunked``, otherwise one).
    placement: Function from stages and chunks to the placement of parts.
  """

  order: Callable[[PipelineSize, int], list[Action]]
  stored: Callable[[PipelineSize, int], int]
  chunked: bool = False
  in_rounds: bool = False
  one_chunk: str = ""
  num_chunks: int = 0
  placement: Callable[[int, int], np.ndarray] = loop_placement


def _forwards(size: PipelineSize, group: int) -> list[Action]:
  """Lists a stage's forwards: of ``group`` microbatches, chunk by chunk.

  Then those of the next microbatches follow in the same way.
  """
  return [
    Action(ActionKind.FORWARD, microbatch, chunk)
    for first in range(0, size.microbatches, group)
    for chunk in range(size.chunks)
    for microbatch in range(first, min(first + group, size.microbatches))
  ]


def _order_1f1b(size: PipelineSize, group: int, warm_up: int) -> list[Action]:
  """Lists a stage's actions: some forwards, then one before each backward.

  ``warm_up`` is the number of these first forwards; ``group`` is that of
  `_forwards`.
  """
  forwards = _forwards(size, group)
  order, rest = forwards[:warm_up], iter(forwards[warm_up:])
  # Backwards follow the order of forwards.
  for action in forwards:
    order += [a for a in [next(rest, None)] if a]
    # Backwards run through the chunks in reverse.
    chunk = size.chunks - 1 - action.chunk
    order.append(Action(ActionKind.BACKWARD, action.microbatch, chunk))
  return order


def _order_split_backward(
  size: PipelineSize, warm_up: int, delay: int
) -> list[Action]:
  """Lists the actions of a stage with split backwards.

  Args:
    size: The size.
    warm_up: Forwards before the first forward that is followed by a backward.
    delay: Number of microbatches by which weight gradients lag behind input
      cotangents.
  """
  order = [
    Action(ActionKind.FORWARD, i) for i in range(
      min(warm_up, size.microbatches)
    )
  ]
  # Per iteration one forward, one input cotangent and one weight gradient of
  # different microbatches, as far as these exist.
  for i in range(size.microbatches + delay):
    for kind, microbatch in (
      (ActionKind.FORWARD, i + warm_up), (ActionKind.INPUT, i),
      (ActionKind.WEIGHT, i - delay)
    ):
      if 0 <= microbatch < size.microbatches:
        order.append(Action(kind, microbatch))
  return order


def _all_forwards_first(size: PipelineSize, stage: int) -> list[Action]:
  """Lists all forwards, one chunk after another, then all backwards."""
  del stage  # all stages have this order
  m = size.microbatches
  return _order_1f1b(size, group=m, warm_up=m * size.chunks)


def _num_all_live(size: PipelineSize, stage: int) -> int:
  del stage
  return size.microbatches * size.chunks


def _num_later_stages(size: PipelineSize, stage: int) -> int:
  """Returns the number of stages after a stage, the warm-up of 1F1B."""
  return size.stages - stage - 1


def _eager_warm_up(size: PipelineSize, stage: int) -> int:
  """Returns how many forwards precede interleaved 1F1B's first backward.

  With one chunk per stage it is that of eager 1F1B.
  """
  return 2 * _num_later_stages(size, stage) + (size.chunks - 1) * size.stages


def _eager_order(size: PipelineSize, stage: int) -> list[Action]:
  # Groups of `stages` microbatches pass through all chunks in turn.
  warm_up = _eager_warm_up(size, stage)
  return _order_1f1b(size, group=size.stages, warm_up=warm_up)


def _eager_stored(size: PipelineSize, stage: int) -> int:
  return min(
    size.microbatches * size.chunks, _eager_warm_up(size, stage) + 1
  )


_F, _B, _I, _W = (
  ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT
)


def _number_microbatches(
  kinds: Iterable[tuple[ActionKind, int]], microbatches: int
) -> list[Action]:
  """Returns actions with microbatch numbers for a list of (kind, chunk) pairs.

  The k-th pair of a kind and chunk runs on microbatch k; a whole backward
  counts as both of its halves. Pairs beyond the last microbatch are dropped.
  """
  order, count = [], collections.Counter[tuple[ActionKind, int]]()
  for kind, chunk in kinds:
    halves = (_I, _W) if kind is _B else (kind,)
    order.append(Action(kind, count[halves[0], chunk], chunk))
    count.update((half, chunk) for half in halves)
  return [action for action in order if action.microbatch < microbatches]


def _zb_v(size: PipelineSize, stage: int) -> list[Action]:
  """Lists a stage's actions in ZB-V, whose backwards are all split.

  Weight gradients directly follow the input's cotangents, or fill the idle end
  of the step. For m < 2 x stages - 1 microbatches, the order is that of 2 x
  stages - 1 microbatches without the actions of microbatches from m on.
  """
  p, waves = size.stages, _num_later_stages(size, stage)
  m = max(size.microbatches, 2 * p - 1)
  both = [(_I, 0), (_W, 0), (_F, 1), (_I, 1), (_W, 1)]
  return _number_microbatches([
    # Forwards until microbatch 0 comes back in chunk 1, then until its
    # cotangents come back.
    *[(_F, 0)] * (2 * waves + 1),
    *[(_F, 1), (_F, 0)] * stage,
    *[(_F, 1), (_I, 1), (_W, 1)] * (waves + 1),
    # Both chunks in turn; the last rounds have no forward of the first chunk.
    *[(_F, 0), *both] * (m - p - waves),
    *both * waves,
    # The last input cotangents, then the weight gradients not yet computed.
    *[(_I, 0), (_I, 1)] * stage,
    *[(_I, 0), (_W, 0)] * (waves + 1),
    *[(_W, 1)] * stage, *[(_W, 0)] * stage,
  ], size.microbatches)


def _dualpipe_v(size: PipelineSize, stage: int) -> list[Action]:
  """Lists a stage's actions in DualPipeV: a forward and a backward alternate.

  Backwards are split where weight gradients fill the bubble: in the warm-up,
  and at the end of the step. For m < 2 x stages microbatches, the order is that
  of 2 x stages microbatches without the actions of microbatches from m on.
  """
  p, waves = size.stages, _num_later_stages(size, stage)
  m = max(size.microbatches, 2 * p)
  # Of the backwards after the pairs, the second half is split. Their weight
  # gradients, and those of the last input cotangents, follow in the same order.
  rest = [1, 0] * (stage + 1)
  whole, split = rest[: stage + 1], rest[stage + 1 :]
  late = split + [0] * waves
  return _number_microbatches([
    *[(_F, 0)] * (2 * waves),
    *[(_F, 0), (_F, 1)] * (stage + 1),
    *[(_I, 1), (_W, 1), (_F, 1)] * waves,
    # The pairs: a forward of one chunk and a backward of the other.
    *[(_F, 0), (_B, 1), (_F, 1), (_B, 0)] * (m - 2 * p + stage + 1),
    *[(_B, 1), (_F, 1), (_B, 0)] * waves,
    *[(_B, chunk) for chunk in whole],
    *[(_I, chunk) for chunk in split],
    *[x for chunk in late[:waves] for x in ((_W, chunk), (_I, 0))],
    *[(_W, chunk) for chunk in late[waves:]],
  ], size.microbatches)


def _v_stored(size: PipelineSize, stage: int, most: int) -> int:
  """Returns the peak of live activations on a stage of a V-shaped placement.

  They are counted in microbatches of one chunk, and are at most ``most``.
  """
  m = size.microbatches
  return min(most, 2 * m, m + stage + 1)


BUILDERS: dict[str, Builder] = {
  "gpipe": Builder(_all_forwards_first, _num_all_live),
  # The warm-up's microbatches and one more are live.
  "1f1b": Builder(
    lambda size, stage: _order_1f1b(
      size, size.stages, _num_later_stages(size, stage)
    ),
    lambda size, stage: min(
      size.microbatches, _num_later_stages(size, stage) + 1
    ),
  ),
  "eager_1f1b": Builder(_eager_order, _eager_stored),
  "interleaved_1f1b": Builder(
    _eager_order, _eager_stored, chunked=True, in_rounds=True,
    one_chunk="eager_1f1b",
  ),
  "looped": Builder(
    _all_forwards_first, _num_all_live, chunked=True, one_chunk="gpipe"
  ),
  # A stage with a shorter warm-up delays more weight gradients, which fill the
  # end of the step: all stages store equally many activations.
  "zb_h1": Builder(
    lambda size, stage: _order_split_backward(
      size, _num_later_stages(size, stage), delay=stage
    ),
    lambda size, stage: min(size.microbatches, size.stages),
  ),
  "zb_h2": Builder(
    lambda size, stage: _order_split_backward(
      size, 2 * _num_later_stages(size, stage), delay=2 * stage
    ),
    lambda size, stage: min(size.microbatches, 2 * size.stages - 1),
  ),
  "zb_v": Builder(
    _zb_v,
    lambda size, stage: _v_stored(size, stage, 2 * size.stages),
    chunked=True, num_chunks=2, placement=v_placement,
  ),
  "dualpipe_v": Builder(
    _dualpipe_v,
    lambda size, stage: _v_stored(size, stage, 2 * size.stages + 1),
    chunked=True, num_chunks=2, placement=v_placement,
  ),
  # For evaluation.
  "forward": Builder(
    lambda size, stage: _forwards(size, size.microbatches),
    lambda size, stage: 0,  # no backward reads activations
    chunked=True,
  ),
}


def build(
  schedule: str, stages: int, microbatches: int, chunks: int = 1
) -> PipelineSchedule:
  """Builds a pipeline schedule by name.

  With one chunk, "interleaved_1f1b" is "eager_1f1b" and "looped" is "gpipe",
  and the schedule has that name.

  Args:
    schedule: A key of ``BUILDERS``.
    stages: Stages of the pipeline.
    microbatches: Microbatches per step; may be fewer than stages.
    chunks: Parts per stage.

  Raises:
    ValueError: The name is unknown, or the builder does not support the size;
      the message names the supported sizes.

  Example:
    The kinds (1: forward, 2: backward) of two stages by tick.

    >>> build("1f1b", stages=2, microbatches=3).kinds.T.tolist()
    [[1, 1, 0, 2, 1, 2, 0, 2], [0, 1, 2, 1, 2, 1, 2, 0]]
  """
  check_supported(schedule, stages, microbatches, chunks)
  if chunks == 1:
    schedule = BUILDERS[schedule].one_chunk or schedule
  size, builder = PipelineSize(stages, microbatches, chunks), BUILDERS[schedule]
  return schedule_earliest(
    schedule,
    [builder.order(size, stage) for stage in range(stages)],
    microbatches,
    chunks,
    [builder.stored(size, stage) for stage in range(stages)],
    builder.placement,
  )


def build_evaluation(
  schedule: PipelineSchedule, microbatches: int = 1
) -> PipelineSchedule:
  """Builds the schedule "forward" on the placement of another schedule.

  Args:
    schedule: Schedule of a training step.
    microbatches: Microbatches of an evaluation.
  """
  size = PipelineSize(schedule.num_stages, microbatches, schedule.num_chunks)
  builder = BUILDERS["forward"]
  return schedule_earliest(
    "forward",
    [builder.order(size, stage) for stage in range(size.stages)],
    microbatches,
    size.chunks,
    [builder.stored(size, stage) for stage in range(size.stages)],
    lambda *_: schedule.parts,
  )


def num_chunks_for(schedule: str, chunks: int) -> int:
  """Returns the chunks per stage of a schedule if a config asks for ``chunks``.

  Args:
    schedule: A key of ``BUILDERS``.
    chunks: Parts per stage of schedules that support any number.

  Example:
    >>> [num_chunks_for(name, 3) for name in ("1f1b", "looped", "zb_v")]
    [1, 3, 2]
  """
  builder = BUILDERS[schedule]
  return builder.num_chunks or (chunks if builder.chunked else 1)


def check_supported(
  schedule: str, stages: int, microbatches: int, chunks: int = 1
) -> None:
  """Checks that `build` supports a size, without building.

  Args:
    schedule: A key of ``BUILDERS``.
    stages: Stages of the pipeline.
    microbatches: Microbatches per step.
    chunks: Parts per stage.

  Raises:
    ValueError: See `build`.
  """
  checks.known("schedule=", schedule, BUILDERS)
  checks.at_least("stages", stages)
  checks.at_least("microbatches", microbatches)
  checks.at_least("chunks", chunks)
  builder = BUILDERS[schedule]
  if chunks != num_chunks_for(schedule, chunks):
    able = ", ".join(n for n in BUILDERS if num_chunks_for(n, chunks) == chunks)
    number = {1: "one chunk", 2: "two chunks"}[num_chunks_for(schedule, chunks)]
    raise ValueError(
      f"schedule={schedule!r} has {number} per stage, but chunks={chunks}; "
      f"schedules with chunks={chunks} are {able}"
    )
  # Interleaving processes rounds of `stages` microbatches.
  left = microbatches % stages
  if builder.in_rounds and chunks > 1 and left:
    fit = [n for n in (microbatches - left, microbatches - left + stages) if n]
    raise ValueError(
      f"schedule={schedule!r} with chunks={chunks} needs a multiple of "
      f"stages={stages} microbatches, but microbatches={microbatches}; use "
      f"{' or '.join(map(str, fit))} microbatches, or schedule='looped'"
    )
