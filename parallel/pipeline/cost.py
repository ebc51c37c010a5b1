"""What a timetable costs: idle stages, stored activations, what is sent.

All of it is counted from the arrays. Where a closed form is known it stands
beside (`builders.Builder.stored` has those of stored activations), and tests
hold both equal.

Shape legend: T = ticks, S = stages.
"""

import dataclasses

import numpy as np

from parallel.pipeline.builders import Size
from parallel.pipeline.timetable import Kind, Timetable, when


@dataclasses.dataclass(frozen=True)
class Cost:
  """What is counted in a timetable, whose ticks are equally long here.

  Attributes:
    ticks: From the first action to the last.
    bubble: The share of stages' ticks in which they are idle.
    own_bubble: The same share, of the ticks from each stage's first action to
      its last: what is left if a stage may begin another step meanwhile.
    stored: Of how many microbatches of its parts each stage stores activations
      at most, ``[S]``. A part has one v-th of a stage's activations.
    inputs: How many inputs of its parts each stage holds at most, ``[S]``; see
      `held`.
    cotangents: How many cotangents of its parts' outputs, ``[S]``.
    deltas: Of how many microbatches of its parts each stage holds what the
      first half of a backward leaves for the second one, ``[S]``; 0 where
      backwards are one action. Where residuals are kept these are the
      cotangents of all products with weights.
    forward_sends: Outputs that each stage sends to the next one, ``[S]``.
    backward_sends: Cotangents that each sends to the one before, ``[S]``.
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
    """Returns the bytes of the fullest stage's activations.

    Args:
      part_bytes: Bytes that a part stores of one microbatch.
    """
    return max(self.stored) * part_bytes

  def sent_bytes(self, boundary_bytes: int) -> int:
    """Returns the bytes that all stages send to one another in a step.

    Args:
      boundary_bytes: Bytes of one microbatch's activations between parts.
    """
    return boundary_bytes * sum(self.forward_sends + self.backward_sends)


def cost(timetable: Timetable) -> Cost:
  """Counts what a timetable costs; it must be one that `check` proves."""
  busy = timetable.kinds != Kind.IDLE
  own = len(busy) - busy.argmax(0) - busy[::-1].argmax(0)
  inputs, cotangents = held(timetable)
  forward, backward = sends(timetable)
  return Cost(
    ticks=len(busy),
    bubble=1 - float(busy.mean()),
    own_bubble=1 - float(busy.sum() / own.sum()),
    stored=_most(stored(timetable)),
    inputs=_most(inputs),
    cotangents=_most(cotangents),
    deltas=_most(halves(timetable)),
    forward_sends=_most(np.cumsum(forward, 0)),
    backward_sends=_most(np.cumsum(backward, 0)),
  )


def stored(timetable: Timetable) -> np.ndarray:
  """Counts stored activations, int ``[T, S]``, in parts of a microbatch.

  A part's activations are stored from its forward to its backward, or to that
  of its weights, both ticks included. Without backwards nothing is stored.
  """
  ticks = when(timetable)
  return _alive(timetable, ticks[Kind.FORWARD], _last_use(ticks))


def held(timetable: Timetable) -> tuple[np.ndarray, np.ndarray]:
  """Counts inputs and cotangents that stages hold, each int ``[T, S]``.

  An input is held from when it comes, a tick after the part before has made
  it, until its part needs it last: for the backward, which computes the forward
  again, or for the forward if there are no backwards. The first part takes its
  input from the batch at its forward, and holds it just as long. A cotangent is
  held until the backward, or that of the weights. The last part's are the
  loss's, which are there a tick after its forward.
  """
  ticks = when(timetable)
  forward, last = ticks[Kind.FORWARD], _last_use(ticks)
  comes = np.concatenate([forward[:1], forward[:-1] + 1])
  inputs = _alive(timetable, comes, np.where(last < 0, forward, last))
  back = np.maximum(ticks[Kind.BACKWARD], ticks[Kind.INPUT])
  comes = np.concatenate([back[1:], forward[-1:]]) + 1
  return inputs, _alive(timetable, comes, last)


def halves(timetable: Timetable) -> np.ndarray:
  """Counts backwards of which one half is done, int ``[T, S]``.

  That is from the first half to the second one, both ticks included.
  """
  ticks = when(timetable)
  return _alive(timetable, ticks[Kind.INPUT], ticks[Kind.WEIGHT])


def sends(timetable: Timetable) -> tuple[np.ndarray, np.ndarray]:
  """Says what is sent to another stage after which action.

  Returns:
    Whether an output goes to the next stage, and whether cotangents go to the
    one before, each bool ``[T, S]``.
  """
  t = timetable
  parts = t.chunks * t.num_stages + np.arange(t.num_stages)
  apart = t.num_stages > 1  # a stage sends nothing to itself
  forward = (t.kinds == Kind.FORWARD) & (parts < t.num_parts - 1)
  backward = np.isin(t.kinds, (Kind.BACKWARD, Kind.INPUT)) & (parts > 0)
  return forward & apart, backward & apart


def _last_use(ticks: np.ndarray) -> np.ndarray:
  """Returns when a part's backward ends, ``[part, microbatch]``; -1: never."""
  return np.maximum(ticks[Kind.BACKWARD], ticks[Kind.WEIGHT])


