"""Removal of switches from a graph that preserves the ranks' max-flows.

To split off a switch w, a unit of capacity u -> w and one of w -> t become one
unit of u -> t. If a graph's switches have equal capacity in and out, each
switch can be split off completely such that every rank's max-flow from the
source is unchanged (Bang-Jensen, Frank and Jackson, "Preserving and increasing
local edge-connectivity in mixed graphs", SIAM J. Discrete Math. 8, 1995).
ForestColl, arXiv 2402.06787, uses this for trees.

Deviation from ForestColl: a whole switch is first split evenly, followed by one
test of the flows. Only if the flows are too small, the switch is split pair by
pair, with a test for every pair.
"""

import collections

import numpy as np

from parallel.plans.schedules.optimal.cut_bound import SourceFlow
from parallel.plans.topology.graph import Path


class PathPool:
  """Paths in the original graph that make up the capacity of each pair.

  Args:
    capacities: int ``[node, node]``: capacities of the original graph.
      Initially, each unit stands for the path along its own link.
  """

  def __init__(self, capacities: np.ndarray) -> None:
    self._paths: dict[tuple[int, int], collections.Counter[Path]] = {
      (int(u), int(v)): collections.Counter(
        {(int(u), int(v)): int(capacities[u, v])}
      )
      for u, v in zip(*np.nonzero(capacities), strict=True)
    }

  def take(self, pair: tuple[int, int], amount: int) -> list[Path]:
    """Removes units of a pair from the pool, shortest paths first.

    Args:
      pair: (source, destination).
      amount: Number of units.

    Returns:
      Path of each unit.
    """
    pool, taken = self._paths[pair], []
    for path in sorted(pool, key=lambda path: (len(path), path)):
      count = min(pool[path], amount - len(taken))
      taken += [path] * count
      pool[path] -= count
      if not pool[path]:
        del pool[path]
      if len(taken) == amount:
        return taken
    raise AssertionError(f"{pair} has no {amount} units left")

  def join(self, source: int, switch: int, there: int, amount: int) -> None:
    """Turns units source -> switch -> there into units source -> there.

    Args:
      source: Node before the switch.
      switch: Switch that is split off.
      there: Node after the switch. If it is the source, the units are lost.
      amount: Number of units.
    """
    first = self.take((source, switch), amount)
    second = self.take((switch, there), amount)
    if source == there:
      return
    pool = self._paths.setdefault((source, there), collections.Counter())
    for a, b in zip(first, second, strict=True):
      pool[_without_loops(a + b[1:])] += 1


def _without_loops(path: Path) -> Path:
  """Removes the part of a path between two visits of the same node."""
  kept: list[int] = []
  for node in path:
    if node in kept:
      del kept[kept.index(node):]
    kept.append(node)
  return tuple(kept)


def split_switches(
  capacities: np.ndarray, num_ranks: int, weight: int
) -> tuple[np.ndarray, PathPool]:
  """Splits off all switches, so that only capacities between ranks are left.

  Args:
    capacities: int ``[node, node]``: capacities, with ranks before switches.
    num_ranks: Number of ranks, n.
    weight: Capacity of the link from the source to each rank, k. Every rank's
      max-flow from the source is at least n k, before and after.

  Returns:
    Capacities between ranks, int ``[rank, rank]``, and their paths.

  Raises:
    ValueError: A switch's capacities in and out differ, and the ranks need the
      unmatched part.
  """
  pool = PathPool(capacities)
  left = capacities.copy()
  size = len(left)
  # Switches are split off in the order of their distance from the ranks. When a
  # farther switch is split, links to ranks have replaced the nearer switches.
  hops = {switch: 0 for switch in range(num_ranks, size)}
  near = set(range(num_ranks))
  level = 0
  while near:
    level += 1
    near = {s for s in hops if hops[s] == 0 and left[list(near), s].any()}
    hops |= dict.fromkeys(near, level)
  for switch in sorted(hops, key=lambda s: (hops[s], s)):
    # Two even splits are tried, the one that pairs ranks with switches first.
    for prefer_ranks in (True, False):
      tried, moves = _split_evenly(left, switch, num_ranks, prefer_ranks)
      if _flows_suffice(tried, num_ranks, weight):
        break
    else:
      tried, moves = _split_pair_by_pair(left, switch, num_ranks, weight)
    for source, there, amount in moves:
      pool.join(source, switch, there, amount)
    left = tried
  left = left[:num_ranks, :num_ranks]
  if not _flows_suffice(left, num_ranks, weight):
    raise ValueError(
      "a switch's links in and out differ in bandwidth, and the unmatched part "
      "is needed; give both directions the same bandwidth"
    )
  return left, pool


