"""Priorities that change while requests run, as in FastSwitch's evaluation.

At each step a server updates the priorities of all requests with a given
probability, the frequency. *Random* draws new priorities. *Markov* keeps each
priority or moves it to a neighbouring level, so that an urgent request tends to
remain urgent.

Source: FastSwitch (arXiv 2411.18424), section 4: frequencies 0.04 and 0.02. Its
transition probabilities are not published; both neighbours are equally likely
here.
"""

from collections.abc import Iterable
import dataclasses

import numpy as np

from caatnet.serving.requests import Request
from parallel.base.checks import known

KINDS = ("none", "random", "markov")


@dataclasses.dataclass
class Priorities:
  """Random process of request priorities.

  Attributes:
    kind: One of `KINDS`.
    frequency: Probability of an update at a step.
    levels: Number of priorities; 0 is the most urgent.
    seed: Seed of the random numbers.
    stay: Probability that Markov keeps a priority.
  """

  kind: str = "none"
  frequency: float = 0.04
  levels: int = 8
  seed: int = 0
  stay: float = 0.5

  def __post_init__(self) -> None:
    known("kind=", self.kind, KINDS)
    self._rng = np.random.default_rng(self.seed)

  def first(self) -> float:
    """Returns the priority of an arriving request."""
    if self.kind == "none":
      return 0.0
    return float(self._rng.integers(self.levels))

  def due(self) -> bool:
    """Returns whether this step updates priorities."""
    return self.kind != "none" and self._rng.random() < self.frequency

  def update(self, requests: Iterable[Request]) -> list[Request]:
    """Updates the priorities of requests; returns those that changed."""
    requests = list(requests)
    if self.kind == "random":
      drawn = self._rng.integers(self.levels, size=len(requests))
    else:
      old = np.array([r.priority for r in requests], np.int64)
      move = self._rng.choice(
        (-1, 0, 1), len(requests),
        p=((1 - self.stay) / 2, self.stay, (1 - self.stay) / 2),
      )
      # A move beyond the first or the last level has no effect.
      drawn = np.clip(old + move, 0, self.levels - 1)
    changed = []
    for request, value in zip(requests, drawn.tolist(), strict=True):
      if request.priority != value:
        request.priority = float(value)
        changed.append(request)
    return changed
