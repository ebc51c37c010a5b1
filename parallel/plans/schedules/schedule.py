"""Collective schedule as data: rounds of transfers between ranks.

`parallel.plans.schedules.check` proves such a schedule,
`parallel.plans.network` times it and `parallel.schedules.run` executes it. All
three read the same value, so the schedule that is timed is the one that runs.

Builders construct all-gathers. The reduce-scatter is the reversed all-gather,
and the all-reduce is the reduce-scatter followed by the all-gather.
"""

import collections
from collections.abc import Callable
import dataclasses
import itertools
from typing import Literal, NamedTuple

from parallel.plans.topology.graph import Path, Topology

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]
COLLECTIVES: tuple[Collective, ...] = (
  "all_reduce", "reduce_scatter", "all_gather"
)


class Transfer(NamedTuple):
  """Transfer of one chunk from one rank to another.

  Attributes:
    source: Rank that sends the value it held of the chunk before the round.
    destination: Rank that receives the chunk.
    chunk: Number of the chunk, from 0.
    operation: "reduce" adds to the destination's value, "copy" replaces it.
    path: Nodes of the topology along the chunk's route, including source and
      destination.
  """

  source: int
  destination: int
  chunk: int
  operation: Literal["reduce", "copy"]
  path: Path


Round = tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Collective as a sequence of rounds of transfers.

  All transfers of a round read the state from before the round. Chunks are
  equal parts of the data. In a reduce-scatter or all-gather, a rank's slice
  consists of the chunks that it owns, in ascending order.

  Attributes:
    name: Name of the algorithm.
    collective: "all_reduce", "reduce_scatter" or "all_gather".
    num_ranks: Number of ranks, n.
    num_chunks: Number of parts into which the data are cut.
    rounds: Rounds in the order of execution.
    owners: ``[chunk]``: rank that ends with the chunk's sum (reduce-scatter) or
      starts with the chunk (all-gather); () for an all-reduce.
    link_capacity: Largest number of chunks that a slowest link carries in a
      round. A faster link may carry more, in proportion to its bandwidth and
      rounded down (`Topology.link_capacities`). `check` proves this. None: any
      number of transfers may share a link.
  """

  name: str
  collective: Collective
  num_ranks: int
  num_chunks: int
  rounds: tuple[Round, ...]
  owners: tuple[int, ...] = ()
  link_capacity: int | None = None

  @property
  def num_transfers(self) -> int:
    """Total number of transfers in all rounds."""
    return sum(map(len, self.rounds))

  def owned(self, rank: int) -> tuple[int, ...]:
    """Returns the chunks of a rank's slice, in the order of the slice."""
    return tuple(c for c, owner in enumerate(self.owners) if owner == rank)


def link_loads(
  transfers: tuple[Transfer, ...],
) -> collections.Counter[tuple[int, int]]:
  """Counts the chunks that a round sends over each link.

  Args:
    transfers: Transfers of one round.

  Returns:
    (source node, destination node) -> number of chunks. A transfer counts on
    every link of its path.
  """
  return collections.Counter(
    pair
    for t in transfers
    for pair in itertools.pairwise(t.path)
  )


def reversed_gather(gather: Schedule) -> Schedule:
  """Returns the reduce-scatter that reverses an all-gather.

  It has the all-gather's rounds in reverse order, with every path reversed. The
  topology must therefore have the reverse of every link that is used.

  Args:
    gather: An all-gather.
  """
  # Each link's load moves to the reverse link. `link_capacity` thus remains
  # true if both directions have the same bandwidth.
  return dataclasses.replace(
    gather, collective="reduce_scatter", rounds=reversed_rounds(gather.rounds)
  )


def reversed_rounds(rounds: tuple[Round, ...]) -> tuple[Round, ...]:
  """Turns copies into reductions, in reverse order and along reversed paths.

  If the all-gather copies a chunk from a parent to a child of a tree, the
  reduce-scatter adds the child's partial sum to that of the parent. In reverse
  order, a child has received from all its own children before it sends.
  """
  return tuple(
    tuple(
      Transfer(t.destination, t.source, t.chunk, "reduce", t.path[::-1])
      for t in transfers
    )
    for transfers in reversed(rounds)
  )


def scatter_then_gather(scatter: Schedule, gather: Schedule) -> Schedule:
  """Returns the all-reduce: a reduce-scatter followed by an all-gather.

  Args:
    scatter: The reduce-scatter.
    gather: An all-gather in which each chunk has the same owner.
  """
  assert scatter.owners == gather.owners, "both must cut the data alike"
  capacities = (scatter.link_capacity, gather.link_capacity)
  return dataclasses.replace(
    gather,
    collective="all_reduce",
    rounds=scatter.rounds + gather.rounds,
    owners=(),
    # If the two directions of a network differ, the two capacities may differ.
    link_capacity=None if None in capacities else max(capacities),
  )


def from_gather(
  gather: Callable[[Topology], Schedule],
  topology: Topology,
  collective: Collective,
) -> Schedule:
  """Builds any of the three collectives from a builder of all-gathers.

  Args:
    gather: Function that builds the all-gather on a topology.
    topology: Network that the schedule runs on.
    collective: "all_reduce", "reduce_scatter" or "all_gather".
  """
  if collective == "all_gather":
    return gather(topology)
  # The reversal uses the reverse of each link. If a link has no reverse of the
  # same bandwidth, the gather is built on the reversed graph, so that its
  # reversal uses links that exist.
  turned = gather(topology if topology.symmetric else topology.reversed())
  scatter = reversed_gather(turned)
  if collective == "reduce_scatter":
    return scatter
  gathered = turned if topology.symmetric else gather(topology)
  return scatter_then_gather(scatter, gathered)
