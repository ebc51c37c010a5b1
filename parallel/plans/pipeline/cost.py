"""Cost of a pipeline schedule: idle stages, stored activations, sent tensors.

All costs are counted from the arrays. Known closed forms are implemented too
(`builders.Builder.stored` has those of stored activations), and tests compare
both.

Shape legend: T = ticks, S = stages.
"""

import dataclasses

import numpy as np

from parallel.plans.pipeline.builders import PipelineSize
from parallel.plans.pipeline.pipeline_schedule import (
  ActionKind,
  PipelineSchedule,
  ticks_of_actions,
)


@dataclasses.dataclass(frozen=True)
class Cost:
  """Counts of a pipeline schedule, with ticks of equal length.

  Attributes:
    ticks: Ticks from the first action to the last.
    bubble: Fraction of idle ticks, averaged over stages.
    own_bubble: Fraction of idle ticks among those from each stage's first
      action to its last. It applies if a stage may start the next step while
      other stages finish this one.
    stored: Peak number of live activations on each of the S stages, ``[S]``,
      counted in microbatches of one part of the model, which has 1 / chunks of
      a stage's activations.
    inputs: Peak number of inputs of its parts of the model that each stage
      holds, ``[S]``; see `count_held_operands`.
    cotangents: Peak number of cotangents of its parts' outputs, ``[S]``.
    deltas: Peak number of deltas, the values that the first half of a backward
      saves for the second, ``[S]``, in microbatches of one part; 0 for whole
      backwards. With saved residuals they are the cotangents of all products
      with weights.
    forward_sends: Outputs that each stage sends to another one, ``[S]``.
    backward_sends: Cotangents that each stage sends to another one, ``[S]``.
  """

  ticks: int
  bubble: float
  own_bubble: float
  stored: tuple[int, ...]
  inputs: tuple[int, ...]
  cotangents: tuple[int, ...]
  deltas: tuple[int, ...]
  forward_sends: tuple[int, ...]
  backward_sends: tuple[int, ...]

  def stored_bytes(self, part_bytes: int) -> int:
    """Returns the bytes of activations on the stage that stores most.

    Args:
      part_bytes: Bytes that a part of the model stores per microbatch.
    """
    return max(self.stored) * part_bytes

  def sent_bytes(self, boundary_bytes: int) -> int:
    """Returns the bytes that all stages send to one another in a step.

    Args:
      boundary_bytes: Bytes of one microbatch's activations between parts.
    """
    return boundary_bytes * sum(self.forward_sends + self.backward_sends)


def cost(schedule: PipelineSchedule) -> Cost:
  """Returns the cost of a schedule.

  Args:
    schedule: Schedule that `parallel.plans.pipeline.check.check` accepts.

  Example:
    With p stages and m microbatches, 1F1B is idle for (p - 1) / (m + p - 1) of
    the step; the first stage stores p microbatches.

    >>> from parallel.plans.pipeline.builders import build
    >>> found = cost(build("1f1b", stages=4, microbatches=9))
    >>> round(found.bubble, 4), found.stored
    (0.25, (4, 3, 2, 1))
  """
  busy = schedule.kinds != ActionKind.IDLE  # [T, S]
  # [S]: ticks from a stage's first action to its last.
  own = len(busy) - busy.argmax(0) - busy[::-1].argmax(0)
  inputs, cotangents = count_held_operands(schedule)
  sent = np.logical_or(*sends_by_direction(schedule))
  forward = sent & (schedule.kinds == ActionKind.FORWARD)
  return Cost(
    ticks=len(busy),
    bubble=1 - float(busy.mean()),
    own_bubble=1 - float(busy.sum() / own.sum()),
    stored=_max_over_ticks(count_live_activations(schedule)),
    inputs=_max_over_ticks(inputs),
    cotangents=_max_over_ticks(cotangents),
    deltas=_max_over_ticks(count_split_backwards(schedule)),
    forward_sends=_max_over_ticks(np.cumsum(forward, 0)),
    backward_sends=_max_over_ticks(np.cumsum(sent & ~forward, 0)),
  )


def count_live_activations(schedule: PipelineSchedule) -> np.ndarray:
  """Counts live activations on S stages at T ticks, int ``[T, S]``.

  The unit is the activations of one microbatch in one part of the model.

  A part's activations are stored from its FORWARD to its BACKWARD or WEIGHT
  action, both ticks included. Without backwards nothing is stored.
  """
  ticks = ticks_of_actions(schedule)
  return _count_live(schedule, ticks[ActionKind.FORWARD], _last_use(ticks))


