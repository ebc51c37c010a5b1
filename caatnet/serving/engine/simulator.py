"""Executor with a simulated clock, whose times come from a cost model.

Steps run one after another, concurrently with one copy per direction and one
load. A copy begins when it is requested and the earlier copies of its kind have
ended, a load when the earlier loads have ended; a step begins when the previous
step and the copies that it waits for have ended. Copies and loads do not slow
steps down, nor each other. Steps can slow loads down.
"""

import collections
from collections.abc import Callable
import dataclasses
import heapq
import math

import numpy as np

from caatnet.serving.engine.executor import (
  CompletionEvent,
  Copy,
  CopyKind,
  EngineStep,
  WeightLoad,
)
from caatnet.serving.engine.times import StepTimes
from caatnet.serving.requests import Request


@dataclasses.dataclass(frozen=True)
class CopyTimes:
  """Cost model of page copies.

  Attributes:
    page_bytes: Bytes of a page over all layers.
    ranges_per_run: Contiguous byte ranges per range of adjacent pages: one for
      each layer and each array of the cache.
    call_s: Seconds of overhead per byte range.
    out_rate: Bytes per second to the host.
    in_rate: Bytes per second from the host.
    within_rate: Bytes per second within the device.
    single: Whether each page is copied separately, even if pages are adjacent.
  """

  page_bytes: int
  ranges_per_run: int
  call_s: float
  out_rate: float
  in_rate: float
  within_rate: float
  single: bool = False

  def seconds(self, kind: CopyKind, num_runs: int, num_pages: int) -> float:
    """Returns the seconds of a copy of `num_runs` ranges of adjacent pages."""
    rate = {
      "out": self.out_rate, "in": self.in_rate, "within": self.within_rate
    }[kind]
    runs = num_pages if self.single else num_runs
    calls = runs * self.ranges_per_run
    return calls * self.call_s + num_pages * self.page_bytes / rate


# Cost model of servers without copies.
NO_COPIES = CopyTimes(1, 1, 0.0, math.inf, math.inf, math.inf)


@dataclasses.dataclass
class _PendingLoad:
  """Load whose end can change when the next step is submitted.

  Attributes:
    load: The load.
    asked_s: Time in seconds at which the load was requested.
    work_s: Seconds of the load if no step runs.
    until_step_s: Seconds from the load's start until a step of the expert may
      begin, if no other step runs.
    begin_s: Start time in seconds.
    end_s: End time in seconds.
  """

  load: WeightLoad
  asked_s: float
  work_s: float
  until_step_s: float
  begin_s: float = 0.0
  end_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class SimulatedCosts:
  """Estimates for the scheduler (`executor.Costs`) by the simulator's models.

  Attributes:
    steps: Cost model of steps.
    copies: Cost model of copies.
    most: Maximum number of tokens of a step; longer chunks are split.
  """

  steps: StepTimes
  copies: CopyTimes
  most: int

  def prefill_s(self, start: int, length: int) -> float:
    """Returns the seconds that a prompt chunk adds to the steps that read it.

    The chunk shares its steps with other sequences, for which the weights are
    read in any case. One decode represents these sequences.
    """
    one = np.ones(1)
    seconds, end = 0.0, start + length
    while start < end:
      part = min(self.most, end - start)
      seconds += self.steps.step_s(one, [(start, part)])
      seconds -= self.steps.step_s(one, [])
      start += part
    return seconds

  def copy_s(self, kind: CopyKind, num_runs: int, num_pages: int) -> float:
    """Returns the seconds of a copy of `num_runs` ranges of adjacent pages."""
    return self.copies.seconds(kind, num_runs, num_pages)


