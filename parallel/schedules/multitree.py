"""MultiTree: one spanning tree per rank, grown together step by step.

Every step restores all links. The trees take turns; in a turn a tree gains one
rank, over free links, from a rank that it held when the step began. A step
ends when a whole round of turns adds nothing. The trees are those of an
all-gather; a reduce-scatter walks them back.

Source: Huang et al., "Communication Algorithm-Architecture Co-Design for
Distributed Deep Learning", ISCA 2021, and its published simulator, which ends
a step when the last tree of a round adds nothing: more steps on meshes. Not in
the paper: a link with q times the slowest one's bandwidth takes q chunks per
step.
"""

import array
import itertools
import operator

import numpy as np

from parallel.schedules.schedule import Schedule, Transfer
from parallel.topology import Path, Topology


def grow(
  topology: Topology, *, farthest_first: bool = False
) -> list[tuple[tuple[int, ...], tuple[Path, ...]]]:
  """Grows the trees of an all-gather.

  Args:
    topology: Any; ranks reach each other over links or through switches.
    farthest_first: From the second round of a step on, let trees take turns in
      the order of their roots' distance to the farthest rank, largest first,
      and not in the order of ranks.

  Returns:
    ``[step]``: roots in the order of their turns, and for each turn the path
    from a rank of the root's tree to a new one.
  """
  n = topology.num_ranks
  ranks = list(range(n))
  order = ranks
  if farthest_first:
    far = [max(topology.hops(rank, v) for v in ranks) for rank in ranks]
    order = sorted(ranks, key=lambda rank: (-far[rank], -rank))
  grower = _Direct if topology.num_switches == 0 else _Switched
  state = grower(topology)
  steps = []
  missing = n * (n - 1)
  while missing:
    state.begin()
    roots, paths = state.turns(ranks)
    added = roots
    if farthest_first:
      again = set(added)
      added = [rank for rank in order if rank in again]
    while added:
      added, more = state.turns(added)
      roots += added
      paths += more
    state.end(roots)
    # Tuples of numbers, unlike lists, are no work for the garbage collector.
    steps.append((tuple(roots), tuple(paths)))
    missing -= len(roots)
  return steps


def gather(topology: Topology, *, farthest_first: bool = False) -> Schedule:
  """The all-gather: chunk r goes down the tree of rank r."""
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


class _Direct:
  """Ranks joined by links alone; a tree's frontier is the links out of it.

  Within a step a link that is taken stays taken, so each tree looks at each
  link of its frontier at most once per step. Between steps all frontiers are
  one array, in the order of roots.
  """

  def __init__(self, topology: Topology) -> None:
    n = topology.num_ranks
    self._paths = list(topology.links_by_pair)
    self._head_of = [head for _, head in self._paths]
    self._heads = np.array(self._head_of, np.int32)
    sources = np.array([source for source, _ in self._paths], np.int32)
    self._out = np.argsort(sources, kind="stable").astype(np.int32)
    self._degree = np.bincount(sources, minlength=n)
    self._ends = np.cumsum(self._degree)
    self._capacity = list(topology.multiples.values())
    self._member = [bytearray(n) for _ in range(n)]
    self._roots = self._frontier = np.empty(0, np.int32)
    self._held = np.zeros((n, n), bool)  # as of the last step
    ranks = np.arange(n, dtype=np.int32)
    self._join(ranks, ranks)

  def begin(self) -> None:
    self._free = self._capacity[:]
    self._left = sum(self._free)
    self._taken: list[int] = []
    links = array.array("i", self._frontier.tobytes())
    ranks = np.arange(len(self._member) + 1)
    bounds = np.searchsorted(self._roots, ranks).tolist()
    is_free = self._free.__getitem__
    self._ahead = [
      filter(is_free, links[low:high])
      for low, high in itertools.pairwise(bounds)
    ]

  def turns(self, roots: list[int]) -> tuple[list[int], list[Path]]:
    """One turn each: the roots whose trees grew, in the same order, and how."""
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
    """Their new ranks become parents."""
    self._join(np.array(roots, np.int32), self._heads[self._taken])

  def _join(self, roots: np.ndarray, new: np.ndarray) -> None:
    """Adds ranks to trees: their links to the frontiers, less those inside."""
    self._held[roots, new] = True
    degree = self._degree[new]
    ends = np.cumsum(degree)
    # The links out of a rank lie together in `_out`.
    place = np.repeat(self._ends[new] - ends, degree) + np.arange(ends[-1])
    roots = np.append(self._roots, np.repeat(roots, degree))
    links = np.append(self._frontier, self._out[place])
    live = np.flatnonzero(~self._held[roots, self._heads[links]])
    live = live[np.argsort(roots[live], kind="stable")]
    self._roots, self._frontier = roots[live], links[live]