def count_held_operands(schedule: PipelineSchedule) -> tuple[
  np.ndarray, np.ndarray
]:
  """Counts inputs and cotangents of parts on stages, each int ``[T, S]``.

  T are ticks, S stages, and a part is the layers of one chunk of a stage.

  An input is held from its arrival, one tick after the previous part has
  produced it, until its part last reads it: in the backward, which repeats the
  forward, or in the forward if there are no backwards. The first part takes its
  input from the batch at its forward, and also holds it until it last reads it.
  A cotangent is held until the BACKWARD or WEIGHT action. The last part's
  cotangents come from the loss, one tick after its forward.
  """
  ticks = ticks_of_actions(schedule)
  forward, last = ticks[ActionKind.FORWARD], _last_use(ticks)
  # Tick at which a part's input arrives, [part, microbatch]. The first part
  # reads its input from the batch at its forward.
  comes = np.concatenate([forward[:1], forward[:-1] + 1])
  inputs = _count_live(schedule, comes, np.where(last < 0, forward, last))
  # The cotangents of a part's output arrive one tick after the next part's
  # backward; those of the last part, one tick after its forward.
  back = np.maximum(ticks[ActionKind.BACKWARD], ticks[ActionKind.INPUT])
  comes = np.concatenate([back[1:], forward[-1:]]) + 1
  return inputs, _count_live(schedule, comes, last)


def count_split_backwards(schedule: PipelineSchedule) -> np.ndarray:
  """Counts split backwards of which one half has run, int ``[ticks, stages]``.

  A backward counts from the tick of INPUT to that of WEIGHT, both included.
  """
  ticks = ticks_of_actions(schedule)
  return _count_live(
    schedule, ticks[ActionKind.INPUT], ticks[ActionKind.WEIGHT]
  )


def sends_by_direction(schedule: PipelineSchedule) -> tuple[
  np.ndarray, np.ndarray
]:
  """Returns the actions whose result is sent to another stage.

  In a loop, outputs are sent to the next stage and cotangents to the previous
  one; in a V, every second chunk has the opposite directions.

  Returns:
    Whether a result is sent to the next stage, and whether it is sent to the
    previous one, each bool ``[T, S]``.
  """
  t, parts = schedule, schedule.part_of_actions()  # [T, S]
  # Directions of a part's outputs and cotangents; the last part's outputs and
  # the first one's cotangents are not sent.
  outputs = np.append(t.directions, 0)
  cotangents = -np.insert(t.directions, 0, 0)
  way = np.where(t.kinds == ActionKind.FORWARD, outputs[parts], 0)
  back = np.isin(t.kinds, (ActionKind.BACKWARD, ActionKind.INPUT))
  way = np.where(back, cotangents[parts], way)
  apart = t.num_stages > 1  # a stage sends nothing to itself
  return (way > 0) & apart, (way < 0) & apart


def _last_use(ticks: np.ndarray) -> np.ndarray:
  """Returns the last tick of each backward, ``[part, microbatch]``.

  ``ticks`` are those of actions, ``[kind, part, microbatch]``; -1 for none.
  """
  return np.maximum(ticks[ActionKind.BACKWARD], ticks[ActionKind.WEIGHT])


def _count_live(
  schedule: PipelineSchedule, first: np.ndarray, last: np.ndarray
) -> np.ndarray:
  """Counts live values on each stage at each tick, int ``[ticks, stages]``.

  Args:
    schedule: The schedule.
    first: First tick of each value, ``[part, microbatch]``.
    last: Last tick of each value, inclusive; -1 if it does not exist.
  """
  change = np.zeros((schedule.num_ticks + 1, schedule.num_stages), int)
  parts, microbatches = np.nonzero(last >= 0)
  stages = schedule.stage_of_part[parts]
  # Values add 1 at their first tick and -1 after their last one; the running
  # sum over ticks is the number of live values.
  np.add.at(change, (first[parts, microbatches], stages), 1)
  np.add.at(change, (last[parts, microbatches] + 1, stages), -1)
  return change[:-1].cumsum(0)


def _max_over_ticks(counts: np.ndarray) -> tuple[int, ...]:
  """Returns each stage's largest of the counts ``[ticks, stages]``."""
  return tuple(counts.max(0).tolist())


# Closed forms, with p stages, m microbatches and v chunks (`PipelineSize`) ----


def num_sends(
  size: PipelineSize, backward: bool = True, v_shaped: bool = False
) -> int:
  """Returns the number of tensors that stages send in a step.

  For p stages, m microbatches and v chunks it is 2 m (v p - 1). In a V, v - 1
  pairs of consecutive parts share a stage, and it is 2 m v (p - 1).
  """
  if size.stages == 1:
    return 0
  boundaries = size.stages * size.chunks - 1  # between consecutive parts
  if v_shaped:
    boundaries -= size.chunks - 1
  return (1 + backward) * size.microbatches * boundaries


