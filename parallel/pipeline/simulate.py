"""Times a timetable on stages and links that differ.

Two models. By events, each stage runs its actions in the timetable's order, and
each as soon as the stage is free and what it takes is there: ticks have no
length. In lockstep, as one program on all stages runs it (`run`), a tick costs
its longest part, and then its longest hop.

Shape legend: T = ticks, S = stages.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from parallel import checks
from parallel.pipeline.builders import Size
from parallel.pipeline.cost import sends
from parallel.pipeline.timetable import Kind, Timetable


@dataclasses.dataclass(frozen=True)
class Work:
  """Seconds that each part computes on one microbatch, ``[part]`` each.

  Attributes:
    forward_s: Its output.
    backward_s: The cotangents of its input and weights in one action.
    input_s: Those of its input alone.
    weight_s: Those of its weights alone.
  """

  forward_s: tuple[float, ...]
  backward_s: tuple[float, ...]
  input_s: tuple[float, ...]
  weight_s: tuple[float, ...]

  def by_kind(self) -> np.ndarray:
    """Returns seconds as float ``[kind, part]``."""
    return np.array([
      np.zeros(len(self.forward_s)), self.forward_s, self.backward_s,
      self.input_s, self.weight_s,
    ])


def even_work(
  size: Size,
  forward_s: float,
  input_s: float,
  weight_s: float,
  factors: Sequence[float] = (),
) -> Work:
  """Returns the work of stages that are cut into equal parts.

  A whole backward takes the time of its halves.

  Args:
    size: Stages and chunks.
    forward_s: Seconds of a stage's forward, all its chunks together.
    input_s: Those of its inputs' cotangents.
    weight_s: Those of its weights' gradients.
    factors: By which each stage takes longer, ``[stage]``; () for 1.

  Raises:
    ValueError: Seconds or factors are not positive, or factors are not one per
      stage.
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
  shares = np.tile(factors or (1.0,) * size.stages, size.chunks) / size.chunks
  return Work(*(
    tuple((seconds * shares).tolist())
    for seconds in (forward_s, input_s + weight_s, input_s, weight_s)
  ))


@dataclasses.dataclass(frozen=True)
class Hops:
  """Links from stage to stage, those of outputs apart from cotangents'.

  Attributes:
    forward_s: Seconds for which an output keeps the link from each stage to the
      next one busy, ``[S]``; the last stage's goes to the first one.
    backward_s: The same of cotangents, to the stage before.
    latency_s: Seconds from then on until it is there.
    overlap: Whether a stage computes while it sends. If not, it waits until its
      link is free and has taken the message.
  """

  forward_s: tuple[float, ...]
  backward_s: tuple[float, ...]
  latency_s: float = 0.0
  overlap: bool = True


def even_hops(
  stages: int, busy_s: float = 0.0, latency_s: float = 0.0, *,
  overlap: bool = True,
) -> Hops:
  """Returns equal links.

  Args:
    stages: Stages of the pipeline.
    busy_s: Seconds for which a message keeps a link busy.
    latency_s: Seconds from then on until it is there.
    overlap: Whether a stage computes while it sends.

  Raises:
    ValueError: A time is negative.
  """
  checks.not_negative("busy_s", busy_s)
  checks.not_negative("latency_s", latency_s)
  return Hops((busy_s,) * stages, (busy_s,) * stages, latency_s, overlap)


@dataclasses.dataclass(frozen=True)
class Timeline:
  """When everything happens.

  Attributes:
    timetable: What is timed.
    start_s: When each action starts, float ``[T, S]``; nan where idle.
    end_s: When it ends.
    leave_s: When what it has made is put on a link; nan where nothing is.
    sent_s: When the link is free again.
    arrival_s: When it is on the other stage.
    finish_s: When the last action ends.
  """

  timetable: Timetable
  start_s: np.ndarray
  end_s: np.ndarray
  leave_s: np.ndarray
  sent_s: np.ndarray
  arrival_s: np.ndarray
  finish_s: float

  @property
  def bubble(self) -> float:
    """The share of all stages' time in which they do not compute."""
    busy_s = np.nansum(self.end_s - self.start_s)
    return 1 - float(busy_s) / (self.finish_s * self.timetable.num_stages)


