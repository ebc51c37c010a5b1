"""Selection of a configuration and a device order, with reasons for exclusions.

All configurations are enumerated (`space`). Those that cannot run or do not fit
into memory are counted by the constraint that excludes them. The step time of
all others is predicted in the default device order. If some configurations
differ only in rematerialization, offloading and saved values, only those are
predicted that recompute and offload no more than necessary to fit. For the best
few degrees (stages, data, tensor), the device order of the best configuration
is then optimised, and its gap to a lower bound computed. Another configuration
of the same degrees may be faster in this order, and then replaces the first.
For up to ``MAX_EXACT_DEVICES`` devices the whole step is predicted in all
orders, since the search objective contains only the slowest links. Finally all
candidates are sorted again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses

import numpy as np

from parallel.plans.planner import device_order, space
from parallel.plans.planner.bound import cost_lower_bound
from parallel.plans.planner.device_order import MAX_EXACT_DEVICES
from parallel.plans.planner.latency import Latency
from parallel.plans.planner.memory import PeakMemory
from parallel.plans.planner.message_costs import Grid, Traffic, cost
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import Choices, Configuration
from parallel.plans.planner.steps import all_orders, steps_s
from parallel.plans.workload import TrainingStep

# largest number of configurations of one grid that are tried in a device order
_MAX_SAME_GRID = 20
# candidates slower than this multiple of the best are not refined
_REFINED_RATIO = 1.3


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
  """A configuration with its predictions.

  Attributes:
    configuration: The configuration.
    memory: Bytes of a device, by cause.
    latency: Seconds of a step, by cause.
    order: Device by stage, data and tensor rank, int ``[p, d, t]``.
    own_s: Seconds of a step of this configuration in the default device order.
    bound_s: Lower bound over all device orders, in seconds, of the part of a
      step's time that depends on the order; None if not computed.
    order_s: Seconds of the same part in `order`.
  """

  configuration: Configuration
  memory: PeakMemory
  latency: Latency
  order: np.ndarray
  own_s: float
  bound_s: float | None = None
  order_s: float = 0.0

  @property
  def gap(self) -> float | None:
    """Largest time that a better order can save, as a fraction of a step."""
    if self.bound_s is None:
      return None
    # By rounding, the bound may exceed an optimal order's seconds.
    return max(0.0, self.order_s - self.bound_s) / self.latency.total


@dataclasses.dataclass(frozen=True)
class Plan:
  """Best configurations of a problem, and why others are excluded.

  Attributes:
    best: The best few candidates, fastest first, at most one per grid.
    front: Pareto front of time and memory, fastest first, in the default device
      order.
    excluded: Constraint -> (number of excluded configurations, last reason).
    priced: Number of configurations whose step time was predicted.
    skipped: Number of device orders that were not searched for lack of time.
  """

  best: tuple[Candidate, ...]
  front: tuple[Candidate, ...]
  excluded: Mapping[str, tuple[int, str]]
  priced: int
  skipped: int


def plan(
  problem: Problem, choices: Choices, *, count: int = 5, ordered: int = 10,
  has_time: Callable[[], bool] = lambda: True,
) -> Plan:
  """Finds the best configurations of a model on a cluster.

  Args:
    problem: The training step on the cluster.
    choices: Values to try.
    count: Number of results, which differ in their (stages, data, tensor).
    ordered: Number of candidates whose device order is optimised.
    has_time: Called before each search of a device order; if it returns False,
      the candidate keeps its present order.

  Raises:
    ValueError: No configuration fits; the message states the missing and the
      required memory.
  """
  excluded: dict[str, tuple[int, str]] = {}
  smallest: tuple[Configuration, PeakMemory] | None = None
  fitting = []
  for alike in _group_configurations(
    problem.step, problem.links.num_devices, choices, excluded
  ):
    found = []
    for c in alike:
      needs = problem.memory(c)
      # Used in the error message if nothing fits.
      if smallest is None or needs.total < smallest[1].total:
        smallest = c, needs
      if needs.total <= problem.memory_bytes:
        found.append((c, needs))
      else:
        _count(
          excluded, "memory", _explain_memory(c, needs, problem.memory_bytes)
        )
    fitting += _drop_dominated(found)
  if not fitting:
    raise ValueError(_explain_no_fit(smallest, excluded, problem))
  # First, predict all configurations in the default device order.
  priced = [
    _make_candidate(c, needs, problem.predict(c)) for c, needs in fitting
  ]
  priced.sort(key=lambda x: x.latency.total)
  of_degrees: dict[Grid, Candidate] = {}  # fastest first: keeps the best
  for x in priced:
    of_degrees.setdefault(x.configuration.grid, x)
  # Second, optimise the device order of the best configuration of each grid.
  skipped = 0

  def searched(x, search):
    nonlocal skipped
    if has_time():
      return search(x)
    skipped += 1
    return x

  better = [
    searched(x, lambda x: reorder_devices(x, problem))
    for x in [*of_degrees.values()][: max(count, ordered)]
  ]
  better.sort(key=lambda x: x.latency.total)
  # Third, try other configurations of the same grid in these orders.
  near = _REFINED_RATIO * better[0].latency.total
  better = [
    searched(x, lambda x: _best_of_same_grid(x, priced, problem))
    if i < count or x.latency.total < near else x
    for i, x in enumerate(better)
  ]
  better.sort(key=lambda x: x.latency.total)
  best = [
    _add_bound(x, problem.traffic(x.configuration)) for x in better[:count]
  ]
  return Plan(
    tuple(best), tuple(pareto_front(priced)), excluded, len(priced), skipped
  )


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
  """Returns the candidates that no other beats in both time and memory."""
  found: list[Candidate] = []
  # In order of time: only a smaller memory extends the front.
  for x in sorted(
    candidates, key=lambda x: (x.latency.total, x.memory.total)
  ):
    if not found or x.memory.total < found[-1].memory.total:
      found.append(x)
  return found


def why_not(
  c: Configuration, problem: Problem, choices: Choices, best: Candidate
) -> str:
  """Explains in a sentence or two why a configuration is not the best."""
  if c.grid.size != problem.links.num_devices:
    return (
      f"{c.grid} takes {c.grid.size} devices; the cluster has "
      f"{problem.links.num_devices}"
    )
  # Constraints in the order of the search: validity, memory, time.
  refused = space.violated_constraint(c, problem.step, choices)
  if refused is not None:
    return f"it cannot run ({refused[0]}): {refused[1]}"
  needs = problem.memory(c)
  if needs.total > problem.memory_bytes:
    return _explain_memory(c, needs, problem.memory_bytes)
  found = reorder_devices(
    _make_candidate(c, needs, problem.predict(c)), problem
  )
  # Extra seconds by cause, compared with the best.
  more = {
    cause: seconds - getattr(best.latency, cause)
    for cause, seconds in dataclasses.asdict(found.latency).items()
  }
  cause = max(more, key=lambda key: more[key])
  slower = found.latency.total / best.latency.total - 1
  if slower <= 0:
    return f"it is at least as fast as the best: {found.latency.total:.4g} s"
  return (
    f"it fits, but takes {found.latency.total:.4g} s, {slower:.1%} more than "
    f"the best; most of that in {cause}: {more[cause]:+.4g} s"
  )


def reorder_devices(candidate: Candidate, problem: Problem) -> Candidate:
  """Returns a candidate in the best device order that a quick search finds."""
  c = candidate.configuration
  costs = problem.traffic(c)
  # On equal nodes the default order is often one of the best.
  if c.grid.size > MAX_EXACT_DEVICES and cost(
    costs, candidate.order
  ) <= cost_lower_bound(costs):
    return candidate
  # A quick search without random restarts; never worse than before.
  found = device_order.search(costs, kicks=0)
  other = _with_order(candidate, found.devices, problem)
  return min(candidate, other, key=lambda x: x.latency.total)


def _best_of_same_grid(
  candidate: Candidate, priced: Sequence[Candidate], problem: Problem
) -> Candidate:
  """Returns the fastest of the candidates ``priced`` with the candidate's grid.

  All are compared in its device order, which is then optimised again.
  """
  grid = candidate.configuration.grid
  alike = [x for x in priced if x.configuration.grid == grid][:_MAX_SAME_GRID]
  # All in the order that was optimised for the first candidate.
  alike = [
    candidate, *(_with_order(x, candidate.order, problem) for x in alike)
  ]
  alike.sort(key=lambda x: x.latency.total)
  # All orders are tried for the best candidate of each pipeline schedule.
  of_schedules: dict[str, Candidate] = {}
  for x in alike:
    of_schedules.setdefault(x.configuration.schedule, x)
  if grid.size <= MAX_EXACT_DEVICES:
    found = [_best_of_all_orders(x, problem) for x in of_schedules.values()]
  else:
    found = [alike[0], reorder_devices(alike[0], problem)]
  return min(found, key=lambda x: x.latency.total)


def _with_order(
  candidate: Candidate, order: np.ndarray, problem: Problem
) -> Candidate:
  # Only the time depends on the order, not the memory.
  latency = problem.predict(candidate.configuration, order)
  return dataclasses.replace(candidate, latency=latency, order=order)


def _best_of_all_orders(candidate: Candidate, problem: Problem) -> Candidate:
  """Returns a candidate in the fastest of all device orders."""
  c = candidate.configuration
  orders = all_orders(c.grid)
  seconds = steps_s(c, problem.step, problem.links, problem.timing, orders)
  best = orders[seconds.argmin()].astype(int)  # int8 -> int
  other = _with_order(candidate, best, problem)
  return min(candidate, other, key=lambda x: x.latency.total)


def _add_bound(candidate: Candidate, costs: Traffic) -> Candidate:
  """Returns a candidate with the lower bound of its cost in any order."""
  return dataclasses.replace(
    candidate, bound_s=cost_lower_bound(costs),
    order_s=float(cost(costs, candidate.order))
  )


def _group_configurations(
  step: TrainingStep, num_devices: int, choices: Choices,
  excluded: dict[str, tuple[int, str]],
) -> Iterable[list[Configuration]]:
  """Returns runnable configurations, grouped if all but three fields are equal.

  The fields are remat, offload and keep. Configurations that cannot run are
  counted in ``excluded``.
  """
  groups: dict[Configuration, list[Configuration]] = {}
  for c in space.all_configurations(step.batch_size, num_devices, choices):
    refused = space.violated_constraint(c, step, choices)
    if refused is not None:
      _count(excluded, *refused)
      continue
    # Key of the group: the configuration without these three fields.
    rest = dataclasses.replace(c, remat="none", offload=False, keep="inputs")
    groups.setdefault(rest, []).append(c)
  return groups.values()


def _drop_dominated(
  found: list[tuple[Configuration, PeakMemory]]
) -> list[tuple[Configuration, PeakMemory]]:
  """Returns the configurations that recompute and offload only what they must.

  ``found`` are those configurations of a group that fit into memory.
  """
  # Whether a differs from b, and recomputes and offloads at least as much.
  def more(a, b):
    levels, keeps = space.REMATS, space.KEEPS
    return (
      levels.index(a.remat) >= levels.index(b.remat)
      and keeps.index(a.keep) >= keeps.index(b.keep)
      and a.offload >= b.offload and a != b
    )

  return [
    (c, needs) for c, needs in found
    if not any(more(c, other) for other, _ in found)
  ]


def _make_candidate(
  c: Configuration, needs: PeakMemory, latency: Latency
) -> Candidate:
  own = np.arange(c.grid.size).reshape(c.grid)  # default order, [p, d, t]
  return Candidate(c, needs, latency, own, latency.total)


def _count(
  excluded: dict[str, tuple[int, str]], name: str, reason: str
) -> None:
  excluded[name] = excluded.get(name, (0, ""))[0] + 1, reason


def _explain_memory(c: Configuration, needs: PeakMemory, most: float) -> str:
  return (
    f"{c} does not fit: it needs {needs.total / 1e9:.1f} GB, "
    f"{(needs.total - most) / 1e9:.1f} GB more than a device has, most of it "
    f"for {needs.binding} ({getattr(needs, needs.binding) / 1e9:.1f} GB)"
  )


def _explain_no_fit(
  smallest: tuple[Configuration, PeakMemory] | None,
  excluded: Mapping[str, tuple[int, str]], problem: Problem,
) -> str:
  """Returns the error text: missing memory, and devices that would suffice.

  ``smallest`` is the runnable configuration that needs the least memory, None
  for none; ``excluded`` is `Plan.excluded`.
  """
  n = problem.links.num_devices
  if smallest is None:
    why = "; ".join(f"{k}: {reason}" for k, (_, reason) in excluded.items())
    return f"no configuration of {n} devices can run: {why}"
  c, needs = smallest
  state = needs.weights + needs.gradients + needs.optimizer
  state *= problem.fit(c).upper  # a part of `needs.buffers`
  rest = needs.total - state  # assumed independent of the device count
  most = problem.memory_bytes
  text = (
    f"no configuration fits. The smallest: {_explain_memory(c, needs, most)}. "
  )
  if rest >= most:
    return text + (
      "It does not fit even without training state: use shorter sequences or "
      "a narrower model"
    )
  return text + (
    f"Devices of {needs.total / 1e9:.0f} GB suffice, or about "
    f"{int(np.ceil(n * state / (most - rest)))} of these devices"
  )
