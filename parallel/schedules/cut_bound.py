"""How fast an all-gather can be at best on a graph: the tightest cut.

    T* = M / n  max over S of |S and ranks| / B+(S)

S omits at least one rank and B+(S) is the bandwidth of the links that leave
it. With y bytes per second from a source to every rank, some S is too tight
for y exactly if some rank's max-flow from the source is below n y (Edmonds);
Newton's method on y finds the tightest S in a few rounds. Source: ForestColl,
arXiv 2402.06787, which searches y by bisection.
"""

import dataclasses
from fractions import Fraction
import math

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from parallel.topology import Topology

_LARGEST = 1_000_000  # of integer bandwidths: max-flow is exact in 32 bits


@dataclasses.dataclass(frozen=True)
class CutBound:
  """The bound of an all-gather or a reduce-scatter, and what proves it.

  Attributes:
    seconds_per_byte: T* / M, M being the bytes of all ranks' slices together.
    cut: The nodes of S; each rank in it must send its slice out of it.
    leaving: B+(S), bytes per second.
  """

  seconds_per_byte: float
  cut: tuple[int, ...]
  leaving: float


def cut_bound(topology: Topology) -> CutBound:
  """The tightest cut of a topology of at least two ranks."""
  _, nodes = tightest_cut(topology)
  return bound_of(topology, nodes)


def bound_of(topology: Topology, nodes: frozenset[int]) -> CutBound:
  """The bound that one cut gives."""
  leaving = math.fsum(
    link.bandwidth for link in topology.links
    if link.source in nodes and link.destination not in nodes
  )
  ranks = sum(node < topology.num_ranks for node in nodes)
  seconds = ranks / leaving / topology.num_ranks
  return CutBound(seconds, tuple(sorted(nodes)), leaving)


def integer_capacities(topology: Topology) -> np.ndarray:
  """int ``[node, node]``: bandwidths in a common unit.

  Rounded down where no unit divides all of them: by less than a millionth of
  the fastest one.
  """
  slowest = min(link.bandwidth for link in topology.links)
  fastest = max(link.bandwidth for link in topology.links)
  ratios = {
    link.bandwidth: Fraction(link.bandwidth / slowest).limit_denominator(64)
    for link in topology.links
  }
  exact = all(
    abs(float(r) * slowest / b - 1) < 1e-9 for b, r in ratios.items()
  )
  unit = math.lcm(*(r.denominator for r in ratios.values()))
  if not exact or unit * fastest / slowest > _LARGEST:
    ratios = {b: Fraction(int(b / fastest * _LARGEST)) for b in ratios}
    unit = 1
  found = np.zeros((topology.num_nodes,) * 2, np.int64)
  for link in topology.links:
    found[link.source, link.destination] = unit * ratios[link.bandwidth]
  return found


def tightest_cut(topology: Topology) -> tuple[Fraction, frozenset[int]]:
  """The largest y, in `integer_capacities`, and the S that limits it."""
  n = topology.num_ranks
  if n < 2:
    raise ValueError(f"{topology.name}: one rank has nothing to send")
  capacities = integer_capacities(topology)
  into = capacities.sum(axis=0)[:n]
  last = int(np.argmin(into))
  cut = frozenset(range(topology.num_nodes)) - {last}
  y = Fraction(int(into[last]), n - 1)
  proven = 0  # ranks in a row whose flow suffices
  rank = 0
  while proven < n:
    flow = SourceFlow(capacities * y.denominator, n, y.numerator)
    while proven < n:
      side = flow.cut(rank, n * y.numerator)
      if side is not None:
        break
      proven += 1
      rank = (rank + 1) % n
    if proven < n:
      cut, proven = side, 0
      inside = sorted(cut)
      outside = sorted(set(range(topology.num_nodes)) - cut)
      leaving = int(capacities[np.ix_(inside, outside)].sum())
      y = Fraction(leaving, sum(node < n for node in cut))
  return y, cut


class SourceFlow:
  """Max-flows from a source that feeds every rank.

  Args:
    capacities: int ``[node, node]``.
    num_ranks: n.
    weight: Of the links from the source, one number or one per rank.
  """

  def __init__(
    self, capacities: np.ndarray, num_ranks: int, weight: int
  ) -> None:
    size = len(capacities)
    self._source = size
    whole = np.zeros((size + 1, size + 1), np.int32)
    whole[:size, :size] = capacities
    whole[size, :num_ranks] = weight
    self._graph = sparse.csr_matrix(whole)
    self._num_ranks = num_ranks

  def _flow(self, rank: int):
    return csgraph.maximum_flow(self._graph, self._source, rank)

  def reaches(self, wanted: int) -> bool:
    """Whether every rank's flow is at least that much."""
    return all(
      self._flow(rank).flow_value >= wanted for rank in range(self._num_ranks)
    )

  def cut(self, rank: int, wanted: int) -> frozenset[int] | None:
    """The source's side of a smallest cut; None if the flow suffices."""
    result = self._flow(rank)
    if result.flow_value >= wanted:
      return None
    residual = self._graph - result.flow
    residual.data = (residual.data > 0).astype(np.int8)
    residual.eliminate_zeros()
    side = csgraph.breadth_first_order(
      residual, self._source, return_predecessors=False
    )
    return frozenset(map(int, side)) - {self._source}