def events(timetable: Timetable, work: Work, hops: Hops) -> Timeline:
  """Runs a timetable event by event.

  Args:
    timetable: The timetable, one that `check` proves.
    work: Seconds of its parts.
    hops: Links between its stages.

  Returns:
    When each action happens.
  """
  t, last = timetable, timetable.num_parts - 1
  seconds, forward_sends = work.by_kind().tolist(), sends(t)[0].tolist()
  backward_sends = sends(t)[1].tolist()
  microbatches, chunks = t.microbatches.tolist(), t.chunks.tolist()
  kinds = t.kinds.tolist()
  found = np.full((5, t.num_ticks, t.num_stages), np.nan)
  # When outputs and cotangents are where they are taken, [part][microbatch].
  outputs, cotangents = np.zeros(
    (2, t.num_parts, t.num_microbatches)
  ).tolist()
  free = [0.0] * t.num_stages
  links = {1: [0.0] * t.num_stages, -1: [0.0] * t.num_stages}
  # By ticks, everything comes after what it needs; so one pass is enough.
  for tick, stage in np.argwhere(t.kinds).tolist():
    kind, m = kinds[tick][stage], microbatches[tick][stage]
    part = chunks[tick][stage] * t.num_stages + stage
    start = free[stage]
    if kind == Kind.FORWARD and part:
      start = max(start, outputs[part - 1][m])
    elif kind in (Kind.BACKWARD, Kind.INPUT) and part < last:
      start = max(start, cotangents[part + 1][m])
    end = there = free[stage] = start + seconds[kind][part]
    leave = sent = arrival = np.nan
    way = forward_sends[tick][stage] - backward_sends[tick][stage]
    if way:
      busy = (hops.forward_s if way > 0 else hops.backward_s)[stage]
      leave = max(end, links[way][stage])
      sent = links[way][stage] = leave + busy
      there = arrival = sent + hops.latency_s
      if not hops.overlap:
        free[stage] = sent
    if kind == Kind.FORWARD:
      outputs[part][m] = there
    elif kind != Kind.WEIGHT:
      cotangents[part][m] = there
    found[:, tick, stage] = start, end, leave, sent, arrival
  return Timeline(t, *found, finish_s=float(np.nanmax(found[1])))


def many_events_s(
  timetable: Timetable, work: np.ndarray, forward_s: np.ndarray,
  backward_s: np.ndarray,
) -> np.ndarray:
  """Returns when `events` of many cases finish, float64 ``[N]``.

  Links have no latency of their own, and stages compute while they send.

  Args:
    timetable: The timetable, one that `check` proves.
    work: Seconds of its parts, ``[kind, part, N]``, as `Work.by_kind` has them.
    forward_s: Seconds of outputs on their links, ``[S, N]``.
    backward_s: Those of cotangents.
  """
  t, none = timetable, np.zeros(work.shape[-1])
  forward_sends, backward_sends = sends(t)
  there: dict[tuple[bool, int, int], np.ndarray] = {}
  free = [none] * t.num_stages
  links = {True: [none] * t.num_stages, False: [none] * t.num_stages}
  for tick, stage in np.argwhere(t.kinds).tolist():
    kind, m = t.kinds[tick, stage], int(t.microbatches[tick, stage])
    part = int(t.chunks[tick, stage]) * t.num_stages + stage
    start, out = free[stage], kind == Kind.FORWARD
    if kind != Kind.WEIGHT:
      needs = (out, part - 1 if out else part + 1, m)
      start = np.maximum(start, there.get(needs, none))
    end = free[stage] = start + work[kind, part]
    if forward_sends[tick, stage] or backward_sends[tick, stage]:
      busy = (forward_s if out else backward_s)[stage]
      end = links[out][stage] = np.maximum(end, links[out][stage]) + busy
    if kind != Kind.WEIGHT:
      there[out, part, m] = end
  return np.max(free, axis=0)


def lockstep_s(
  timetable: Timetable, work: Work, hops: Hops, lanes: int = 1
) -> float:
  """Returns the seconds of a step in which all stages wait for each tick.

  Args:
    timetable: The timetable.
    work: Seconds of its parts.
    hops: Links between its stages. A tick's hops are after its parts.
    lanes: Successive stages that share a device, one after another.
  """
  t = timetable
  computing = _computing(t, work).reshape(t.num_ticks, -1, lanes).sum(2)
  forward, backward = sends(t)
  sending = np.maximum(
    forward * (np.array(hops.forward_s) + hops.latency_s),
    backward * (np.array(hops.backward_s) + hops.latency_s),
  )
  return float((computing.max(1) + sending.max(1)).sum())


def lockstep_waiting_s(
  timetable: Timetable, action_s: Mapping[str, float], lanes: int = 1
) -> float:
  """Returns for how long a device waits for others' actions in lockstep.

  Args:
    timetable: The timetable.
    action_s: Seconds of actions by the names of their kinds in lower case, such
      as "forward", equal for all parts. So all devices wait as long.
    lanes: Successive stages that share a device, one after another.
  """
  t = timetable
  work = Work(*(
    (action_s.get(kind.name.lower(), 0.0),) * t.num_parts
    for kind in Kind if kind is not Kind.IDLE
  ))
  own_s = float(_computing(t, work)[:, :lanes].sum())
  return lockstep_s(t, work, even_hops(t.num_stages), lanes) - own_s


def _computing(timetable: Timetable, work: Work) -> np.ndarray:
  """Returns the seconds of all actions, float ``[T, S]``."""
  stages = np.arange(timetable.num_stages)
  parts = timetable.chunks * timetable.num_stages + stages
  return work.by_kind()[timetable.kinds, parts]
