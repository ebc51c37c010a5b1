"""Simulation of a pipeline schedule on unequal stages and links.

There are two models. In the event model, each stage runs its actions in the
schedule's order, each as soon as the stage is idle and the operands have
arrived; ticks have no length. In the lockstep model all stages run one program
(`parallel.pipeline.run`), and a tick takes the time of its longest action plus
that of its longest hop.

Shape legend: T = ticks, S = stages.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from parallel.base import checks
from parallel.plans.pipeline.builders import PipelineSize
from parallel.plans.pipeline.cost import sends_by_direction
from parallel.plans.pipeline.pipeline_schedule import (
  ActionKind,
  PipelineSchedule,
  loop_placement,
)


@dataclasses.dataclass(frozen=True)
class PartTimes:
  """Compute seconds of each part of the model on one microbatch, ``[part]``.

  Attributes:
    forward_s: Seconds to compute the output.
    backward_s: Seconds to compute the cotangents of input and weights together.
    input_s: Seconds to compute the cotangents of the input alone.
    weight_s: Seconds to compute the cotangents of the weights alone.
  """

  forward_s: tuple[float, ...]
  backward_s: tuple[float, ...]
  input_s: tuple[float, ...]
  weight_s: tuple[float, ...]

  def by_kind(self) -> np.ndarray:
    """Returns the seconds by `ActionKind`, float ``[kind, part]``."""
    return np.array([
      np.zeros(len(self.forward_s)), self.forward_s, self.backward_s,
      self.input_s, self.weight_s,
    ])


def even_part_times(
  size: PipelineSize,
  forward_s: float,
  input_s: float,
  weight_s: float,
  factors: Sequence[float] = (),
  parts: np.ndarray | None = None,
  again_s: float = 0.0,
) -> PartTimes:
  """Returns the times of the model's parts if those of a stage are equal.

  A backward that is not split takes the time of its two halves, and repeats the
  forward only once.

  Args:
    size: Stages and chunks.
    forward_s: Seconds of a stage's forward, all its chunks together.
    input_s: Seconds to compute the cotangents of the stage's inputs.
    weight_s: Seconds to compute the gradients of the stage's weights.
    factors: Slowdown of each stage, ``[stage]``; () for 1.
    parts: Placement of the parts (`PipelineSchedule.parts`); None for a loop.
    again_s: Seconds of the forward that each action of a backward repeats; 0 if
      activations are saved.

  Raises:
    ValueError: Seconds or factors are not positive, or the number of factors is
      not that of the stages.
  """
  for key, value in (
    ("forward_s", forward_s), ("input_s", input_s), ("weight_s", weight_s),
    *(("factors", factor) for factor in factors),
  ):
    checks.positive(key, value)
  if factors and len(factors) != size.stages:
    raise ValueError(
      f"factors={tuple(factors)} must be one for each of {size.stages} stages"
    )
  shares = np.empty(size.stages * size.chunks)  # [part]
  shares[
    loop_placement(size.stages, size.chunks) if parts is None else parts
  ] = (
    np.array(factors or (1.0,) * size.stages) / size.chunks
  )
  return PartTimes(*(
    tuple((seconds * shares).tolist())
    for seconds in (
      forward_s, input_s + weight_s + again_s, input_s + again_s,
      weight_s + again_s,
    )
  ))


@dataclasses.dataclass(frozen=True)
class StageLinks:
  """Links between stages, separate for each direction.

  Attributes:
    forward_s: Seconds that a message occupies the link from each stage to the
      next one, ``[S]``; the last stage's leads to the first one.
    backward_s: Seconds that a message occupies the link to the previous stage,
      ``[S]``.
    latency_s: Seconds from the release of the link to the arrival.
    overlap: Whether a stage computes while it sends. If not, it waits until its
      link is free and has taken the message.
  """

  forward_s: tuple[float, ...]
  backward_s: tuple[float, ...]
  latency_s: float = 0.0
  overlap: bool = True


def even_stage_links(
  stages: int, busy_s: float = 0.0, latency_s: float = 0.0, *,
  overlap: bool = True,
) -> StageLinks:
  """Returns equal links between all stages.

  Args:
    stages: Stages of the pipeline.
    busy_s: Seconds that a message occupies a link.
    latency_s: Seconds from the release of the link to the arrival.
    overlap: Whether a stage computes while it sends.

  Raises:
    ValueError: A time is negative.
  """
  checks.not_negative("busy_s", busy_s)
  checks.not_negative("latency_s", latency_s)
  return StageLinks((busy_s,) * stages, (busy_s,) * stages, latency_s, overlap)


@dataclasses.dataclass(frozen=True)
class Timeline:
  """Times of all actions and messages, in seconds from the start of the step.

  Attributes:
    schedule: The simulated schedule.
    start_s: Start of each action, float ``[ticks, stages]`` like all attributes
      but the first and the last; nan where idle.
    end_s: End of each action.
    leave_s: Time at which an action's result is put on a link; nan for none.
    sent_s: Time at which that link is free again.
    arrival_s: Time at which the result arrives on the other stage.
    finish_s: End of the last action.
  """

  schedule: PipelineSchedule
  start_s: np.ndarray
  end_s: np.ndarray
  leave_s: np.ndarray
  sent_s: np.ndarray
  arrival_s: np.ndarray
  finish_s: float

  @property
  def bubble(self) -> float:
    """Fraction of the step in which stages are idle, averaged over stages."""
    busy_s = np.nansum(self.end_s - self.start_s)  # nan where idle
    return 1 - float(busy_s) / (self.finish_s * self.schedule.num_stages)


def events(
  schedule: PipelineSchedule, work: PartTimes, hops: StageLinks
) -> Timeline:
  """Simulates a schedule in the event model.

  Args:
    schedule: Schedule that `parallel.plans.pipeline.check.check` accepts.
    work: Seconds of its parts.
    hops: Links between its stages.

  Returns:
    The times of all actions.

  Example:
    Two stages whose forward takes 1 s and whose backward takes 2 s; each
    message takes 0.5 s.

    >>> from parallel.plans.pipeline.builders import build
    >>> size = PipelineSize(stages=2, microbatches=4)
    >>> work = even_part_times(size, forward_s=1.0, input_s=1.0, weight_s=1.0)
    >>> schedule = build("1f1b", stages=2, microbatches=4)
    >>> events(schedule, work, even_stage_links(2)).finish_s
    15.0
    >>> events(schedule, work, even_stage_links(2, busy_s=0.5)).finish_s
    17.0
  """
  t, last = schedule, schedule.num_parts - 1
  seconds, parts = work.by_kind().tolist(), t.part_of_actions().tolist()
  ahead, back = (x.tolist() for x in sends_by_direction(t))
  microbatches = t.microbatches.tolist()
  kinds = t.kinds.tolist()
  # start, end, leave, sent and arrival of each action; nan where idle.
  found = np.full((5, t.num_ticks, t.num_stages), np.nan)
  # Arrival of outputs and cotangents at their consumers, [part][microbatch].
  outputs, cotangents = np.zeros(
    (2, t.num_parts, t.num_microbatches)
  ).tolist()
  # Time at which each stage and each link, by direction, is free again.
  free = [0.0] * t.num_stages
  links = {1: [0.0] * t.num_stages, -1: [0.0] * t.num_stages}
  # Ticks are a topological order, so one pass is enough.
  for tick, stage in np.argwhere(t.kinds).tolist():
    kind, m = kinds[tick][stage], microbatches[tick][stage]
    part = parts[tick][stage]
    # An action waits for its stage and for its operand.
    start = free[stage]
    if kind == ActionKind.FORWARD and part:
      start = max(start, outputs[part - 1][m])
    elif kind in (ActionKind.BACKWARD, ActionKind.INPUT) and part < last:
      start = max(start, cotangents[part + 1][m])
    end = there = free[stage] = start + seconds[kind][part]
    leave = sent = arrival = np.nan
    # 1: to the next stage, -1: to the previous one, 0: no message.
    way = ahead[tick][stage] - back[tick][stage]
    if way:
      busy = (hops.forward_s if way > 0 else hops.backward_s)[stage]
      # A message waits for its link and occupies it for `busy` seconds.
      leave = max(end, links[way][stage])
      sent = links[way][stage] = leave + busy
      there = arrival = sent + hops.latency_s
      if not hops.overlap:  # the stage is blocked until the link has it
        free[stage] = sent
    if kind == ActionKind.FORWARD:
      outputs[part][m] = there
    elif kind != ActionKind.WEIGHT:
      cotangents[part][m] = there
    found[:, tick, stage] = start, end, leave, sent, arrival
  return Timeline(t, *found, finish_s=float(np.nanmax(found[1])))


def batched_finish_s(
  schedule: PipelineSchedule, work: np.ndarray, forward_s: np.ndarray,
  backward_s: np.ndarray,
) -> np.ndarray:
  """Returns the finish times of `events` for N sets of times, float64 ``[N]``.

  Links have no latency, and stages compute while they send.

  Args:
    schedule: Schedule that `parallel.plans.pipeline.check.check` accepts.
    work: Seconds of its parts, ``[kind, part, N]``, as `PartTimes.by_kind` has
      them.
    forward_s: Seconds that messages occupy the links to the next stage,
      ``[S, N]``.
    backward_s: Seconds that they occupy the links to the previous stage.
  """
  t, none = schedule, np.zeros(work.shape[-1])
  (ahead, back), parts = sends_by_direction(t), t.part_of_actions()
  # (whether an output, part, microbatch) -> time of arrival, [N].
  there: dict[tuple[bool, int, int], np.ndarray] = {}
  free = [none] * t.num_stages
  links = {True: [none] * t.num_stages, False: [none] * t.num_stages}
  for tick, stage in np.argwhere(t.kinds).tolist():
    kind, m = t.kinds[tick, stage], int(t.microbatches[tick, stage])
    part = int(parts[tick, stage])
    # The same recurrence as in `events`, over arrays of cases.
    start, out = free[stage], kind == ActionKind.FORWARD
    if kind != ActionKind.WEIGHT:
      needs = (out, part - 1 if out else part + 1, m)
      start = np.maximum(start, there.get(needs, none))
    end = free[stage] = start + work[kind, part]
    if ahead[tick, stage] or back[tick, stage]:
      way = bool(ahead[tick, stage])
      busy = (forward_s if way else backward_s)[stage]
      end = links[way][stage] = np.maximum(end, links[way][stage]) + busy
    if kind != ActionKind.WEIGHT:
      there[out, part, m] = end
  return np.max(free, axis=0)


def lockstep_s(
  schedule: PipelineSchedule, work: PartTimes, hops: StageLinks, lanes: int = 1
) -> float:
  """Returns the seconds of a step if stages wait for one another in each tick.

  Args:
    schedule: The schedule.
    work: Seconds of its parts.
    hops: Links between its stages. The hops of a tick start after its actions.
    lanes: Number of consecutive stages on each device, which runs them in turn.
  """
  t = schedule
  # Stages of one device run one after another: [T, S] -> [T, devices].
  computing = _action_seconds(t, work).reshape(t.num_ticks, -1, lanes).sum(2)
  forward, backward = sends_by_direction(t)
  sending = np.maximum(
    forward * (np.array(hops.forward_s) + hops.latency_s),
    backward * (np.array(hops.backward_s) + hops.latency_s),
  )
  # computing: [T, devices]; sending: [T, S].
  return float((computing.max(1) + sending.max(1)).sum())


def lockstep_waiting_s(
  schedule: PipelineSchedule, action_s: Mapping[str, float], lanes: int = 1
) -> float:
  """Returns the seconds that a device waits for other devices in lockstep.

  Args:
    schedule: The schedule.
    action_s: Seconds of actions by the lower-case names of their kinds, such as
      "forward", equal for all parts, so that all devices wait equally long.
    lanes: Number of consecutive stages on each device, which runs them in turn.
  """
  t = schedule
  work = PartTimes(*(
    (action_s.get(kind.name.lower(), 0.0),) * t.num_parts
    for kind in ActionKind if kind is not ActionKind.IDLE
  ))
  # All devices have equal work: take the first one's. Backwards that some
  # stages split and others do not must take the time of their halves.
  own_s = float(_action_seconds(t, work)[:, :lanes].sum())
  return lockstep_s(t, work, even_stage_links(t.num_stages), lanes) - own_s


def _action_seconds(schedule: PipelineSchedule, work: PartTimes) -> np.ndarray:
  """Returns the seconds of all actions, float ``[ticks, stages]``.

  ``work`` are the seconds of the model's parts.
  """
  return work.by_kind()[schedule.kinds, schedule.part_of_actions()]