def step_s(
  schedule: str, size: PipelineSize, forward_s: float, input_s: float,
  weight_s: float
) -> float:
  """Returns the seconds of a step on equal stages with free communication.

  Args:
    schedule: A key of `builders.BUILDERS`.
    size: The size, which the builder must support.
    forward_s: Seconds of a microbatch's forward on a stage with all its chunks.
    input_s: Seconds to compute the cotangents of the stage's inputs.
    weight_s: Seconds to compute the gradients of the stage's weights.

  Raises:
    ValueError: No closed form is known. With p stages and m microbatches, there
      is none for ZB-H1 if m < p; for ZB-H2 if m < 2 p - 1; for ZB-V if m < 2 p
      - 1 or input_s is not the longest time; for DualPipeV if m < 2 p or
      input_s differs from forward_s.

  Source: Narayanan et al., 2104.04473, section 2.2, and Lamy-Poirier,
  2211.05953. The formulas of ZB-H1, ZB-H2, ZB-V and DualPipeV were found with
  `simulate.events`. Let F = forward_s, B = input_s and W = weight_s. In
  DualPipeV a pair's forward and backward run one after the other here; the
  published bubble, (p - 1) (F + 2 B - W) / v, assumes that the results of both
  are available at the end of the pair. The formula of ZB-H1 is the paper's (Qi
  et al., 2401.10241) if the three times are equal or F + B - W is at least F
  and B. The papers count the bubble per stage (`Cost.own_bubble`), which is
  zero for ZB-H2 and, with equal times, for ZB-V; here the later start of later
  stages counts, too.

  Example:
    1F1B takes the time of m + p - 1 microbatches, 3 seconds each.

    >>> size = PipelineSize(4, 9)
    >>> step_s("1f1b", size, forward_s=1.0, input_s=1.0, weight_s=1.0)
    36.0
  """
  p, m, v = size
  both_s = forward_s + input_s + weight_s
  # Each formula is the work of a stage plus the bubble.
  if schedule == "zb_h1" and m >= p:
    return m * both_s + (p - 1) * max(
      forward_s, input_s, forward_s + input_s - weight_s
    )
  if schedule == "zb_h2" and m >= 2 * p - 1:
    return m * both_s + (p - 1) * max(
      forward_s, input_s - forward_s, forward_s + input_s - 2 * weight_s
    )
  longest = input_s >= max(forward_s, weight_s)
  if schedule == "zb_v" and m >= 2 * p - 1 and longest:
    return m * both_s + (p - 1) * max(input_s, 2 * (input_s - weight_s)) / v
  if schedule == "dualpipe_v" and m >= 2 * p and forward_s == input_s:
    return m * both_s + (p - 1) * max(
      forward_s, forward_s + input_s - weight_s
    ) / v
  if schedule in ("gpipe", "1f1b", "eager_1f1b"):
    return (m + p - 1) * both_s
  if schedule == "interleaved_1f1b":
    return m * both_s + (p - 1) * both_s / v
  if schedule in ("looped", "forward"):
    # With fewer microbatches than stages each loop waits for the previous one.
    rounds = (v - 1) * max(m, p) + m + p - 1
    return rounds * (both_s if schedule == "looped" else forward_s) / v
  raise ValueError(
    f"schedule={schedule!r} with stages={p} and microbatches={m} has no closed "
    "form of its time; simulate it"
  )


def bubble(
  schedule: str, size: PipelineSize, forward_s: float, input_s: float,
  weight_s: float
) -> float:
  """Returns the fraction of a step in which a stage is idle.

  For 1F1B with p stages and m microbatches it is (p - 1) / (m + p - 1).
  Arguments and errors are those of `step_s`.
  """
  work_s = forward_s
  if schedule != "forward":
    work_s += input_s + weight_s
  step = step_s(schedule, size, forward_s, input_s, weight_s)
  return 1 - size.microbatches * work_s / step


def exposed_s(size: PipelineSize, hop_s: float) -> float:
  """Returns the seconds that hops add to a step of 1F1B.

  Without hops, a stage has just enough microbatches in flight to cover the path
  to the last stage and back. With p stages, the first microbatch and each full
  round of p others thus wait for 2 (p - 1) hops. In an incomplete round, each
  microbatch except the round's first waits for two hops.

  Args:
    size: The size, of one chunk.
    hop_s: Seconds from the end of an action until its result is on the next
      stage. Messages must not queue: each occupies a link for at most the time
      of a forward and a backward.
  """
  p, m, _ = size
  # All full rounds, then the microbatches of the incomplete one.
  rounds, left = divmod(m - 1, p)
  return hop_s * (2 * (p - 1) * (rounds + 1) + 2 * max(0, left - 1))