class _Switched:
  """Ranks joined through switches too.

  A turn takes the way with the fewest links to a new rank, from the parent
  that joined first. A parent from which no way is free stays without one until
  the step ends; one without a free link out, which is most of them, has none.
  """

  def __init__(self, topology: Topology) -> None:
    n = topology.num_ranks
    self._num_ranks = n
    self._tails = [link.source for link in topology.links]
    self._heads = [link.destination for link in topology.links]
    self._out: list[list[int]] = [[] for _ in range(topology.num_nodes)]
    for number, link in enumerate(topology.links):
      self._out[link.source].append(number)
    self._ordered: dict[tuple[int, int], list[int]] = {}
    self._within = [_ranks_within(topology, rank) for rank in range(n)]
    self._capacity = list(topology.multiples.values())
    self._members = [[root] for root in range(n)]  # in the order of joining
    self._joined = [{root} for root in range(n)]

  def begin(self) -> None:
    self._free = self._capacity[:]
    self._parents = [list(members) for members in self._members]
    self._out_of = [0] * self._num_ranks  # free links, by rank
    self._into = [0] * self._num_ranks
    for tail, head, free in zip(
      self._tails, self._heads, self._free, strict=True
    ):
      if tail < self._num_ranks:
        self._out_of[tail] += free
      if head < self._num_ranks:
        self._into[head] += free

  def turns(self, roots: list[int]) -> tuple[list[int], list[Path]]:
    """One turn each: the roots whose trees grew, in the same order, and how."""
    added, paths = [], []
    reachable = {rank for rank, free in enumerate(self._into) if free}
    for root in roots:
      outside = reachable - self._joined[root]
      if not outside:
        continue
      best: list[int] = []
      stuck = set()
      for parent in self._parents[root]:
        within = self._within[parent]
        if best and within[min(len(best), len(within)) - 1].isdisjoint(outside):
          continue  # no way from here is shorter
        links = self._out_of[parent] and self._find(parent, outside)
        if not links:
          stuck.add(parent)
        elif not best or len(links) < len(best):
          best = links
        if 0 < len(best) <= 2:  # two links: beside the same switch
          break
      if stuck:
        self._parents[root] = [
          parent for parent in self._parents[root] if parent not in stuck
        ]
      if best:
        for link in best:
          self._free[link] -= 1
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
    """The fewest free links from a rank to one outside the tree, or none."""
    came = {parent: -1}  # node -> link into it
    queue = [parent]
    for node in queue:
      for link in self._links(node, parent):
        head = self._heads[link]
        if not self._free[link] or head in came:
          continue
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
    """Out of a node: to ranks, from the parent's number on, then to switches.

    So the ranks at a switch look for children at different ranks.
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
    """New ranks become parents when the next step begins."""


def _ranks_within(topology: Topology, source: int) -> list[set[int]]:
  """``[hops]``: ranks that many links away, or fewer."""
  hops = [topology.hops(source, rank) for rank in range(topology.num_ranks)]
  within = [set() for _ in range(max(hops) + 1)]
  for limit, ranks in enumerate(within):
    ranks.update(rank for rank, far in enumerate(hops) if 0 <= far <= limit)
  return within
