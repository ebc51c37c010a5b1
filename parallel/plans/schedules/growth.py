"""Greedy growth of trees by arrival time.

Each tree sends one chunk from its root to all ranks. The state records when
each link becomes free and when each rank of a tree holds the chunk. This gives
the earliest time at which each tree can deliver its chunk to one more rank. The
tree with the earliest such time is extended and occupies the links of its path;
this is repeated until all trees are complete. Slow links are thus used only
where they do not delay a chunk, and trees become wide where latency dominates
and deep where bandwidth dominates.

Source: "earliest completing edge first" of Bhat, Raghavendra and Prasanna,
"Efficient collective communication in distributed heterogeneous systems",
ICDCS 1999, for one tree whose nodes send one message at a time. Deviation: many
trees grow at once here, on links and through switches.
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
import heapq

from parallel.plans.schedules.pipeline import pack_into_rounds
from parallel.plans.schedules.schedule import (
  Round,
  Schedule,
  Transfer,
  link_loads,
)
from parallel.plans.topology.graph import Path, Topology


@functools.lru_cache(maxsize=32)
def grow(
  topology: Topology,
  trees: int,
  size_bytes: float | None = None,
) -> tuple[tuple[int, Path], ...]:
  """Grows the trees of an all-gather.

  Args:
    topology: Network that the trees span.
    trees: Trees per rank; each takes an equal part of the rank's slice.
    size_bytes: Bytes of all slices together; None ignores latencies.

  Returns:
    (chunk, path) of each message, in the order in which they start. Rank r has
    chunks ``r * trees`` to ``(r + 1) * trees - 1``.
  """
  if topology.num_ranks == 1:
    return ()
  state = _Trees(topology, trees, size_bytes)
  # (earliest arrival at one more rank, ranks so far, chunk): of equal times,
  # the tree with the fewest ranks is first.
  soonest = [(state.plan(chunk), 1, chunk) for chunk in range(state.num_trees)]
  heapq.heapify(soonest)
  while soonest:
    _, size, chunk = soonest[0]
    # Other trees may have occupied links since this path was planned.
    if not state.is_plan_valid(chunk):
      heapq.heapreplace(soonest, (state.plan(chunk), size, chunk))
      continue
    state.extend(chunk)
    if size + 1 == topology.num_ranks:
      heapq.heappop(soonest)
    else:
      heapq.heapreplace(soonest, (state.plan(chunk), size + 1, chunk))
  return tuple((chunk, path) for _, chunk, path in sorted(state.messages))


class _Trees:
  """State of growth: partial trees and the times at which links become free.

  Links are numbered as in `Topology.links`, trees by their chunks.
  """

  def __init__(
    self, topology: Topology, trees: int, size_bytes: float | None
  ) -> None:
    n, links = topology.num_ranks, topology.links
    self.num_trees = n * trees
    self.messages: list[tuple[float, int, Path]] = []  # (start, chunk, path)
    self._num_ranks = n
    self._tails = [link.source for link in links]
    self._heads = [link.destination for link in links]
    chunk = (size_bytes or 1.0) / self.num_trees
    self._taken = [chunk / link.bandwidth for link in links]
    # Time from the start of a message until all of it has crossed the link.
    self._cost = [
      taken + (link.latency_s if size_bytes else 0.0)
      for taken, link in zip(self._taken, links, strict=True)
    ]
    self._free = [0.0] * len(links)  # s: when each link becomes free
    self._out: list[list[int]] = [[] for _ in range(topology.num_nodes)]
    for number, tail in enumerate(self._tails):
      self._out[tail].append(number)
    # For each tree: arrival time at each of its ranks; links out of these
    # ranks; planned path to the next rank, and arrival time there.
    self._has = [{chunk // trees: 0.0} for chunk in range(self.num_trees)]
    self._ahead = [list(self._out[c // trees]) for c in range(self.num_trees)]
    self._way: list[list[int]] = [[] for _ in range(self.num_trees)]
    self._planned = [0.0] * self.num_trees

  def plan(self, tree: int) -> float:
    """Plans a tree's earliest path to a new rank; returns the arrival time."""
    has, heads, tails = self._has[tree], self._heads, self._tails
    free, cost = self._free, self._cost
    ahead = [link for link in self._ahead[tree] if heads[link] not in has]
    self._ahead[tree] = ahead
    # For each link out of the tree's ranks: (time at which the message has
    # crossed it, link). Equal to `_crossing_time`, inlined in this innermost
    # loop.
    ways = [
      (max(has[tails[link]], free[link]) + cost[link], link) for link in ahead
    ]
    end, link = min(ways)
    if heads[link] >= self._num_ranks:
      end, way = self._search(has, ways)
    else:
      way = [link]
    self._way[tree], self._planned[tree] = way, end
    return end

  def _search(
    self, has: Mapping[int, float], ways: list[tuple[float, int]]
  ) -> tuple[float, list[int]]:
    """Searches for the earliest path through switches, by Dijkstra's algorithm.

    Args:
      has: Arrival time at each rank of the tree.
      ways: For each link out of these ranks, the time at which a message would
        have crossed it, and the link.

    Returns:
      Arrival time and links of the path.
    """
    heapq.heapify(ways)
    came: dict[int, int] = {}  # node -> link into it
    while True:
      end, link = heapq.heappop(ways)
      node = self._heads[link]
      if node in came:
        continue
      came[node] = link
      if node < self._num_ranks:
        way = [link]
        while self._tails[way[-1]] >= self._num_ranks:
          way.append(came[self._tails[way[-1]]])
        return end, way[::-1]
      for further in self._out[node]:
        there = self._heads[further]
        if there not in came and there not in has:
          heapq.heappush(ways, (self._crossing_time(further, end), further))

  def _crossing_time(self, link: int, ready: float) -> float:
    """Returns when a message that is ready at ``ready`` has crossed a link."""
    # Store and forward: a node sends a message on once all of it has arrived.
    return max(ready, self._free[link]) + self._cost[link]

  def is_plan_valid(self, tree: int) -> bool:
    """Returns whether a tree's planned path still has its arrival time."""
    # If so, it is still the earliest path, since links only become occupied.
    way = self._way[tree]
    end = self._has[tree][self._tails[way[0]]]
    for link in way:
      end = self._crossing_time(link, end)
    return end == self._planned[tree]

  def extend(self, tree: int) -> None:
    """Adds the rank at the end of the planned path to a tree."""
    way = self._way[tree]
    path = (self._tails[way[0]], *(self._heads[link] for link in way))
    end = self._has[tree][path[0]]
    start = max(end, self._free[way[0]])
    self.messages.append((start, tree, path))
    for link in way:
      start, end = max(end, self._free[link]), self._crossing_time(link, end)
      self._free[link] = start + self._taken[link]
    self._has[tree][path[-1]] = end
    self._ahead[tree] += self._out[path[-1]]


