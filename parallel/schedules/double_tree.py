"""Double binary tree: two trees, half of the data each, in small pieces.

For an even n every rank has children in one of the trees only, so that both
together keep all ports busy. Source: Sanders, Speck and Traeff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35, 2009; the trees are those of MultiTree's simulator. There a
2-colouring of the edges says in which rounds a piece moves down an edge; here
it says who goes first, and others may use ports that are left.
"""

import collections
from collections.abc import Sequence

from parallel.schedules.colouring import partial_permutations
from parallel.schedules.schedule import (
  Collective,
  Round,
  Schedule,
  Transfer,
  from_gather,
  reversed_rounds,
)
from parallel.topology import Topology


def build(topology: Topology, collective: Collective) -> Schedule:
  """An all-reduce to the roots and back, in n pieces (n + 1 if n is odd).

  In an all-gather each rank's slice spreads along the edges from there, half
  of it in either tree; a reduce-scatter is its reverse.
  """
  if collective != "all_reduce":
    return from_gather(_gather, topology, collective)
  n = topology.num_ranks
  num_chunks = n + n % 2
  trees = _trees(n)
  starts = [(c % 2, trees[c % 2].index(-1)) for c in range(num_chunks)]
  back = topology.reversed()
  rounds = reversed_rounds(_spread(back, trees, starts))
  rounds += _spread(topology, trees, starts)
  return Schedule("double_tree", "all_reduce", n, num_chunks, rounds)


def _gather(topology: Topology) -> Schedule:
  n = topology.num_ranks
  starts = [(c % 2, c // 2) for c in range(2 * n)]
  return Schedule(
    "double_tree", "all_gather", n, 2 * n,
    _spread(topology, _trees(n), starts),
    tuple(rank for _, rank in starts),
  )


def _trees(n: int) -> list[list[int]]:
  """Of each rank its parent in either tree; the root's is -1."""
  first = [_parent(rank, n) for rank in range(n)]
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
  """With b the lowest set bit: (rank XOR b) OR 2 b, or rank XOR b."""
  if rank == 0:
    return -1
  low = rank & -rank
  above = (rank ^ low) | 2 * low
  return above if above < n else rank ^ low


def _spread(
  topology: Topology,
  trees: Sequence[Sequence[int]],
  starts: Sequence[tuple[int, int]],
) -> tuple[Round, ...]:
  """Copies chunks along the edges of their trees to all ranks.

  Args:
    topology: For the paths.
    trees: Parents.
    starts: Of each chunk its tree and the rank that has it.

  Returns:
    Rounds in which a rank sends at most one chunk and receives at most one.
  """
  beside: list[dict[int, list[int]]] = [
    collections.defaultdict(list) for _ in trees
  ]
  for tree, parents in enumerate(trees):
    for rank, parent in enumerate(parents):
      if parent >= 0:
        beside[tree][rank].append(parent)
        beside[tree][parent].append(rank)
  down = [
    (parent, rank)
    for parents in trees
    for rank, parent in enumerate(parents) if parent >= 0
  ]
  turns = [set(edges) for edges in partial_permutations(down)]
  waiting = [
    (chunk, rank, there)
    for chunk, (tree, rank) in enumerate(starts)
    for there in beside[tree][rank]
  ]
  rounds = []
  while waiting:
    turn = turns[len(rounds) % len(turns)]
    waiting.sort(key=lambda move, turn=turn: (move[1:] not in turn, move))
    sending, receiving = set(), set()
    moved, left = [], []
    for chunk, source, there in waiting:
      if source in sending or there in receiving:
        left.append((chunk, source, there))
        continue
      sending.add(source)
      receiving.add(there)
      moved.append((chunk, source, there))
      left += [
        (chunk, there, further)
        for further in beside[starts[chunk][0]][there] if further != source
      ]
    rounds.append(
      tuple(
        Transfer(
          source, there, chunk, "copy", topology.shortest_path(source, there)
        )
        for chunk, source, there in moved
      )
    )
    waiting = left
  return tuple(rounds)
