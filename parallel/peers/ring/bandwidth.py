"""Bandwidth measurement between peers, and sums over measured links.

Pairs are measured in rounds, as in a round-robin tournament: each peer is in at
most one pair per round, so concurrent measurements do not share a peer's link.
Both directions of a pair are measured concurrently, as a ring uses them.

`Rings` caches an epoch's measured links for each set of contributors, and
chooses between a ring and a direct exchange by their modelled times
(`parallel.peers.ring.times`). A peer requests a measurement when it has none
for the set, or when sums have become slower. Contributors exchange these
requests with their weights (`parallel.peers.exchange`), and one request
suffices, so all contributors make the same choice without an extra message.

Example:
  >>> import numpy as np
  >>> from parallel.peers.ring import bandwidth
  >>> bandwidth.rounds(4)
  [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
  >>> rates = np.full((4, 4), 1e9)  # bytes per second
  >>> rates[0, 1] = rates[1, 0] = 1e7  # one slow pair
  >>> bandwidth.ring_order(rates)  # keeps ranks 0 and 1 apart
  (0, 2, 1, 3)
"""

from collections.abc import Callable, Sequence
import itertools
import logging
import math
import time
from typing import Any

import numpy as np

from parallel.peers.membership.messages import Id
from parallel.peers.ring import link_collectives, times
from parallel.peers.ring.link_collectives import BLOCK_BYTES, Order
from parallel.peers.ring.times import Matrix
from parallel.peers.transport.links import Links

LOG = logging.getLogger(__name__)
EXACT = 9  # largest number of peers with exhaustive search: 8! / 2 rings
# A measurement takes at least this many times a message without data, so that
# the delay of a link and TCP's slow start change its rate little.
_TRIPS = 8
# Measure again after `_IN_A_ROW` sums that were `_SLOWER` times slower than the
# fastest one.
_SLOWER, _IN_A_ROW = 2.0, 3


