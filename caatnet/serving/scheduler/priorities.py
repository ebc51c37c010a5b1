"""Priorities that change while requests run, as in FastSwitch's evaluation.

A server updates priorities with a frequency: at each step with that
probability, all requests at once. *Random* draws them anew. *Markov* moves each
to a neighbouring level or leaves it, so that who was urgent tends to stay so.

Source: FastSwitch (arXiv 2411.18424), section 4: frequencies 0.04 and 0.02. Its
transition probabilities are not published; here each neighbour has the same.
"""

from collections.abc import Iterable
import dataclasses

import numpy as np

from caatnet.serving.requests import Request

KINDS = ("none", "random", "markov")


@dataclasses.dataclass
class Priorities:
  """Draws priorities.

  Attributes:
    kind: One of `KINDS`.
    frequency: The probability of an update at a step.
    levels: How many priorities there are, from 0, the most urgent.
    seed: Of the random numbers.
    stay: The probability that Markov leaves a priority as it is.
  """

  kind: str = "none"
  frequency: float = 0.04
  levels: int = 8
  seed: int = 0
  stay: float = 0.5

  def __post_init__(self) -> None:
    if self.kind not in KINDS:
      raise ValueError(
        f"kind={self.kind!r} must be one of {', '.join(KINDS)}"
      )
    self._rng = np.random.default_rng(self.seed)

  def first(self) -> float:
    """Returns the priority of a request that arrives."""
    if self.kind == "none":
      return 0.0
    return float(self._rng.integers(self.levels))

  def due(self) -> bool:
    """Returns whether this step updates priorities."""
    return self.kind != "none" and self._rng.random() < self.frequency

  def update(self, requests: Iterable[Request]) -> list[Request]:
    """Gives requests new priorities, and returns those that got another."""
    requests = list(requests)
    if self.kind == "random":
      drawn = self._rng.integers(self.levels, size=len(requests))
    else:
      old = np.array([r.priority for r in requests], np.int64)
      move = self._rng.choice(
        (-1, 0, 1), len(requests),
        p=((1 - self.stay) / 2, self.stay, (1 - self.stay) / 2),
      )
      drawn = np.clip(old + move, 0, self.levels - 1)
    changed = []
    for request, value in zip(requests, drawn.tolist(), strict=True):
      if request.priority != value:
        request.priority = float(value)
        changed.append(request)
    return changed