def _alive(
  timetable: Timetable, first: np.ndarray, last: np.ndarray
) -> np.ndarray:
  """Counts what is there at each tick, int ``[T, S]``.

  Args:
    timetable: The timetable.
    first: From which tick something is there, ``[part, microbatch]``.
    last: Until which tick, that one included; -1 if it never is.
  """
  change = np.zeros((timetable.num_ticks + 1, timetable.num_stages), int)
  parts, microbatches = np.nonzero(last >= 0)
  stages = parts % timetable.num_stages
  np.add.at(change, (first[parts, microbatches], stages), 1)
  np.add.at(change, (last[parts, microbatches] + 1, stages), -1)
  return change[:-1].cumsum(0)


def _most(counts: np.ndarray) -> tuple[int, ...]:
  """Returns the most of each stage over ticks."""
  return tuple(counts.max(0).tolist())


# Closed forms -----------------------------------------------------------------


def num_sends(size: Size, backward: bool = True) -> int:
  """Returns how many tensors stages send in a step: 2 m (v p - 1)."""
  if size.stages == 1:
    return 0
  boundaries = size.stages * size.chunks - 1
  return (1 + backward) * size.microbatches * boundaries


def layers_of_stage(num_layers: int, size: Size) -> int:
  """Returns the layers that a stage holds: as many as the fullest one needs.

  A program has one shape on all devices, so parts of fewer layers are filled up
  with layers of zeros.
  """
  return size.chunks * -(-num_layers // (size.stages * size.chunks))


def step_s(
  timetable: str, size: Size, forward_s: float, input_s: float, weight_s: float
) -> float:
  """Returns the seconds of a step on equal stages whose hops take no time.

  Args:
    timetable: A key of `builders.BUILDERS`.
    size: The size, which the builder must take.
    forward_s: Seconds of a microbatch's forward on a stage, all its chunks.
    input_s: Those of the cotangents of inputs.
    weight_s: Those of the gradients of weights.

  Raises:
    ValueError: No closed form is known: ZB-H1 with fewer microbatches than
      stages, ZB-H2 with fewer than twice as many less one.

  Source: Narayanan et al., 2104.04473, section 2.2, and Lamy-Poirier,
  2211.05953. Those of ZB-H1 and ZB-H2 were found with `simulate.events`; where
  the three times are equal, or the last of the terms is the largest, that of
  ZB-H1 is the paper's (Qi et al., 2401.10241). The paper counts the bubble of a
  stage apart (`Cost.own_bubble`), which ZB-H2 has none of then, but its stages
  begin one after another.
  """
  p, m, v = size
  both_s = forward_s + input_s + weight_s
  if timetable == "zb_h1" and m >= p:
    return m * both_s + (p - 1) * max(
      forward_s, input_s, forward_s + input_s - weight_s
    )
  if timetable == "zb_h2" and m >= 2 * p - 1:
    return m * both_s + (p - 1) * max(
      forward_s, input_s - forward_s, forward_s + input_s - 2 * weight_s
    )
  if timetable in ("gpipe", "1f1b", "eager_1f1b"):
    return (m + p - 1) * both_s
  if timetable == "interleaved_1f1b":
    return m * both_s + (p - 1) * both_s / v
  if timetable in ("looped", "forward"):
    # With fewer microbatches than stages each loop waits for the one before.
    rounds = (v - 1) * max(m, p) + m + p - 1
    return rounds * (both_s if timetable == "looped" else forward_s) / v
  raise ValueError(
    f"timetable={timetable!r} with stages={p} and microbatches={m} has no "
    "closed form of its time"
  )


def bubble(
  timetable: str, size: Size, forward_s: float, input_s: float, weight_s: float
) -> float:
  """Returns the share of a step in which stages idle: 1 - m (F + B) / T.

  For 1F1B that is (p - 1) / (m + p - 1). Arguments and errors are those of
  `step_s`.
  """
  work_s = forward_s
  if timetable != "forward":
    work_s += input_s + weight_s
  step = step_s(timetable, size, forward_s, input_s, weight_s)
  return 1 - size.microbatches * work_s / step


def exposed_s(size: Size, hop_s: float) -> float:
  """Returns by how many seconds hops make a step of 1F1B longer.

  A stage keeps as many microbatches in flight as the way to the last stage and
  back needs without hops. So each round of p microbatches waits for 2 (p - 1)
  hops, and the microbatches of a round that is not full for two each.

  Args:
    size: The size, of one chunk.
    hop_s: Seconds from the end of an action until the next stage has what it
      made. Messages do not wait for one another: that is so if a link is busy
      with one for no longer than a forward and a backward take.
  """
  p, m, _ = size
  rounds, left = divmod(m - 1, p)
  return hop_s * (2 * (p - 1) * (rounds + 1) + 2 * max(0, left - 1))
