"""Regret of a plan: its step time over the optimum, minus 1.

The optimum is over all configurations in all orders of devices.

All orders of a configuration are timed at once
(`parallel.plans.planner.steps`). The best of them is also timed by
`latency.predict`, which must agree.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any

import numpy as np

from parallel.plans.planner import plan
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import (
  Choices,
  Configuration,
  all_configurations,
  violated_constraint,
)
from parallel.plans.planner.steps import all_orders, steps_s


@dataclasses.dataclass(frozen=True, eq=False)
class BestPlan:
  """Result of `search_exhaustively`: the best configuration and device order.

  Attributes:
    seconds: Predicted time of a step.
    configuration: The parallel configuration.
    order: Device of each coordinate, int ``[stages, data, tensor]``.
    configurations: Number of configurations tried.
    orders: Number of orders tried, over all configurations.
  """

  seconds: float
  configuration: Configuration
  order: np.ndarray
  configurations: int
  orders: int


def regret(problem: Problem, choices: Choices) -> dict[str, Any]:
  """Computes a plan and the exhaustive optimum.

  Returns both as plain data, and the regret: the plan's predicted step time
  over that of the optimum, minus 1.
  """
  planned = plan.plan(problem, choices, count=1).best[0]
  best = search_exhaustively(problem, choices)
  return {
    "devices": problem.links.num_devices, "execution": problem.timing.execution,
    "configurations": best.configurations, "orders": best.orders,
    "plan": str(planned.configuration), "plan, s": planned.latency.total,
    "best": str(best.configuration), "best, s": best.seconds,
    "regret": planned.latency.total / best.seconds - 1,
  }


def search_exhaustively(problem: Problem, choices: Choices) -> BestPlan:
  """Returns the fastest of all configurations that fit, in all orders."""
  best: tuple[float, Configuration, np.ndarray] | None = None
  tried = count = 0
  for c in _fitting_configurations(problem, choices):
    orders = all_orders(c.grid)
    seconds = steps_s(
      c, problem.step, problem.links, problem.timing, orders
    )
    tried, count = tried + 1, count + len(orders)
    i = int(seconds.argmin())
    # The vectorised times must equal those of `predict`.
    own = problem.predict(c, orders[i]).total
    assert abs(own - seconds[i]) <= 1e-9 * own, (c, orders[i])
    if best is None or seconds[i] < best[0]:
      best = float(seconds[i]), c, orders[i]
  return BestPlan(*best, tried, count)


def _fitting_configurations(problem: Problem, choices: Choices) -> Iterator[
  Configuration
]:
  step = problem.step
  for c in all_configurations(
    step.batch_size, problem.links.num_devices, choices
  ):
    if violated_constraint(c, step, choices) is None and (
      problem.memory(c).total <= problem.memory_bytes
    ):
      yield c
