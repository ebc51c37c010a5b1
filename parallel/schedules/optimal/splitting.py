"""Takes switches out of a graph without making any rank harder to reach.

To split a switch w off, a unit of capacity u -> w and one of w -> t become one
unit of u -> t. If a graph's switches have as much capacity in as out, all of a
switch can be split off such that every rank's max-flow from the source stays
what it was (Bang-Jensen, Frank and Jackson, "Preserving and increasing local
edge-connectivity in mixed graphs", SIAM J. Discrete Math. 8, 1995). ForestColl,
arXiv 2402.06787, uses this for trees.

Unlike there, a whole switch is first split evenly, and the flows are tested
once after it. Only if they do not suffice, the switch is split pair by pair,
with a test for every pair.
"""

import collections

import numpy as np

from parallel.schedules.optimal.cut_bound import SourceFlow
from parallel.topology.graph import Path


class Pool:
  """The paths in the original graph that each pair's capacity stands for.

  Args:
    capacities: int ``[node, node]``: capacities of the original graph. At
      first, each unit stands for the path along its own link.
  """

  def __init__(self, capacities: np.ndarray) -> None:
    self._paths: dict[tuple[int, int], collections.Counter[Path]] = {
      (int(u), int(v)): collections.Counter(
        {(int(u), int(v)): int(capacities[u, v])}
      )
      for u, v in zip(*np.nonzero(capacities), strict=True)
    }

  def take(self, pair: tuple[int, int], amount: int) -> list[Path]:
    """Takes units of a pair out of the pool, those of the shortest paths first.

    Args:
      pair: (source, destination).
      amount: Number of units.

    Returns:
      The path of each unit.
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
      switch: The switch that is split off.
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
  """Cuts out what a path walks between two visits of the same node."""
  kept: list[int] = []
  for node in path:
    if node in kept:
      del kept[kept.index(node):]
    kept.append(node)
  return tuple(kept)


def split_switches(
  capacities: np.ndarray, num_ranks: int, weight: int
) -> tuple[np.ndarray, Pool]:
  """Splits all switches off.

  Args:
    capacities: int ``[node, node]``: capacities, with ranks before switches.
    num_ranks: Number of ranks, n.
    weight: Capacity of the links from the source to each rank, k. Every rank's
      max-flow from the source is at least n k, and stays so.

  Returns:
    The capacities between ranks, int ``[rank, rank]``, and the paths that they
    stand for.

  Raises:
    ValueError: A switch's capacities in and out differ, and the ranks need
      what has no counterpart.
  """
  pool = Pool(capacities)
  left = capacities.copy()
  size = len(left)
  # Switches are split off in the order of their distance from the ranks: those
  # farther away then find ranks in place of the nearer switches.
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
      tried, moves = _even(left, switch, num_ranks, prefer_ranks)
      if _suffices(tried, num_ranks, weight):
        break
    else:
      tried, moves = _pair_by_pair(left, switch, num_ranks, weight)
    for source, there, amount in moves:
      pool.join(source, switch, there, amount)
    left = tried
  left = left[:num_ranks, :num_ranks]
  if not _suffices(left, num_ranks, weight):
    raise ValueError(
      "a switch's links in and out differ in bandwidth, and what is left "
      "over is needed; give both directions the same bandwidth"
    )
  return left, pool


def _suffices(capacities: np.ndarray, num_ranks: int, weight: int) -> bool:
  """Says whether every rank's max-flow from the source is n k or more."""
  flow = SourceFlow(capacities, num_ranks, weight)
  return flow.reaches(num_ranks * weight)


# (source, destination, units) that one switch passed on
Move = tuple[int, int, int]


def _even(
  capacities: np.ndarray, switch: int, num_ranks: int, prefer_ranks: bool
) -> tuple[np.ndarray, list[Move]]:
  """Splits a switch unit by unit, each to the pair that has least so far.

  Args:
    capacities: int ``[node, node]``; not changed.
    switch: The switch to split off.
    num_ranks: Number of ranks, n.
    prefer_ranks: Whether units from switches go to ranks first, and units from
      ranks to switches.

  Returns:
    The capacities without the switch, and the moves.
  """
  left = capacities.copy()
  into, out = left[:, switch].copy(), left[switch].copy()
  left[:, switch] = left[switch] = 0
  size = len(left)
  is_rank = np.arange(size) < num_ranks
  moves: collections.Counter[tuple[int, int]] = collections.Counter()
  while into.any() and out.any():
    source = int(np.argmax(into))
    # By precedence: back to the source last, since this loses the unit; then
    # the kind of node, if preferred; then the pair with the least capacity. The
    # fraction is below 1 and only breaks ties, for the node with most units
    # left to receive.
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


def _pair_by_pair(
  capacities: np.ndarray, switch: int, num_ranks: int, weight: int
) -> tuple[np.ndarray, list[Move]]:
  """Splits a switch pair by pair, as much of each as the ranks' flows allow.

  Args:
    capacities: int ``[node, node]``; not changed.
    switch: The switch to split off.
    num_ranks: Number of ranks, n.
    weight: Capacity of the links from the source to each rank, k.

  Returns:
    The capacities without the switch, and the moves.
  """
  left, moves = capacities.copy(), []
  for source in map(int, np.flatnonzero(capacities[:, switch])):
    for there in map(int, np.flatnonzero(capacities[switch])):
      most = int(min(left[source, switch], left[switch, there]))
      # A binary search for the largest amount that suffices: `low` does, `high`
      # does not. All of it is tried first: if it fits, the search ends.
      low, high = 0, most + 1
      amount = most
      while high - low > 1:
        tried = left.copy()
        tried[source, switch] -= amount
        tried[switch, there] -= amount
        if source != there:
          tried[source, there] += amount
        if _suffices(tried, num_ranks, weight):
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
  # What no pair could use is dropped. The caller tests whether it was needed.
  left[:, switch] = left[switch] = 0
  return left, moves
