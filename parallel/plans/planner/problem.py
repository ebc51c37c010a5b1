"""Planning problem: a training step, a cluster and timing assumptions.

Functions of the planner take individual values. A `Problem` is the input of a
whole plan and passes each function the values that it needs.
"""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.planner import latency, memory
from parallel.plans.planner.latency import Latency, TimingAssumptions
from parallel.plans.planner.memory import Fit, PeakMemory
from parallel.plans.planner.message_costs import Traffic
from parallel.plans.planner.space import Configuration
from parallel.plans.workload import TrainingStep


@dataclasses.dataclass(frozen=True)
class Problem:
  """Training step on a cluster, for which a plan is searched.

  Attributes:
    step: The training step.
    links: The cluster.
    timing: Assumptions about the time of computation and stages.
  """

  step: TrainingStep
  links: LinkMatrix
  timing: TimingAssumptions = dataclasses.field(
    default_factory=TimingAssumptions
  )

  @property
  def memory_bytes(self) -> float:
    """Memory of a device in bytes."""
    return self.links.device.memory_bytes

  def fit(self, c: Configuration) -> Fit:
    """Returns fitted factors of the memory formulas for a configuration."""
    return memory.FITS[self.links.device.platform].of(c)

  def memory(self, c: Configuration) -> PeakMemory:
    """Returns an upper bound of the memory of a device, in bytes by cause."""
    return memory.memory(c, self.step, self.fit(c))

  def traffic(self, c: Configuration) -> Traffic:
    """Returns `latency.traffic` of a configuration on this cluster."""
    return latency.traffic(c, self.step, self.links, self.timing.execution)

  def predict(
    self, c: Configuration, order: np.ndarray | None = None
  ) -> Latency:
    """Returns `latency.predict` of a configuration on this cluster."""
    return latency.predict(c, self.step, self.links, self.timing, order)

  def sensitivity(
    self, c: Configuration, order: np.ndarray,
    factors: Sequence[float] = (0.5, 2.0),
  ) -> dict[float, float]:
    """Returns the seconds of a step if all links were faster by each factor.

    Args:
      c: The configuration.
      order: Device by stage, data and tensor rank, int ``[p, d, t]``.
      factors: Numbers that multiply bandwidths and divide latencies.
    """
    found = {}  # factor -> seconds
    for factor in factors:
      links = dataclasses.replace(
        self.links, bandwidth=self.links.bandwidth * factor,
        latency_s=self.links.latency_s / factor,
      )
      found[factor] = dataclasses.replace(self, links=links).predict(
        c, order
      ).total
    assert all(math.isfinite(x) for x in found.values())
    return found
