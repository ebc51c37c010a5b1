"""What published configurators choose, to be timed by one simulator.

All choose stages, data and tensor ranks and microbatches of 1F1B without ZeRO,
tensor ranks within a node, and get the memory that a configuration needs:

- ``rule``: the rules of Narayanan et al. (arXiv 2104.04473): tensor ranks
  as many as a node has devices, then as few stages as make the model fit, then
  the microbatches that (m + p - 1)(f + b) likes best. Devices in their own
  order.
- ``megatron``: the same tensor ranks; all stages and microbatches are tried out
  on the cluster, by the simulator here, and the fastest taken.
- ``trials``: all that fits is tried out so.
- ``amp``: AMP's model (arXiv 2210.07297) on links as published, in its order.
  It has no memory: what does not fit is tried in vain, and the next one taken.
- ``pipette``: Pipette's model (arXiv 2405.18093) on measured links. Its first
  few get an order of nodes by annealing, and the best of these is taken.
- ``same``: this planner's model and order of devices, on the same choices.
- ``whole``: all of this planner's choices.
"""

from collections.abc import Callable
import dataclasses

import numpy as np

from caatnet.studies.published import models
from parallel.planner import plan
from parallel.planner.problem import Problem
from parallel.planner.space import Choices, Configuration, everything, refusal


@dataclasses.dataclass(frozen=True)
class Case:
  """What is to be configured.

  Attributes:
    problem: The training step on the actual links.
    nominal: The same on links as published.
    choices: What this planner tries.
    annealed: How many of its first Pipette anneals.
    steps: Orders that an annealing tries.
  """

  problem: Problem
  nominal: Problem
  choices: Choices
  annealed: int = 10
  steps: int = 1000

  @property
  def plain(self) -> Choices:
    """What all configurators know; Megatron-LM keeps residuals."""
    return dataclasses.replace(
      self.choices, timetables=("1f1b",), chunks=(1,), schemes=("ddp",),
      routes=("psum",), remats=("none", "full"), offload=False,
      keeps=("residuals",),
    )

  def runs(self) -> list[Configuration]:
    """Returns all that are runs, whether they fit or not."""
    links, step = self.problem.links, self.problem.step
    most = int(np.bincount(links.nodes).max())
    return [
      c for c in everything(step.batch_size, links.num_devices, self.plain)
      if refusal(c, step, self.plain) is None and c.tensor <= most
    ]

  def fits(self, c: Configuration) -> bool:
    """Returns whether a device has the memory."""
    return self.problem.memory(c).total <= self.problem.memory_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
  """What a configurator chooses.

  Attributes:
    configuration: The configuration.
    order: The device of each coordinate, int ``[p, d, t]``.
    said_s: Seconds of a step by its own model; None if it has none.
    in_vain: How many that do not fit it would rather have.
  """

  configuration: Configuration
  order: np.ndarray
  said_s: float | None = None
  in_vain: int = 0


def choose(name: str, case: Case) -> Choice:
  """Lets a configurator choose.

  Args:
    name: A key of ``CHOOSERS``.
    case: Training step and cluster to configure.

  Raises:
    ValueError: Nothing that it knows fits.
  """
  return CHOOSERS[name](case)


def _own(c: Configuration) -> np.ndarray:
  return np.arange(c.grid.size).reshape(c.grid)


def _fitting(case: Case) -> list[Configuration]:
  found = [c for c in case.runs() if case.fits(c)]
  if not found:
    raise ValueError(
      f"nothing fits on {case.problem.links.name} without ZeRO and offload, "
      "of which published configurators do not know"
    )
  return found


def _widest(case: Case) -> list[Configuration]:
  """Returns what fits with the most tensor ranks."""
  found = _fitting(case)
  most = max(c.tensor for c in found)
  return [c for c in found if c.tensor == most]


def _rule(case: Case) -> Choice:
  found = _widest(case)
  stages = min(c.stages for c in found)

  def seconds(c: Configuration) -> float:
    return (c.microbatches + stages - 1) * models.stage_s(c, case.nominal)

  best = min((c for c in found if c.stages == stages), key=seconds)
  return Choice(best, _own(best), seconds(best))


def _tried(case: Case, some: list[Configuration]) -> Choice:
  best = min(some, key=lambda c: case.problem.predict(c).total)
  return Choice(best, _own(best))


def _amp(case: Case) -> Choice:
  nominal = case.nominal
  in_order = sorted(
    case.runs(), key=lambda c: models.amp_s(c, nominal, _own(c))
  )
  for in_vain, c in enumerate(in_order):
    if case.fits(c):
      said_s = models.amp_s(c, nominal, _own(c))
      return Choice(c, _own(c), said_s, in_vain)
  raise ValueError("nothing that AMP tries fits")


def _pipette(case: Case) -> Choice:
  problem = case.problem
  in_order = sorted(
    _fitting(case), key=lambda c: models.pipette_s(c, problem, _own(c))
  )
  found = []
  for c in in_order[: case.annealed]:
    order = models.pipette_order(c, problem, steps=case.steps)
    found.append(Choice(c, order, models.pipette_s(c, problem, order)))
  return min(found, key=lambda choice: choice.said_s)


def _planned(case: Case, choices: Choices) -> Choice:
  best = plan.plan(case.problem, choices, count=1).best[0]
  return Choice(best.configuration, best.order, best.latency.total)


# The names of configurators.
CHOOSERS: dict[str, Callable[[Case], Choice]] = {
  "rule": _rule,
  "megatron": lambda case: _tried(case, _widest(case)),
  "trials": lambda case: _tried(case, _fitting(case)),
  "amp": _amp,
  "pipette": _pipette,
  "same": lambda case: _planned(case, case.plain),
  "whole": lambda case: _planned(case, case.choices),
}
