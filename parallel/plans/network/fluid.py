"""Fluid simulation of TCP flows that share links: flows have rates, no packets.

Rates are max-min fair: to raise the rate of a flow, one would have to lower
that of a flow that is not faster (Bertsekas and Gallager, "Data Networks",
1992, section 6.5). Rates change when a flow starts, ends, or exhausts its
window. The window has 10 segments at first (RFC 6928) and doubles once per
round trip (slow start) until the flow sends without pause for a round trip.

Example:
  >>> from parallel.plans.network import fluid
  >>> cell = fluid.Network({"cell": 10.0})
  >>> for name, size in (("a", 10), ("b", 30)):
  ...   cell.start(0.0, name, fluid.Path(("cell",)), size)
  >>> cell.run()  # both send 5 B/s until a ends
  {'a': 2.0, 'b': 4.0}
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
import dataclasses
import heapq
import math
from typing import NamedTuple

SEGMENT = 1448  # bytes of data in an Ethernet frame, with TCP's timestamps
INITIAL_WINDOW = 10 * SEGMENT
# bytes that are sent in less time are a rounding error
_TIME_TOLERANCE_S = 1e-9


class Path(NamedTuple):
  """Path of a flow through the network, and limits of its rate.

  Attributes:
    links: Names of its links.
    most: Largest rate of the flow, in bytes per second.
    rtt_s: Round trip in seconds, without queues. 0 for a flow that no window
      limits.
  """

  links: tuple[Hashable, ...]
  most: float = math.inf
  rtt_s: float = 0.0


# Maps the paths of flows, in the order of their starts, and the capacities of
# links to the rates of the flows, all in bytes per second.
RateAllocator = Callable[
  [Sequence[Path], Mapping[Hashable, float]], list[float]
]


def max_min(
  paths: Sequence[Path], capacities: Mapping[Hashable, float]
) -> list[float]:
  """Returns max-min fair rates in bytes/s, by progressive filling.

  Args:
    paths: Paths of the flows; each has a link or a largest rate.
    capacities: Capacity of each link, in bytes per second.

  Example:
    >>> ends = [Path(("a",)), Path(("a", "b")), Path(("b",), most=1.0)]
    >>> max_min(ends, {"a": 10.0, "b": 4.0})
    [7.0, 3.0, 1.0]
  """
  rates = [0.0] * len(paths)
  left, rising = dict(capacities), set(range(len(paths)))
  while rising:
    counts: dict[Hashable, int] = {}
    for i in rising:
      for link in paths[i].links:
        counts[link] = counts.get(link, 0) + 1
    shares = {link: left[link] / count for link, count in counts.items()}
    level = min(*shares.values(), *(paths[i].most for i in rising), math.inf)
    full = {k for k, share in shares.items() if share <= level * (1 + 1e-12)}
    for i in sorted(rising):
      if paths[i].most <= level or not full.isdisjoint(paths[i].links):
        rates[i] = level
        rising.remove(i)
        for link in paths[i].links:
          left[link] = max(0.0, left[link] - level)
  return rates


def loss_limit(rtt_s: float, loss: float) -> float:
  """Returns the largest rate of a flow with random losses, in bytes/s.

  It is 1.22 segments per round trip, divided by the square root of the loss;
  infinite if one of the arguments is 0.

  Args:
    rtt_s: Round trip in seconds, without queues.
    loss: Probability that a segment is lost.

  Source: Mathis et al., "The Macroscopic Behavior of the TCP Congestion
  Avoidance Algorithm", CCR 27(3), 1997.
  """
  if not rtt_s or not loss:
    return math.inf
  return 1.22 * SEGMENT / (rtt_s * math.sqrt(loss))


@dataclasses.dataclass
class _Flow:
  """State of a flow.

  Attributes:
    path: Its path.
    left: Bytes that are not sent yet.
    credit: Bytes that the current window still allows to send.
    window: Size of the next window in bytes.
    opens_s: Time at which the next window opens; infinite if no window limits
      the flow any more.
    rate: Rate at which it last sent, in bytes/s; 0 if it has not sent yet.
  """

  path: Path
  left: float
  credit: float
  window: float
  opens_s: float
  rate: float = 0.0

  def rounding(self, time: float) -> float:
    """Returns the error in bytes that the rounding of times can cause.

    ``time`` is the current time in seconds.
    """
    return 1e-6 + max(_TIME_TOLERANCE_S, math.ulp(time)) * self.rate

  def sends(self, time: float) -> bool:
    """Returns whether more bytes than a rounding error can be sent now."""
    return min(self.left, self.credit) > self.rounding(time)


class Network:
  """Simulated network: links and the flows on them."""

  def __init__(
    self, capacities: Mapping[Hashable, float],
    discipline: RateAllocator = max_min, window: float = INITIAL_WINDOW,
  ) -> None:
    """Creates a network without flows at time 0.

    Args:
      capacities: Capacity of each link, in bytes per second.
      discipline: Function that divides the links' capacities among flows.
      window: Initial window in bytes.
    """
    self._capacities, self._discipline = capacities, discipline
    self._window, self._time = window, 0.0
    self._flows: dict[Hashable, _Flow] = {}
    self._arrivals: list[tuple[float, int, Hashable]] = []
    self._count = 0
    self._rates: dict[Hashable, float] = {}

  def start(
    self, time: float, key: Hashable, path: Path, size: float
  ) -> None:
    """Starts a flow.

    Args:
      time: Time in seconds, not before that of the last call of `advance`.
      key: Name of the flow, unique among those in progress.
      path: Its path.
      size: Bytes to send.
    """
    self._flows[key] = _Flow(path, size, 0.0, self._window, time)

  def cancel(self, time: float, key: Hashable) -> None:
    """Removes a flow, which never arrives; `next_s` must be after ``time``."""
    self._send(time)
    self._flows.pop(key, None)
    self._rates.pop(key, None)
    self._arrivals = [entry for entry in self._arrivals if entry[2] != key]
    heapq.heapify(self._arrivals)
    self._allocate()

  def next_s(self) -> float:
    """Returns the time of the next event in seconds; infinity for none."""
    times = [self._arrivals[0][0]] if self._arrivals else []
    for key, flow in self._flows.items():
      if math.isfinite(flow.opens_s):
        times.append(flow.opens_s)
      rate = self._rates.get(key, 0.0)
      if rate:
        times.append(self._time + min(flow.left, flow.credit) / rate)
    return max(self._time, min(times, default=math.inf))

  def advance(self, time: float) -> list[Hashable]:
    """Simulates until ``time``; returns keys of arrived flows, in order."""
    found = []
    while (event_s := self.next_s()) <= time:
      self._send(event_s)
      self._update_windows()
      while self._arrivals and self._arrivals[0][0] <= self._time:
        found.append(heapq.heappop(self._arrivals)[2])
      self._allocate()
    self._send(time)
    return found

  def run(self) -> dict[Hashable, float]:
    """Simulates all flows to their ends; returns key -> arrival seconds."""
    found = {}
    while (event_s := self.next_s()) < math.inf:
      found.update(dict.fromkeys(self.advance(event_s), event_s))
    return found

  def _send(self, time: float) -> None:
    """Sends at the current rates until ``time``; no event may be earlier."""
    for key, rate in self._rates.items():
      sent = rate * (time - self._time)
      flow = self._flows[key]
      flow.left, flow.credit = flow.left - sent, flow.credit - sent
    self._time = time

  def _update_windows(self) -> None:
    """Opens windows that are due, and ends flows whose bytes are sent."""
    for key, flow in list(self._flows.items()):
      if flow.left <= flow.rounding(self._time):
        del self._flows[key]
        self._rates.pop(key, None)
        self._count += 1
        heapq.heappush(self._arrivals, (
          self._time + flow.path.rtt_s / 2, self._count, key
        ))
      elif flow.opens_s <= self._time:
        # No window limits a flow that has sent for a whole round trip.
        if flow.sends(self._time) or not flow.path.rtt_s:
          flow.credit = flow.opens_s = math.inf
        else:
          flow.credit, flow.window = flow.window, 2 * flow.window
          flow.opens_s = self._time + flow.path.rtt_s

  def _allocate(self) -> None:
    """Computes the rates of the flows that have something to send."""
    keys = [k for k, flow in self._flows.items() if flow.sends(self._time)]
    self._rates = dict(zip(keys, self._discipline(
      [self._flows[key].path for key in keys], self._capacities
    ), strict=True))
    for key, rate in self._rates.items():
      self._flows[key].rate = rate
