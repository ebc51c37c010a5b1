"""Throughput-optimal trees for any graph, with the cut that proves optimality.

There are four steps. First, the capacities are multiplied by a scale U and
rounded down to integers, with U just large enough that every rank can be the
root of k trees. Then the switches are split off, the trees are packed, and
their transfers are put into rounds.

With n ranks, a chunk of 1 / (n k) of the data goes down each tree. A link of
capacity c is part of at most U c trees, so the busiest link needs at most
M U / (n k) seconds for M bytes of all slices together. This is the cut bound T*
if U / k has its smallest possible value, 1 / y (`cut_bound`).

This bounds the time of the busiest link, not of the whole schedule: trees are
deep, and a chunk must pass all their levels. With chunks cut into pieces
(`parallel.plans.schedules.pipeline`), the time of large messages approaches
that of the busiest link. For small messages, trees that are grown with
latencies in mind (`parallel.plans.schedules.growth`) finish earlier.

Source: ForestColl, arXiv 2402.06787. Deviations: k is the smallest one within a
tolerance of the bound, at most `max_weight`; the rounds are not from the paper.
"""

import collections
from collections.abc import Mapping
import dataclasses
from fractions import Fraction
import functools
import heapq
import itertools
from typing import Literal

import numpy as np

from parallel.base.checks import at_least, known
from parallel.plans.schedules import growth
from parallel.plans.schedules.optimal.cut_bound import (
  CutBound,
  SourceFlow,
  bound_of,
  integer_capacities,
  tightest_cut,
)
from parallel.plans.schedules.optimal.packing import pack
from parallel.plans.schedules.optimal.splitting import split_switches
from parallel.plans.schedules.schedule import (
  Collective,
  Schedule,
  Transfer,
  from_gather,
)
from parallel.plans.topology.graph import Path, Topology


@dataclasses.dataclass(frozen=True)
class Forest:
  """Set of k spanning trees for every rank.

  Attributes:
    bound: Lower bound on an all-gather's time, and the cut that proves it.
    weight: Number of trees of each rank, k.
    trees: ``[chunk]``: tree that the chunk goes down, as the paths of its
      edges, parents first. The k chunks of a root are consecutive.
    seconds_per_byte: Seconds of the busiest link per byte of all slices.
  """

  bound: CutBound
  weight: int
  trees: tuple[tuple[Path, ...], ...]
  seconds_per_byte: float

  @property
  def ratio(self) -> float:
    """The busiest link's time divided by the bound, at least 1."""
    return self.seconds_per_byte / self.bound.seconds_per_byte


