"""Symbolic proof that a schedule performs its collective.

The proof runs the schedule on sets. A rank's copy of a chunk is represented by
the set of ranks whose summands it contains, stored as a bit mask. Three rules
ensure that each summand is counted exactly once in the result: a rank sends
only values that it held before the round, a reduction joins disjoint sets, and
a copy does not lose a summand. A round without transfers is rejected: it sends
nothing and takes no time, so it indicates a fault of its builder.
"""

import collections
import itertools

from parallel.base.checks import known
from parallel.plans.schedules.schedule import (
  COLLECTIVES,
  Schedule,
  Transfer,
  link_loads,
)
from parallel.plans.topology.graph import Topology


def check(schedule: Schedule, topology: Topology | None = None) -> None:
  """Proves a schedule by running it on sets of ranks.

  Example:
    >>> import dataclasses
    >>> from parallel.plans.schedules import builders
    >>> from parallel.plans.topology.builders import ring
    >>> schedule = builders.build("ring", ring(4))
    >>> check(schedule, ring(4))
    >>> check(dataclasses.replace(schedule, rounds=schedule.rounds[:-1]))
    Traceback (most recent call last):
    ValueError: ring, all_reduce: after 5 rounds chunk 1 at rank 0 lacks the \
summands of ranks 1, 2, 3

  Args:
    schedule: Schedule to prove.
    topology: If given, paths must follow its links, and the schedule's
      `link_capacity` is proven too.

  Raises:
    ValueError: The schedule is wrong. The message names the first wrong
      transfer and its round, or a round that is empty.
  """
  _check_fields(schedule, topology)
  held = _initial_masks(schedule)
  rooms = None
  if topology is not None and schedule.link_capacity is not None:
    rooms = topology.link_capacities(schedule.link_capacity)
  for number, transfers in enumerate(schedule.rounds):
    if not transfers:
      raise ValueError(
        f"{schedule.name}, {schedule.collective}: round {number} of "
        f"{len(schedule.rounds)} has no transfer"
      )
    _check_round(schedule, number, transfers, held)
    if topology is not None:
      _check_paths(schedule, number, transfers, topology, rooms)
  _check_end(schedule, held)


