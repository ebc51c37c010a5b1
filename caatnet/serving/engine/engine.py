"""Keeps an executor busy with what a scheduler decides.

The next step is made while one is being computed, so a scheduler sees the
tokens of a step when the next one has begun already.
"""

from collections.abc import Callable, Iterable
import gc
import math

from caatnet.serving.engine.executor import Executor, Step
from caatnet.serving.requests import Request
from caatnet.serving.scheduler.scheduler import Scheduler

# New objects, less those that went, after which the garbage collector looks.
_OBJECTS = 20_000


class Engine:
  """A scheduler and an executor.

  Attributes:
    scheduler: Decides.
    executor: Computes.
    steps_ahead: How many steps are under way at a time: 2 makes one while one
      is computed, 1 waits for each.
  """

  def __init__(
    self, scheduler: Scheduler, executor: Executor, steps_ahead: int = 2
  ) -> None:
    """Makes an engine with nothing to do."""
    self.scheduler, self.executor = scheduler, executor
    self.steps_ahead = steps_ahead
    self._under_way = 0

  @property
  def idle(self) -> bool:
    """Whether nothing is under way and nobody waits."""
    return not self._under_way and self.scheduler.idle

  def turn(self, until_s: float = math.inf) -> Step | None:
    """Makes a step if there is one to make, or else waits for an end.

    Args:
      until_s: Until when it waits at most.

    Returns:
      The step; None if it waited.
    """
    if self._under_way < self.steps_ahead:
      step = self.scheduler.step(self.executor.now())
      for copy in self.scheduler.take_copies():
        self.executor.copy(copy)
      if step is not None:
        self.executor.submit(step)
        self._under_way += 1
        return step
      if self.idle and until_s == math.inf:
        return None  # the last one's deadline has passed
    for event in self.executor.wait(until_s):
      if event.step is not None:
        self._under_way -= 1
      self.scheduler.receive(event)
    return None


def settle() -> None:
  """Lets the garbage collector look seldom, and not at what is there now.

  What a server has when it begins to serve stays for ever. What steps make is
  no part of cycles, so it goes without a collector; the default, a look at each
  700 new objects, takes a twentieth of a step's time.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(_OBJECTS)


def replay(
  engine: Engine, requests: Iterable[Request],
  watch: Callable[[Engine, Step | None], None] | None = None,
) -> None:
  """Serves requests at the times of their arrivals, until all have ended.

  Args:
    engine: An engine with nothing to do.
    requests: They in the order of their arrivals.
    watch: Is called after each turn with the step that was made, if any.
  """
  waiting = iter(requests)
  coming = next(waiting, None)
  while coming is not None or not engine.idle:
    now = engine.executor.now()
    while coming is not None and coming.arrival_s <= now:
      engine.scheduler.add(coming)
      coming = next(waiting, None)
    step = engine.turn(math.inf if coming is None else coming.arrival_s)
    if watch is not None:
      watch(engine, step)
