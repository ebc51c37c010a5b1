"""Engine: keeps an executor busy with the steps of a scheduler.

The next step is made while the current one is computed, so the scheduler
receives the tokens of a step after the next one has begun.
"""

from collections.abc import Callable, Iterable
import gc
import math

from caatnet.serving.engine.executor import EngineStep, Executor
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.scheduler import Scheduler

# Garbage collection threshold: net number of new objects per collection.
_GC_THRESHOLD = 20_000


class Engine:
  """Scheduler and executor of one replica.

  Attributes:
    scheduler: Makes steps.
    executor: Runs steps.
    steps_ahead: Maximum number of steps under way: with 2, the next step is
      made while one is computed; with 1, after it.
  """

  def __init__(
    self, scheduler: Scheduler, executor: Executor, steps_ahead: int = 2
  ) -> None:
    """Makes an idle engine."""
    self.scheduler, self.executor = scheduler, executor
    self.steps_ahead = steps_ahead
    self._under_way = 0

  @property
  def idle(self) -> bool:
    """Whether no request is left and no step, copy or load is under way."""
    return not self._under_way and self.scheduler.idle

  def step(self, until_s: float = math.inf) -> EngineStep | None:
    """Submits a step if possible; otherwise waits for an event.

    Args:
      until_s: Time at which the wait ends at the latest, on the executor's
        clock.

    Returns:
      The submitted step; None if the call waited.
    """
    if self._under_way < self.steps_ahead:
      step = self.scheduler.step(self.executor.now())
      for copy in self.scheduler.take_copies():
        self.executor.copy(copy)
      for load in self.scheduler.take_loads():
        self.executor.load(load)
      if step is not None:
        self.executor.submit(step)
        self._under_way += 1
        return step
      if self.idle and until_s == math.inf:
        return None  # the last request has expired
    for event in self.executor.wait(until_s):
      if event.step is not None:
        self._under_way -= 1
      self.scheduler.receive(event)
    return None


def tune_gc() -> None:
  """Makes garbage collection rare, and exempts all existing objects from it.

  Objects that exist when a server starts to serve stay for its lifetime.
  Objects that steps create are not part of reference cycles, so reference
  counts free them. The default, a collection per 700 new objects, takes a
  twentieth of a step's time.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(_GC_THRESHOLD)


def replay(
  engine: Engine, requests: Iterable[Request],
  watch: Callable[[Engine, EngineStep | None], None] | None = None,
) -> None:
  """Serves requests at their arrival times, until all have ended.

  Args:
    engine: An idle engine.
    requests: Requests in the order of their arrival times.
    watch: Called after each engine step with the submitted step, or None if the
      engine waited.

  Example:
    One request of 8 prompt tokens on a simulated device, where a step takes
    10 ms, and 1 ms more per token of a chunk:

    >>> from caatnet.serving.cache.host_cache import HostCache
    >>> from caatnet.serving.cache.pages import Pages
    >>> from caatnet.serving.engine.simulator import Simulator
    >>> from caatnet.serving.scheduler.limits import Limits
    >>> from caatnet.serving.scheduler.policies import registry
    >>> class Times:
    ...   def step_s(self, contexts, chunks):
    ...     return 0.010 + 0.001 * sum(length for _, length in chunks)
    >>> pages, simulator = Pages(16, page_size=4), Simulator(Times())
    >>> scheduler = Scheduler(
    ...   Limits(), registry.make("first_come", pages), pages,
    ...   HostCache(0, 4, reserve=False), simulator.costs)
    >>> request = Request(0, prompt=range(8), max_tokens=3)
    >>> replay(Engine(scheduler, simulator), [request])
    >>> [round(time_s, 3) for time_s in request.token_times]
    [0.018, 0.028, 0.038]
  """
  waiting = iter(requests)
  coming = next(waiting, None)
  while coming is not None or not engine.idle:
    now = engine.executor.now()
    # All requests that have arrived by now, before the next step is made.
    while coming is not None and coming.arrival_s <= now:
      engine.scheduler.add(coming)
      coming = next(waiting, None)
    step = engine.step(math.inf if coming is None else coming.arrival_s)
    if watch is not None:
      watch(engine, step)
