"""Pipelining of collective schedules: chunks are cut into pieces.

A rank forwards a piece while it receives the next one. A deep tree thus takes
the time of the most loaded link plus that of a few pieces, instead of a few
chunks. The result is an ordinary schedule with smaller chunks and more rounds.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import itertools

from parallel.base.checks import at_least
from parallel.plans.schedules.schedule import (
  Round,
  Schedule,
  Transfer,
  link_loads,
)
from parallel.plans.topology.graph import Topology

LinkEnds = tuple[int, int]  # source and destination node of a link

# A schedule of more transfers takes gigabytes, and minutes to build.
_MAX_TRANSFERS = 2**24


def pipelined(
  schedule: Schedule,
  topology: Topology,
  pieces: int,
  link_capacity: int | None = None,
) -> Schedule:
  """Cuts every chunk into pieces that are sent one after the other.

  Each piece has the transfers of its chunk, in the same order. The transfers
  are put into rounds piece by piece, each into the earliest round in which all
  links of its path have capacity left.

  Example:
    The ring's all-gather sends 4 chunks in 3 rounds. In halves, it takes twice
    as many rounds of half the time:

    >>> from parallel.plans.schedules import builders
    >>> from parallel.plans.topology.builders import ring
    >>> whole = builders.build("ring", ring(4), "all_gather")
    >>> halves = pipelined(whole, ring(4), pieces=2)
    >>> halves.num_chunks, len(halves.rounds)
    (8, 6)

  Args:
    schedule: Schedule to cut.
    topology: Network that the schedule runs on.
    pieces: Pieces of each chunk, at least 1; 1 returns the schedule unchanged.
    link_capacity: Pieces that a slowest link carries in a round. None uses the
      number of chunks that it carries in a round of the given schedule, so that
      a round takes 1 / ``pieces`` of the time, without latencies.

  Raises:
    ValueError: `pieces` is not a positive integer, or too large, or in some
      round a rank both sends and receives the same chunk. Builders make no such
      schedules.
  """
  at_least("pieces", pieces)
  if pieces == 1 or not schedule.rounds:
    return schedule
  if pieces * schedule.num_transfers > _MAX_TRANSFERS:
    raise ValueError(
      f"pieces={pieces} of {schedule.num_transfers:,} transfers are too many; "
      f"pieces must be at most {_MAX_TRANSFERS // schedule.num_transfers:,}"
    )
  capacity = (
    link_capacity or schedule.link_capacity or _capacity(schedule, topology)
  )
  for number, transfers in enumerate(schedule.rounds):
    received = {(t.destination, t.chunk) for t in transfers}
    for t in transfers:
      if (t.source, t.chunk) in received:
        raise ValueError(
          f"{schedule.name}, round {number}: rank {t.source} both sends and "
          f"receives chunk {t.chunk}, so pieces={pieces} must be 1"
        )
  in_order = (
    t._replace(chunk=t.chunk * pieces + piece)
    for piece in range(pieces)
    for transfers in schedule.rounds
    for t in transfers
  )
  return Schedule(
    schedule.name,
    schedule.collective,
    schedule.num_ranks,
    schedule.num_chunks * pieces,
    pack_into_rounds(in_order, topology.link_capacities(capacity)),
    tuple(rank for rank in schedule.owners for _ in range(pieces)),
    link_capacity=capacity,
  )


def _capacity(schedule: Schedule, topology: Topology) -> int:
  """Returns the smallest `Schedule.link_capacity` that a schedule respects."""
  multiples = topology.relative_bandwidths
  return max(
    -(-load // multiples[pair])
    for transfers in schedule.rounds
    for pair, load in link_loads(transfers).items()
  )


def pack_into_rounds(
  transfers: Iterable[Transfer], room: Mapping[LinkEnds, int]
) -> tuple[Round, ...]:
  """Puts each transfer into the earliest round with capacity on its links.

  Args:
    transfers: Transfers in an order in which they could be made one by one.
    room: Capacity of each link: transfers per round, at least 1.
  """
  rounds: list[list[Transfer]] = []
  # For each copy (rank, chunk): the first round that may send it, the one after
  # its arrival; and the first that may overwrite it, that of its last send.
  ready: dict[LinkEnds, int] = collections.defaultdict(int)
  sent: dict[LinkEnds, int] = collections.defaultdict(int)
  links = {pair: _LinkOccupancy(amount) for pair, amount in room.items()}
  ways: dict[Sequence[int], list[_LinkOccupancy]] = {}
  for t in transfers:
    copy = (t.destination, t.chunk)
    number = max(ready[t.source, t.chunk], sent[copy])
    if t.operation == "copy":
      number = max(number, ready[copy])
    way = ways.get(t.path)
    if way is None:
      way = ways[t.path] = [links[x] for x in itertools.pairwise(t.path)]
    # The earliest round with capacity left on all links of the path.
    start = -1
    while start != number:
      start = number
      for link in way:
        number = link.first_free(number)
    for link in way:
      link.take(number)
    sent[t.source, t.chunk] = max(sent[t.source, t.chunk], number)
    ready[copy] = max(ready[copy], number + 1)
    while len(rounds) <= number:
      rounds.append([])
    rounds[number].append(t)
  return tuple(map(tuple, rounds))


class _LinkOccupancy:
  """Occupancy of a link: the rounds in which it is full."""

  def __init__(self, room: int) -> None:
    self._room = room
    self._used: dict[int, int] = collections.defaultdict(int)
    # Full round -> a later round; all rounds in between are full.
    self._after: dict[int, int] = {}

  def first_free(self, number: int) -> int:
    """Returns the first round, at or after ``number``, that is not full."""
    after, free = self._after, number
    while free in after:
      free = after[free]
    while number != free:  # path compression shortens the next search
      after[number], number = free, after[number]
    return free

  def take(self, number: int) -> None:
    """Counts a transfer over the link in round ``number``."""
    self._used[number] += 1
    if self._used[number] == self._room:
      self._after[number] = number + 1
