"""Collectives between the contributors of a round, for use in user code.

All contributors call the same function (`Combine`) on the same shared state. It
calls the methods of a `RoundExchange`, in the same order on all contributors,
and returns the next shared state, which must be identical on all of them. The
results of the methods are bitwise identical on all contributors.
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
from parallel.peers.ring.bandwidth import AlgorithmSelector, SumAlgorithm
from parallel.peers.ring.link_collectives import SumOrder
from parallel.peers.transport.links import Links
from parallel.peers.transport.transfers import disagreement

_MAX_OPERATIONS = 1 << 20  # per round; the tags of round r start at r times it
_TIMED_BYTES = 1 << 16  # smaller sums measure latency, not bandwidth


class RoundExchange:
  """Collectives between the contributors of one attempt of a round.

  Attributes:
    round: Number of the round.
    epoch: Number of the attempt's epoch, a numbered list of the members.
    contributors: Contributing peers, in the order of their ranks.
    weights: Weight of each contribution, in the order of the ranks.
    samples: peer -> sample numbers of its contribution, as [start, stop) spans;
      () in a run without sample leases.
  """

  def __init__(
    self, links: Links, task: Reduce, weight: float, samples: Spans,
    rings: AlgorithmSelector | None = None,
  ) -> None:
    """Exchanges weights, samples and measurement requests with all peers.

    Args:
      links: Links of the epoch.
      task: Round to attempt.
      weight: Weight of this peer's contribution.
      samples: Samples of this peer's contribution.
      rings: Measured links; None if links are not measured.

    Raises:
      LinksLost: A peer was lost, or `PeerSettings.measured` differs.
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
    # If all weights are 0, as without tokens, the mean is unweighted.
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
      links.fail_by_disagreement(disagreement(
        links.me, measured, "must have the same PeerSettings.measured"
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
      LinksLost: A peer was lost.
    """
    return link_collectives.gather(
      self._links, self._next_tag(), data, ranks=self.contributors
    ).result()

  def sum(self, x: np.ndarray, order: SumOrder = "direct") -> np.ndarray:
    """Returns the sum of all contributors' arrays.

    Args:
      x: float32 ``[...]``, contiguous, of equal shape on all contributors.
      order: Order of additions, as for `link_collectives.all_reduce`. With
        measured links, "ring" selects the algorithm that `algorithm` returns.

    Returns:
      float32 ``[...]``, bitwise identical on all contributors.

    Raises:
      LinksLost: A peer was lost.
    """
    measured = order == "ring"
    chosen = self.algorithm(x.nbytes) if measured else SumAlgorithm(
      order, self.contributors
    )
    start = time.monotonic()
    total = link_collectives.all_reduce(
      self._links, self._next_tag(), x, **chosen._asdict()
    ).result()
    if measured and self._rings is not None and x.nbytes >= _TIMED_BYTES:
      # Slower sums than before lead to a new measurement.
      self._rings.took(x.nbytes, time.monotonic() - start)
    return total

  def algorithm(self, nbytes: int) -> SumAlgorithm:
    """Returns the algorithm that `sum` uses for order="ring".

    Its order of additions determines the bits of the sum, so a result can only
    be reproduced with the same algorithm.

    Args:
      nbytes: Bytes of the array.

    Returns:
      With measured links, the fastest of a ring, a direct exchange and a sum
      that first adds inside each site; otherwise a ring in the order of the
      ranks.
    """
    if self._rings is None:
      return SumAlgorithm("ring", self.contributors)
    return self._rings.choice(self.contributors, nbytes)

  def mean(self, x: np.ndarray, order: SumOrder = "direct") -> np.ndarray:
    """Returns the weighted mean of all contributors' arrays.

    Each contributor multiplies its array by its weight; the sum is divided by
    the sum of the weights, all in float32.

    Args:
      x: float32 ``[...]``, as for `sum`.
      order: Order of additions, as for `sum`.

    Raises:
      LinksLost: A peer was lost.
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
      LinksLost: A peer was lost, or has called more or fewer operations.
    """
    link_collectives.wait_for_end(
      self._links, self._next_tag(), self.contributors
    )

  def _next_tag(self) -> int:
    self._tag += 1
    return self._tag


# Computes the next shared state from (exchange, current state, contribution).
# It must modify neither of the latter two, since a failed attempt is repeated.
Combine = Callable[[RoundExchange, State, Any], State]


class PeerContribution(NamedTuple):
  """Contribution of a peer to a round.

  Attributes:
    value: Value passed to `combine`.
    combine: Function that computes the next shared state.
    weight: Weight of the contribution, e.g. its number of tokens.
    begun: Number of committed rounds (`SampleLeases.round`) when its samples
      were drawn.
    samples: Numbers of the contribution's training samples, as [start, stop)
      spans; empty without sample leases.
    loss: Loss of the contribution, for monitoring; None for none.
  """

  value: Any
  combine: Combine
  weight: float
  begun: int
  samples: Spans
  loss: float | None = None