def _check_fields(schedule: Schedule, topology: Topology | None) -> None:
  """Checks the fields of a schedule except its rounds."""
  n, chunks = schedule.num_ranks, schedule.num_chunks
  name = schedule.name
  known(f"{name}: collective=", schedule.collective, COLLECTIVES)
  if n < 1 or chunks < 1:
    raise ValueError(
      f"{name}: num_ranks={n} and num_chunks={chunks} must be at least 1"
    )
  if topology is not None and topology.num_ranks != n:
    raise ValueError(
      f"schedule {name} has {n} ranks, but topology {topology.name} has "
      f"{topology.num_ranks}; they must be equal"
    )
  if schedule.collective == "all_reduce":
    if schedule.owners:
      raise ValueError(f"{name}: chunks of an all-reduce must have no owners")
    return
  counts = collections.Counter(schedule.owners)
  even = {rank: chunks // n for rank in range(n)}
  if counts != even or chunks % n:
    raise ValueError(
      f"{name}: every rank must own an equal share of the {chunks} chunks, "
      f"got {dict(sorted(counts.items()))}"
    )


def _initial_masks(schedule: Schedule) -> list[list[int]]:
  """Returns the bit masks before the first round, ``[rank][chunk]``.

  Bit r of a mask is set if the copy contains the summand of rank r.
  """
  n, chunks = schedule.num_ranks, schedule.num_chunks
  if schedule.collective != "all_gather":
    return [[1 << rank] * chunks for rank in range(n)]
  held = [[0] * chunks for _ in range(n)]
  for chunk, owner in enumerate(schedule.owners):
    # A gathered chunk is complete from the start, so all its bits are set;
    # the proof does not distinguish its summands. Other ranks hold nothing.
    held[owner][chunk] = (1 << n) - 1
  return held


def _check_round(
  schedule: Schedule,
  number: int,
  transfers: tuple[Transfer, ...],
  held: list[list[int]],
) -> None:
  """Applies round ``number`` to ``held`` in place; checks every transfer.

  ``held`` are bit masks as `_initial_masks` returns them.
  """
  n, chunks = schedule.num_ranks, schedule.num_chunks
  # Two passes: all sent values are read before any is written, because the
  # transfers of a round read the state before it.
  sent = []
  for place, t in enumerate(transfers):
    if not (0 <= t.source < n and 0 <= t.destination < n) or (
      t.source == t.destination
    ):
      raise _transfer_error(
        schedule, number, place,
        f"ranks must differ, and lie in [0, {n})",
      )
    if not 0 <= t.chunk < chunks:
      raise _transfer_error(
        schedule, number, place,
        f"its chunk must lie in [0, {chunks})",
      )
    if t.operation not in ("reduce", "copy"):
      raise _transfer_error(
        schedule, number, place,
        "its operation must be reduce or copy",
      )
    ends = (t.path[0], t.path[-1]) if t.path else None
    if ends != (t.source, t.destination):
      raise _transfer_error(
        schedule, number, place,
        f"its path is {t.path}; it must lead from the source to the "
        "destination",
      )
    sent.append(held[t.source][t.chunk])
    if not sent[-1]:
      raise _transfer_error(
        schedule, number, place,
        "the source must hold the chunk, but has no copy of it",
      )
  reduced, copied = set(), set()
  for place, (t, mask) in enumerate(zip(transfers, sent, strict=True)):
    copy = (t.destination, t.chunk)
    mine = held[t.destination][t.chunk]
    # Several reductions may reach one copy in a round, since sums commute. A
    # copy operation must be alone: with another transfer the result would
    # depend on the order of arrival.
    if copy in copied or (t.operation == "copy" and copy in reduced):
      raise _transfer_error(
        schedule, number, place,
        "a copy allows no other transfer to its chunk in the same round",
      )
    (copied if t.operation == "copy" else reduced).add(copy)
    if t.operation == "copy":
      if mine & ~mask:
        raise _transfer_error(
          schedule,
          number,
          place,
          "the copy would lose the summands of ranks "
          f"{_format_ranks(mine & ~mask)}",
        )
    elif mine & mask:
      raise _transfer_error(
        schedule, number, place,
        f"the summands of ranks {_format_ranks(mine & mask)} would count twice",
      )
    held[t.destination][t.chunk] = mine | mask


def _check_paths(
  schedule: Schedule,
  number: int,
  transfers: tuple[Transfer, ...],
  topology: Topology,
  rooms: dict[tuple[int, int], int] | None,
) -> None:
  """Checks that paths of round ``number`` follow links of the topology.

  No link may carry more chunks than ``rooms`` has for it; None for no limits.
  """
  pairs = topology.links_by_pair
  for place, t in enumerate(transfers):
    for pair in itertools.pairwise(t.path):
      if pair not in pairs:
        raise _transfer_error(
          schedule, number, place,
          f"{topology.name} has no link from {pair[0]} to {pair[1]}",
        )
  if rooms is None:
    return
  for pair, load in link_loads(transfers).items():
    if load > rooms[pair]:
      place = next(
        place for place, t in enumerate(transfers)
        if pair in itertools.pairwise(t.path)
      )
      raise _transfer_error(
        schedule, number, place,
        f"{load} chunks share the link from {pair[0]} to {pair[1]}, which has "
        f"room for {rooms[pair]}",
      )


def _check_end(schedule: Schedule, held: list[list[int]]) -> None:
  """Checks that every rank ends with the sums that the collective requires.

  ``held`` are the bit masks after the last round, as in `_initial_masks`.
  """
  everyone = (1 << schedule.num_ranks) - 1
  for rank, copies in enumerate(held):
    wanted = range(schedule.num_chunks)
    if schedule.collective == "reduce_scatter":
      wanted = schedule.owned(rank)
    for chunk in wanted:
      if copies[chunk] != everyone:
        raise ValueError(
          f"{schedule.name}, {schedule.collective}: after "
          f"{len(schedule.rounds)} rounds chunk {chunk} at rank {rank} lacks "
          f"the summands of ranks {_format_ranks(everyone & ~copies[chunk])}"
        )


def _transfer_error(
  schedule: Schedule, number: int, place: int, why: str
) -> ValueError:
  t = schedule.rounds[number][place]
  return ValueError(
    f"{schedule.name}, {schedule.collective}: round {number}, transfer "
    f"{place} ({t.operation} of chunk {t.chunk}, rank {t.source} to "
    f"{t.destination}): {why}"
  )


def _format_ranks(mask: int) -> str:
  """Formats at most eight ranks of a bit mask, for an error message."""
  found = [i for i in range(mask.bit_length()) if mask >> i & 1]
  return ", ".join(map(str, found[:8])) + (" ..." if len(found) > 8 else "")
