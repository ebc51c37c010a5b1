"""Schedules of the transfers in a shared cell: which client sends when.

The clients of a radio cell share its capacity C: the sum of their rates is at
most C. Client k has an update of S_k bytes, which is ready at time a_k, and
sends it at a rate of at most c_k.

If no client limits the rate (c_k >= C), no schedule ends earlier than equal
sharing. Let a schedule use the whole capacity while an update is waiting, and
let [b, T] be its last busy interval. Updates ready before b were sent by
b, so the (T - b) C bytes that it sends in [b, T] became ready at b or later,
and no schedule sends them before T. Every schedule that does not pause while an
update waits thus ends at T: sharing and all orders.

With limits, sharing gives clients with a low limit less than they could use,
and the cell is not full at the end. `earliest_schedule` solves a linear
program; it is exact, since only the number of bytes that a client sends between
consecutive ready times matters. Sharing delays all updates, so fewer meet a
deadline than if clients send one after another: `select_on_time_clients` solves
a mixed-integer program.

Downlinks differ, since clients compute before they send. Let d be the time of
one model alone. If K equal models are sent one after another, the i-th arrives
at i d; if they share the cell, all arrive at K d. So no update is ready later
than with sharing. The first is ready (K - 1) d earlier, and the round ends as
much earlier if the cell's uplink is busy from then on.

Example:
  >>> from caatnet.federated import uplinks
  >>> slow, fast = uplinks.Uplink(0.0, 9.0, 3.0), uplinks.Uplink(0.0, 4.0)
  >>> each = [slow, fast, fast, fast]
  >>> max(uplinks.fair_sharing_ends_s(each, capacity=7.0))
  3.952...
  >>> uplinks.earliest_schedule(each, capacity=7.0).end_s
  3.0
"""

from collections.abc import Iterator, Sequence
import itertools
import math
from typing import NamedTuple

import numpy as np
from scipy import optimize

from parallel.plans.network import fluid

_CELL = "cell"


class Uplink(NamedTuple):
  """Update that a client sends in a round.

  Attributes:
    ready_s: Time in seconds from which it can be sent.
    size: Size in bytes.
    most: Largest rate of the client, in bytes per second.
  """

  ready_s: float
  size: float
  most: float = math.inf


class Interval(NamedTuple):
  """Part of a schedule.

  Attributes:
    start_s, end_s: Start and end in seconds.
    rates: Rate of each client, in bytes per second.
  """

  start_s: float
  end_s: float
  rates: tuple[float, ...]


class Schedule(NamedTuple):
  """Schedule of uplinks: when the last one ends, and its intervals."""

  end_s: float
  intervals: tuple[Interval, ...]


def fair_sharing_ends_s(
  uplinks: Sequence[Uplink], capacity: float
) -> list[float]:
  """Returns the end of each uplink in seconds, with max-min fair rates.

  Args:
    uplinks: Uplinks of the clients.
    capacity: Capacity of the cell in bytes per second.
  """
  return group_priority_ends_s(uplinks, capacity, [range(len(uplinks))])


def group_priority_ends_s(
  uplinks: Sequence[Uplink], capacity: float, groups: Sequence[Sequence[int]]
) -> list[float]:
  """Returns the end of each uplink in seconds, if groups have priorities.

  A group gets the rate that earlier groups leave, and shares it max-min fairly.
  If all groups have one client, clients send in the order of the groups.

  Args:
    uplinks: Uplinks of the clients.
    capacity: Capacity of the cell in bytes per second.
    groups: Clients of each group, the highest priority first; each client is
      in one group.
  """
  # Rates change whenever an uplink starts or ends. The network then calls
  # `discipline` with paths, each of which has one link, named by its client.
  place = {k: i for i, group in enumerate(groups) for k in group}

  def discipline(
    paths: Sequence[fluid.Path], capacities: dict
  ) -> list[float]:
    del capacities
    rates, left = [0.0] * len(paths), capacity
    names = [path.links[0] for path in paths]
    for i in range(len(groups)):
      mine = [j for j, k in enumerate(names) if place[k] == i]
      found = fluid.max_min(
        [fluid.Path((_CELL,), paths[j].most) for j in mine], {_CELL: left}
      ) if left > 0 else [0.0] * len(mine)
      for j, rate in zip(mine, found, strict=True):
        rates[j] = rate
      left = max(0.0, left - sum(found))
    return rates

  network = fluid.Network({}, discipline)
  for k, uplink in enumerate(uplinks):
    path = fluid.Path((k,), uplink.most)
    network.start(uplink.ready_s, k, path, uplink.size)
  ends = network.run()
  return [ends[k] for k in range(len(uplinks))]


def best_groups(
  uplinks: Sequence[Uplink], capacity: float
) -> tuple[float, tuple[tuple[int, ...], ...]]:
  """Tries all groups and priorities; returns those that end the round first.

  Args:
    uplinks: Uplinks of at most six clients, which have 4,683 ordered groupings.
    capacity: Capacity of the cell in bytes per second.

  Returns:
    (end of the round in seconds, groups by priority).
  """
  assert len(uplinks) <= 6
  return min(
    (max(group_priority_ends_s(uplinks, capacity, groups)), groups)
    for groups in _ordered_groups(tuple(range(len(uplinks))))
  )


