"""Modelled times of sums over measured links, and the fastest algorithm.

A link from rank i to rank j sends one block at a time at a rate in bytes per
second, and a block arrives after a delay. The model follows the blocks of
`parallel.peers.ring.link_collectives`: a rank forwards a block as soon as it
has been received and added. Additions take no time, and a rank sends over all
its links at once. If the links from one site to another share a measured
capacity (`parallel.peers.ring.bandwidth`), each of n links that a sum uses at
once has at most 1 / n of it. The model has no joint limit for the links of one
rank.

Let t be the time in which one link sends the array. With equal rates of all
pairs, a direct exchange of M peers takes 2 t / M, and a ring 2 t (M - 1) / M. A
ring is faster if it avoids links that are much slower than others. If all links
of a host share its network interface, both take about equally long, since each
host sends equally many bytes.
If two sites of M / 2 ranks share a link, a direct exchange sends M / 2 arrays
each way, a ring 2 (M - 1) / M, and a sum inside sites first sends one.

Shape legend: M = ranks, P = orders of ranks, B = blocks of a chunk, S = sites.

Example:
  >>> import numpy as np
  >>> from parallel.peers.ring import times
  >>> links = times.MeasuredLinks(np.full((4, 4), 1e6), np.zeros((4, 4)))
  >>> times.fastest_algorithm(links, nbytes=4_000_000, block_bytes=1_000_000)
  AlgorithmChoice(order='direct', ranks=(0, 1, 2, 3), seconds=2.0, sites=())
  >>> links.rates[0, 1] = links.rates[1, 0] = 1e5  # one slow pair
  >>> times.fastest_algorithm(links, nbytes=4_000_000, block_bytes=1_000_000)
  AlgorithmChoice(order='ring', ranks=(0, 2, 1, 3), seconds=6.0, sites=())
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from parallel.peers.ring.link_collectives import SumOrder

EXACT = 7  # largest number of ranks with exhaustive search: 6! / 2 rings
# A chunk is modelled as at most this many blocks, which keeps a search short.
_MAX_BLOCKS = 4


class MeasuredLinks(NamedTuple):
  """Measured rates, delays and shared capacities of the links between ranks.

  Attributes:
    rates: float64 ``[M, M]``, bytes per second from the row's rank to the
      column's; the diagonal is not read.
    delays: float64 ``[M, M]``, seconds from the row's rank to the column's.
    site: int ``[M]``, site of each rank, numbered from 0; None for one site.
    shared: float64 ``[S, S]``, bytes per second of all links together from the
      row's site to the column's; infinite if they do not share a link. None
      if no links do.
  """

  rates: np.ndarray
  delays: np.ndarray
  site: np.ndarray | None = None
  shared: np.ndarray | None = None


class AlgorithmChoice(NamedTuple):
  """Algorithm of a sum.

  Attributes:
    order: Order of additions, as for `link_collectives.all_reduce`.
    ranks: Ranks in the order in which they are added.
    seconds: Modelled time of the sum.
    sites: Number of ranks of each site; () unless ``order`` is "sites".
  """

  order: SumOrder
  ranks: tuple[int, ...]
  seconds: float
  sites: tuple[int, ...] = ()


def _concurrent_rates(
  links: MeasuredLinks, sources: np.ndarray, targets: np.ndarray
) -> np.ndarray:
  """Returns the rates in bytes/s, ``[P, M]``, of links in use at once.

  Args:
    links: Links of M ranks.
    sources: Rank that sends over each link, int ``[P, M]``; -1 for no link. The
      links of a row are in use at once.
    targets: Rank that receives over each link, int ``[P, M]``.
  """
  rates = links.rates[sources, targets]
  if links.shared is None:
    return rates
  num_sites = len(links.shared)
  pair = links.site[sources] * num_sites + links.site[targets]  # [P, M]
  used = np.zeros((len(pair), num_sites**2))
  np.add.at(used, (np.arange(len(pair))[:, None], pair), sources >= 0)
  used = np.take_along_axis(used, pair, axis=1)  # [P, M]
  return np.minimum(rates, np.where(
    used > 1, links.shared.reshape(-1)[pair] / np.maximum(used, 1), np.inf
  ))


def _block_count_and_size(
  nbytes: float, num_ranks: int, block_bytes: int
) -> tuple[
  int, float
]:
  """Returns (number of blocks of a chunk, bytes of a block).

  Each of ``num_ranks`` ranks has a chunk of an array of ``nbytes`` bytes, sent
  in blocks of at most ``block_bytes``.
  """
  chunk = nbytes / num_ranks
  count = min(max(1, math.ceil(chunk / block_bytes)), _MAX_BLOCKS)
  return count, chunk / count


def direct_seconds(
  links: MeasuredLinks, nbytes: float, block_bytes: int,
  sites: tuple[int, ...] = ()
) -> float:
  """Returns the modelled seconds of a sum by "direct" or by "sites".

  Args:
    links: Links of M ranks.
    nbytes: Bytes of the array.
    block_bytes: Bytes of a block.
    sites: Number of ranks of each site, in rank order; () for "direct".
  """
  m = len(links.rates)
  if m < 2:
    return 0.0
  sites = sites or (m,)
  owners = min(sites)
  index = np.concatenate([np.arange(size) for size in sites])  # [M] in the site
  of = np.repeat(np.arange(len(sites)), sites)  # [M]
  owner = index < owners
  alike = of[:, None] == of
  # [M, M]: contributions to owners, totals from them, and between sites.
  given = alike & owner & ~np.eye(m, dtype=bool)
  total, across = given.T, ~alike & owner & (index[:, None] == index)
  count, size = _block_count_and_size(nbytes, owners, block_bytes)
  ranks = np.arange(m)

  def each_of(used: np.ndarray) -> np.ndarray:
    """Returns the seconds of a block on each link if all ``used`` ones send."""
    rates = _concurrent_rates(
      links, np.where(used, ranks[:, None], -1).reshape(1, -1),
      np.broadcast_to(ranks, (m, m)).reshape(1, -1),
    ).reshape(m, m)
    return np.where(used, size / np.where(used, rates, 1.0), 0.0)

  def last(arrivals: np.ndarray, used: np.ndarray) -> np.ndarray:
    return np.where(used, arrivals + links.delays, 0.0).max(axis=0)  # [M]

  each_given, each_total, each_across = map(each_of, (given, total, across))
  # Each link first sends all blocks of the receiver's chunk ...
  free = count * each_given  # [M, M]
  busy = np.zeros((m, m))  # links between sites
  end = 0.0
  for k in range(count):
    # ... whose block k the receiver has when the last contribution arrives.
    ready = last((k + 1) * each_given, given)  # [M]
    # Sums of sites go to the owners in other sites.
    busy = np.maximum(busy, ready[:, None]) + each_across
    ready = np.maximum(ready, last(busy, across))
    # Then each owner sends its sum to all others of its site.
    free = np.maximum(free, ready[:, None]) + each_total
    end = max(end, float(np.maximum(ready, last(free, total)).max()))
  return end


def ring_seconds(
  links: MeasuredLinks, orders: np.ndarray, nbytes: float, block_bytes: int
) -> np.ndarray:
  """Returns the modelled times of a ring sum with several orders of the ranks.

  Args:
    links: Links of M ranks.
    orders: Ranks in the order of each ring, int ``[P, M]``.
    nbytes: Bytes of the array.
    block_bytes: Bytes of a block.

  Returns:
    float64 ``[P]``, seconds.
  """
  m = orders.shape[1]
  if m < 3:  # a ring of two is a direct exchange: one link, both directions
    seconds = direct_seconds(links, nbytes, block_bytes)
    return np.full(len(orders), seconds)
  count, size = _block_count_and_size(nbytes, m, block_bytes)
  # Partial sums go down, M - 1 hops. A rank sends the chunk that starts there,
  # then chunks in the order of their arrival from above.
  below, above = np.roll(orders, 1, axis=1), np.roll(orders, -1, axis=1)
  least = np.zeros(len(orders))
  if links.shared is not None:
    # Partial sums and sums may share a link at once.
    pairs = np.concatenate([orders, orders], 1), np.concatenate(
      [below, above], 1
    )
    least = np.maximum(
      (m - 1) * count * size / _concurrent_rates(links._replace(
        rates=np.full((m, m), np.inf)
      ), *pairs).min(axis=1),
      # Blocks that are late may be sent in another order, which is faster.
      ring_seconds(
        links._replace(shared=None), orders, nbytes, block_bytes
      ),
    )
  # [P, M] seconds per block
  each = size / _concurrent_rates(links, orders, below)
  delays = links.delays[orders, below]
  ready = np.zeros((count, *orders.shape))  # [B, P, M], at each rank
  free = np.zeros(orders.shape)  # time at which a link has sent all before
  for _ in range(m - 1):
    for k in range(count):
      free = np.maximum(free, ready[k]) + each
      ready[k] = np.roll(free + delays, -1, axis=1)  # at the rank below
  # `ready` is now the time of each rank's own sum. Sums go up.
  each = size / _concurrent_rates(links, orders, above)
  delays = links.delays[orders, above]
  number = np.arange((m - 1) * count)[:, None, None]
  # [(M - 1) B, P, M]: blocks by the number of hops behind them. A rank sends
  # them in the order of their arrival, also before its own ones.
  there = np.full((len(number), *orders.shape), np.inf)
  there[:count] = ready
  while True:
    order = np.argsort(there, axis=0, kind="stable")
    start = np.take_along_axis(there, order, axis=0) - number * each
    sent = np.empty_like(there)
    np.put_along_axis(
      sent, order,
      np.maximum.accumulate(start, axis=0) + (number + 1) * each, axis=0,
    )
    arrived = np.roll(sent + delays, 1, axis=2)  # at the rank above
    if np.array_equal(arrived[:-count], there[count:]):
      return np.maximum(least, arrived.max(axis=(0, 2)))
    there[count:] = arrived[:-count]


def fastest_ring(
  links: MeasuredLinks, nbytes: float, block_bytes: int, start: tuple[int, ...]
) -> tuple[tuple[int, ...], float]:
  """Searches for the fastest ring; returns (order of its ranks, seconds).

  The search is exhaustive up to ``EXACT`` ranks. Beyond that, an order is
  improved by reversals of segments (2-opt) until none helps.

  Args:
    links: Links of M ranks.
    nbytes: Bytes of the array.
    block_bytes: Bytes of a block.
    start: First order of the search beyond ``EXACT`` ranks.
  """
  m = len(links.rates)

  def best(orders: list[tuple[int, ...]]) -> tuple[tuple[int, ...], float]:
    seconds = ring_seconds(links, np.array(orders), nbytes, block_bytes)
    # The first of equally fast orders, so that all peers choose the same.
    i = int(np.argmin(seconds.round(9)))
    return orders[i], float(seconds[i])

  if m <= EXACT:
    return best([
      (0, *rest) for rest in itertools.permutations(range(1, m))
      if m < 3 or rest[0] < rest[-1]  # a ring and its reverse use equal links
    ])
  found = best([start])
  while True:
    order = found[0]
    turned = best([
      (*order[:i], *order[i:j][::-1], *order[j:])
      for i in range(1, m) for j in range(i + 2, m + 1)
    ])
    if turned[1] >= found[1] - 1e-9:
      return found
    found = turned


def candidate_algorithms(
  links: MeasuredLinks, nbytes: float, block_bytes: int,
  start: tuple[int, ...] | None = None,
) -> list[AlgorithmChoice]:
  """Returns the algorithms of a sum with their times; one of them is a ring.

  Args:
    links: Links of M ranks.
    nbytes: Bytes of the array.
    block_bytes: Bytes of a block.
    start: First order of the search for a ring; the order of the ranks if
      None.
  """
  plain = tuple(range(len(links.rates)))
  order, seconds = fastest_ring(links, nbytes, block_bytes, start or plain)
  found = [
    AlgorithmChoice("ring", order, seconds),
    AlgorithmChoice(
      "direct", plain, direct_seconds(links, nbytes, block_bytes)
    ),
  ]
  if links.site is not None and len(set(links.site)) > 1:
    ranks = np.argsort(links.site, kind="stable")
    sites = tuple(np.bincount(links.site).tolist())
    seconds = direct_seconds(links._replace(
      rates=links.rates[np.ix_(ranks, ranks)],
      delays=links.delays[np.ix_(ranks, ranks)], site=links.site[ranks],
    ), nbytes, block_bytes, sites)
    found.append(
      AlgorithmChoice("sites", tuple(ranks.tolist()), seconds, sites)
    )
  return found


def fastest_algorithm(
  links: MeasuredLinks, nbytes: float, block_bytes: int,
  start: tuple[int, ...] | None = None,
) -> AlgorithmChoice:
  """Returns the fastest of the `candidate_algorithms`, by modelled time."""
  return min(
    candidate_algorithms(links, nbytes, block_bytes, start),
    key=lambda choice: choice.seconds,
  )
