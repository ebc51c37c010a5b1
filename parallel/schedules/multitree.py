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

from operator import length_hint

from parallel.schedules.schedule import Schedule, Transfer
from parallel.topology import Path, Topology


def grow(
  topology: Topology, *, farthest_first: bool = False
) -> list[list[list[Path]]]:
  """Grows the trees of an all-gather.

  Args:
    topology: Any; ranks reach each other over links or through switches.
    farthest_first: From the second round of a step on, let trees take turns in
      the order of their roots' distance to the farthest rank, largest first,
      and not in the order of ranks.

  Returns:
    ``[step][root]``: paths from a rank of the root's tree to a new one.
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
  while state.missing:
    state.begin()
    grown: list[list[Path]] = [[] for _ in ranks]
    added = state.turns(ranks, grown)
    if farthest_first:
      again = set(added)
      added = [rank for rank in order if rank in again]
    while added:
      added = state.turns(added, grown)
    state.end(grown)
    steps.append(grown)
  return steps


def gather(topology: Topology, *, farthest_first: bool = False) -> Schedule:
  """The all-gather: chunk r goes down the tree of rank r."""
  rounds = tuple(
    tuple(
      Transfer(path[0], path[-1], root, "copy", path)
      for root, paths in enumerate(grown)
      for path in paths
    )
    for grown in grow(topology, farthest_first=farthest_first)
  )
  n = topology.num_ranks
  return Schedule(
    "multitree", "all_gather", n, n, rounds, tuple(range(n)), link_capacity=1
  )


class _Direct:
  """Ranks joined by links alone; the frontier of a tree is a list of links.

  Within a step a link that is taken stays taken, so each tree looks at each
  link of its frontier once per step.
  """

  def __init__(self, topology: Topology) -> None:
    n = topology.num_ranks
    self._paths = [(link.source, link.destination) for link in topology.links]
    self._heads = [link.destination for link in topology.links]
    self._out: list[list[int]] = [[] for _ in range(n)]
    for number, link in enumerate(topology.links):
      self._out[link.source].append(number)
    self._capacity = list(topology.multiples.values())
    self._member = [bytearray(n) for _ in range(n)]
    for root in range(n):
      self._member[root][root] = 1
    self._frontier = [list(self._out[root]) for root in range(n)]
    self.missing = n * (n - 1)

  def begin(self) -> None:
    self._free = self._capacity[:]
    self._left = sum(self._free)
    self._ahead = [iter(frontier) for frontier in self._frontier]
    self._done: list[list[int]] = [[] for _ in self._frontier]  # places

  def turns(self, roots: list[int], grown: list[list[Path]]) -> list[int]:
    """One turn each; returns the roots whose trees grew, in the same order."""
    free, heads, paths = self._free, self._heads, self._paths
    left = self._left
    added = []
    for root in roots:
      if not left:
        break
      member, ahead = self._member[root], self._ahead[root]
      for link in ahead:
        if free[link]:
          place = -1 - length_hint(ahead)  # from the frontier's end
          self._done[root].append(place)
          head = heads[link]
          if not member[head]:
            member[head] = 1
            free[link] -= 1
            left -= 1
            grown[root].append(paths[link])
            added.append(root)
            break
    self._left = left
    self.missing -= len(added)
    return added

  def end(self, grown: list[list[Path]]) -> None:
    for frontier, done, paths in zip(
      self._frontier, self._done, grown, strict=True
    ):
      for place in done:  # ascending: those closer to the end stay valid
        del frontier[place]
      for path in paths:
        frontier += self._out[path[1]]


class _Switched:
  """Ranks joined through switches too.

  A turn takes the way with the fewest links to a new rank, from the parent
  that joined first. A parent from which no way is free stays without one until
  the step ends.
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
    self._capacity = list(topology.multiples.values())
    self._members = [[root] for root in range(n)]  # in the order of joining
    self._joined = [{root} for root in range(n)]
    self.missing = n * (n - 1)

  def begin(self) -> None:
    self._free = self._capacity[:]
    self._parents = [list(members) for members in self._members]

  def turns(self, roots: list[int], grown: list[list[Path]]) -> list[int]:
    """One turn each; returns the roots whose trees grew, in the same order."""
    added = []
    for root in roots:
      best: list[int] = []
      stuck = set()
      for parent in self._parents[root]:
        links = self._find(parent, self._joined[root])
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
        path = (self._tails[best[0]], *(self._heads[link] for link in best))
        grown[root].append(path)
        self._members[root].append(new)
        self._joined[root].add(new)
        added.append(root)
    self.missing -= len(added)
    return added

  def _find(self, parent: int, joined: set[int]) -> list[int]:
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
        elif head not in joined:
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

  def end(self, grown: list[list[Path]]) -> None:
    """New ranks become parents when the next step begins."""
