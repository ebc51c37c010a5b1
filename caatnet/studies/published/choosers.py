"""Choices of published configurators, all timed by one simulator.

Each configurator chooses the number p of pipeline stages, the number of data
ranks, the number of tensor ranks, the number m of microbatches, and the
rematerialization of layers. All but ``whole`` choose only plans with the
schedule 1F1B, without ZeRO and offload; all but ``same`` and ``whole`` also use
at most as many tensor ranks as a node has devices. All but ``amp`` know the
memory that each plan needs. f + b is the time of the forward and the backward
of a microbatch on a stage:

- ``rule``: rules of Narayanan et al. (arXiv 2104.04473): the most tensor ranks
  with which a plan fits, then the fewest stages, then the m and the
  rematerialization that minimise (m + p - 1)(f + b). Devices are in the
  cluster's order.
- ``megatron``: as many tensor ranks as ``rule``; of these plans, all that fit
  are simulated on the cluster, and the fastest is chosen.
- ``trials``: all plans that fit are simulated in the same way.
- ``amp``: the fastest by AMP's model (arXiv 2210.07297), which assumes that all
  links have their published bandwidth. It has no memory model: its candidates
  that do not fit are skipped.
- ``pipette``: Pipette's model (arXiv 2405.18093) on the actual links. Annealing
  orders the nodes of its best few candidates, and the best is chosen.
- ``same``: this project's planner on the search space of the published ones.
- ``whole``: this project's planner on its whole search space.
"""

from collections.abc import Callable
import dataclasses

import numpy as np

from caatnet.studies.published import models
from parallel.plans.planner import plan
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import (
  Choices,
  Configuration,
  all_configurations,
  violated_constraint,
)


@dataclasses.dataclass(frozen=True)
class PublishedSetting:
  """Configuration problem: a training step on a cluster.

  Attributes:
    problem: Training step on the actual links.
    nominal: Training step on links with their published bandwidth.
    choices: Search space of this project's planner.
    annealed: Number of best candidates for which Pipette anneals the order of
      the nodes.
    steps: Number of orders that one annealing tries.
  """

  problem: Problem
  nominal: Problem
  choices: Choices
  annealed: int = 10
  steps: int = 1000

  @property
  def plain(self) -> Choices:
    """Search space of the published configurators.

    The schedule is 1F1B with saved residuals, without ZeRO and offload.
    """
    return dataclasses.replace(
      self.choices, schedules=("1f1b",), chunks=(1,), schemes=("ddp",),
      routes=("psum",), remats=("none", "full"), offload=False,
      keeps=("residuals",),
    )

  def runs(self) -> list[Configuration]:
    """Returns all valid configurations in `plain`, even if they do not fit."""
    links, step = self.problem.links, self.problem.step
    most = int(np.bincount(links.nodes).max())  # devices of a node
    return [
      c for c in all_configurations(
        step.batch_size, links.num_devices, self.plain
      )
      if violated_constraint(c, step, self.plain) is None and c.tensor <= most
    ]

  def fits(self, c: Configuration) -> bool:
    """Returns whether the configuration fits into a device's memory."""
    return self.problem.memory(c).total <= self.problem.memory_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class ChosenPlan:
  """Choice of a configurator.

  Attributes:
    configuration: The configuration.
    order: Device of each stage, data and tensor rank, int ``[p, d, t]``.
    said_s: Seconds of a step by the configurator's own model; None without one.
    in_vain: Number of candidates that the configurator's model prefers to its
      choice, but that do not fit into memory.
  """

  configuration: Configuration
  order: np.ndarray
  said_s: float | None = None
  in_vain: int = 0


def choose(name: str, case: PublishedSetting) -> ChosenPlan:
  """Returns the choice of a configurator.

  Args:
    name: Key of ``CHOOSERS``.
    case: Training step and cluster to configure.

  Raises:
    ValueError: None of its candidates fits.
  """
  return CHOOSERS[name](case)


def _default_order(c: Configuration) -> np.ndarray:
  return np.arange(c.grid.size).reshape(c.grid)


def _fitting(case: PublishedSetting) -> list[Configuration]:
  found = [c for c in case.runs() if case.fits(c)]
  if not found:
    raise ValueError(
      f"nothing fits on {case.problem.links.name} without ZeRO and offload, "
      "which published configurators do not support"
    )
  return found


def _most_tensor_parallel(case: PublishedSetting) -> list[Configuration]:
  """Returns the configurations that fit and have the most tensor ranks."""
  found = _fitting(case)
  most = max(c.tensor for c in found)
  return [c for c in found if c.tensor == most]


def _rule(case: PublishedSetting) -> ChosenPlan:
  found = _most_tensor_parallel(case)
  stages = min(c.stages for c in found)

  def seconds(c: Configuration) -> float:
    return (c.microbatches + stages - 1) * models.stage_s(c, case.nominal)

  best = min((c for c in found if c.stages == stages), key=seconds)
  return ChosenPlan(best, _default_order(best), seconds(best))


def _choose_by_simulation(
  case: PublishedSetting, some: list[Configuration]
) -> ChosenPlan:
  best = min(some, key=lambda c: case.problem.predict(c).total)
  return ChosenPlan(best, _default_order(best))


def _amp(case: PublishedSetting) -> ChosenPlan:
  nominal = case.nominal
  in_order = sorted(
    case.runs(), key=lambda c: models.amp_s(c, nominal, _default_order(c))
  )
  # AMP has no memory model: its choice is the first candidate that fits.
  for in_vain, c in enumerate(in_order):
    if case.fits(c):
      said_s = models.amp_s(c, nominal, _default_order(c))
      return ChosenPlan(c, _default_order(c), said_s, in_vain)
  raise ValueError("no candidate of AMP fits into device memory")


def _pipette(case: PublishedSetting) -> ChosenPlan:
  problem = case.problem
  in_order = sorted(
    _fitting(case),
    key=lambda c: models.pipette_s(c, problem, _default_order(c))
  )
  found = []
  # Annealing is slow, so only the best candidates get an order.
  for c in in_order[: case.annealed]:
    order = models.pipette_order(c, problem, steps=case.steps)
    found.append(ChosenPlan(c, order, models.pipette_s(c, problem, order)))
  return min(found, key=lambda choice: choice.said_s)


def _choose_by_planner(case: PublishedSetting, choices: Choices) -> ChosenPlan:
  best = plan.plan(case.problem, choices, count=1).best[0]
  return ChosenPlan(best.configuration, best.order, best.latency.total)


# Configurators by name.
CHOOSERS: dict[str, Callable[[PublishedSetting], ChosenPlan]] = {
  "rule": _rule,
  "megatron": lambda case: _choose_by_simulation(
    case, _most_tensor_parallel(case)
  ),
  "trials": lambda case: _choose_by_simulation(case, _fitting(case)),
  "amp": _amp,
  "pipette": _pipette,
  "same": lambda case: _choose_by_planner(case, case.plain),
  "whole": lambda case: _choose_by_planner(case, case.choices),
}
