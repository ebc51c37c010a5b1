"""Packs spanning trees, k of every rank, into integer capacities.

Trees grow one at a time, breadth-first. Tree edge x -> y may carry as many
units as leave every set of ranks enough capacity in for the trees that must
still enter it,

    min over S with y in S, x not in S of  in(S) - (units of roots outside S)

a max-flow from x to y, with x feeding every root the units that it still has
to send. Source: Edmonds' theorem as ForestColl (arXiv 2402.06787) and Berczi
and Frank, "Packing arborescences", 2009, use it. Unlike ForestColl, a tree that
cannot grow with all its units gives some back to its root, and these start
again; so no other tree is ever unfinished.
"""

import dataclasses

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

_TRIES = 6  # edges that may carry a whole tree are looked for this often


@dataclasses.dataclass(frozen=True)
class Tree:
  """A spanning tree.

  Attributes:
    root: Its rank.
    weight: Units of capacity that it takes on each of its edges.
    edges: (parent, child), parents first.
  """

  root: int
  weight: int
  edges: tuple[tuple[int, int], ...]


def pack(capacities: np.ndarray, weight: int) -> list[Tree]:
  """Packs trees of ``weight`` units for every root.

  Args:
    capacities: int ``[rank, rank]``; with ``weight`` units from a source to
      each rank, every rank's max-flow is at least n times ``weight``.
    weight: k.

  Returns:
    Trees whose weights sum to k for each root.
  """
  state = _State(capacities, weight)
  trees = []
  while state.waiting.any():
    # Roots take turns, so that none is left with what others did not want.
    trees.append(_grow(state, int(np.argmax(state.waiting))))
  return trees


class _State:
  """Capacities and units that are left, and the graph of their max-flows.

  Attributes:
    capacities: int ``[rank, rank]``.
    waiting: int ``[rank]``: units of a root that are in no tree yet.
  """

  def __init__(self, capacities: np.ndarray, weight: int) -> None:
    n = len(capacities)
    self.capacities = capacities.copy()
    self.waiting = np.full(n, weight)
    # A hub, fed by the x of the question, feeds the roots. Entries that are
    # zero are kept, so that only data change from one flow to the next.
    rows, columns = np.nonzero(capacities)
    edges = len(rows)
    rows = np.concatenate([rows, np.arange(n), np.full(n, n)])
    columns = np.concatenate([columns, np.full(n, n), np.arange(n)])
    places = sparse.csr_matrix(
      (np.arange(1, len(rows) + 1, dtype=np.int32), (rows, columns)),
      shape=(n + 1, n + 1),
    )
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
    self.capacities[source, there] -= units
    self._graph.data[self._edge[source, there]] -= units

  def room(self, source: int, there: int, wanted: int) -> int:
    """Units of ``wanted`` that a tree may send along an edge."""
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
    data = self._graph.data
    data[self._from_hub] = waiting
    data[self._to_hub[source]] = total
    flow = csgraph.maximum_flow(self._graph, source, there).flow_value
    data[self._to_hub[source]] = 0
    return max(0, min(most, int(flow) - total))


def _grow(state: _State, root: int) -> Tree:
  n = len(state.capacities)
  weight = int(state.waiting[root])
  state.waiting[root] = 0
  joined = np.zeros(n, bool)
  joined[root] = True
  members, edges = [root], []
  while len(members) < n:
    source, there, units = _next(state, members, joined, weight)
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


def _next(
  state: _State, members: list[int], joined: np.ndarray, weight: int
) -> tuple[int, int, int]:
  """The first edge for all units, or the best of several."""
  best, tries = (0, 0, 0), 0
  for source in members:
    ahead = np.flatnonzero((state.capacities[source] > 0) & ~joined)
    # Larger capacities first: they leave more ways for other trees.
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
