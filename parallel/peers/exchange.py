"""Exchange between the contributors of a round, as user code sees it.

All contributors call the same function on the same shared state, and exchange
their contributions through an `RoundExchange`, in the same order of calls. The
function returns the next shared state, which must be identical on all
contributors; results of the exchange are bitwise identical.
"""

from collections.abc import Callable
import json
import time
from typing import Any, NamedTuple

import numpy as np

from parallel.peers.membership.leases import Spans
from parallel.peers.membership.messages import Id, Reduce
from parallel.peers.membership.shared_state import State
from parallel.peers.ring import link_collectives
from parallel.peers.ring.bandwidth import Algorithm, Rings
from parallel.peers.ring.link_collectives import Order
from parallel.peers.transport.links import Links
from parallel.peers.transport.transfers import disagreement

_MAX_OPERATIONS = 1 << 20  # per round; round r has tags from r times this
_TIMED_BYTES = 1 << 16  # smaller sums measure latency, not bandwidth


class RoundExchange:
  """Collectives between the contributors of one attempt of a round.

  Attributes:
    round: Number of the round.
    epoch: Epoch of the attempt.
    contributors: Contributing peers, in the order of their ranks.
    weights: Weight of each contribution, in the order of the ranks.
    samples: peer -> sample numbers of its contribution, as [start, stop) spans;
      () without leases.
  """

  def __init__(
    self, links: Links, task: Reduce, weight: float, samples: Spans,
    rings: Rings | None = None,
  ) -> None:
    """Exchanges weights, samples and measurement requests.

    Args:
      links: Links of the epoch.
      task: Round to attempt.
      weight: Weight of this peer's contribution.
      samples: Samples of this peer's contribution.
      rings: Measured links; None uses rank order.

    Raises:
      Lost: A peer was lost, or `Settings.measured` differs between peers.
    """
    self.round, self.epoch = task.round, task.epoch
    self.contributors: tuple[Id, ...] = task.contributors
    self._links, self._tag = links, task.round * _MAX_OPERATIONS
    # None: measurement is disabled on this peer.
    wish = rings.wanted(self.contributors) if rings is not None else None
    # One gather carries the weight, the samples and the request.
    mine = json.dumps([weight, samples, wish]).encode()
    said = [json.loads(bytes(data)) for data in self.gather(mine)]
    weights = tuple(float(weight) for weight, _, _ in said)
    # All weights 0, e.g. no tokens counted: the plain mean.
    self.weights = weights if any(weights) else (1.0,) * len(weights)
    # JSON has lists; spans are tuples.
    self.samples: dict[Id, Spans] = {
      peer: tuple((start, stop) for start, stop in spans)
      for peer, (_, spans, _) in zip(self.contributors, said, strict=True)
    }
    self._rings = rings
    measured = {
      peer: f"measured={other is not None}"
      for peer, (_, _, other) in zip(self.contributors, said, strict=True)
    }
    if len(set(measured.values())) > 1:
      links.disagree(disagreement(
        links.me, measured, "must have the same Settings.measured"
      ))
      raise links.error
    # All contributors read the same requests, so all decide alike.
    if rings is not None and any(wish for _, _, wish in said):
      self._tag += 3  # `measure` uses three tags
      rings.measure(self.contributors, self._tag - 2)

  @property
  def rank(self) -> int:
    """Rank of this peer among the contributors."""
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
      x: float32 ``[...]``, contiguous, of equal shape on all contributors.
      order: Order of additions, as for `link_collectives.all_reduce`. With
        measured links, "ring" selects the algorithm that `algorithm` returns.

    Returns:
      float32 ``[...]``, bitwise identical on all contributors.

    Raises:
      Lost: A peer was lost.
    """
    measured = order == "ring"
    chosen = self.algorithm(x.nbytes) if measured else Algorithm(
      order, self.contributors
    )
    start = time.monotonic()
    total = link_collectives.all_reduce(
      self._links, self._next(), x, **chosen._asdict()
    ).result()
    if measured and self._rings is not None and x.nbytes >= _TIMED_BYTES:
      # Slower sums than before lead to a new measurement.
      self._rings.took(x.nbytes, time.monotonic() - start)
    return total

  def algorithm(self, nbytes: int) -> Algorithm:
    """Returns the algorithm that `sum` uses for order="ring".

    Its order of additions determines the bits of the sum, so a result can only
    be reproduced with the same algorithm.

    Args:
      nbytes: Bytes of the array.

    Returns:
      Order of additions, contributors in that order, and sizes of sites. With
      measured links it is the fastest of a ring, a direct exchange and a sum
      inside each site first; otherwise it is a ring in the order of the ranks.
    """
    if self._rings is None:
      return Algorithm("ring", self.contributors)
    return self._rings.choice(self.contributors, nbytes)

  def mean(self, x: np.ndarray, order: Order = "direct") -> np.ndarray:
    """Returns the weighted mean of all contributors' arrays.

    Each contributor multiplies its array by its weight; the sum is divided by
    the sum of the weights, all in float32.

    Args:
      x: float32 ``[...]``, as for `sum`.
      order: Order of additions, as for `sum`.

    Raises:
      Lost: A peer was lost.
    """
    mine = self.weights[self.rank]
    if mine != 1:
      x = x * np.float32(mine)
    # Float32 in rank order, so that all contributors divide by the same bits.
    total = np.float32(0)
    for weight in self.weights:
      total += np.float32(weight)
    return self.sum(x, order) / total

  def end(self) -> None:
    """Ends the operations of this attempt; waits for the other peers.

    Raises:
      Lost: A peer was lost, or has called more or fewer operations.
    """
    link_collectives.end(self._links, self._next(), self.contributors)

  def _next(self) -> int:
    self._tag += 1
    return self._tag


# Computes the next shared state from (exchange, current state, contribution).
# It must modify neither input: after a failed attempt it is called again.
Combine = Callable[[RoundExchange, State, Any], State]


class PeerContribution(NamedTuple):
  """Contribution of a peer to a round.

  Attributes:
    value: Value passed to `combine`.
    combine: Function that computes the next state.
    weight: Weight of the contribution, e.g. its number of tokens.
    begun: Number of committed rounds (`Leases.round`) when its samples were
      drawn.
    samples: Samples of the contribution; empty without leases.
    loss: Loss of the contribution, for monitoring; None for none.
  """

  value: Any
  combine: Combine
  weight: float
  begun: int
  samples: Spans
  loss: float | None = None
