"""MultiTree: one spanning tree per rank, all grown together step by step.

At the start of a step all links are free. The trees take turns. In its turn, a
tree adds one rank, over free links from a rank that it had at the start of the
step, and occupies these links. A step ends when no tree can add a rank. The
trees perform an all-gather, and each step is a round of the schedule. The
reduce-scatter reverses the all-gather.

Source: Huang et al., "Communication Algorithm-Architecture Co-Design for
Distributed Deep Learning", ISCA 2021, and its published simulator.

Deviations: the simulator ends a step when the last tree of a round adds no
rank, which takes more steps on meshes. The paper assumes links of one
bandwidth. With different bandwidths, a step would last as long as the slowest
link takes, so the trees then grow by arrival time instead of in steps
(`parallel.plans.schedules.growth`).
"""

import array
import itertools
import operator

import numpy as np

from parallel.plans.schedules import growth
from parallel.plans.schedules.schedule import Schedule, Transfer
from parallel.plans.topology.graph import Path, Topology


def grow(
  topology: Topology, *, farthest_first: bool = False
) -> list[tuple[tuple[int, ...], tuple[Path, ...]]]:
  """Grows the trees of an all-gather.

  Args:
    topology: Topology with links of one bandwidth; ranks are joined by links or
      through switches.
    farthest_first: Whether, from the second round of turns of a step on, trees
      take turns in descending order of the distance from the root to the
      farthest rank. Otherwise they take turns in the order of rank numbers.

  Returns:
    For each step: roots of the trees that grew, in the order of their turns,
    and for each of these turns the path from a rank of the tree to its new
    rank.
  """
  n = topology.num_ranks
  ranks = list(range(n))
  order = ranks
  if farthest_first:
    far = [max(topology.hops(rank, v) for v in ranks) for rank in ranks]
    order = sorted(ranks, key=lambda rank: (-far[rank], -rank))
  grower = _DirectGrowth if topology.num_switches == 0 else _SwitchedGrowth
  state = grower(topology)
  steps = []
  missing = n * (n - 1)  # ranks still to be added, summed over all trees
  while missing:
    state.begin()
    roots, paths = state.turns(ranks)
    # Within a step, links only become occupied, and new ranks are not parents
    # yet. A tree that cannot grow in one round of turns cannot grow in the next
    # one either, so only trees that grew take another turn.
    added = roots
    if farthest_first:
      again = set(added)
      added = [rank for rank in order if rank in again]
    while added:
      added, more = state.turns(added)
      roots += added
      paths += more
    state.end(roots)
    # Tuples, since Python's garbage collector does not track tuples of numbers.
    steps.append((tuple(roots), tuple(paths)))
    missing -= len(roots)
  return steps


def gather(topology: Topology, *, farthest_first: bool = False) -> Schedule:
  """Builds the all-gather: chunk r goes down the tree of rank r.

  Args:
    topology: Network that the schedule runs on.
    farthest_first: Order of turns, as in `grow`.

  Returns:
    An all-gather of one chunk per rank, with one chunk per link and round if
    all links have the same bandwidth.

  Raises:
    ValueError: `farthest_first` is True but bandwidths differ, so that trees
      do not take turns.
  """
  if not topology.even:
    if farthest_first:
      raise ValueError(
        f"multitree: farthest_first=True needs links of one bandwidth; those "
        f"of {topology.name} differ"
      )
    return _gather_by_arrival(topology)
  rounds = tuple(
    tuple(
      Transfer(path[0], path[-1], root, "copy", path)
      for root, path in sorted(
        zip(*grown, strict=True), key=operator.itemgetter(0)
      )
    )
    for grown in grow(topology, farthest_first=farthest_first)
  )
  n = topology.num_ranks
  return Schedule(
    "multitree", "all_gather", n, n, rounds, tuple(range(n)), link_capacity=1
  )


def _gather_by_arrival(topology: Topology) -> Schedule:
  """Builds the all-gather for different bandwidths, by arrival time.

  Networks without the slowest links are tried too, as long as the ranks stay
  connected: one chunk on a slow link prolongs the round for all links.
  """
  found = []
  for speed in growth.sample_bandwidths(topology):
    try:
      left = topology.without(*(
        pair for pair, link in topology.links_by_pair.items()
        if link.bandwidth < speed
      ))
    except ValueError:  # a rank is no longer reachable
      break
    found.append(growth.schedule("multitree", left, growth.grow(left, 1)))
  return min(
    found, key=lambda schedule: growth.seconds(schedule.rounds, topology)
  )


