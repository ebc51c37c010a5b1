"""Pipelining: chunks are cut into pieces that follow one another.

A rank sends a piece on while the next one arrives. So a deep tree costs the
time of the fullest link plus that of a few pieces, not of a few chunks. What
comes out is a schedule like any other, with smaller chunks and more rounds.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import itertools

from parallel.checks import at_least
from parallel.schedules.schedule import Round, Schedule, Transfer, link_loads
from parallel.topology.graph import Topology

Pair = tuple[int, int]  # source and destination node of a link


def pipelined(
  schedule: Schedule,
  topology: Topology,
  pieces: int,
  link_capacity: int | None = None,
) -> Schedule:
  """Cuts every chunk into pieces and lets them follow one another.

  Each piece makes the transfers of its chunk in their order. One piece after
  another, every transfer gets the earliest round in which its links have room.

  Args:
    schedule: The schedule.
    topology: The network that it runs on.
    pieces: Pieces of each chunk; 1 leaves the schedule as it is.
    link_capacity: Pieces that the slowest link carries in a round. None stands
      for as many as it carries chunks in a round of the given schedule: then a
      round takes 1 / ``pieces`` of the time, without latencies.

  Raises:
    ValueError: `pieces` is no positive integer, or in some round a rank sends
      a chunk and hears of it, too. Builders make no such schedules.
  """
  at_least("pieces", pieces)
  if pieces == 1 or not schedule.rounds:
    return schedule
  capacity = (
    link_capacity or schedule.link_capacity or _capacity(schedule, topology)
  )
  for number, transfers in enumerate(schedule.rounds):
    heard = {(t.destination, t.chunk) for t in transfers}
    for t in transfers:
      if (t.source, t.chunk) in heard:
        raise ValueError(
          f"{schedule.name}, round {number}: rank {t.source} sends chunk "
          f"{t.chunk} while it hears of it; pieces={pieces} must be 1"
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
    in_rounds(in_order, topology.rooms(capacity)),
    tuple(rank for rank in schedule.owners for _ in range(pieces)),
    link_capacity=capacity,
  )


def _capacity(schedule: Schedule, topology: Topology) -> int:
  """Returns the least `link_capacity` that is true of a schedule."""
  multiples = topology.multiples
  return max(
    -(-load // multiples[pair])
    for transfers in schedule.rounds
    for pair, load in link_loads(transfers).items()
  )


def in_rounds(
  transfers: Iterable[Transfer], room: Mapping[Pair, int]
) -> tuple[Round, ...]:
  """Puts transfers into rounds, each into the earliest one that takes it.

  Args:
    transfers: Transfers in an order in which they could be made one by one.
    room: How many transfers a link carries in a round, at least 1.
  """
  rounds: list[list[Transfer]] = []
  # By copy, a chunk at a rank: the first round that may send it, since it has
  # arrived, and the first one that may overwrite it, since it has been sent.
  ready: dict[Pair, int] = collections.defaultdict(int)
  sent: dict[Pair, int] = collections.defaultdict(int)
  links = {pair: _Link(amount) for pair, amount in room.items()}
  ways: dict[Sequence[int], list[_Link]] = {}
  for t in transfers:
    copy = (t.destination, t.chunk)
    number = max(ready[t.source, t.chunk], sent[copy])
    if t.operation == "copy":
      number = max(number, ready[copy])
    way = ways.get(t.path)
    if way is None:
      way = ways[t.path] = [links[x] for x in itertools.pairwise(t.path)]
    # The earliest round that has room on all links of the path.
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


class _Link:
  """Which rounds of a link are full."""

  def __init__(self, room: int) -> None:
    self._room = room
    self._used: dict[int, int] = collections.defaultdict(int)
    # A full round -> a later one; those in between are full, too.
    self._after: dict[int, int] = {}

  def first_free(self, number: int) -> int:
    """Returns the first round from ``number`` on that is not full."""
    after, free = self._after, number
    while free in after:
      free = after[free]
    while number != free:  # so that the next search is short
      after[number], number = free, after[number]
    return free

  def take(self, number: int) -> None:
    """Counts a transfer in a round."""
    self._used[number] += 1
    if self._used[number] == self._room:
      self._after[number] = number + 1
