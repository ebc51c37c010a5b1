"""Bandwidth measurement between peers, and sums over measured links.

Pairs are measured in rounds, as in a round-robin tournament: each peer is in at
most one pair per round, so concurrent measurements do not share a peer's link.
Both directions of a pair are measured concurrently, as a ring uses them.

Delays are measured first, and divide the peers into sites (`infer_sites`),
whose peers probably share the links to other sites. Between two sites, one pair
at a time is measured until each peer was in a pair. Then disjoint pairs, one
per peer of the smaller site, are measured at once. If they are slower than
alone, they share a link, whose capacity is the sum of their rates
(`MeasuredLinks.shared`). M peers in S sites take about M + S rounds.

`AlgorithmSelector` keeps the measured links of a set of contributors, and
chooses between a ring, a direct exchange and a sum that first adds inside sites
by modelled times (`parallel.peers.ring.times`). A peer requests a measurement
if it has none for the current contributors, or if sums have become slower.
Contributors exchange these requests with their weights
(`parallel.peers.exchange`), and one request suffices, so all contributors make
the same choice without an extra message.

Example:
  >>> import numpy as np
  >>> from parallel.peers.ring import bandwidth
  >>> bandwidth.round_robin_pairings(4)
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
from typing import Any, NamedTuple

import numpy as np

from parallel.peers.membership.messages import Id
from parallel.peers.ring import link_collectives, times
from parallel.peers.ring.link_collectives import BLOCK_BYTES, SumOrder
from parallel.peers.ring.times import MeasuredLinks
from parallel.peers.transport.links import Links

LOG = logging.getLogger(__name__)
EXACT = 9  # largest number of peers with exhaustive search: 8! / 2 rings
# A measurement takes at least this many times the delay of a link, so that the
# delay and TCP's slow start change the measured rate little.
_TRIPS = 8
# Links are measured again after `_MAX_SLOW_SUMS` successive sums that took
# `_SLOWDOWN` times as long as the fastest one.
_SLOWDOWN, _MAX_SLOW_SUMS = 2.0, 3
# Shorter delays count as this one, which a busy processor can cause, too.
_LEAST_DELAY_S = 1e-3
# minimum ratio of delays between sites to delays inside a site
_MIN_SITE_DELAY_RATIO = 4.0
# Largest ratio of two delays between the same two sites: peers of one site are
# about equally far from those of another.
_MAX_DELAY_RATIO = 2.0
# Pairs share a link if the sum of their rates while all send is below this
# fraction of the sum of their rates alone: 1/2 for two pairs on one link.
_SHARED_RATE_RATIO = 0.75

Pairs = Sequence[tuple[int, int]]


def round_robin_pairings(num_peers: int) -> list[list[tuple[int, int]]]:
  """Returns rounds of disjoint pairs; each pair of peers is in one round.

  Uses the circle method of tournaments: M - 1 rounds for even M, M for odd M.
  """
  size = num_peers + num_peers % 2  # if odd, a dummy peer's partner pauses
  ring, found = list(range(size)), []
  for _ in range(size - 1):
    pairs = [(ring[i], ring[-1 - i]) for i in range(size // 2)]
    found.append(sorted(
      (min(p), max(p)) for p in pairs if max(p) < num_peers
    ))
    ring = [ring[0], ring[-1], *ring[1:-1]]  # rotate all but the first
  return found


def infer_sites(delays: np.ndarray) -> np.ndarray:
  """Divides peers into sites by the delays between them.

  Rates do not show sites: pairs that share a link are slow only when they send
  at once. Single-linkage clustering yields a hierarchy of divisions into sites.
  Of those in which all delays between two sites are similar, the function
  selects the one with the largest ratio of the shortest delay between sites to
  the longest one inside a site. If no ratio is at least
  ``_MIN_SITE_DELAY_RATIO``, all peers are one site.

  Args:
    delays: Seconds from the row's peer to the column's, ``[M, M]``.

  Returns:
    int ``[M]``, the site of each peer; sites are ordered by their first peers.

  Example:
    >>> from parallel.peers.ring import bandwidth
    >>> far, near = .06, .0002
    >>> bandwidth.infer_sites(np.array(
    ...   [[0, far, near], [far, 0, far], [near, far, 0]])).tolist()
    [0, 1, 0]
  """
  delays = np.maximum(np.maximum(delays, delays.T), _LEAST_DELAY_S)
  site = np.arange(len(delays))
  best, best_ratio = np.zeros_like(site), _MIN_SITE_DELAY_RATIO
  while len(set(site)) > 1:
    apart = site[:, None] != site
    between = delays[apart].min()
    ratio = between / delays[~apart].max()
    if ratio >= best_ratio and all(
      part.max() <= _MAX_DELAY_RATIO * part.min()
      for s, t in itertools.combinations(set(site), 2)
      for part in (delays[np.ix_(site == s, site == t)],)
    ):
      best, best_ratio = site.copy(), ratio
    for i, j in zip(*np.nonzero(apart & (delays <= between)), strict=True):
      site[site == max(site[i], site[j])] = min(site[i], site[j])
  return np.unique(best, return_inverse=True)[1]


def measure(
  links: Links, tag: int, *, ranks: Sequence[Id] | None = None,
  min_s: float = 0.05, max_bytes: int = 1 << 26, limit_s: float = 60.0,
) -> MeasuredLinks:
  """Measures the links of all peers; all peers call it concurrently.

  Args:
    links: Links of the epoch.
    tag: Tag of the first operation; the next two tags must be unused, too.
    ranks: Peers in the order of their ranks; all members if None.
    min_s: Minimum time of a message in seconds, longer on links with a long
      delay. The size of the message grows until this time is reached.
    max_bytes: Maximum number of bytes sent in one direction.
    limit_s: Time limit of each operation in seconds.

  Returns:
    Rates and delays (0 on the diagonal), sites, and capacities of the links
    that the peers of a site share; identical on all peers.

  Raises:
    LinksLost: A peer was lost, or an operation exceeded its time limit.
  """
  # In the order of the ranks, which is the same on all peers.
  members = tuple(ranks or links.members)
  m, me = len(members), members.index(links.me)

  def step(groups: Sequence[Pairs], rates: np.ndarray | None = None) -> None:
    """Measures rates or delays of pairs; those of one group at the same time.

    Results are written to ``rates``; None measures delays.
    """
    for pairs, pair in ((g, p) for g in groups for p in g if me in p):
      probe = _Probe(
        links, tag, limit_s, [members[i] for i in pair],
        [members[i] for p in pairs for i in p],
      )
      other = pair[pair[0] == me]  # the peer of the pair that is not this one
      if rates is None:
        mine[other] = delay_of(probe.time_exchange, probe.both)
      else:
        rates[other] = rate_of(
          probe.time_exchange, probe.both, max(delays[p] for p in pairs), min_s,
          max_bytes // len(pairs),
        )
    # An empty gather is a barrier, so that rounds do not overlap.
    link_collectives.gather(links, tag + 1, b"", ranks=members).result(limit_s)

  def columns(mine: np.ndarray) -> np.ndarray:
    """Gathers the values ``mine`` of all M peers, ``[M, M]``.

    They are values of a peer's incoming links, which become its column.
    """
    rows = link_collectives.gather(
      links, tag + 1, mine, ranks=members
    ).result(limit_s)
    return np.stack([np.frombuffer(row) for row in rows], axis=1)  # [M, M]

  mine, alone, at_once = np.zeros((3, m))
  for pairs in round_robin_pairings(m):
    step([[pair] for pair in pairs])
  delays = columns(mine)
  site = infer_sites(delays)
  where = [np.flatnonzero(site == s).tolist() for s in range(site.max() + 1)]
  most = max(map(len, where))
  for pairs in round_robin_pairings(most):  # inside all sites
    step([
      [(w[i], w[j])] for w in where for i, j in pairs if j < len(w)
    ], alone)
  for turn in round_robin_pairings(len(where)):
    sites = [(where[s], where[t]) for s, t in turn]
    for i in range(most):
      step([
        [(a[i % len(a)], b[i % len(b)])] for a, b in sites
        if i < max(len(a), len(b))
      ], alone)
    groups = [list(zip(a, b, strict=False)) for a, b in sites]
    step([pairs for pairs in groups if len(pairs) > 1], at_once)
  return _combine_measurements(delays, site, columns(alone), columns(at_once))


def _combine_measurements(
  delays: np.ndarray, site: np.ndarray, alone: np.ndarray, at_once: np.ndarray
) -> MeasuredLinks:
  """Derives rates of all pairs and capacities of shared links.

  Args:
    delays: Delays of all pairs in seconds, ``[M, M]``.
    site: Site of each peer, int ``[M]``.
    alone: Bytes per second of pairs that were measured one at a time, ``[M,
      M]``; 0 for others. Between two sites, each peer is in at least one pair.
    at_once: Bytes per second of pairs of two sites that were measured at once,
      by the time of the slowest pair, ``[M, M]``; 0 for others.
  """
  num = site.max() + 1
  rates, shared = alone.copy(), np.full((num, num), np.inf)
  for s, t in itertools.permutations(range(num), 2):
    part = np.ix_(site == s, site == t)
    there, several = alone[part], at_once[part]
    # A pair that was not measured gets the smaller of its two peers' rates.
    ends = np.minimum(there.max(1, keepdims=True), there.max(0, keepdims=True))
    rates[part] = np.where(there > 0, there, ends)
    used = several > 0
    if several.sum() < _SHARED_RATE_RATIO * there[used].sum():
      shared[s, t] = several.sum()
  return MeasuredLinks(rates, delays, site, shared)


class _Probe:
  """Timed messages of a pair of peers, at the same time as pairs of a group."""

  def __init__(
    self, links: Links, tag: int, limit_s: float, pair: Sequence[Id],
    group: Sequence[Id],
  ) -> None:
    def gather(tag: int, data: Any, ranks: Sequence[Id]) -> list[memoryview]:
      return link_collectives.gather(
        links, tag, data, ranks=ranks
      ).result(limit_s)

    self._end = pair.index(links.me)
    # The tags differ, since a pair may be ahead of other pairs.
    self._exchange = lambda data: gather(tag, data, pair)
    self._meet = lambda data: gather(tag + 2, data, group)

  def both(self, seconds: float) -> list[float]:
    """Exchanges ``seconds`` with all peers of the group; returns the longest.

    The result is [longest at this end of a pair, longest at the other end].
    """
    times = [float(np.frombuffer(t)[0]) for t in self._meet(
      np.array([seconds])
    )]
    return [max(times[self._end :: 2]), max(times[1 - self._end :: 2])]

  def time_exchange(self, size: int) -> float:
    """Exchanges ``size`` bytes with the partner; returns the seconds."""
    self._meet(b"")  # a barrier, since other pairs may be busy
    start = time.monotonic()
    self._exchange(np.zeros(size, np.uint8))
    return time.monotonic() - start


TimeExchange = Callable[[int], float]
ExchangeTimes = Callable[[float], Sequence[float]]


def delay_of(timed: TimeExchange, both: ExchangeTimes) -> float:
  """Returns the delay of a link in seconds.

  Args:
    timed: Exchanges a given number of bytes with the partner; returns seconds.
    both: Sends seconds to the partner; returns [this peer's, the partner's].
  """
  # If the partner starts x seconds later, its delay is x shorter and this
  # peer's x longer, so the mean is the delay.
  found = both(min(timed(0) for _ in range(3)))
  return sum(found) / 2


def rate_of(
  timed: TimeExchange, both: ExchangeTimes, delay_s: float, min_s: float = 0.05,
  max_bytes: int = 1 << 26,
) -> float:
  """Measures the rate of a link by messages of growing sizes.

  Args:
    timed, both: Functions for exchanges with the partner, see `delay_of`.
    delay_s: Delay in seconds, which is subtracted from measured times; equal on
      all peers that measure together.
    min_s: Minimum time of a message in seconds, longer if the delay is long.
    max_bytes: Maximum size of a message in bytes.

  Returns:
    Bytes per second.
  """
  enough_s = max(min_s, _TRIPS * delay_s)
  # Start with 64 KiB: fast links need more bytes for a stable time.
  size = 1 << 16
  while True:
    # `both` makes all peers stop at the same size.
    found = both(timed(size))
    if max(found) >= enough_s:
      # Measure again, since a pause or TCP's slow start may have delayed it.
      found = np.minimum(found, both(timed(size)))
    longest, seconds = max(found), float(found[0])
    if longest >= enough_s or 2 * size > max_bytes:
      # The rate from the partner. At least half of the time counts as transfer.
      return size / max(seconds - delay_s, seconds / 2)
    size *= 4 if (
      8 * (longest - delay_s) < enough_s and 4 * size <= max_bytes
    ) else 2


class SumAlgorithm(NamedTuple):
  """Algorithm of a sum.

  Attributes:
    order, ranks, sites: Arguments of `link_collectives.all_reduce`.
  """

  order: SumOrder
  ranks: tuple[Id, ...]
  sites: tuple[int, ...] = ()


class AlgorithmSelector:
  """Chooses the algorithm of sums by the measured links of an epoch.

  Attributes:
    measured: Number of measurements so far.
  """

  def __init__(
    self, links: Links, say: Callable[[str], None] = LOG.info
  ) -> None:
    """Starts without a measurement.

    Args:
      links: Links of the epoch.
      say: Callback that receives a line whenever the algorithm changes.
    """
    self._links, self._say = links, say
    self._links_of: dict[tuple[Id, ...], MeasuredLinks] = {}
    # By (ranks, rounded bytes).
    self._choices: dict[tuple[tuple[Id, ...], int], SumAlgorithm] = {}
    self._said: SumAlgorithm | None = None
    # Bytes -> seconds of the fastest sum since the last measurement.
    self._best: dict[int, float] = {}
    self._slow = 0
    self.measured = 0

  def wanted(self, ranks: tuple[Id, ...]) -> bool:
    """Returns whether this peer requests to measure the links of ``ranks``."""
    return ranks not in self._links_of or self._slow >= _MAX_SLOW_SUMS

  def measure(self, ranks: tuple[Id, ...], tag: int) -> None:
    """Measures links by the function `measure`; all ranks call this at once."""
    self._links_of = {ranks: measure(self._links, tag, ranks=ranks)}
    self._choices.clear()
    self._best.clear()
    self._slow = 0
    self.measured += 1

  def choice(self, ranks: tuple[Id, ...], nbytes: int) -> SumAlgorithm:
    """Returns the algorithm with the smallest modelled time of a sum.

    Args:
      ranks: Contributors in the order of their ranks.
      nbytes: Bytes of the array; the model rounds them up to a power of two.

    Raises:
      KeyError: The links of these ranks have not been measured.
    """
    size = 1 << max(nbytes - 1, 0).bit_length()
    if (ranks, size) not in self._choices:
      links = self._links_of[ranks]
      found = times.fastest_algorithm(
        links, size, BLOCK_BYTES, ring_order(links.rates)
      )
      chosen = SumAlgorithm(
        found.order, tuple(ranks[i] for i in found.ranks), found.sites
      )
      self._choices[ranks, size] = chosen
      if chosen != self._said:
        self._said = chosen
        how = {
          "direct": "a direct exchange",
          "ring": f"the ring {', '.join(map(str, chosen.ranks))}",
          "sites": f"sums inside sites of {', '.join(map(str, found.sites))} "
          f"peers first, of {', '.join(map(str, chosen.ranks))}",
        }[found.order]
        self._say(
          f"sums of {size / 1e6:.3g} MB use {how}: {found.seconds:.3g} s by "
          "the measured links"
        )
    return self._choices[ranks, size]

  def took(self, nbytes: int, seconds: float) -> None:
    """Records the time of a sum, to detect links that have become slower."""
    best = self._best.get(nbytes, math.inf)
    self._slow = self._slow + 1 if seconds > _SLOWDOWN * best else 0
    self._best[nbytes] = min(best, seconds)


def ring_order(rates: np.ndarray) -> tuple[int, ...]:
  """Returns the ring order that maximises the bandwidth of the slowest link.

  The slowest link determines the time of a ring reduction. Ties are resolved by
  the smallest sum of times per byte, then by the smallest tuple of ranks. Up to
  ``EXACT`` peers the search is exhaustive; beyond that, a nearest-neighbour
  ring is improved by 2-opt moves until none helps.

  Args:
    rates: ``[M, M]``, bytes per second from the row's rank to the column's. A
      ring sends partial sums one way and results the other way, so the slower
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
  return _improve_ring(times, _nearest_neighbour_ring(times))


def _cost(
  times: np.ndarray, order: Sequence[int]
) -> tuple[float, float, tuple[int, ...]]:
  """Returns the cost of a ring: (maximum and sum over its links, the order).

  The sum breaks ties, then the order. ``times`` are seconds per byte between
  ranks, ``[M, M]``.
  """
  steps = times[list(order), [*order[1:], order[0]]]  # [M] seconds per byte
  return float(steps.max()), float(steps.sum()), tuple(order)


def _nearest_neighbour_ring(times: np.ndarray) -> tuple[int, ...]:
  """Returns a ring in which each rank is followed by its nearest unused one.

  ``times`` are seconds per byte between ranks, ``[M, M]``.
  """
  order, rest = [0], set(range(1, len(times)))
  while rest:
    order.append(min(rest, key=lambda j: (times[order[-1], j], j)))
    rest.remove(order[-1])
  return tuple(order)


def _improve_ring(times: np.ndarray, order: tuple[int, ...]) -> tuple[int, ...]:
  """Reverses segments of a ring (2-opt) while this lowers its `_cost`."""
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