class Simulator:
  """Executor on a simulated clock.

  Attributes:
    costs: Times of steps and copies according to the cost models.
    busy_s: Seconds in which a step was computed.
    loaded_s: Seconds that all loads would take if no step ran.
    exposed_s: Seconds in which a load ran and no step was computed.
  """

  def __init__(
    self,
    steps: StepTimes,
    copies: CopyTimes = NO_COPIES,
    most: int = 2048,
    draw: Callable[[Request, int], int] | None = None,
    delay: Callable[[Copy], float] = lambda copy: 0.0,
    load_s: Callable[
      [WeightLoad], tuple[float, float]
    ] = lambda load: (0.0, 0.0),
    load_rate: float = 1.0,
    steps_first: bool = False,
  ) -> None:
    """Starts at time 0.

    Args:
      steps: Cost model of steps.
      copies: Cost model of copies.
      most: Maximum number of tokens of a step.
      draw: Returns a request's token at a position; None makes all tokens 0.
      delay: Returns a copy's additional seconds, unknown to the scheduler.
      load_s: Returns two times of a load in seconds, if no step runs: its
        duration, and the time after its begin at which a step of the expert
        may begin, since the step reads the last weights later.
      load_rate: Speed of loads while a step runs, relative to their full speed.
      steps_first: Whether `wait` waits for the first step under way even if
        a copy or load ends earlier, like
        `caatnet.serving.engine.device.DecoderExecutor`.
    """
    self.costs = SimulatedCosts(steps, copies, most)
    self.busy_s = self.loaded_s = self.exposed_s = 0.0
    self._draw, self._delay, self._load_s = draw, delay, load_s
    self._load_rate, self._steps_first = load_rate, steps_first
    self._now = 0.0
    self._free_s = 0.0
    self._copied_s: dict[str, float] = {}
    self._ends: dict[int, float] = {}
    # Loads that had not ended when the last step began, the end of the load
    # before them, and (begin, end) of the steps since then.
    self._loads: collections.deque[_PendingLoad] = collections.deque()
    self._loaded_until_s = 0.0
    self._spans: list[tuple[float, float]] = []
    # Times from which a step may read a load's weights.
    self._ready_s: dict[WeightLoad, float] = {}
    self._events: list[tuple[float, int, CompletionEvent]] = []
    self._count = 0

  def now(self) -> float:
    """Returns the simulated time in seconds."""
    return self._now

  def submit(self, step: EngineStep) -> None:
    """Enqueues a step; see `executor.Executor`."""
    chunks = [(chunk.start, chunk.length) for chunk in step.chunks]
    seconds = self.costs.steps.step_s(step.positions + 1, chunks)
    # After the previous step and the copies that the step waits for.
    begin = max(
      [self._now, self._free_s, *(self._ends[n] for n in step.after)]
    )
    self._add_exposed_time(begin)
    self._free_s = begin + seconds
    self.busy_s += seconds
    self._spans.append((begin, self._free_s))
    self._update_load_times()
    tokens = np.zeros(len(step.drawing), np.int64)
    if self._draw is not None:
      ends = [c.start + c.length for c in step.chunks if c.draws]
      places = [*(step.positions + 1).tolist(), *ends]
      tokens[:] = list(map(self._draw, step.drawn, places))
    self._end(CompletionEvent(self._free_s, step=step, tokens=tokens))

  def copy(self, copy: Copy) -> None:
    """Enqueues a copy; see `executor.Executor`."""
    states = int(copy.state is not None)  # timed like a run of one page
    seconds = self.costs.copies.seconds(
      copy.kind, len(copy.runs) + states, len(copy.source) + states
    )
    # A step under way may still write the pages that the copy reads.
    begin = max(self._now, self._copied_s.get(copy.kind, 0.0))
    if copy.kind != "in":  # steps under way do not write host pages
      begin = max(begin, self._free_s)
    end = begin + seconds + self._delay(copy)
    self._copied_s[copy.kind] = self._ends[copy.number] = end
    self._end(CompletionEvent(end, copy=copy))

  def load(self, load: WeightLoad) -> None:
    """Enqueues a load; see `executor.Executor`."""
    seconds, until_step_s = self._load_s(load)
    self.loaded_s += seconds
    self._loads.append(_PendingLoad(load, self._now, seconds, until_step_s))
    self._update_load_times()
    self._end(CompletionEvent(self._ready_s[load], load=load))

  def _update_load_times(self) -> None:
    """Recomputes the begin and end of loads, which concurrent steps delay."""
    last = self._loaded_until_s
    for each in self._loads:
      each.begin_s = max(each.asked_s, last)
      last = each.end_s = self._work_end_s(each.begin_s, each.work_s)
      self._ready_s[each.load] = self._work_end_s(
        each.begin_s, each.until_step_s
      )

  def _work_end_s(self, begin: float, work_s: float) -> float:
    """Returns the end of work that starts at `begin` (both in seconds).

    It takes `work_s` seconds if no step runs.
    """
    for start, stop in self._spans if self._load_rate < 1 else ():
      if begin + work_s <= start:
        break
      if stop > begin:
        work_s -= max(0.0, start - begin)
        begin = max(begin, start)
        if work_s <= (stop - begin) * self._load_rate:
          return begin + work_s / self._load_rate
        work_s -= (stop - begin) * self._load_rate
        begin = stop
    return begin + work_s

  def _add_exposed_time(self, until_s: float) -> None:
    """Adds the load time between the last step and `until_s` to `exposed_s`."""
    for each in self._loads:
      begin = max(each.begin_s, self._free_s)
      self.exposed_s += max(0.0, min(each.end_s, until_s) - begin)
    while self._loads and self._loads[0].end_s <= until_s:
      self._loaded_until_s = self._loads.popleft().end_s
    first = self._loads[0].begin_s if self._loads else self._now
    self._spans = [span for span in self._spans if span[1] > first]

  def _end(self, event: CompletionEvent) -> None:
    """Schedules the completion event of a step, copy or load."""
    heapq.heappush(self._events, (event.time_s, self._count, event))
    self._count += 1

  def wait(self, until_s: float) -> list[CompletionEvent]:
    """Advances the clock to the next event; see `executor.Executor`."""
    ends = [
      event.time_s for *_, event in self._events if event.step is not None
    ] if self._steps_first else []
    if ends:
      next_s = min(ends)
    else:
      next_s = min(self._next_s(), until_s)
      assert next_s < math.inf, "nothing is under way"
    self._now = max(self._now, next_s)
    found = []
    while self._next_s() <= self._now:
      found.append(heapq.heappop(self._events)[2])
    return found

  def _next_s(self) -> float:
    """Returns the time of the next event; infinity if there is none."""
    while self._events:
      time_s, count, event = self._events[0]
      if event.load is None or self._ready_s[event.load] == time_s:
        return time_s
      # Steps have slowed the load down since the event was scheduled.
      time_s = self._ready_s[event.load]
      event = event._replace(time_s=time_s)
      heapq.heapreplace(self._events, (time_s, count, event))
    return math.inf