def schedule(
  name: str,
  topology: Topology,
  messages: Sequence[tuple[int, Path]],
  link_capacity: int = 1,
) -> Schedule:
  """Puts the messages of grown trees into rounds.

  If links have different bandwidths, several round lengths are tried: the times
  in which links of some of these bandwidths carry ``link_capacity`` chunks.
  A link that is too slow for one chunk carries one all the same, and the round
  lasts longer. The length with the smallest total time, without latencies, is
  chosen.

  Args:
    name: Name of the schedule.
    topology: Network that the schedule runs on.
    messages: Result of `grow` on this network.
    link_capacity: Largest number of chunks on a slowest link in a round.

  Returns:
    An all-gather.
  """
  n = topology.num_ranks
  trees = max(1, len({chunk for chunk, _ in messages}) // n)
  sent = [
    Transfer(path[0], path[-1], chunk, "copy", path)
    for chunk, path in messages
  ]
  found = []
  slowest, *_ = lengths = sample_bandwidths(topology)
  for speed in lengths:
    room = topology.link_capacities(link_capacity * slowest / speed)
    room = {pair: max(1, amount) for pair, amount in room.items()}
    found.append(pack_into_rounds(sent, room))
  return Schedule(
    name, "all_gather", n, n * trees,
    min(found, key=lambda rounds: seconds(rounds, topology)),
    tuple(rank for rank in range(n) for _ in range(trees)),
    link_capacity=link_capacity,
  )


def sample_bandwidths(topology: Topology) -> list[float]:
  """Returns at most four of the links' bandwidths, in bytes/s, ascending."""
  found = sorted({link.bandwidth for link in topology.links})
  some = [found[(len(found) - 1) * i // 3] for i in range(4)] if found else [1]
  return sorted(set(some))


def seconds(rounds: Iterable[Round], topology: Topology) -> float:
  """Returns the seconds of rounds with chunks of 1 byte, without latency."""
  links = topology.links_by_pair
  return sum(
    max(
      load / links[pair].bandwidth
      for pair, load in link_loads(transfers).items()
    )
    for transfers in rounds
  )
