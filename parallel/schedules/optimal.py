"""Throughput-optimal trees for any graph, and the cut that proves them so.

Capacities are scaled by U and rounded down to integers, such that every rank
can be the root of k trees; switches are split off; the trees are packed. A
chunk of 1 / (n k) of the data goes down each tree. The busiest link then needs
M / (n k) U seconds, which is the cut bound T* where U / k is as small as the
bound has it. Source: ForestColl, arXiv 2402.06787. Not as there: k is the
smallest one within a tolerance of the bound, at most `max_weight`, and the
chunks are put into rounds, which costs about a tree's depth more.
"""

import collections
import dataclasses
from fractions import Fraction
import heapq
import itertools

import numpy as np

from parallel.schedules.cut_bound import (
  CutBound,
  SourceFlow,
  bound_of,
  integer_capacities,
  tightest_cut,
)
from parallel.schedules.packing import pack
from parallel.schedules.schedule import (
  Collective,
  Schedule,
  Transfer,
  from_gather,
)
from parallel.schedules.splitting import split_switches
from parallel.topology import Path, Topology


@dataclasses.dataclass(frozen=True)
class Forest:
  """k spanning trees for every rank.

  Attributes:
    bound: T* and the cut that gives it.
    weight: k.
    trees: Of each chunk, its root's k in a row, paths along tree edges,
      parents first.
    seconds_per_byte: What the busiest link needs, over M.
  """

  bound: CutBound
  weight: int
  trees: tuple[tuple[Path, ...], ...]
  seconds_per_byte: float

  @property
  def ratio(self) -> float:
    """The busiest link's time over the bound, at least 1."""
    return self.seconds_per_byte / self.bound.seconds_per_byte