def rounds(num_peers: int) -> list[list[tuple[int, int]]]:
  """Returns rounds of disjoint pairs that cover each pair once.

  The circle method of round-robin tournaments: M - 1 rounds for even M, M for
  odd M.
  """
  size = num_peers + num_peers % 2  # odd: a dummy peer, whose partner pauses
  ring, found = list(range(size)), []
  for _ in range(size - 1):
    pairs = [(ring[i], ring[-1 - i]) for i in range(size // 2)]
    found.append(sorted(
      (min(p), max(p)) for p in pairs if max(p) < num_peers
    ))
    ring = [ring[0], ring[-1], *ring[1:-1]]  # rotate all but the first
  return found


def measure(
  links: Links, tag: int, *, ranks: Sequence[Id] | None = None,
  min_s: float = 0.05, max_bytes: int = 1 << 26, limit_s: float = 60.0,
) -> Matrix:
  """Measures all pairs of peers; all peers call it concurrently.

  Args:
    links: Links of the epoch.
    tag: Operation tag. It and the next one must be unused.
    ranks: Peers in the order of their ranks; all members if None.
    min_s: Minimum duration in seconds, longer on links with a long delay; the
      size grows until it is reached.
    max_bytes: Maximum number of bytes sent in one direction.
    limit_s: Time limit of each operation in seconds.

  Returns:
    Rates and delays, 0 on the diagonal. Identical on all peers.

  Raises:
    Lost: A peer was lost, or an operation exceeded its time limit.
  """
  # Rank order; all peers use the same.
  members = tuple(ranks or links.members)
  me = members.index(links.me)
  mine = np.zeros((2, len(members)))  # incoming bytes per second, seconds
  for pairs in rounds(len(members)):
    # None: this peer pauses in this round.
    pair = next((p for p in pairs if me in p), None)
    if pair is not None:
      other = pair[pair[0] == me]  # the partner: index 1 if this peer is first
      mine[:, other] = _link(
        links, tag, (members[pair[0]], members[pair[1]]), min_s, max_bytes,
        limit_s,
      )
    # Barrier: an empty gather, so that rounds do not overlap.
    link_collectives.gather(links, tag + 1, b"", ranks=members).result(limit_s)
  rows = link_collectives.gather(
    links, tag + 1, mine, ranks=members
  ).result(limit_s)
  # Each peer measures its incoming links, which are columns. [2, M, M]
  found = np.stack([np.frombuffer(row).reshape(2, -1) for row in rows], axis=2)
  return Matrix(*found)


def _link(
  links: Links, tag: int, pair: tuple[str, str], min_s: float,
  max_bytes: int, limit_s: float,
) -> tuple[float, float]:
  """Returns (bytes per second, delay) of the link from a pair's partner."""

  def gather(data: Any) -> list[memoryview]:
    return link_collectives.gather(links, tag, data, ranks=pair).result(limit_s)

  def both(seconds: float) -> list[float]:
    """Returns both partners' times."""
    return [
      float(np.frombuffer(t)[0]) for t in gather(np.array([seconds]))
    ]

  def timed(data: Any) -> float:
    gather(b"")  # a barrier: the partner may be busy
    start = time.monotonic()
    gather(data)
    return time.monotonic() - start

  return probed(
    lambda size: timed(np.zeros(size, np.uint8)), both, min_s, max_bytes
  )


def probed(
  timed: Callable[[int], float], both: Callable[[float], Sequence[float]],
  min_s: float = 0.05, max_bytes: int = 1 << 26,
) -> tuple[float, float]:
  """Measures a link by messages of growing sizes.

  Args:
    timed: Exchanges messages of some bytes with the partner; returns seconds.
    both: Returns both partners' times from this peer's.
    min_s: Minimum duration in seconds, longer on links with a long delay.
    max_bytes: Maximum size of a message in bytes.

  Returns:
    (bytes per second, delay in seconds).
  """
  # The delay of the link, which is no part of its rate. A partner that starts
  # later by some time measures a delay that is shorter by it.
  found = both(min(timed(0) for _ in range(3)))
  one_way, delay = sum(found) / 2, max(found)
  enough_s = max(min_s, _TRIPS * delay)
  # Start with 64 KiB: fast links need more bytes for a stable time.
  size = 1 << 16
  while True:
    seconds = timed(size)
    # Both partners stop at the same size.
    longest = max(both(seconds))
    if longest >= enough_s or 2 * size > max_bytes:
      # This peer's incoming rate; half of the time is the least that is left.
      return size / max(seconds - delay, seconds / 2), one_way
    size *= 4 if 8 * longest < enough_s and 4 * size <= max_bytes else 2


# Order of additions, and ranks in that order.
Algorithm = tuple[Order, tuple[Id, ...]]


class Rings:
  """Cache of an epoch's measured links, and choice of the algorithm of sums.

  Attributes:
    measured: Number of measurements so far.
  """

  def __init__(
    self, links: Links, say: Callable[[str], None] = LOG.info
  ) -> None:
    """Starts without a measurement.

    Args:
      links: Links of the epoch.
      say: Callback that receives a line for each choice that changes.
    """
    self._links, self._say = links, say
    self._links_of: dict[tuple[Id, ...], Matrix] = {}
    # (ranks, rounded bytes) -> (algorithm, ranks in its order).
    self._choices: dict[tuple[tuple[Id, ...], int], Algorithm] = {}
    self._said: Algorithm | None = None
    # Bytes -> seconds of the fastest sum since the last measurement.
    self._best: dict[int, float] = {}
    self._slow = 0
    self.measured = 0

  def wanted(self, ranks: tuple[Id, ...]) -> bool:
    """Returns whether this peer requests a measurement."""
    return ranks not in self._links_of or self._slow >= _IN_A_ROW

  def measure(self, ranks: tuple[Id, ...], tag: int) -> None:
    """Measures the links; all ranks call it concurrently. See `measure`."""
    self._links_of = {ranks: measure(self._links, tag, ranks=ranks)}
    self._choices.clear()
    self._best.clear()
    self._slow = 0
    self.measured += 1

  def choice(self, ranks: tuple[Id, ...], nbytes: int) -> Algorithm:
    """Returns the algorithm of a sum with the smallest modelled time.

    Args:
      ranks: Contributors in the order of their ranks.
      nbytes: Bytes of the array. Sizes are rounded up to a power of two.

    Raises:
      KeyError: The links of these ranks have not been measured.
    """
    size = 1 << max(nbytes - 1, 0).bit_length()
    if (ranks, size) not in self._choices:
      links = self._links_of[ranks]
      found = times.fastest(
        links, size, BLOCK_BYTES, ring_order(links.rates)
      )
      chosen = found.order, tuple(ranks[i] for i in found.ranks)
      self._choices[ranks, size] = chosen
      if chosen != self._said:
        self._said = chosen
        how = "a direct exchange" if found.order == "direct" else (
          f"the ring {', '.join(map(str, chosen[1]))}"
        )
        self._say(
          f"sums of {size / 1e6:.3g} MB use {how}: {found.seconds:.3g} s by "
          "the measured links"
        )
    return self._choices[ranks, size]

  def took(self, nbytes: int, seconds: float) -> None:
    """Records the time of a sum, to detect links that have become slower."""
    best = self._best.get(nbytes, math.inf)
    self._slow = self._slow + 1 if seconds > _SLOWER * best else 0
    self._best[nbytes] = min(best, seconds)


def ring_order(rates: np.ndarray) -> tuple[int, ...]:
  """Returns the ring order that maximises the bandwidth of the slowest link.

  The slowest link determines the time of a ring reduction. Ties are resolved by
  the smallest sum of times per byte, then by the smallest tuple of ranks. Up to
  ``EXACT`` peers the search is exhaustive; beyond that, a nearest-neighbour
  ring is improved by 2-opt moves until none helps.

  Args:
    rates: ``[M, M]``: bytes per second from the row's rank to the column's. A
      ring sends partial sums one way and results the other, so the slower
      direction of each pair counts.

  Returns:
    Ranks in the order of the ring, starting with rank 0.

  Raises:
    ValueError: A rate between two peers is not positive and finite.
  """
  rates = np.asarray(rates, float)
  n = len(rates)
  if n < 3:  # all orders are equal
    return tuple(range(n))
  # [M, M], symmetric; the ones on the diagonal avoid a division by zero.
  slower = np.where(np.eye(n, dtype=bool), 1.0, np.minimum(rates, rates.T))
  if not (np.isfinite(slower).all() and (slower > 0).all()):
    raise ValueError("all rates between two peers must be positive")
  times = 1 / slower  # seconds per byte
  if n <= EXACT:
    orders = (
      (0, *rest) for rest in itertools.permutations(range(1, n))
      if rest[0] < rest[-1]  # a ring and its reverse have equal costs
    )
    return min(orders, key=lambda order: _cost(times, order))
  return _improved(times, _nearest(times))


def _cost(
  times: np.ndarray, order: Sequence[int]
) -> tuple[float, float, tuple[int, ...]]:
  """Returns (slowest link, sum of links, order); smaller is better."""
  steps = times[list(order), [*order[1:], order[0]]]  # [M] seconds per byte
  return float(steps.max()), float(steps.sum()), tuple(order)


def _nearest(times: np.ndarray) -> tuple[int, ...]:
  """Returns the ring that always continues with the fastest unvisited rank."""
  order, rest = [0], set(range(1, len(times)))
  while rest:
    order.append(min(rest, key=lambda j: (times[order[-1], j], j)))
    rest.remove(order[-1])
  return tuple(order)


def _improved(times: np.ndarray, order: tuple[int, ...]) -> tuple[int, ...]:
  """Reverses segments (2-opt) while this lowers the cost."""
  best = _cost(times, order)
  while True:
    turns = (
      (*order[:i], *order[i:j][::-1], *order[j:])
      # Rank 0 stays first; segments have at least two ranks.
      for i in range(1, len(order)) for j in range(i + 2, len(order) + 1)
    )
    found = min(_cost(times, turn) for turn in turns)
    if found[:2] >= best[:2]:  # compare costs, not the order
      return order
    best, order = found, found[2]
