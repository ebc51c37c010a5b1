"""Packing of k spanning trees per rank into integer capacities.

A tree of weight w stands for w equal trees and takes w units of capacity on
each of its edges. Trees grow one at a time, breadth-first. Each set S of ranks
must keep enough incoming capacity for all trees that still have to enter it,
one unit for each unit of a root outside S. A new tree edge x -> y may therefore
carry at most

    min over S with y in S, x not in S of  in(S) - (units of roots outside S)

units, where in(S) is the remaining capacity into S. This is the value of a
max-flow from x to y, minus the units of all roots, in a graph in which x also
has an edge to every root with the units that this root still has to send.

Source: Edmonds' theorem, as used by ForestColl (arXiv 2402.06787) and by Berczi
and Frank, "Packing arborescences", 2009. Deviation from ForestColl: a tree that
cannot grow with all its units returns some to its root, which later start as a
separate tree. So there is never more than one unfinished tree.
"""

import dataclasses

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

# Number of edges that are tried, with one max-flow each, to find an edge that
# carries all units of a tree; after that the best edge so far is taken.
_TRIES = 6


@dataclasses.dataclass(frozen=True)
class Tree:
  """Spanning tree of the ranks.

  Attributes:
    root: Rank whose data go down the tree.
    weight: Units of capacity that the tree takes on each of its edges.
    edges: (parent, child) pairs. A rank is a child before it is a parent.
  """

  root: int
  weight: int
  edges: tuple[tuple[int, int], ...]


def pack(capacities: np.ndarray, weight: int) -> list[Tree]:
  """Packs trees of ``weight`` units for every root.

  Args:
    capacities: int ``[rank, rank]``: units of capacity from one rank to
      another. With ``weight`` units from a source to each of n ranks, every
      rank's max-flow from it must be at least n times ``weight``.
    weight: Units of each root.

  Returns:
    Trees whose weights sum to ``weight`` for each root.
  """
  state = _State(capacities, weight)
  trees = []
  while state.waiting.any():
    # The root with the most remaining units is next. Roots thus take turns, and
    # no root is left with only the capacity that other roots did not use.
    trees.append(_grow(state, int(np.argmax(state.waiting))))
  return trees


class _State:
  """Remaining capacities and units, and the graph for the max-flows.

  Attributes:
    capacities: int ``[rank, rank]``: capacity not taken by any tree.
    waiting: int ``[rank]``: units of a root that are in no tree yet.
  """

  def __init__(self, capacities: np.ndarray, weight: int) -> None:
    n = len(capacities)
    self.capacities = capacities.copy()
    self.waiting = np.full(n, weight)
    # The flow's source x has an edge to a hub, node n, which has edges to the
    # roots, so that a new x changes one entry instead of n. The sparse matrix
    # is built once, with an entry, possibly zero, for every edge that may be
    # used. Between flows only its data change.
    rows, columns = np.nonzero(capacities)
    edges = len(rows)
    rows = np.concatenate([rows, np.arange(n), np.full(n, n)])
    columns = np.concatenate([columns, np.full(n, n), np.arange(n)])
    places = sparse.csr_matrix(
      (np.arange(1, len(rows) + 1, dtype=np.int32), (rows, columns)),
      shape=(n + 1, n + 1),
    )
    # The data are the edges' numbers, from 1, in the order of storage; argsort
    # inverts this order: edge i is stored at order[i].
    order = np.argsort(places.data)
    self._graph = places
    self._graph.data = np.zeros(len(rows), np.int32)
    self._edge = {
      (int(u), int(v)): int(order[i])
      for i, (u, v) in enumerate(zip(rows, columns, strict=True))
    }
    self._edges = order[:edges]
    self._to_hub, self._from_hub = order[edges : edges + n], order[edges + n :]
    self._graph.data[self._edges] = capacities[rows[:edges], columns[:edges]]

  def take(self, source: int, there: int, units: int) -> None:
    """Takes units of the capacity of the edge from ``source`` to ``there``.

    A negative number gives them back.
    """
    self.capacities[source, there] -= units
    self._graph.data[self._edge[source, there]] -= units

  def room(self, source: int, there: int, wanted: int) -> int:
    """Returns the number of units that a tree may send along an edge.

    Args:
      source: Tail of the edge, x, a rank of the tree.
      there: Head of the edge, y, a rank outside the tree.
      wanted: Units of the tree, an upper bound on the result.
    """
    caps, waiting = self.capacities, self.waiting
    total = int(waiting.sum())
    most = min(
      wanted,
      int(caps[source, there]),
      # The two smallest sets, {there} and all but {source}, need no flow.
      int(caps[:, there].sum() + waiting[there]) - total,
      int(caps[source].sum() - waiting[source]),
    )
    if most <= 0:
      return 0
    # A cut is the capacity into a set plus the units of the roots in it. Minus
    # the units of all roots, it is what trees from outside leave free.
    data = self._graph.data
    data[self._from_hub] = waiting
    data[self._to_hub[source]] = total
    flow = csgraph.maximum_flow(self._graph, source, there).flow_value
    data[self._to_hub[source]] = 0
    return max(0, min(most, int(flow) - total))


def _grow(state: _State, root: int) -> Tree:
  """Returns a tree of as many of the root's waiting units as possible."""
  n = len(state.capacities)
  weight = int(state.waiting[root])
  state.waiting[root] = 0
  joined = np.zeros(n, bool)
  joined[root] = True
  members, edges = [root], []
  while len(members) < n:
    source, there, units = _choose_edge(state, members, joined, weight)
    # If this edge cannot carry all units, the tree's weight is reduced, and its
    # existing edges give the difference back.
    if units < weight:
      for edge in edges:
        state.take(*edge, units - weight)
      state.waiting[root] += weight - units
      weight = units
    state.take(source, there, weight)
    edges.append((source, there))
    members.append(there)
    joined[there] = True
  return Tree(root, weight, tuple(edges))


def _choose_edge(
  state: _State, members: list[int], joined: np.ndarray, weight: int
) -> tuple[int, int, int]:
  """Returns an edge that carries all units of a tree, or the best one tried.

  Args:
    state: Remaining capacities and units.
    members: Ranks of the tree, in the order of joining.
    joined: bool ``[rank]``: whether the tree has the rank.
    weight: Units of the tree.

  Returns:
    Parent, child, and the units that the edge can carry, at least 1.
  """
  best, tries = (0, 0, 0), 0
  for source in members:
    ahead = np.flatnonzero((state.capacities[source] > 0) & ~joined)
    # Edges with more remaining capacity come first, which leaves more paths for
    # other trees.
    for there in ahead[np.argsort(-state.capacities[source, ahead],
                                  kind="stable")]:
      units = state.room(source, int(there), weight)
      if units > best[2]:
        best = (source, int(there), units)
      tries += 1
      if best[2] == weight or (best[2] and tries >= _TRIES):
        return best
  assert best[2], "the capacities do not hold the trees"
  return best
