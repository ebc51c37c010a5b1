"""Measures the links of an epoch, and orders a ring by them.

Pairs are measured in rounds, as in a tournament: in each round every peer is in
at most one pair, so pairs do not share a peer's link. Both directions of a pair
are measured at once, as a ring uses them.

An epoch's `Rings` has the ring of each set of contributors. A peer wishes that
links are measured when it has no ring for them, or when sums take longer than
they did; contributors tell each other their wishes, and one is enough. So all
have the same ring without a message of its own.
"""

from collections.abc import Sequence
import itertools
import math
import time

import numpy as np

from parallel.elastic.membership.messages import Id
from parallel.elastic.ring import link_collectives
from parallel.elastic.transport.links import Links

EXACT = 9  # peers up to which all orders are tried
# Links have changed if so many sums in a row take so much longer.
_SLOWER, _IN_A_ROW = 2.0, 3


def rounds(num_peers: int) -> list[list[tuple[int, int]]]:
  """Returns rounds of pairs in which each pair is once (circle method)."""
  size = num_peers + num_peers % 2  # the last one stands for a pause
  ring, found = list(range(size)), []
  for _ in range(size - 1):
    pairs = [(ring[i], ring[-1 - i]) for i in range(size // 2)]
    found.append(sorted(
      (min(p), max(p)) for p in pairs if max(p) < num_peers
    ))
    ring = [ring[0], ring[-1], *ring[1:-1]]
  return found


def measure(
  links: Links, tag: int, *, ranks: Sequence[Id] | None = None,
  least_s: float = 0.05, most_bytes: int = 1 << 26, limit_s: float = 60.0,
) -> np.ndarray:
  """Measures all pairs of peers, who all take part at the same time.

  Args:
    links: The links of the epoch.
    tag: A tag that, with the next one, no other operation has.
    ranks: The peers, in the order of their ranks; all members if None.
    least_s: What is sent is doubled until it takes so long.
    most_bytes: What is sent in one direction, at most.
    limit_s: Seconds that one step may take.

  Returns:
    float64 ``[M, M]``: bytes per second from a rank to another; 0 on the
    diagonal. The same on all peers.
  """
  members = tuple(ranks or links.members)
  me = members.index(links.me)
  mine = np.zeros(len(members))
  for pairs in rounds(len(members)):
    pair = next((p for p in pairs if me in p), None)
    if pair is not None:
      other = pair[pair[0] == me]
      mine[other] = _rate(
        links, tag, (members[pair[0]], members[pair[1]]), least_s, most_bytes,
        limit_s,
      )
    # All begin the next round together.
    link_collectives.gather(links, tag + 1, b"", ranks=members).result(limit_s)
  rows = link_collectives.gather(
    links, tag + 1, mine, ranks=members
  ).result(limit_s)
  return np.stack([np.frombuffer(row) for row in rows], axis=1)


def _rate(
  links: Links, tag: int, pair: tuple[str, str], least_s: float,
  most_bytes: int, limit_s: float,
) -> float:
  """Returns the bytes per second that come from the other one of a pair."""
  size = 1 << 16
  while True:
    data = np.zeros(size, np.uint8)
    # The other one may still be waiting for the end of the round before.
    link_collectives.gather(links, tag, b"", ranks=pair).result(limit_s)
    start = time.monotonic()
    link_collectives.gather(links, tag, data, ranks=pair).result(limit_s)
    seconds = time.monotonic() - start
    # Both stop at the same size: the slower one's time decides.
    times = link_collectives.gather(
      links, tag, np.array([seconds]), ranks=pair
    ).result(limit_s)
    slowest = max(float(np.frombuffer(t)[0]) for t in times)
    if slowest >= least_s or 2 * size > most_bytes:
      return size / seconds
    size *= 2


class Rings:
  """The rings of an epoch, by measured links.

  Attributes:
    measured: How often links have been measured.
  """

  def __init__(self, links: Links) -> None:
    self._links = links
    self._rings: dict[tuple[Id, ...], tuple[Id, ...]] = {}
    self._best, self._slow = math.inf, 0
    self.measured = 0

  def wanted(self, ranks: tuple[Id, ...]) -> bool:
    """Returns whether this peer wishes that links are measured."""
    return ranks not in self._rings or self._slow >= _IN_A_ROW

  def measure(self, ranks: tuple[Id, ...], tag: int) -> None:
    """Measures, which all ranks do at the same time; see `measure`."""
    rates = measure(self._links, tag, ranks=ranks)
    self._rings = {ranks: tuple(ranks[i] for i in ring_order(rates))}
    self._best, self._slow = math.inf, 0
    self.measured += 1

  def ring(self, ranks: tuple[Id, ...]) -> tuple[Id, ...]:
    """Returns the ranks in the order of their ring."""
    return self._rings[ranks]

  def took(self, seconds_per_byte: float) -> None:
    """Notes how long a sum around a ring has taken."""
    slow = seconds_per_byte > _SLOWER * self._best
    self._slow = self._slow + 1 if slow else 0
    self._best = min(self._best, seconds_per_byte)


def ring_order(rates: np.ndarray) -> tuple[int, ...]:
  """Chooses the ring whose slowest link is fastest.

  A ring's reduction takes as long as its slowest link; among rings with equal
  ones the least sum of times per byte decides, then the order of the numbers.
  All orders are tried for up to ``EXACT`` peers; for more, a ring that goes to
  the nearest peer is improved by turning parts of it round until no turn helps.

  Args:
    rates: ``[M, M]``: bytes per second from a rank to another. A ring's sums go
      one way and their result the other, so the slower direction counts.

  Returns:
    The ranks in the order of the ring, from 0.

  Raises:
    ValueError: A rate is not positive.
  """
  rates = np.asarray(rates, float)
  n = len(rates)
  if n < 3:
    return tuple(range(n))
  slower = np.where(np.eye(n, dtype=bool), 1.0, np.minimum(rates, rates.T))
  if not (np.isfinite(slower).all() and (slower > 0).all()):
    raise ValueError("all rates between two peers must be positive")
  times = 1 / slower
  if n <= EXACT:
    orders = (
      (0, *rest) for rest in itertools.permutations(range(1, n))
      if rest[0] < rest[-1]  # the other half goes the other way round
    )
    return min(orders, key=lambda order: _cost(times, order))
  return _improved(times, _nearest(times))


def _cost(
  times: np.ndarray, order: Sequence[int]
) -> tuple[float, float, tuple[int, ...]]:
  steps = times[list(order), [*order[1:], order[0]]]
  return float(steps.max()), float(steps.sum()), tuple(order)


def _nearest(times: np.ndarray) -> tuple[int, ...]:
  order, rest = [0], set(range(1, len(times)))
  while rest:
    order.append(min(rest, key=lambda j: (times[order[-1], j], j)))
    rest.remove(order[-1])
  return tuple(order)


def _improved(times: np.ndarray, order: tuple[int, ...]) -> tuple[int, ...]:
  """Turns parts round (2-opt) while this lowers the cost."""
  best = _cost(times, order)
  while True:
    turns = (
      (*order[:i], *order[i:j][::-1], *order[j:])
      for i in range(1, len(order)) for j in range(i + 2, len(order) + 1)
    )
    found = min(_cost(times, turn) for turn in turns)
    if found[:2] >= best[:2]:
      return order
    best, order = found, found[2]