@functools.lru_cache(maxsize=8)
def forest(
  topology: Topology,
  *,
  weight: int | None = None,
  max_weight: int | None = None,
  tolerance: float = 0.01,
) -> Forest:
  """Returns the trees of an all-gather.

  Example:
    On a ring of 4 ranks, two trees per rank load the busiest link no more than
    the cut bound requires:

    >>> from parallel.plans.topology.builders import ring
    >>> found = forest(ring(4))
    >>> found.weight, found.ratio
    (2, 1.0)

  Args:
    topology: Topology of at least two ranks. A switch should have the same
      bandwidth in and out.
    weight: Number of trees of each rank, k. None chooses the smallest k within
      the tolerance, or the best k if no k is within it.
    max_weight: Largest k that is tried. None stands for 8, or for the k that
      makes 128 chunks if that is larger.
    tolerance: Maximum excess of the busiest link's time over the bound, as a
      fraction of the bound.

  Raises:
    ValueError: The topology has only one rank, or a switch's bandwidths in and
      out differ and the trees need the difference.
  """
  n = topology.num_ranks
  y, cut = tightest_cut(topology)
  capacities = integer_capacities(topology)
  # A larger k rounds capacities less, but makes more and smaller chunks.
  tried = range(1, (max_weight or max(8, 128 // n)) + 1)
  best: tuple[Fraction, int] | None = None  # (scale over its lower bound, k)
  for k in tried if weight is None else (weight,):
    limit = None if best is None else best[0]
    ratio = _smallest_scale(capacities, n, k, y, limit)
    if ratio is not None:
      best = (ratio, k)
    if best is not None and best[0] <= 1 + tolerance:
      break
  ratio, k = best
  # The ratio is that of the scale to its lower bound, k / y.
  chunks = _paths_of_trees(_scaled(capacities, ratio * k / y), n, k)
  # The time uses the real bandwidths, not the rounded capacities.
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


def _paths_of_trees(capacities: np.ndarray, n: int, k: int) -> list[list[Path]]:
  """Packs k trees for each of n ranks; returns ``[chunk]``: its tree's paths.

  A packed tree of weight w becomes w trees with the same edges. Each tree takes
  a separate path for an edge, since the capacity between two ranks may be
  spread over several paths through switches.
  """
  between_ranks, pool = split_switches(capacities, n, k)
  chunks: list[list[Path]] = [[] for _ in range(n * k)]
  used = [0] * n
  for tree in pack(between_ranks, k):
    first = tree.root * k + used[tree.root]
    used[tree.root] += tree.weight
    for edge in tree.edges:
      for i, path in enumerate(pool.take(edge, tree.weight)):
        chunks[first + i].append(path)
  return chunks


def _scaled(capacities: np.ndarray, scale: Fraction) -> np.ndarray:
  """Multiplies capacities by a fraction and rounds down, exactly."""
  return capacities * scale.numerator // scale.denominator


def _smallest_scale(
  capacities: np.ndarray, n: int, k: int, y: Fraction, limit: Fraction | None
) -> Fraction | None:
  """Returns how far the smallest sufficient scale U is above its lower bound.

  U suffices if the capacities, times U and rounded down, hold k trees per root.

  Args:
    capacities: int ``[node, node]``: capacities, not scaled.
    n: Number of ranks.
    k: Trees of each rank.
    y: Largest rate that the tightest cut allows. At the lower bound k / y of U
      the trees would just fit without rounding.
    limit: Only results below this value are searched; None for no limit.

  Returns:
    The ratio U y / k, at least 1; None if there is none below the limit.
  """
  def suffices(scale: Fraction) -> bool:
    flow = SourceFlow(_scaled(capacities, scale), n, k)
    return flow.reaches(n * k)

  least = Fraction(k) / y
  if limit is not None and limit <= 1:  # no ratio is below 1
    return None
  if suffices(least):
    return Fraction(1)
  values = sorted({int(c) for c in capacities[capacities > 0]})
  # At this scale, every scaled capacity exceeds that at the least scale by at
  # least 1. Rounded down, it is thus at least the exact capacity at the least
  # scale, and the trees fit.
  most = least + Fraction(1, values[0])
  if limit is not None:
    most = min(most, limit * least)
  # A rounded capacity changes only where U times the capacity is an integer, so
  # only these U are tried; the largest one shows whether any of them fits.
  steps = sorted({
    Fraction(i, c)
    for c in values
    for i in range(int(least * c) + 1, int(most * c) + 1)
  })
  if limit is not None:
    steps = [u for u in steps if u < limit * least]
  if not steps or not suffices(steps[-1]):
    return None
  # Rounded capacities grow with U, so a binary search finds the smallest U.
  low, high = -1, len(steps) - 1
  while high - low > 1:
    middle = (low + high) // 2
    if suffices(steps[middle]):
      high = middle
    else:
      low = middle
  return steps[high] / least


def build(
  topology: Topology,
  collective: Collective,
  *,
  trees: Literal["packed", "grown"] = "packed",
  weight: int | None = None,
  max_weight: int | None = None,
  tolerance: float = 0.01,
  size_bytes: float | None = None,
  link_capacity: int = 1,
) -> Schedule:
  """Builds any of the three collectives.

  Packed trees load no link more than the cut bound allows, but may be deep:
  they are best for large, pipelined messages. Grown trees balance depth
  against load for a given message size. `caatnet.studies.collectives.chosen`
  selects between them.

  Args:
    topology: Network that the schedule runs on.
    collective: "all_reduce", "reduce_scatter" or "all_gather".
    trees: "packed" (`forest`) or "grown" (`parallel.plans.schedules.growth`).
    weight: Number of trees of each rank, k. None means the choice of `forest`
      for packed trees, and 1 for grown trees.
    max_weight: For packed trees, as in `forest`.
    tolerance: For packed trees, as in `forest`.
    size_bytes: For grown trees, bytes of the buffer. None ignores latencies.
    link_capacity: For grown trees, number of chunks that the slowest link
      carries in a round.

  Raises:
    ValueError: An option has no effect on these trees, or is out of its range.
  """
  _check_effects(trees, {
    "max_weight": ("packed", max_weight is not None),
    "tolerance": ("packed", tolerance != 0.01),
    "size_bytes": ("grown", size_bytes is not None),
    "link_capacity": ("grown", link_capacity != 1),
  })
  if weight is not None:
    at_least("weight", weight)
  at_least("link_capacity", link_capacity)
  if trees == "grown":
    return from_gather(
      lambda x: growth.schedule(
        "optimal", x, growth.grow(x, weight or 1, size_bytes), link_capacity
      ),
      topology,
      collective,
    )
  options = {"max_weight": max_weight, "tolerance": tolerance}
  # If some links have no reverse of the same bandwidth, the two halves of the
  # all-reduce have different forests. Both must cut the data into the same
  # number of chunks, so the larger k of the two is used for both.
  if (
    collective == "all_reduce"
    and topology.num_ranks > 1
    and not topology.symmetric
    and weight is None
  ):
    halves = (topology, topology.reversed())
    weight = max(forest(x, **options).weight for x in halves)
  return from_gather(
    lambda x: gather(x, weight=weight, **options), topology, collective
  )


def _check_effects(
  trees: str, given: Mapping[str, tuple[str, bool]]
) -> None:
  """Raises ValueError if a given option has no effect on this kind of trees."""
  known("trees=", trees, ("packed", "grown"))
  for key, (needed, is_given) in given.items():
    if is_given and trees != needed:
      raise ValueError(f"{key} has no effect on trees={trees!r}")


def gather(topology: Topology, **options: float | None) -> Schedule:
  """Builds the all-gather in which each chunk goes down its own packed tree.

  Args:
    topology: Network that the schedule runs on.
    **options: `weight`, `max_weight` and `tolerance`, as in `forest`.
  """
  n = topology.num_ranks
  if n == 1:
    return Schedule("optimal", "all_gather", 1, 1, (), (0,), link_capacity=1)
  return schedule(topology, forest(topology, **options))


def schedule(topology: Topology, found: Forest) -> Schedule:
  """Builds the all-gather of a given forest.

  Args:
    topology: Network that the schedule runs on.
    found: Result of `forest` on this network.
  """
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
  """Puts each transfer into the first round in which its links are free.

  Among the ready transfers, those whose child has the longest chain of tree
  edges below it go first: these chains determine the last round.

  Args:
    topology: Network, which gives the links' capacities.
    trees: ``[chunk]``: paths along the edges of its tree, parents first.
  """
  # (minus the child's height, chunk, path): the heap pops the smallest first.
  ready: list[tuple[int, int, Path]] = []
  below: list[dict[int, int]] = []  # [chunk]: rank -> longest chain below it
  # [chunk]: rank -> paths to its children
  children: list[dict[int, list[Path]]] = []
  for chunk, paths in enumerate(trees):
    height: dict[int, int] = collections.defaultdict(int)
    after: dict[int, list[Path]] = collections.defaultdict(list)
    # Children before parents, so that a child's height is final when read.
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
    room = dict(topology.relative_bandwidths)
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
      # Transfers of a round read the state before it, so the child can forward
      # the chunk from the next round on.
      later += [
        (-below[chunk][p[-1]], chunk, p) for p in children[chunk][there]
      ]
    rounds.append(tuple(sent))
    ready = later
  return tuple(rounds)
