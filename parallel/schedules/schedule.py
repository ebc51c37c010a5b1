"""A collective as data: who sends which chunk to whom, round by round.

The same value is proven by `parallel.schedules.check`, timed by
`parallel.network` and run by `parallel.schedules.run`.
"""

from collections.abc import Callable
import dataclasses
from typing import Literal, NamedTuple

from parallel.topology import Path, Topology

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]
COLLECTIVES: tuple[Collective, ...] = (
  "all_reduce", "reduce_scatter", "all_gather"
)


class Transfer(NamedTuple):
  """One chunk from one rank to another.

  Attributes:
    source: Rank that sends what it holds of the chunk before the round.
    destination: Rank that receives.
    chunk: Number of the chunk.
    operation: "reduce" adds to what the destination holds, "copy" replaces it.
    path: Nodes of the topology that it goes through.
  """

  source: int
  destination: int
  chunk: int
  operation: Literal["reduce", "copy"]
  path: Path


Round = tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Rounds of transfers; those of a round read the state before it.

  Chunks are equal parts of the data. A rank's slice in a reduce-scatter or
  all-gather is made of the chunks that it owns, in ascending order.

  Attributes:
    name: Of the algorithm.
    collective: "all_reduce", "reduce_scatter" or "all_gather".
    num_ranks: n.
    num_chunks: Parts into which the data are cut.
    rounds: One after the other.
    owners: Of each chunk, the rank that ends with its sum (reduce-scatter) or
      starts with it (all-gather); () for an all-reduce.
    link_capacity: A claim that `check` proves: in no round does a link carry
      more than this many chunks, for each multiple of the slowest link's
      bandwidth that it has. None: transfers may share links.
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
    """Of all rounds."""
    return sum(map(len, self.rounds))

  def owned(self, rank: int) -> tuple[int, ...]:
    """Chunks of a rank's slice, in the order of the slice."""
    return tuple(c for c, owner in enumerate(self.owners) if owner == rank)


def reversed_gather(gather: Schedule) -> Schedule:
  """The reduce-scatter that sends every copy of an all-gather back.

  Its rounds are the gather's from last to first, every path walked the other
  way, so it needs links in both directions.
  """
  return dataclasses.replace(
    gather, collective="reduce_scatter", rounds=reversed_rounds(gather.rounds)
  )


def reversed_rounds(rounds: tuple[Round, ...]) -> tuple[Round, ...]:
  """Copies as reductions, from last to first, every path the other way."""
  return tuple(
    tuple(
      Transfer(t.destination, t.source, t.chunk, "reduce", t.path[::-1])
      for t in transfers
    )
    for transfers in reversed(rounds)
  )


def scatter_then_gather(scatter: Schedule, gather: Schedule) -> Schedule:
  """The all-reduce that a reduce-scatter and an all-gather make."""
  assert scatter.owners == gather.owners, "both must cut the data alike"
  return dataclasses.replace(
    gather,
    collective="all_reduce",
    rounds=scatter.rounds + gather.rounds,
    owners=(),
  )


def from_gather(
  gather: Callable[[Topology], Schedule],
  topology: Topology,
  collective: Collective,
) -> Schedule:
  """Any of the three collectives, given a builder of all-gathers.

  The reduce-scatter is the all-gather walked back, or where links lack one
  back, an all-gather on the turned links.
  """
  if collective == "all_gather":
    return gather(topology)
  turned = gather(topology if topology.symmetric else topology.reversed())
  scatter = reversed_gather(turned)
  if collective == "reduce_scatter":
    return scatter
  gathered = turned if topology.symmetric else gather(topology)
  return scatter_then_gather(scatter, gathered)