def forest(
  topology: Topology,
  *,
  weight: int | None = None,
  max_weight: int | None = None,
  tolerance: float = 0.01,
) -> Forest:
  """Finds the trees of an all-gather.

  Args:
    topology: At least two ranks. A switch's links have the same bandwidth in
      and out.
    weight: k; None chooses the smallest one within the tolerance, or else the
      best.
    max_weight: Largest k tried; None: 8, or as many as make 128 chunks.
    tolerance: Of the busiest link's time over the bound.
  """
  n = topology.num_ranks
  y, cut = tightest_cut(topology)
  capacities = integer_capacities(topology)
  tried = range(1, (max_weight or max(8, 128 // n)) + 1)
  best: tuple[Fraction, int] | None = None  # (U y / k, k)
  for k in tried if weight is None else (weight,):
    limit = None if best is None else best[0]
    ratio = _smallest_scale(capacities, n, k, y, limit)
    if ratio is not None:
      best = (ratio, k)
    if best is not None and best[0] <= 1 + tolerance:
      break
  ratio, k = best
  scaled = _scaled(capacities, ratio * k / y)
  between_ranks, pool = split_switches(scaled, n, k)
  chunks: list[list[Path]] = [[] for _ in range(n * k)]
  used = [0] * n
  for tree in pack(between_ranks, k):
    first = tree.root * k + used[tree.root]
    used[tree.root] += tree.weight
    for edge in tree.edges:
      for i, path in enumerate(pool.take(edge, tree.weight)):
        chunks[first + i].append(path)
  loads = collections.Counter(
    pair
    for paths in chunks for path in paths
    for pair in itertools.pairwise(path)
  )
  links = topology.links_by_pair
  busiest = max(load / links[pair].bandwidth for pair, load in loads.items())
  return Forest(
    bound_of(topology, cut), k, tuple(map(tuple, chunks)), busiest / (n * k)
  )


def _scaled(capacities: np.ndarray, scale: Fraction) -> np.ndarray:
  return capacities * scale.numerator // scale.denominator


def _smallest_scale(
  capacities: np.ndarray, n: int, k: int, y: Fraction, limit: Fraction | None
) -> Fraction | None:
  """The smallest U y / k at which capacities hold k trees per root.

  Args:
    capacities: In whole units.
    n: Ranks.
    k: Trees per root.
    y: The bound's rate; at U = k / y all is tight before rounding.
    limit: A ratio that must be beaten.

  Returns:
    None if it is not beaten.
  """
  def suffices(scale: Fraction) -> bool:
    flow = SourceFlow(_scaled(capacities, scale), n, k)
    return flow.reaches(n * k)

  least = Fraction(k) / y
  if suffices(least):
    return Fraction(1)
  values = sorted({int(c) for c in capacities[capacities > 0]})
  most = least + Fraction(1, values[0])  # rounds every capacity up
  if limit is not None:
    most = min(most, limit * least)
  # Rounded capacities change where U times one of them is an integer.
  steps = sorted({
    Fraction(i, c)
    for c in values
    for i in range(int(least * c) + 1, int(most * c) + 1)
  })
  if limit is not None:
    steps = [u for u in steps if u < limit * least]
  if not steps or not suffices(steps[-1]):
    return None
  low, high = -1, len(steps) - 1
  while high - low > 1:
    middle = (low + high) // 2
    if suffices(steps[middle]):
      high = middle
    else:
      low = middle
  return steps[high] / least


def build(
  topology: Topology, collective: Collective, **options: float | None
) -> Schedule:
  """Any of the three collectives; `forest` says what the options are."""
  if (
    collective == "all_reduce"
    and topology.num_ranks > 1
    and not topology.symmetric
    and options.get("weight") is None
  ):  # both halves must cut the data alike
    halves = (topology, topology.reversed())
    options |= {"weight": max(forest(x, **options).weight for x in halves)}
  return from_gather(lambda x: gather(x, **options), topology, collective)


def gather(topology: Topology, **options: float | None) -> Schedule:
  """The all-gather: chunk by chunk down the trees, in few rounds."""
  n = topology.num_ranks
  if n == 1:
    return Schedule("optimal", "all_gather", 1, 1, (), (0,), link_capacity=1)
  return schedule(topology, forest(topology, **options))


def schedule(topology: Topology, found: Forest) -> Schedule:
  """The all-gather of trees that `forest` found on that topology."""
  n = topology.num_ranks
  return Schedule(
    "optimal",
    "all_gather",
    n,
    n * found.weight,
    _rounds(topology, found.trees),
    tuple(rank for rank in range(n) for _ in range(found.weight)),
    link_capacity=1,
  )


def _rounds(
  topology: Topology, trees: tuple[tuple[Path, ...], ...]
) -> tuple[tuple[Transfer, ...], ...]:
  """Puts transfers into rounds as links are free.

  Those with the most links below them in their tree go first.
  """
  ready: list[tuple[int, int, Path]] = []
  below: list[dict[int, int]] = []  # of each chunk: rank -> height
  children: list[dict[int, list[Path]]] = []
  for chunk, paths in enumerate(trees):
    height: dict[int, int] = collections.defaultdict(int)
    after: dict[int, list[Path]] = collections.defaultdict(list)
    for path in reversed(paths):
      parent, child = path[0], path[-1]
      height[parent] = max(height[parent], height[child] + 1)
      after[parent].append(path)
    below.append(height)
    children.append(after)
    root = paths[0][0]
    ready += [(-height[p[-1]], chunk, p) for p in after[root]]
  rounds = []
  while ready:
    heapq.heapify(ready)
    room = dict(topology.multiples)
    sent, later = [], []
    while ready:
      order, chunk, path = heapq.heappop(ready)
      pairs = list(itertools.pairwise(path))
      if any(room[pair] == 0 for pair in pairs):
        later.append((order, chunk, path))
        continue
      for pair in pairs:
        room[pair] -= 1
      there = path[-1]
      sent.append(Transfer(path[0], there, chunk, "copy", path))
      later += [
        (-below[chunk][p[-1]], chunk, p) for p in children[chunk][there]
      ]
    rounds.append(tuple(sent))
    ready = later
  return tuple(rounds)
