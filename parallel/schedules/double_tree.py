"""Double binary tree: two trees, half of the data each, in small pieces.

For an even n every rank has children in one of the trees only, so that both
together keep all ports busy. Source: Sanders, Speck and Traeff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35, 2009; the trees are NCCL's, as in MultiTree's simulator. There a
colouring of the edges says when a piece moves; here it moves as soon as its
ports are free.
"""

from collections.abc import Sequence

from parallel.schedules.schedule import Collective, Schedule, Transfer
from parallel.topology import Topology


def build(topology: Topology, collective: Collective) -> Schedule:
  """Pieces of 1/n of the data.

  An all-reduce reduces to the roots and copies back. In an all-gather each
  rank's slice spreads along the edges from there, half of it in either tree; a
  reduce-scatter is its reverse.
  """
  n = topology.num_ranks
  trees = [parents(n), second_parents(n)]
  if collective == "all_reduce":
    chunks = {tree: range(tree, n + n % 2, 2) for tree in (0, 1)}
    down = [
      (chunk, move)
      for chunk in range(n + n % 2)
      for move in _spread(trees[chunk % 2], trees[chunk % 2].index(-1))
    ]
    del chunks
    return Schedule()
  return None
