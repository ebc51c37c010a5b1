"""Model checker: explores every reachable state of a few peers with faults.

A state of all processes is called a world (`parallel.peers.membership.world`).
The search over the transitions of `parallel.peers.membership.transitions` is
breadth first, so a counterexample is a shortest one. `Model.violation` checks
the safety properties in every state. Liveness is checked at the end: from each
state in which a live peer holds the newest revision, a state in which all
rounds are committed can be reached without further faults.

Example:
  >>> from parallel.peers.membership.coordinator import Rules
  >>> from parallel.peers.membership.search import search
  >>> from parallel.peers.membership.world import SearchBounds, FaultBudget
  >>> found = search(SearchBounds(1, 1, FaultBudget(cuts=1), Rules(least=1)))
  >>> found.complete, found.problem
  (True, '')
"""

from collections.abc import Callable
import dataclasses

from parallel.peers.membership.transitions import Model
from parallel.peers.membership.world import ProtocolModules, SearchBounds, World


@dataclasses.dataclass(frozen=True)
class SearchResult:
  """Result of a search.

  Attributes:
    states: Number of distinct states that were reached.
    problem: Violated property; "" if none is violated.
    trace: Shortest sequence of events that leads to the violation.
    complete: Whether all reachable states were explored.
  """

  states: int
  problem: str
  trace: tuple[str, ...]
  complete: bool


def search(
  bounds: SearchBounds, protocol: ProtocolModules | None = None,
  progress: Callable[[int], None] = lambda states: None,
) -> SearchResult:
  """Explores all states that are reachable from the initial one.

  Args:
    bounds: Number of peers, rounds and faults.
    protocol: Modules under test; None for those of this package.
    progress: Callback that receives the number of states after each level of
      the breadth-first search.
  """
  model = Model(bounds, protocol or ProtocolModules())
  first = model.first()
  # State -> (predecessor, event): the tree of shortest traces.
  parents: dict[World, tuple[World | None, str]] = {first: (None, "")}
  onward: dict[World, list[World]] = {}  # successors without a fault
  frontier = [first]
  while frontier:
    following = []
    for world in frontier:
      steps = onward[world] = []
      for what, accident, result in model.successors(world):
        # A string names the property that the step itself has violated.
        problem = result if isinstance(result, str) else model.violation(
          world, result
        )
        if problem:
          trace = (*_trace(parents, world), what)
          return SearchResult(len(parents), problem, trace, complete=False)
        # Liveness may rely on fault-free steps only.
        if not accident:
          steps.append(result)
        if result not in parents:
          parents[result] = world, what
          following.append(result)
      if len(parents) > bounds.most:
        # Too many states; those that were explored violate no property.
        return SearchResult(len(parents), "", (), complete=False)
    progress(len(parents))
    frontier = following
  stuck = _find_stuck_world(model, onward)
  if stuck is not None:
    trace = _trace(parents, stuck)
    return SearchResult(
      len(parents), "no run can complete", trace, complete=True
    )
  return SearchResult(len(parents), "", (), complete=True)


def _trace(
  parents: dict[World, tuple[World | None, str]], world: World
) -> tuple[str, ...]:
  """Returns the events that lead from the first state to ``world``.

  ``parents``: state -> (state before it, event between them).
  """
  steps = []
  before: World | None = world
  while before is not None:
    before, what = parents[before]
    steps.append(what)
  return tuple(reversed(steps[:-1]))  # without the start


def _find_stuck_world(
  model: Model, onward: dict[World, list[World]]
) -> World | None:
  """Returns a state in which a run should be able to complete and cannot.

  ``onward``: state -> its successors without a fault.
  """
  # Search backwards from the final states over fault-free steps.
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
