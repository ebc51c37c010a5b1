"""A collective as data: who sends which chunk to whom, round by round.

`parallel.schedules.check` proves such a schedule, `parallel.network` times it
and `parallel.schedules.run` executes it. All three read the same value, so
what is timed is what runs.

Builders make all-gathers. The reduce-scatter is the all-gather walked back,
and the all-reduce is the reduce-scatter followed by the all-gather.
"""

import collections
from collections.abc import Callable
import dataclasses
import itertools
from typing import Literal, NamedTuple

from parallel.topology.graph import Path, Topology

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]
COLLECTIVES: tuple[Collective, ...] = (
  "all_reduce", "reduce_scatter", "all_gather"
)


class Transfer(NamedTuple):
  """One chunk that one rank sends to another.

  Attributes:
    source: Rank that sends the value it held of the chunk before the round.
    destination: Rank that receives the chunk.
    chunk: Number of the chunk, from 0.
    operation: "reduce" adds to what the destination holds, "copy" replaces it.
    path: Nodes of the topology that the chunk goes through, source and
      destination included.
  """

  source: int
  destination: int
  chunk: int
  operation: Literal["reduce", "copy"]
  path: Path


Round = tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A collective as a sequence of rounds of transfers.

  All transfers of a round read the state from before the round. Chunks are
  equal parts of the data. In a reduce-scatter or all-gather, a rank's slice
  consists of the chunks that it owns, in ascending order.

  Attributes:
    name: Name of the algorithm.
    collective: "all_reduce", "reduce_scatter" or "all_gather".
    num_ranks: Number of ranks, n.
    num_chunks: Number of parts into which the data are cut.
    rounds: Rounds, in the order in which they happen.
    owners: ``[chunk]``: the rank that ends with the chunk's sum
      (reduce-scatter) or starts with the chunk (all-gather). It is () for an
      all-reduce.
    link_capacity: A claim that `check` proves. In no round does a link carry
      more than this many chunks times its bandwidth over the slowest link's,
      rounded down (`Topology.rooms`). None claims nothing: transfers may share
      links.
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
    """Number of transfers in all rounds together."""
    return sum(map(len, self.rounds))

  def owned(self, rank: int) -> tuple[int, ...]:
    """Returns the chunks of a rank's slice, in the order of the slice."""
    return tuple(c for c, owner in enumerate(self.owners) if owner == rank)


def link_loads(
  transfers: tuple[Transfer, ...],
) -> collections.Counter[tuple[int, int]]:
  """Counts the chunks that a round sends over each link.

  Args:
    transfers: The transfers of one round.

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
  """Returns the reduce-scatter that sends every copy of an all-gather back.

  Its rounds are the gather's from last to first, with every path walked the
  other way. So the topology needs the reverse of every link that is used.
  """
  # Each link's load moves to the reverse link, so the claim `link_capacity`
  # stays true where both directions have the same bandwidth.
  return dataclasses.replace(
    gather, collective="reduce_scatter", rounds=reversed_rounds(gather.rounds)
  )


def reversed_rounds(rounds: tuple[Round, ...]) -> tuple[Round, ...]:
  """Turns copies into reductions, from last to first, along reversed paths.

  Where the gather copies a chunk from a tree's parent to a child, the scatter
  adds the child's partial sum to the parent's. Going from last to first, a
  child has heard from all of its own children before it sends.
  """
  return tuple(
    tuple(
      Transfer(t.destination, t.source, t.chunk, "reduce", t.path[::-1])
      for t in transfers
    )
    for transfers in reversed(rounds)
  )


def scatter_then_gather(scatter: Schedule, gather: Schedule) -> Schedule:
  """Returns the all-reduce: a reduce-scatter and then an all-gather.

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
    # Where a network's two directions differ, so may the halves' claims.
    link_capacity=None if None in capacities else max(capacities),
  )


def from_gather(
  gather: Callable[[Topology], Schedule],
  topology: Topology,
  collective: Collective,
) -> Schedule:
  """Builds any of the three collectives with a builder of all-gathers.

  Args:
    gather: Builds the all-gather on a topology.
    topology: The network that the schedule runs on.
    collective: The collective to build.
  """
  if collective == "all_gather":
    return gather(topology)
  # Walking back uses the reverse of each link. Where a link has no reverse of
  # the same bandwidth, the gather is built on the reversed graph, so that its
  # walk back runs over links that exist.
  turned = gather(topology if topology.symmetric else topology.reversed())
  scatter = reversed_gather(turned)
  if collective == "reduce_scatter":
    return scatter
  gathered = turned if topology.symmetric else gather(topology)
  return scatter_then_gather(scatter, gathered)