def _flows_suffice(capacities: np.ndarray, num_ranks: int, weight: int) -> bool:
  """Returns whether each rank's max-flow is at least ``num_ranks * weight``.

  It comes from a source with a link of capacity ``weight`` to every rank.
  """
  flow = SourceFlow(capacities, num_ranks, weight)
  return flow.reaches(num_ranks * weight)


# Units that a switch forwarded: (source, destination, number of units).
ForwardedUnits = tuple[int, int, int]


def _split_evenly(
  capacities: np.ndarray, switch: int, num_ranks: int, prefer_ranks: bool
) -> tuple[np.ndarray, list[ForwardedUnits]]:
  """Splits off a switch; each unit goes to a pair with least capacity so far.

  Args:
    capacities: int ``[node, node]``; not changed.
    switch: Switch to split off.
    num_ranks: Number of ranks, n.
    prefer_ranks: Whether units from switches go to ranks first, and units from
      ranks to switches.

  Returns:
    Capacities without the switch, and the units that it forwarded.
  """
  left = capacities.copy()
  into, out = left[:, switch].copy(), left[switch].copy()
  left[:, switch] = left[switch] = 0
  size = len(left)
  is_rank = np.arange(size) < num_ranks
  moves: collections.Counter[tuple[int, int]] = collections.Counter()
  while into.any() and out.any():
    source = int(np.argmax(into))
    # Destinations in order of precedence: of the preferred kind, if any; with
    # the least capacity from the source; last the source itself, which loses
    # the unit. The fraction is below 1 and only breaks ties, in favour of the
    # node with the most units left to receive.
    cost = left[source] * 4.0 - out / (1.0 + out.max())
    if prefer_ranks:
      cost += 1e6 * (is_rank == is_rank[source])
    cost[out == 0] = np.inf
    cost[source] = 1e12 if out[source] else np.inf
    there = int(np.argmin(cost))
    into[source] -= 1
    out[there] -= 1
    moves[source, there] += 1
    if source != there:
      left[source, there] += 1
  return left, [(u, t, amount) for (u, t), amount in moves.items()]


def _split_pair_by_pair(
  capacities: np.ndarray, switch: int, num_ranks: int, weight: int
) -> tuple[np.ndarray, list[ForwardedUnits]]:
  """Splits off a switch: each pair in turn gets as many units as flows allow.

  Args:
    capacities: int ``[node, node]``; not changed.
    switch: Switch to split off.
    num_ranks: Number of ranks, n.
    weight: Capacity of the link from the source to each rank, k.

  Returns:
    Capacities without the switch, and the units that it forwarded.
  """
  left, moves = capacities.copy(), []
  for source in map(int, np.flatnonzero(capacities[:, switch])):
    for there in map(int, np.flatnonzero(capacities[switch])):
      most = int(min(left[source, switch], left[switch, there]))
      # Binary search for the largest amount that suffices: `low` suffices,
      # `high` does not. The full amount is tried first and ends the search if
      # it suffices.
      low, high = 0, most + 1
      amount = most
      while high - low > 1:
        tried = left.copy()
        tried[source, switch] -= amount
        tried[switch, there] -= amount
        if source != there:
          tried[source, there] += amount
        if _flows_suffice(tried, num_ranks, weight):
          low = amount
        else:
          high = amount
        amount = (low + high) // 2
      if low:
        left[source, switch] -= low
        left[switch, there] -= low
        if source != there:
          left[source, there] += low
        moves.append((source, there, low))
  # Units that no pair can use are dropped. The caller tests whether they were
  # needed.
  left[:, switch] = left[switch] = 0
  return left, moves
