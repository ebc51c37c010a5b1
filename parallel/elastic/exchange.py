"""One attempt of a round, as the user's function sees it.

All contributors run the same function on the same shared state, and exchange
their parts through an `Exchange`, in the same order of calls. Whatever the
function returns is the next shared state, which must be the same on all: what
it takes from the exchange is, bit for bit.
"""

from collections.abc import Callable
import json
import time
from typing import Any, NamedTuple

import numpy as np

from parallel.elastic.membership.leases import Spans
from parallel.elastic.membership.messages import Id, Reduce
from parallel.elastic.membership.shared_state import State
from parallel.elastic.ring import link_collectives
from parallel.elastic.ring.bandwidth import Rings
from parallel.elastic.ring.link_collectives import Order
from parallel.elastic.transport.links import Links

_MOST_OPERATIONS = 1 << 20  # of a round
_TIMED_BYTES = 1 << 16  # shorter sums say nothing of links


class Exchange:
  """What contributors of a round say to each other.

  Attributes:
    round: Its number.
    epoch: In which it is attempted.
    contributors: Whose parts are exchanged, in the order of their ranks.
    ring: The same, in the order in which sums around a ring go. It is a part of
      their value: who wants to do them again must keep it.
    weights: What each one's part weighs.
    samples: What each one has drawn; empty without leases.
  """

  def __init__(
    self, links: Links, task: Reduce, weight: float, samples: Spans,
    rings: Rings | None = None,
  ) -> None:
    """Tells the others a part's weight and samples, and waits for theirs.

    Args:
      links: Of the epoch.
      task: The round.
      weight: What the part weighs.
      samples: What it has drawn.
      rings: Rings by measured links; with None a ring is in the order of ranks.

    Raises:
      Lost: A peer was lost.
      ValueError: Some peers measure links, and others do not.
    """
    self.round, self.epoch = task.round, task.epoch
    self.contributors: tuple[Id, ...] = task.contributors
    self._links, self._tag = links, task.round * _MOST_OPERATIONS
    wish = rings.wanted(self.contributors) if rings is not None else None
    mine = json.dumps([weight, samples, wish]).encode()
    said = [json.loads(bytes(data)) for data in self.gather(mine)]
    weights = tuple(float(weight) for weight, _, _ in said)
    self.weights = weights if any(weights) else (1.0,) * len(weights)
    self.samples: dict[Id, Spans] = {
      peer: tuple((start, stop) for start, stop in spans)
      for peer, (_, spans, _) in zip(self.contributors, said, strict=True)
    }
    self._rings, self.ring = rings, self.contributors
    for peer, (_, _, other) in zip(self.contributors, said, strict=True):
      if (other is None) != (wish is None):
        raise ValueError(f"Settings.measured is another one on {peer}")
    if rings is not None:
      if any(wish for _, _, wish in said):
        self._tag += 2
        rings.measure(self.contributors, self._tag - 1)
      self.ring = rings.ring(self.contributors)

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
    return link_collectives.gather(
      self._links, self._next(), data, ranks=self.contributors
    ).result()

  def sum(self, x: np.ndarray, order: Order = "direct") -> np.ndarray:
    """Returns the sum of all contributors' arrays.

    Args:
      x: float32 ``[...]``, contiguous, of the same shape on all.
      order: In which order is added, as for `link_collectives.all_reduce`.

    Raises:
      Lost: A peer was lost.
    """
    ring, start = order == "ring", time.monotonic()
    total = link_collectives.all_reduce(
      self._links, self._next(), x, order=order,
      ranks=self.ring if ring else self.contributors,
    ).result()
    if ring and self._rings is not None and x.nbytes >= _TIMED_BYTES:
      self._rings.took((time.monotonic() - start) / x.nbytes)
    return total

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
    loss: Of the part, for people who look on; None for none.
  """

  value: Any
  combine: Combine
  weight: float
  begun: int
  samples: Spans
  loss: float | None = None
