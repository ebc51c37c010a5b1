"""Builders of timetables, by the names that configs use.

Each is the order of a stage's actions; `timetable.arranged` gives every action
the earliest tick. A step of p stages, m microbatches and v chunks per stage.
But for the zero-bubble ones they are one rule: some forwards first (the
*warm-up*), then a forward before every backward, then what is left. Backwards
take microbatches in the order of forwards, so all timetables add gradients up
in one order, part by part.

Sources: GPipe (Huang et al., 1811.06965), here with backwards in the order of
forwards; 1F1B (PipeDream-Flush: Narayanan et al., 2006.09503); interleaved 1F1B
(Megatron-LM: Narayanan et al., 2104.04473); eager 1F1B (Zhuang et al.,
2211.05322), which warms up twice as long, so that hops are hidden that take up
to half of a microbatch's time; looped (breadth-first: Lamy-Poirier,
2211.05953); ZB-H1 and ZB-H2, the hand-made orders of Qi et al., 2401.10241.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

from parallel import checks
from parallel.pipeline.timetable import Action, Kind, Timetable, arranged


class Size(NamedTuple):
  """What a timetable is built for.

  Attributes:
    stages: Stages of the pipeline, p.
    microbatches: Microbatches of a step, m.
    chunks: Parts of a stage, v.
  """

  stages: int
  microbatches: int
  chunks: int = 1


@dataclasses.dataclass(frozen=True)
class Builder:
  """How a timetable is built, and for what.

  Attributes:
    order: Returns the actions of a stage in turn, given size and stage.
    stored: Returns of how many microbatches of its parts that stage keeps
      activations at most: the closed form.
    chunked: Whether stages may have several chunks.
    in_rounds: Whether microbatches must be a multiple of stages, where there
      are several chunks.
    one_chunk: Which builder takes its place where stages have one chunk; ""
      for itself.
  """

  order: Callable[[Size, int], list[Action]]
  stored: Callable[[Size, int], int]
  chunked: bool = False
  in_rounds: bool = False
  one_chunk: str = ""


def _forwards(size: Size, group: int) -> list[Action]:
  """Lists forwards: all chunks for a group of microbatches, then the next."""
  return [
    Action(Kind.FORWARD, microbatch, chunk)
    for first in range(0, size.microbatches, group)
    for chunk in range(size.chunks)
    for microbatch in range(first, min(first + group, size.microbatches))
  ]


def _alternating(size: Size, group: int, warm_up: int) -> list[Action]:
  """Lists forwards, as many as the warm-up; then one before each backward."""
  forwards = _forwards(size, group)
  order, rest = forwards[:warm_up], iter(forwards[warm_up:])
  for action in forwards:
    order += [a for a in [next(rest, None)] if a]
    # The last chunk is the first that is given cotangents.
    chunk = size.chunks - 1 - action.chunk
    order.append(Action(Kind.BACKWARD, action.microbatch, chunk))
  return order


def _split(size: Size, warm_up: int, delay: int) -> list[Action]:
  """Lists actions of a stage whose backwards are two.

  Args:
    size: The size.
    warm_up: Forwards before the first forward that has a backward behind it.
    delay: By how many microbatches weights' gradients come after inputs'.
  """
  order = [
    Action(Kind.FORWARD, i) for i in range(min(warm_up, size.microbatches))
  ]
  for i in range(size.microbatches + delay):
    for kind, microbatch in (
      (Kind.FORWARD, i + warm_up), (Kind.INPUT, i), (Kind.WEIGHT, i - delay)
    ):
      if 0 <= microbatch < size.microbatches:
        order.append(Action(kind, microbatch))
  return order


def _all_first(size: Size, stage: int) -> list[Action]:
  """All forwards, one chunk after another, then all backwards."""
  del stage  # the same on all stages
  m = size.microbatches
  return _alternating(size, group=m, warm_up=m * size.chunks)


def _all_stored(size: Size, stage: int) -> int:
  del stage
  return size.microbatches * size.chunks


def _waves(size: Size, stage: int) -> int:
  """Forwards until a stage's first cotangents come at 1F1B."""
  return size.stages - stage - 1


