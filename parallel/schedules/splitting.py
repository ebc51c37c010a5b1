"""Takes switches out of a graph without making any rank harder to reach.

A unit of capacity u -> w and one of w -> t become one of u -> t. In a graph
whose switches have as much capacity in as out, all of a switch can be split
off such that every rank's flow from the source stays (Bang-Jensen, Frank and
Jackson, "Preserving and increasing local edge-connectivity in mixed graphs",
SIAM J. Discrete Math. 8, 1995; used by ForestColl, arXiv 2402.06787). Unlike
there, a whole switch is first split evenly and the result is tested; only if
that fails it is done pair by pair.
"""

import collections

import numpy as np

from parallel.schedules.cut_bound import SourceFlow
from parallel.topology import Path


class Pool:
  """Which paths a pair's capacity stands for.

  Args:
    capacities: int ``[node, node]``; every link is a path at first.
  """

  def __init__(self, capacities: np.ndarray) -> None:
    self._paths: dict[tuple[int, int], collections.Counter[Path]] = {
      (int(u), int(v)): collections.Counter(
        {(int(u), int(v)): int(capacities[u, v])}
      )
      for u, v in zip(*np.nonzero(capacities), strict=True)
    }

  def take(self, pair: tuple[int, int], amount: int) -> list[Path]:
    """Takes that many units, shortest paths first."""
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
    """Turns units of two pairs into units of one."""
    first = self.take((source, switch), amount)
    second = self.take((switch, there), amount)
    if source == there:
      return
    pool = self._paths.setdefault((source, there), collections.Counter())
    for a, b in zip(first, second, strict=True):
      pool[_without_loops(a + b[1:])] += 1


def _without_loops(path: Path) -> Path:
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
    capacities: int ``[node, node]``, ranks before switches.
    num_ranks: n.
    weight: k: every rank's flow is at least n k, with k from the source to
      each rank, and stays that.

  Returns:
    int ``[rank, rank]`` and the paths behind it.

  Raises:
    ValueError: A switch has more capacity in than out or the other way round,
      and the ranks need it.
  """
  pool = Pool(capacities)
  left = capacities.copy()
  size = len(left)
  # Switches beside ranks first, so that later ones see ranks alone.
  hops = {switch: 0 for switch in range(num_ranks, size)}
  near = set(range(num_ranks))
  level = 0
  while near:
    level += 1
    near = {s for s in hops if hops[s] == 0 and left[list(near), s].any()}
    hops |= dict.fromkeys(near, level)
  for switch in sorted(hops, key=lambda s: (hops[s], s)):
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
  flow = SourceFlow(capacities, num_ranks, weight)
  return flow.reaches(num_ranks * weight)


Move = tuple[int, int, int]


def _even(
  capacities: np.ndarray, switch: int, num_ranks: int, prefer_ranks: bool
) -> tuple[np.ndarray, list[Move]]:
  """Splits a switch unit by unit, always to the pair with least so far.

  Args:
    capacities: Left as they are.
    switch: To split off.
    num_ranks: n.
    prefer_ranks: From switches to ranks first, and from ranks to switches.
  """
  left = capacities.copy()
  into, out = left[:, switch].copy(), left[switch].copy()
  left[:, switch] = left[switch] = 0
  size = len(left)
  is_rank = np.arange(size) < num_ranks
  moves: collections.Counter[tuple[int, int]] = collections.Counter()
  while into.any() and out.any():
    source = int(np.argmax(into))
    cost = left[source] * 4.0 - out / (1.0 + out.max())
    if prefer_ranks:
      cost += 1e6 * (is_rank == is_rank[source])
    cost[out == 0] = np.inf
    cost[source] = 1e12 if out[source] else np.inf  # back to itself: lost
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
  """Moves as much of each pair as every rank's flow allows."""
  left, moves = capacities.copy(), []
  for source in map(int, np.flatnonzero(capacities[:, switch])):
    for there in map(int, np.flatnonzero(capacities[switch])):
      most = int(min(left[source, switch], left[switch, there]))
      low, high = 0, most + 1
      amount = most
      while high - low > 1 or amount == most > low:
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
  left[:, switch] = left[switch] = 0
  return left, moves
