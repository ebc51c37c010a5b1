"""A schedule of an all-reduce as a table of integers.

In a round of the table a device sends at most one chunk and receives at most
one, so a schedule's round may become several. Their order keeps its meaning,
that all transfers of a round read the state before it: no chunk is written
before it has been sent.
"""

import numpy as np

from parallel.schedules.check import check
from parallel.schedules.schedule import Schedule, Transfer

_OPERATIONS = {"reduce": 0, "copy": 1}


def table(schedule: Schedule) -> np.ndarray:
  """What each device does in each round.

  Args:
    schedule: Proven first; of an all-reduce.

  Returns:
    int32 ``[rounds, n, 4]``: to whom it sends, which chunk; into which chunk
    it receives, and whether it adds (0) or copies (1); -1 where it does not.

  Raises:
    ValueError: Another collective, or a round whose transfers cannot be put in
      such an order.
  """
  check(schedule)
  if schedule.collective != "all_reduce":
    raise ValueError(
      f"{schedule.name}: a table is of an all_reduce, not of "
      f"{schedule.collective}"
    )
  rows = []
  for number, transfers in enumerate(schedule.rounds):
    left = list(transfers)
    while left:
      chosen = _together(left)
      if not chosen:
        raise ValueError(
          f"{schedule.name}: round {number} has no order in which each device "
          f"sends and receives one chunk at a time: {left[0]}"
        )
      left = [t for t in left if t not in chosen]
      rows.append(_row(chosen, schedule.num_ranks))
  return np.stack(rows)


def _together(transfers: list[Transfer]) -> list[Transfer]:
  """As many as can go at once, none of which writes what others still read."""
  readers: dict[tuple[int, int], list[Transfer]] = {}
  for t in transfers:
    readers.setdefault((t.source, t.chunk), []).append(t)
  chosen: list[Transfer] = []
  sending: set[int] = set()
  receiving: set[int] = set()
  for transfer in transfers:
    more = [transfer]
    for t in more:  # and all that must not come later
      more += [
        other for other in readers.get((t.destination, t.chunk), ())
        if other not in more and other not in chosen
      ]
    sources = {t.source for t in more}
    destinations = {t.destination for t in more}
    fits = len(sources) == len(destinations) == len(more)
    if fits and not sources & sending and not destinations & receiving:
      chosen += more
      sending |= sources
      receiving |= destinations
  return chosen


def _row(transfers: list[Transfer], num_ranks: int) -> np.ndarray:
  row = np.full((num_ranks, 4), -1, np.int32)
  for t in transfers:
    row[t.source, :2] = t.destination, t.chunk
    row[t.destination, 2:] = t.chunk, _OPERATIONS[t.operation]
  return row
