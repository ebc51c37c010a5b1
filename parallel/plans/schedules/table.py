"""Integer table of an all-reduce schedule, which communication kernels read.

In a round of the table, a device sends at most one chunk and receives at most
one chunk, so a round of the schedule may become several rounds of the table. In
a round of the schedule, all transfers read the state before it. The order of
the table's rounds preserves this: no chunk at a rank is overwritten before the
rank has sent it.
"""

import numpy as np

from parallel.plans.schedules.check import check
from parallel.plans.schedules.schedule import Schedule, Transfer

_OPERATIONS = {"reduce": 0, "copy": 1}


def table(schedule: Schedule) -> np.ndarray:
  """Returns the sends and receives of each device in each round.

  Example:
    First round of the ring on three devices. Device 0 sends chunk 1 to device 2
    and adds what it receives to chunk 2:

    >>> from parallel.plans.schedules import builders
    >>> from parallel.plans.topology.builders import ring
    >>> table(builders.build("ring", ring(3)))[0].tolist()
    [[2, 1, 2, 0], [0, 2, 0, 0], [1, 0, 1, 0]]

  Args:
    schedule: All-reduce schedule, which this function proves.

  Returns:
    int32 ``[rounds, n, 4]``: for each round and device, the destination of its
    send, the chunk that it sends, the chunk that it receives, and whether the
    received chunk is added (0) or copied (1). The first two are -1 if the
    device does not send, the last two if it does not receive.

  Raises:
    ValueError: The schedule is another collective, or the transfers of a round
      have no order with one send and one receive at a time.
  """
  check(schedule)
  if schedule.collective != "all_reduce":
    raise ValueError(
      f"{schedule.name}: only an all_reduce can be converted to a table, not "
      f"{schedule.collective}"
    )
  rows = []
  for number, transfers in enumerate(schedule.rounds):
    left = list(transfers)
    while left:
      chosen = _choose_round(left)
      if not chosen:
        raise ValueError(
          f"{schedule.name}: round {number} has no order in which each device "
          "sends and receives one chunk at a time; the first transfer left is "
          f"{left[0]}"
        )
      left = [t for t in left if t not in chosen]
      rows.append(_row(chosen, schedule.num_ranks))
  if not rows:  # one rank
    return np.empty((0, schedule.num_ranks, 4), np.int32)
  return np.stack(rows)


def _choose_round(transfers: list[Transfer]) -> list[Transfer]:
  """Chooses transfers for one round of the table, greedily.

  Returns:
    Transfers in which each rank sends at most once and receives at most once.
    None of them overwrites a chunk that a later transfer must read. Empty if
    no transfer can go first.
  """
  readers: dict[tuple[int, int], list[Transfer]] = {}
  for t in transfers:
    readers.setdefault((t.source, t.chunk), []).append(t)
  chosen: list[Transfer] = []
  sending: set[int] = set()
  receiving: set[int] = set()
  for transfer in transfers:
    more = [transfer]
    # A transfer overwrites its chunk at the destination. Transfers that send
    # the overwritten chunk must not come later, so they join the group, as do
    # those that send chunks which new members overwrite. The loop extends the
    # list over which it iterates.
    for t in more:
      more += [
        other for other in readers.get((t.destination, t.chunk), ())
        if other not in more and other not in chosen
      ]
    sources = {t.source for t in more}
    destinations = {t.destination for t in more}
    # The members of a group fit into this round together or not at all.
    fits = len(sources) == len(destinations) == len(more)
    if fits and not sources & sending and not destinations & receiving:
      chosen += more
      sending |= sources
      receiving |= destinations
  return chosen


def _row(transfers: list[Transfer], num_ranks: int) -> np.ndarray:
  """Returns one round of the table, int32 ``[n, 4]`` for n ranks.

  The four columns are those of `table`.
  """
  row = np.full((num_ranks, 4), -1, np.int32)
  for t in transfers:
    row[t.source, :2] = t.destination, t.chunk
    row[t.destination, 2:] = t.chunk, _OPERATIONS[t.operation]
  return row