def _eager_warm_up(size: Size, stage: int) -> int:
  """Megatron-LM's warm-up; with one chunk that of eager 1F1B."""
  return 2 * _waves(size, stage) + (size.chunks - 1) * size.stages


def _eager_order(size: Size, stage: int) -> list[Action]:
  warm_up = _eager_warm_up(size, stage)
  return _alternating(size, group=size.stages, warm_up=warm_up)


def _eager_stored(size: Size, stage: int) -> int:
  return min(
    size.microbatches * size.chunks, _eager_warm_up(size, stage) + 1
  )


BUILDERS: dict[str, Builder] = {
  "gpipe": Builder(_all_first, _all_stored),
  "1f1b": Builder(
    lambda size, stage: _alternating(size, size.stages, _waves(size, stage)),
    lambda size, stage: min(size.microbatches, _waves(size, stage) + 1),
  ),
  "eager_1f1b": Builder(_eager_order, _eager_stored),
  "interleaved_1f1b": Builder(
    _eager_order, _eager_stored, chunked=True, in_rounds=True,
    one_chunk="eager_1f1b",
  ),
  "looped": Builder(
    _all_first, _all_stored, chunked=True, one_chunk="gpipe"
  ),
  # Where a stage waits for fewer cotangents, it puts off more gradients of
  # weights, which fill the end: all stages store equally much.
  "zb_h1": Builder(
    lambda size, stage: _split(size, _waves(size, stage), delay=stage),
    lambda size, stage: min(size.microbatches, size.stages),
  ),
  "zb_h2": Builder(
    lambda size, stage: _split(size, 2 * _waves(size, stage), delay=2 * stage),
    lambda size, stage: min(size.microbatches, 2 * size.stages - 1),
  ),
  "forward": Builder(
    lambda size, stage: _forwards(size, size.microbatches),
    lambda size, stage: 0,
    chunked=True,
  ),
}


def build(
  timetable: str, stages: int, microbatches: int, chunks: int = 1
) -> Timetable:
  """Builds a timetable with the builder of that name.

  With one chunk, "interleaved_1f1b" is "eager_1f1b" and "looped" is "gpipe":
  what is built has their names.

  Args:
    timetable: A key of ``BUILDERS``.
    stages: Stages of the pipeline.
    microbatches: Microbatches of a step; fewer than stages will do.
    chunks: Parts of a stage.

  Raises:
    ValueError: The name is unknown, or the builder does not take the size; the
      message says what it would take.
  """
  taken(timetable, stages, microbatches, chunks)
  if chunks == 1:
    timetable = BUILDERS[timetable].one_chunk or timetable
  size, builder = Size(stages, microbatches, chunks), BUILDERS[timetable]
  return arranged(
    timetable,
    [builder.order(size, stage) for stage in range(stages)],
    microbatches,
    chunks,
    [builder.stored(size, stage) for stage in range(stages)],
  )


def taken(
  timetable: str, stages: int, microbatches: int, chunks: int = 1
) -> None:
  """Refuses what `build` does not take, and builds nothing.

  Args:
    timetable: A key of ``BUILDERS``.
    stages: Stages of the pipeline.
    microbatches: Microbatches of a step.
    chunks: Parts of a stage.

  Raises:
    ValueError: See `build`.
  """
  checks.known("timetable=", timetable, BUILDERS)
  checks.at_least("stages", stages)
  checks.at_least("microbatches", microbatches)
  checks.at_least("chunks", chunks)
  builder = BUILDERS[timetable]
  if chunks > 1 and not builder.chunked:
    able = ", ".join(name for name, b in BUILDERS.items() if b.chunked)
    raise ValueError(
      f"timetable={timetable!r} has one chunk per stage, not chunks={chunks}; "
      f"these take several: {able}"
    )
  left = microbatches % stages
  if builder.in_rounds and chunks > 1 and left:
    fit = [n for n in (microbatches - left, microbatches - left + stages) if n]
    raise ValueError(
      f"timetable={timetable!r} with chunks={chunks} takes multiples of "
      f"stages={stages}, not microbatches={microbatches}: "
      f"{' or '.join(map(str, fit))} would fit, or 'looped'"
    )
