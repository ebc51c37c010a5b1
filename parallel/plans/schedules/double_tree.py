"""Double binary tree: two trees, each of which carries half of the chunks.

For an even number of ranks, every rank has children in only one of the trees.
The two trees together thus use the ports of all ranks, whereas in a single tree
half of the ranks are leaves, which send nothing in a broadcast.

Source: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", Parallel Computing 35, 2009. The trees are those
of MultiTree's published simulator. Deviation: in the paper, a 2-colouring of
the edges fixes the rounds in which an edge sends chunks. Here, edges of one
colour only have priority in a round, and other edges may use the free ports.
"""

import collections
from collections.abc import Sequence, Set
import dataclasses
import functools
import heapq

from parallel.plans.schedules.colouring import partial_permutations
from parallel.plans.schedules.schedule import (
  Collective,
  Round,
  Schedule,
  Transfer,
  from_gather,
  link_loads,
  reversed_rounds,
)
from parallel.plans.topology.graph import Topology

_Edge = tuple[int, int]  # sender, receiver
_Move = tuple[int, int, int]  # chunk, sender, receiver


def build(topology: Topology, collective: Collective) -> Schedule:
  """Builds a collective on the double binary tree.

  With n ranks, the all-reduce sums n chunks (n + 1 if n is odd) towards the
  roots and copies back. In the all-gather, each rank's slice spreads along the
  edges, half of it in each tree. The reduce-scatter is the reversed all-gather.

  Args:
    topology: Network that the schedule runs on.
    collective: "all_reduce", "reduce_scatter" or "all_gather".

  Returns:
    The schedule. Its `link_capacity` is 1 if all links have the same bandwidth
    and no two transfers of a round share a link.
  """
  if collective != "all_reduce":
    return from_gather(_gather, topology, collective)
  n = topology.num_ranks
  num_chunks = n + n % 2  # even, so that both trees carry the same number
  trees = _tree_parents(n)
  starts = [(c % 2, trees[c % 2].index(-1)) for c in range(num_chunks)]
  # The reduction reverses this spread, so its paths use the reversed links.
  back = topology.reversed()
  rounds = reversed_rounds(_broadcast_rounds(back, trees, starts))
  rounds += _broadcast_rounds(topology, trees, starts)
  return _set_link_capacity(
    Schedule("double_tree", "all_reduce", n, num_chunks, rounds), topology
  )


def _set_link_capacity(schedule: Schedule, topology: Topology) -> Schedule:
  """Returns a schedule with `link_capacity` 1 if that is true of its rounds.

  It is true if all links are equal and no transfers of a round share a link.
  """
  loads = [
    load for transfers in schedule.rounds
    for load in link_loads(transfers).values()
  ]
  if not topology.even or max(loads, default=1) > 1:
    return schedule
  return dataclasses.replace(schedule, link_capacity=1)


def _gather(topology: Topology) -> Schedule:
  """Builds the all-gather; each rank has one chunk for each tree."""
  n = topology.num_ranks
  starts = [(c % 2, c // 2) for c in range(2 * n)]
  return _set_link_capacity(Schedule(
    "double_tree", "all_gather", n, 2 * n,
    _broadcast_rounds(topology, _tree_parents(n), starts),
    tuple(rank for _, rank in starts),
  ), topology)


def _tree_parents(n: int) -> list[list[int]]:
  """Returns the parent of each of n ranks, ``[tree][rank]``; -1 at the root."""
  first = [_parent(rank, n) for rank in range(n)]
  # In the first tree odd ranks are leaves. For an even n, mirroring the order
  # of the ranks makes the even ones leaves. For an odd n, mirroring would keep
  # the parities, so the tree is shifted by one rank instead; rank 0 then takes
  # the place of the last rank, first[-1].
  if n % 2 == 0:
    second = [n - 1 - first[n - 1 - rank] for rank in range(n)]
    second = [-1 if parent == n else parent for parent in second]
  else:
    second = [
      -1 if first[rank - 1] < 0 else (first[rank - 1] + 1) % n
      for rank in range(n)
    ]
  return [first, second]


def _parent(rank: int, n: int) -> int:
  """Returns a rank's parent in the first tree.

  With b the lowest set bit of the rank, the parent is (rank XOR b) OR 2 b, or
  rank XOR b if no rank has that number. A parent's lowest set bit is larger, so
  ranks with b = 1, the odd ones, are leaves.
  """
  if rank == 0:
    return -1
  low = rank & -rank
  above = (rank ^ low) | 2 * low
  return above if above < n else rank ^ low


def _broadcast_rounds(
  topology: Topology,
  trees: Sequence[Sequence[int]],
  starts: Sequence[tuple[int, int]],
) -> tuple[Round, ...]:
  """Returns rounds that copy chunks along their trees' edges to all ranks.

  Args:
    topology: Network in which paths are looked up.
    trees: ``[tree][rank]``: parent of the rank; -1 at the root.
    starts: ``[chunk]``: tree of the chunk, and rank that holds it initially.

  Returns:
    Rounds in which a rank sends at most one chunk and receives at most one.
  """
  beside = [_neighbours(parents) for parents in trees]
  down = [
    (parent, rank)
    for parents in trees
    for rank, parent in enumerate(parents) if parent >= 0
  ]
  # In both trees together, a rank has at most two edges to children and two
  # from parents. The edges are split into two sets, in each of which a rank
  # sends and receives at most once; the sets alternately have priority.
  turns = [set(edges) for edges in partial_permutations(down)]
  # edge -> heap of the chunks that its sender holds and has to send
  waiting: dict[_Edge, list[int]] = collections.defaultdict(list)
  for chunk, (tree, rank) in enumerate(starts):
    for there in beside[tree][rank]:
      waiting[rank, there].append(chunk)  # ascending: a heap
  path = functools.cache(topology.shortest_path)  # of an edge
  rounds = []
  while waiting:
    turn = turns[len(rounds) % len(turns)]
    moved = _take_moves(waiting, turn)
    # Chunks that arrive in this round can be forwarded from the next one on.
    for chunk, source, there in moved:
      for further in beside[starts[chunk][0]][there]:
        if further != source:
          heapq.heappush(waiting[there, further], chunk)
    rounds.append(tuple(
      Transfer(source, there, chunk, "copy", path(source, there))
      for chunk, source, there in moved
    ))
  return tuple(rounds)


def _neighbours(parents: Sequence[int]) -> dict[int, list[int]]:
  """Returns the neighbours of each rank in a tree, given each rank's parent.

  A chunk may start at any rank of its tree, so it moves both up and down edges.
  """
  found: dict[int, list[int]] = collections.defaultdict(list)
  for rank, parent in enumerate(parents):
    if parent >= 0:
      found[rank].append(parent)
      found[parent].append(rank)
  return found


def _take_moves(
  waiting: dict[_Edge, list[int]], turn: Set[_Edge]
) -> list[_Move]:
  """Removes and returns a round's moves: at most a send and receive per rank.

  ``waiting`` has the chunks to send over each tree edge (source, destination).
  Each edge offers only its first chunk, since its chunks share both ports.
  Edges in `turn` have priority, then chunks with the smallest numbers. A move
  is (chunk, source, destination).
  """
  heads = sorted(
    (edge not in turn, chunks[0], edge) for edge, chunks in waiting.items()
  )
  sending, receiving = set(), set()
  moved = []
  for _, chunk, (source, there) in heads:
    if source in sending or there in receiving:
      continue
    sending.add(source)
    receiving.add(there)
    moved.append((chunk, source, there))
    heapq.heappop(waiting[source, there])
    if not waiting[source, there]:
      del waiting[source, there]
  return moved
