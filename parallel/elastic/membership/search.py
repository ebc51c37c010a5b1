"""Searches every state that a small world of peers can reach.

The search is breadth first over `parallel.elastic.membership.transitions`, so
the trace to what it finds is a shortest one. What must hold in every state is
in `Model.violation`; that a world can go on is decided at the end: from each
state in which somebody lives who has the newest revision, one is reached
without further accidents in which all rounds are committed.
"""

from collections.abc import Callable
import dataclasses

from parallel.elastic.membership.transitions import Model
from parallel.elastic.membership.world import Bounds, Protocol, World


@dataclasses.dataclass(frozen=True)
class Found:
  """What a search has found.

  Attributes:
    states: Different states that were reached.
    problem: What is wrong; "" if nothing is.
    trace: How to get there, a shortest way.
    complete: Whether all states were reached that can be.
  """

  states: int
  problem: str
  trace: tuple[str, ...]
  complete: bool


def search(
  bounds: Bounds, protocol: Protocol | None = None,
  progress: Callable[[int], None] = lambda states: None,
) -> Found:
  """Searches all states of a world.

  Args:
    bounds: The world.
    protocol: The functions; None for the project's.
    progress: Is told the number of states now and then.
  """
  model = Model(bounds, protocol or Protocol())
  first = model.first()
  parents: dict[World, tuple[World | None, str]] = {first: (None, "")}
  onward: dict[World, list[World]] = {}
  frontier = [first]
  while frontier:
    following = []
    for world in frontier:
      steps = onward[world] = []
      for what, accident, result in model.successors(world):
        problem = result if isinstance(result, str) else model.violation(
          world, result
        )
        if problem:
          trace = (*_trace(parents, world), what)
          return Found(len(parents), problem, trace, complete=False)
        if not accident:
          steps.append(result)
        if result not in parents:
          parents[result] = world, what
          following.append(result)
      if len(parents) > bounds.most:
        return Found(len(parents), "", (), complete=False)
    progress(len(parents))
    frontier = following
  stuck = _stuck(model, onward)
  if stuck is not None:
    trace = _trace(parents, stuck)
    return Found(len(parents), "nobody can go on", trace, complete=True)
  return Found(len(parents), "", (), complete=True)


def _trace(
  parents: dict[World, tuple[World | None, str]], world: World
) -> tuple[str, ...]:
  steps = []
  before: World | None = world
  while before is not None:
    before, what = parents[before]
    steps.append(what)
  return tuple(reversed(steps[:-1]))


def _stuck(model: Model, onward: dict[World, list[World]]) -> World | None:
  """Returns the first state from which the end cannot be reached."""
  back: dict[World, list[World]] = {}
  good = []
  for world, steps in onward.items():
    for result in steps:
      back.setdefault(result, []).append(world)
    if model.done(world):
      good.append(world)
  reaching = set(good)
  while good:
    for world in back.get(good.pop(), ()):
      if world not in reaching:
        reaching.add(world)
        good.append(world)
  for world in onward:
    if world not in reaching and model.can_go_on(world):
      return world
  return None
