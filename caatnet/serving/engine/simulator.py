"""An executor whose clock is simulated, and whose times come from a model.

Steps run one after another, and beside them the copies of each direction. A
copy begins when it is asked for and those of its kind before it have ended; a
step begins when the step before it and the copies that it waits for have ended.
Copies do not slow steps down.
"""

from collections.abc import Callable
import dataclasses
import heapq
import math

import numpy as np

from caatnet.serving.engine.executor import Copy, Event, Kind, Step
from caatnet.serving.engine.times import StepTimes
from caatnet.serving.requests import Request


@dataclasses.dataclass(frozen=True)
class CopyTimes:
  """How long copies of pages take.

  Attributes:
    page_bytes: The bytes of a page over all layers.
    ranges_per_run: In how many contiguous ranges a run of pages lies: one for
      each layer and each of the cache's arrays.
    call_s: Seconds for each range.
    out_rate: Bytes per second to the host.
    in_rate: Bytes per second from the host.
    within_rate: Bytes per second within the device.
    single: Whether each page is a run of its own, whatever stands beside it.
  """

  page_bytes: int
  ranges_per_run: int
  call_s: float
  out_rate: float
  in_rate: float
  within_rate: float
  single: bool = False

  def seconds(self, kind: Kind, num_runs: int, num_pages: int) -> float:
    """Returns how long a copy takes."""
    rate = {
      "out": self.out_rate, "in": self.in_rate, "within": self.within_rate
    }[kind]
    runs = num_pages if self.single else num_runs
    calls = runs * self.ranges_per_run
    return calls * self.call_s + num_pages * self.page_bytes / rate


# For servers that copy nothing.
NO_COPIES = CopyTimes(1, 1, 0.0, math.inf, math.inf, math.inf)


@dataclasses.dataclass(frozen=True)
class SimulatedCosts:
  """The simulator's own times, as a scheduler asks for them.

  Attributes:
    steps: Times of steps.
    copies: Times of copies.
    most: Tokens of a step; what is longer is read in several.
  """

  steps: StepTimes
  copies: CopyTimes
  most: int

  def prefill_s(self, start: int, length: int) -> float:
    """Returns how much longer steps take that also read a chunk.

    Beside other sequences, whose weights are read anyway; one decode stands for
    them.
    """
    one = np.ones(1)
    seconds, end = 0.0, start + length
    while start < end:
      part = min(self.most, end - start)
      seconds += self.steps.step_s(one, [(start, part)])
      seconds -= self.steps.step_s(one, [])
      start += part
    return seconds

  def copy_s(self, kind: Kind, num_runs: int, num_pages: int) -> float:
    """Returns how long a copy takes alone."""
    return self.copies.seconds(kind, num_runs, num_pages)


class Simulator:
  """Runs steps and copies on a clock of its own.

  Attributes:
    costs: Times of its model.
    busy_s: Seconds in which a step was computed.
  """

  def __init__(
    self,
    steps: StepTimes,
    copies: CopyTimes = NO_COPIES,
    most: int = 2048,
    draw: Callable[[Request, int], int] | None = None,
    delay: Callable[[Copy], float] = lambda copy: 0.0,
  ) -> None:
    """Makes it at time 0.

    Args:
      steps: Times of steps.
      copies: Times of copies.
      most: Tokens of a step at most.
      draw: Returns a request's token at a position; None makes all of them 0.
      delay: Returns seconds that a copy takes longer than expected.
    """
    self.costs = SimulatedCosts(steps, copies, most)
    self.busy_s = 0.0
    self._draw, self._delay = draw, delay
    self._now = 0.0
    self._free_s = 0.0
    self._copied_s: dict[str, float] = {}
    self._ends: dict[int, float] = {}
    self._events: list[tuple[float, int, Event]] = []
    self._count = 0

  def now(self) -> float:
    """Returns the simulated time."""
    return self._now

  def submit(self, step: Step) -> None:
    """Begins a step, as `executor.Executor` says."""
    chunks = [(chunk.start, chunk.length) for chunk in step.chunks]
    seconds = self.costs.steps.step_s(step.positions + 1, chunks)
    begin = max(
      [self._now, self._free_s, *(self._ends[n] for n in step.after)]
    )
    self._free_s = begin + seconds
    self.busy_s += seconds
    tokens = np.zeros(len(step.drawing), np.int64)
    if self._draw is not None:
      ends = [c.start + c.length for c in step.chunks if c.draws]
      places = [*(step.positions + 1).tolist(), *ends]
      tokens[:] = list(map(self._draw, step.drawn, places))
    self._end(Event(self._free_s, step=step, tokens=tokens))

  def copy(self, copy: Copy) -> None:
    """Begins a copy, as `executor.Executor` says."""
    states = int(copy.state is not None)  # each is a run of one page
    seconds = self.costs.copies.seconds(
      copy.kind, len(copy.runs) + states, len(copy.source) + states
    )
    # What it reads may be written by a step under way.
    begin = max(self._now, self._copied_s.get(copy.kind, 0.0))
    if copy.kind != "in":
      begin = max(begin, self._free_s)
    end = begin + seconds + self._delay(copy)
    self._copied_s[copy.kind] = self._ends[copy.number] = end
    self._end(Event(end, copy=copy))

  def _end(self, event: Event) -> None:
    heapq.heappush(self._events, (event.time_s, self._count, event))
    self._count += 1

  def wait(self, until_s: float) -> list[Event]:
    """Advances to the next end; see `executor.Executor`."""
    if not self._events or self._events[0][0] > until_s:
      assert until_s < math.inf, "nothing is under way"
      self._now = max(self._now, until_s)
      return []
    self._now = max(self._now, self._events[0][0])
    found = []
    while self._events and self._events[0][0] <= self._now:
      found.append(heapq.heappop(self._events)[2])
    return found