class _DirectGrowth:
  """Growth of trees on a network without switches.

  A tree's frontier consists of the links from its ranks to ranks outside it. An
  occupied link stays occupied until the step ends, so each tree examines each
  link of its frontier at most once per step. Between steps the frontiers of all
  trees are one array, sorted by root.

  For n ranks, growth takes n (n - 1) turns in Python, so the inner loop uses
  lists and bytearrays. NumPy handles the work that is done once per step.
  """

  def __init__(self, topology: Topology) -> None:
    n = topology.num_ranks
    self._paths = list(topology.links_by_pair)
    self._head_of = [head for _, head in self._paths]
    self._heads = np.array(self._head_of, np.int32)
    sources = np.array([source for source, _ in self._paths], np.int32)
    # Links sorted by source: those out of a rank are contiguous and end before
    # `_ends[rank]`. The stable sort keeps the order of directions, which is the
    # same at every rank of a grid. This matters: sorted by the neighbours'
    # numbers, a 32x32 torus takes 261 steps instead of 256.
    self._out = np.argsort(sources, kind="stable").astype(np.int32)
    self._degree = np.bincount(sources, minlength=n)
    self._ends = np.cumsum(self._degree)
    self._member = [bytearray(n) for _ in range(n)]
    self._roots = self._frontier = np.empty(0, np.int32)
    self._held = np.zeros((n, n), bool)  # [root, rank] after the last step
    # Each tree starts with its root.
    ranks = np.arange(n, dtype=np.int32)
    self._join(ranks, ranks)

  def begin(self) -> None:
    """Starts a step: frees all links and restarts all frontiers."""
    self._free = [1] * len(self._head_of)
    self._left = sum(self._free)
    self._taken: list[int] = []
    # Iterating over an array.array gives Python integers, faster than numpy.
    links = array.array("i", self._frontier.tobytes())
    ranks = np.arange(len(self._member) + 1)
    bounds = np.searchsorted(self._roots, ranks).tolist()
    # One iterator per tree, which resumes in the next turn at the link where it
    # stopped. It tests whether a link is free when it reaches the link.
    is_free = self._free.__getitem__
    self._ahead = [
      filter(is_free, links[low:high])
      for low, high in itertools.pairwise(bounds)
    ]

  def turns(self, roots: list[int]) -> tuple[list[int], list[Path]]:
    """Adds at most one rank to each tree, in turn.

    Args:
      roots: Roots of the trees, in the order of their turns.

    Returns:
      Roots of the trees that grew, in the same order, and the path to each
      tree's new rank.
    """
    free, heads, left = self._free, self._head_of, self._left
    added, taken = [], []
    for root in roots:
      if not left:
        break
      member = self._member[root]
      for link in self._ahead[root]:
        head = heads[link]
        if not member[head]:
          member[head] = 1
          free[link] -= 1
          left -= 1
          added.append(root)
          taken.append(link)
          break
    self._left = left
    self._taken += taken
    return added, [self._paths[link] for link in taken]

  def end(self, roots: list[int]) -> None:
    """Ends a step: the new ranks become parents.

    Args:
      roots: Root of each turn that added a rank, in the order of turns.
    """
    self._join(np.array(roots, np.int32), self._heads[self._taken])

  def _join(self, roots: np.ndarray, new: np.ndarray) -> None:
    """Adds ranks to trees and updates the frontiers.

    Args:
      roots: int ``[addition]``: root of the tree.
      new: int ``[addition]``: rank that the tree gains.
    """
    self._held[roots, new] = True
    degree = self._degree[new]
    ends = np.cumsum(degree)
    # Positions in `_out` of all links out of the new ranks, rank after rank.
    # The links of an addition are elements ends - degree to ends - 1 of this
    # list, and elements `_ends` - degree to `_ends` - 1 of `_out`.
    place = np.repeat(self._ends[new] - ends, degree) + np.arange(ends[-1])
    roots = np.append(self._roots, np.repeat(roots, degree))
    links = np.append(self._frontier, self._out[place])
    # Links whose head is now in the tree are dropped. The stable sort orders
    # the links by tree, and within a tree by the time when their rank joined.
    live = np.flatnonzero(~self._held[roots, self._heads[links]])
    live = live[np.argsort(roots[live], kind="stable")]
    self._roots, self._frontier = roots[live], links[live]


