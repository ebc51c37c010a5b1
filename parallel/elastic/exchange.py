"""One attempt of a round, as the user's function sees it.

All contributors run the same function on the same shared state, and exchange
their parts through an `Exchange`, in the same order of calls. Whatever the
function returns is the next shared state, which must be the same on all: what
it takes from the exchange is, bit for bit.
"""

from collections.abc import Callable
import json
from typing import Any, NamedTuple

import numpy as np

from parallel.elastic import collectives
from parallel.elastic.collectives import Order
from parallel.elastic.leases import Spans
from parallel.elastic.links import Links
from parallel.elastic.messages import Id, Reduce
from parallel.elastic.state import State

_MOST_OPERATIONS = 1 << 20  # of a round


class Exchange:
  """What contributors of a round say to each other.

  Attributes:
    round: Its number.
    epoch: In which it is attempted.
    contributors: Whose parts are exchanged, in the order of their ranks.
    weights: What each one's part weighs.
    samples: What each one has drawn; empty without leases.
  """

  def __init__(
    self, links: Links, task: Reduce, weight: float, samples: Spans
  ) -> None:
    """Tells the others a part's weight and samples, and waits for theirs.

    Raises:
      Lost: A peer was lost.
    """
    self.round, self.epoch = task.round, task.epoch
    self.contributors: tuple[Id, ...] = task.contributors
    self._links, self._tag = links, task.round * _MOST_OPERATIONS
    said = [
      json.loads(bytes(data))
      for data in self.gather(json.dumps([weight, samples]).encode())
    ]
    self.weights = tuple(float(weight) for weight, _ in said)
    self.samples: dict[Id, Spans] = {
      peer: tuple((start, stop) for start, stop in spans)
      for peer, (_, spans) in zip(self.contributors, said, strict=True)
    }

  @property
  def rank(self) -> int:
    """This peer's rank among the contributors."""
    return self.contributors.index(self._links.me)

  def gather(self, data: Any) -> list[memoryview]:
    """Returns all contributors' bytes, in the order of their ranks.

    Args:
      data: A contiguous buffer.

    Raises:
      Lost: A peer was lost.
    """
    return collectives.gather(
      self._links, self._next(), data, ranks=self.contributors
    ).result()

  def sum(self, x: np.ndarray, order: Order = "direct") -> np.ndarray:
    """Returns the sum of all contributors' arrays.

    Args:
      x: float32 ``[...]``, contiguous, of the same shape on all.
      order: In which order is added, as for `collectives.all_reduce`.

    Raises:
      Lost: A peer was lost.
    """
    return collectives.all_reduce(
      self._links, self._next(), x, order=order, ranks=self.contributors
    ).result()

  def mean(self, x: np.ndarray, order: Order = "direct") -> np.ndarray:
    """Returns the mean of all contributors' arrays, by their weights.

    Each multiplies its array by its weight, and the sum is divided by that of
    the weights, all in float32. With weights of 1 it is the plain mean.

    Args:
      x: As for `sum`.
      order: As for `sum`.
    """
    mine = self.weights[self.rank]
    if mine != 1:
      x = x * np.float32(mine)
    total = np.float32(0)
    for weight in self.weights:
      total += np.float32(weight)
    return self.sum(x, order) / total

  def _next(self) -> int:
    self._tag += 1
    return self._tag


# What makes the next shared state of the present one and a part. It must write
# to neither: if the attempt fails, it is called again with them.
Combine = Callable[[Exchange, State, Any], State]


class Part(NamedTuple):
  """What a peer gives to a round.

  Attributes:
    value: What the user's function is given.
    combine: The function.
    weight: What it weighs, e.g. tokens.
    begun: `leases.Leases.round` of when its samples were drawn.
    samples: These samples; empty without leases.
  """

  value: Any
  combine: Combine
  weight: float
  begun: int
  samples: Spans