def earliest_schedule(uplinks: Sequence[Uplink], capacity: float) -> Schedule:
  """Returns a schedule whose last uplink ends as early as possible.

  Args:
    uplinks: Uplinks of the clients.
    capacity: Capacity of the cell in bytes per second.
  """
  times = sorted({uplink.ready_s for uplink in uplinks})
  shares = _LinearProgram(uplinks, capacity, [*times, math.inf])
  # Minimises the last variable: the length of the last interval.
  cost = np.zeros(shares.num + 1)
  cost[-1] = 1.0
  found = optimize.linprog(
    cost, A_ub=shares.limits(True), b_ub=shares.lengths(),
    A_eq=shares.sums(True), b_eq=[uplink.size for uplink in uplinks],
    bounds=(0, None),
  )
  assert found.success, found.message
  end_s = times[-1] + float(found.x[-1])
  return Schedule(end_s, shares.intervals(found.x, end_s))


def select_on_time_clients(
  uplinks: Sequence[Uplink], capacity: float, deadline_s: float
) -> tuple[int, ...]:
  """Returns a largest set of clients whose uplinks can end by a deadline.

  Args:
    uplinks: Uplinks of the clients.
    capacity: Capacity of the cell in bytes per second.
    deadline_s: Time of the deadline in seconds.
  """
  mine = [k for k, u in enumerate(uplinks) if u.ready_s < deadline_s]
  if not mine:
    return ()
  some = [uplinks[k] for k in mine]
  times = sorted({uplink.ready_s for uplink in some})
  shares = _LinearProgram(some, capacity, [*times, deadline_s])
  sizes = np.diag([uplink.size for uplink in some])
  chosen = optimize.milp(
    np.concatenate([np.zeros(shares.num), -np.ones(len(some))]),
    constraints=[
      optimize.LinearConstraint(
        np.hstack([shares.sums(False), -sizes]), 0, 0
      ),
      optimize.LinearConstraint(
        np.pad(shares.limits(False), ((0, 0), (0, len(some)))),
        ub=shares.lengths(),
      ),
    ],
    bounds=optimize.Bounds(
      0, np.concatenate([np.full(shares.num, np.inf), np.ones(len(some))])
    ),
    integrality=np.concatenate([np.zeros(shares.num), np.ones(len(some))]),
  )
  assert chosen.success, chosen.message
  return tuple(
    k for k, y in zip(mine, chosen.x[shares.num:], strict=True) if y > 0.5
  )


class _LinearProgram:
  """Linear program whose variables are each client's bytes in each interval.

  Attributes:
    num: Number of these variables; methods with ``open_end`` add one.
  """

  def __init__(
    self, uplinks: Sequence[Uplink], capacity: float, times: Sequence[float]
  ) -> None:
    """Creates the variables.

    Args:
      uplinks: Uplinks of the clients.
      capacity: Capacity of the cell in bytes per second.
      times: Ascending times between which the intervals lie: start of the
        first one, and end of each. The last time is infinity if the length of
        the last interval is a variable.
    """
    self._uplinks, self._capacity, self._times = uplinks, capacity, times
    self._places = [
      (k, i) for k, uplink in enumerate(uplinks)
      for i in range(len(times) - 1) if uplink.ready_s <= times[i]
    ]
    self.num = len(self._places)
    # Rates are bounded by the client and by the cell.
    self._most = [
      min(uplink.most, capacity) for uplink in uplinks
    ]

  def sums(self, open_end: bool) -> np.ndarray:
    """Returns the matrix that sums each client's bytes, one row per client.

    Args:
      open_end: Whether the last variable is the length of the last interval.
    """
    found = np.zeros((len(self._uplinks), self.num + open_end))
    for j, (k, _) in enumerate(self._places):
      found[k, j] = 1.0
    return found

  def limits(self, open_end: bool) -> np.ndarray:
    """Returns the matrix A of the constraints A x <= `lengths`.

    The vector x has the variables: the bytes of each client in each interval
    and, with ``open_end``, the length of the last interval. A has one row for
    the bytes of each client in each interval: the seconds that they take at the
    client's largest rate. It then has one row per interval: the seconds that
    the bytes of all clients take at the capacity of the shared radio cell. None
    of these may exceed the length of the interval.

    Args:
      open_end: Whether the last variable is the length of the last interval.
        Rows of this interval subtract that length, and their bound is 0.
    """
    count = len(self._times) - 1
    found = np.zeros((self.num + count, self.num + open_end))
    for j, (k, i) in enumerate(self._places):
      found[j, j] = 1 / self._most[k]
      found[self.num + i, j] = 1 / self._capacity
      if open_end and i == count - 1:
        found[j, -1] = -1.0
    if open_end:
      found[-1, -1] = -1.0
    return found

  def lengths(self) -> np.ndarray:
    """Returns the upper bound of each row of `limits`, in seconds."""
    length = [
      b - a if math.isfinite(b) else 0.0
      for a, b in itertools.pairwise(self._times)
    ]
    return np.array([length[i] for _, i in self._places] + length)

  def intervals(
    self, values: np.ndarray, end_s: float
  ) -> tuple[Interval, ...]:
    """Returns the intervals, with rates, of the program's solution."""
    times = [*self._times[:-1], end_s]
    sent = np.zeros((len(times) - 1, len(self._uplinks)))
    for (k, i), value in zip(self._places, values, strict=False):
      sent[i, k] = value
    return tuple(
      Interval(a, b, tuple((row / (b - a)).tolist()))
      for (a, b), row in zip(itertools.pairwise(times), sent, strict=True)
    )


def _ordered_groups(
  clients: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], ...]]:
  """Yields all ordered partitions of clients into groups."""
  if not clients:
    yield ()
  for size in range(1, len(clients) + 1):
    for group in itertools.combinations(clients, size):
      rest = tuple(k for k in clients if k not in group)
      for others in _ordered_groups(rest):
        yield (group, *others)