class _SwitchedGrowth:
  """Growth of trees on a network with switches.

  A turn takes the path with the fewest links from any parent to a new rank; of
  equal paths, that of the parent that joined first. The search stops at a path
  as short as the smallest distance between two ranks. A parent without a free
  path is not tried again in the same step. Most of these parents have no free
  outgoing link, which is known without a search.
  """

  def __init__(self, topology: Topology) -> None:
    n = topology.num_ranks
    self._num_ranks = n
    # Indexed by the number of the link in `Topology.links`.
    self._tails = [link.source for link in topology.links]
    self._heads = [link.destination for link in topology.links]
    self._out: list[list[int]] = [[] for _ in range(topology.num_nodes)]
    for number, link in enumerate(topology.links):
      self._out[link.source].append(number)
    self._ordered: dict[tuple[int, int], list[int]] = {}
    self._within = [_ranks_within(topology, rank) for rank in range(n)]
    # Lower bound of a path's links: one between ranks, two through a switch.
    self._shortest = 1 if any(
      max(link.source, link.destination) < n for link in topology.links
    ) else 2
    # Ranks of each tree, in the order of joining and as a set.
    self._members = [[root] for root in range(n)]
    self._joined = [{root} for root in range(n)]

  def begin(self) -> None:
    """Starts a step: all links are free, all ranks of a tree are parents."""
    self._free = [1] * len(self._heads)
    # Copies, since ranks that join in this step are parents from the next one.
    self._parents = [list(members) for members in self._members]
    # Free capacity of the links out of each rank, and of those into it.
    self._out_of = [0] * self._num_ranks
    self._into = [0] * self._num_ranks
    for tail, head, free in zip(
      self._tails, self._heads, self._free, strict=True
    ):
      if tail < self._num_ranks:
        self._out_of[tail] += free
      if head < self._num_ranks:
        self._into[head] += free

  def turns(self, roots: list[int]) -> tuple[list[int], list[Path]]:
    """Adds at most one rank to each tree, in turn.

    Args:
      roots: Roots of the trees, in the order of their turns.

    Returns:
      Roots of the trees that grew, in the same order, and the path to each
      tree's new rank.
    """
    added, paths = [], []
    reachable = {rank for rank, free in enumerate(self._into) if free}
    for root in roots:
      outside = reachable - self._joined[root]
      if not outside:
        continue
      best: list[int] = []
      stuck = set()
      for parent in self._parents[root]:
        # Searches dominate the cost, so they are skipped if they cannot help:
        # if even with all links free, no rank outside the tree is nearer to the
        # parent than the length of `best`.
        within = self._within[parent]
        if best and within[min(len(best), len(within)) - 1].isdisjoint(outside):
          continue
        links = self._out_of[parent] and self._find(parent, outside)
        if not links:
          stuck.add(parent)
        elif not best or len(links) < len(best):
          best = links
        if 0 < len(best) <= self._shortest:
          break
      if stuck:
        self._parents[root] = [
          parent for parent in self._parents[root] if parent not in stuck
        ]
      if best:
        for link in best:
          self._free[link] -= 1
        # Ranks do not forward, so only the first link leaves a rank and only
        # the last one enters a rank.
        new = self._heads[best[-1]]
        self._out_of[self._tails[best[0]]] -= 1
        self._into[new] -= 1
        if not self._into[new]:
          reachable.remove(new)
        path = (self._tails[best[0]], *(self._heads[link] for link in best))
        paths.append(path)
        self._members[root].append(new)
        self._joined[root].add(new)
        added.append(root)
    return added, paths

  def _find(self, parent: int, outside: set[int]) -> list[int]:
    """Searches breadth-first for a path over free links to a rank ``outside``.

    Returns:
      Links of a shortest path, starting at the parent; [] if there is none.
    """
    came = {parent: -1}  # node -> link into it
    queue = [parent]
    for node in queue:
      for link in self._links(node, parent):
        head = self._heads[link]
        if not self._free[link] or head in came:
          continue
        # The search continues through switches. Ranks do not forward, so a rank
        # is either a destination or ignored.
        if head >= self._num_ranks:
          came[head] = link
          queue.append(head)
        elif head in outside:
          links = [link]
          while self._tails[links[-1]] != parent:
            links.append(came[self._tails[links[-1]]])
          return links[::-1]
    return []

  def _links(self, node: int, parent: int) -> list[int]:
    """Returns the links out of a node in the order in which to try them.

    Links to ranks come first, cyclically from the parent's number on, then
    links to switches. Parents at the same switch thus try different ranks first
    and do not all compete for the link to the rank with the lowest number.
    """
    key = (node, parent)
    if key not in self._ordered:
      n = self._num_ranks
      self._ordered[key] = sorted(
        self._out[node],
        key=lambda link: (
          self._heads[link] if self._heads[link] >= n
          else (self._heads[link] - parent) % n
        ),
      )
    return self._ordered[key]

  def end(self, roots: list[int]) -> None:
    """Ends a step. New ranks become parents when the next step begins.

    Args:
      roots: Unused; root of each turn that added a rank.
    """


def _ranks_within(topology: Topology, source: int) -> list[set[int]]:
  """Returns, for each number of links, the ranks within it of ``source``."""
  hops = [topology.hops(source, rank) for rank in range(topology.num_ranks)]
  within = [set() for _ in range(max(hops) + 1)]
  for limit, ranks in enumerate(within):
    ranks.update(rank for rank, far in enumerate(hops) if 0 <= far <= limit)
  return within
