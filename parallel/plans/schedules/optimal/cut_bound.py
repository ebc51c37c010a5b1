"""Lower bound on the time of an all-gather on a graph: the tightest cut.

Let S be a set of nodes that omits at least one rank. Every rank in S must send
its slice, M / n bytes of the M bytes in all, out of S. With B+(S) the bandwidth
of the links that leave S, no all-gather is faster than

    T* = M / n  max over S of (number of ranks in S) / B+(S)

Let y = min over S of B+(S) / (number of ranks in S), so that T* = M / (n y). It
is the rate at which every rank can send to all others at once. To test a rate
y, add a source with a link of bandwidth y to every rank. Some S has a smaller
ratio than y if and only if the max-flow from the source to some rank is below
n y (Edmonds). The cut of that max-flow is such an S, and its ratio is the next
y to test. This is Newton's method on y; it takes a few steps to the tightest S.

Source: ForestColl, arXiv 2402.06787, which searches y by bisection.
"""

import dataclasses
from fractions import Fraction
import math

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from parallel.plans.topology.graph import Topology

# Bandwidths are rounded to at most a millionth of the fastest one; scipy's
# max-flow takes 32-bit capacities.
_MAX_RESOLUTION = 1_000_000
_MAX_CAPACITY = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class CutBound:
  """Lower bound on an all-gather's time, and the cut that proves it.

  Attributes:
    seconds_per_byte: Bound divided by the bytes of all ranks' slices together.
    cut: Nodes on the sending side. Each rank in it must send its slice out.
    leaving: Bandwidth of the links out of ``cut``, in bytes per second.
  """

  seconds_per_byte: float
  cut: tuple[int, ...]
  leaving: float


def cut_bound(topology: Topology) -> CutBound:
  """Returns the bound that the tightest cut of a topology gives.

  Example:
    A ring of 4 ranks with links of 1 byte/s: three ranks send their quarters to
    the fourth over two links.

    >>> from parallel.plans.topology.builders import ring
    >>> cut_bound(ring(4, bandwidth=1.0))
    CutBound(seconds_per_byte=0.375, cut=(1, 2, 3), leaving=2.0)

  Args:
    topology: Topology of at least two ranks.

  Raises:
    ValueError: The topology has only one rank.
  """
  _, nodes = tightest_cut(topology)
  return bound_of(topology, nodes)


def bound_of(topology: Topology, nodes: frozenset[int]) -> CutBound:
  """Returns the bound that one cut gives.

  Args:
    topology: The topology.
    nodes: Nodes on the sending side of the cut, with at least one rank.
  """
  leaving = math.fsum(
    link.bandwidth for link in topology.links
    if link.source in nodes and link.destination not in nodes
  )
  ranks = sum(node < topology.num_ranks for node in nodes)
  seconds = ranks / leaving / topology.num_ranks
  return CutBound(seconds, tuple(sorted(nodes)), leaving)


def integer_capacities(topology: Topology) -> np.ndarray:
  """Returns the bandwidths as integers in a common unit.

  If no unit divides all of them, the unit is a millionth of the fastest one, or
  the finest that the 32-bit max-flow allows, and bandwidths are rounded down
  to a multiple of it, at least 1.

  Returns:
    int ``[node, node]``: bandwidth of the link from the first node to the
    second; 0 without a link.
  """
  slowest = min(link.bandwidth for link in topology.links)
  fastest = max(link.bandwidth for link in topology.links)
  # `tightest_cut` multiplies capacities by up to n - 1. Its source has a link
  # to each rank, of at most the smallest bandwidth into any rank.
  into = [0.0] * topology.num_nodes
  for link in topology.links:
    into[link.destination] += link.bandwidth / fastest
  n = topology.num_ranks
  largest = min(
    _MAX_RESOLUTION, _MAX_CAPACITY // max(n, math.ceil(max(into[:n])))
  )
  # Recovers ratios like 1, 2.5 or 1/3 as exact fractions from floats.
  ratios = {
    link.bandwidth: Fraction(link.bandwidth / slowest).limit_denominator(64)
    for link in topology.links
  }
  exact = all(
    abs(float(r) * slowest / b - 1) < 1e-9 for b, r in ratios.items()
  )
  unit = math.lcm(*(r.denominator for r in ratios.values()))
  if not exact or unit * fastest / slowest > largest:
    ratios = {
      b: Fraction(max(1, int(b / fastest * largest))) for b in ratios
    }
    unit = 1
  found = np.zeros((topology.num_nodes,) * 2, np.int64)
  for link in topology.links:
    found[link.source, link.destination] = unit * ratios[link.bandwidth]
  return found


def tightest_cut(topology: Topology) -> tuple[Fraction, frozenset[int]]:
  """Returns the largest rate at which all ranks can send, and the limiting cut.

  Args:
    topology: Topology of at least two ranks.

  Returns:
    The rate, in units of `integer_capacities`, and the cut's sending side.

  Raises:
    ValueError: The topology has only one rank.
  """
  n = topology.num_ranks
  if n < 2:
    raise ValueError(
      f"topology {topology.name} has one rank; a collective needs at least two"
    )
  capacities = integer_capacities(topology)
  # First guess: a cut around the rank with the least incoming bandwidth.
  into = capacities.sum(axis=0)[:n]
  last = int(np.argmin(into))
  cut = frozenset(range(topology.num_nodes)) - {last}
  y = Fraction(int(into[last]), n - 1)
  # The rate y is proven once the flows to all ranks suffice. Ranks are tested
  # in cyclic order: after y decreases, the rank that failed is tested first.
  proven = 0  # consecutive ranks whose flow suffices
  rank = 0
  while proven < n:
    # With y = p / q, capacities times q and source links of p are integers.
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
  """Solver of max-flows from a source that is linked to every rank.

  Args:
    capacities: int ``[node, node]``: capacity of each link.
    num_ranks: Number of ranks, n.
    weight: Capacity of the link from the source to each rank.
  """

  def __init__(
    self, capacities: np.ndarray, num_ranks: int, weight: int
  ) -> None:
    # The source is an additional node with the largest number.
    size = len(capacities)
    assert max(capacities.max(), weight) <= _MAX_CAPACITY, "32 bits overflow"
    self._source = size
    whole = np.zeros((size + 1, size + 1), np.int32)
    whole[:size, :size] = capacities
    whole[size, :num_ranks] = weight
    self._graph = sparse.csr_matrix(whole)
    self._num_ranks = num_ranks

  def _flow(self, rank: int):
    """Returns scipy's max-flow from the source to a rank."""
    return csgraph.maximum_flow(self._graph, self._source, rank)

  def reaches(self, wanted: int) -> bool:
    """Returns whether every rank's max-flow is at least `wanted`."""
    return all(
      self._flow(rank).flow_value >= wanted for rank in range(self._num_ranks)
    )

  def cut(self, rank: int, wanted: int) -> frozenset[int] | None:
    """Returns the source's side of a minimum cut between source and rank.

    Args:
      rank: The rank.
      wanted: Flow that suffices.

    Returns:
      Nodes on the source's side; None if the max-flow is at least `wanted`.
    """
    result = self._flow(rank)
    if result.flow_value >= wanted:
      return None
    # By max-flow min-cut, the source's side consists of the nodes reachable
    # over links with residual capacity.
    residual = self._graph - result.flow
    residual.data = (residual.data > 0).astype(np.int8)
    residual.eliminate_zeros()
    side = csgraph.breadth_first_order(
      residual, self._source, return_predecessors=False
    )
    return frozenset(map(int, side)) - {self._source}
