"""Times a schedule on a topology: whole messages, one at a time on each link.

`events` is event-driven. A message is stored at every node of its path and
sent on whole; a link sends one message at a time, first come first served. A
transfer starts when the transfers of earlier rounds have brought its chunk to
its source; with ``barrier=True`` when all of them have arrived everywhere.
The arithmetic is that of ASTRA-sim's congestion-aware analytical network
(astra-network-analytical, Link.cpp): a message of s bytes keeps a link of B
bytes per nanosecond for floor(s / B) ns and arrives after floor(latency + s /
B) ns; events of the same nanosecond happen in the order of their making. It
differs in taking any graph, and the schedule's own paths.

`lockstep` is the alpha-beta model of a machine that waits after every round
and cuts through switches: a round lasts as long as the latency of a path plus
the bytes of the round on its fullest link. `lower_bound` is what no order on
the links can beat.
"""

import array
import collections
import dataclasses
import heapq

import numpy as np

from parallel.network import layout as layouts
from parallel.network.layout import HopTimes, Layout


@dataclasses.dataclass(frozen=True)
class Timeline:
  """When each hop happens, in ns from the start.

  Attributes:
    layout: What ran.
    size_bytes: Of the collective's buffer.
    finish_ns: Last arrival.
    requested_ns: int ``[hop]``: the message stands before the link.
    start_ns: int ``[hop]``: the link begins to send it.
    end_ns: int ``[hop]``: the link is free again.
    arrival_ns: int ``[hop]``: the message is at the link's far end.
  """

  layout: Layout
  size_bytes: int
  finish_ns: int
  requested_ns: np.ndarray
  start_ns: np.ndarray
  end_ns: np.ndarray
  arrival_ns: np.ndarray

  @property
  def utilisation(self) -> np.ndarray:
    """float ``[link]`` in [0, 1]: the share of the time that it sends."""
    busy = self._by_link(self.end_ns - self.start_ns)
    return busy / max(self.finish_ns, 1)

  @property
  def waiting_ns(self) -> np.ndarray:
    """int ``[link]``: what messages stood before it, all together."""
    return self._by_link(self.start_ns - self.requested_ns)

  @property
  def longest_queues(self) -> np.ndarray:
    """int ``[link]``: most messages that stood before it at a time."""
    links = self.layout.hop_links
    waits = self.start_ns > self.requested_ns
    at = np.concatenate([self.requested_ns[waits], self.start_ns[waits]])
    link = np.concatenate([links[waits]] * 2)
    step = np.repeat([1, -1], waits.sum())
    order = np.lexsort((step, at, link))  # leaves before it joins
    longest = np.zeros(len(self.layout.links), np.int64)
    # Each link's steps sum to 0, so one running sum serves all of them.
    np.maximum.at(longest, link[order], np.cumsum(step[order]))
    return longest

  def _by_link(self, values: np.ndarray) -> np.ndarray:
    return layouts.sum_by(self.layout.hop_links, values, len(self.layout.links))


def events(
  layout: Layout, size_bytes: int, *, barrier: bool = False
) -> Timeline:
  """Runs a schedule event by event.

  Args:
    layout: What is sent over which links.
    size_bytes: Of the collective's buffer: all chunks together.
    barrier: Whether a round waits for all of the one before.

  Raises:
    ValueError: Fewer bytes than chunks.

  Source: astra-network-analytical, congestion_aware (see the module).
  """
  times, segments = layout.hop_ns(size_bytes), _segments(layout, barrier)
  starts, released = _run(layout, times, segments)
  start_ns = np.asarray(starts)
  at = start_ns + times.arrival_ns[times.kinds]
  requested = np.empty_like(at)
  requested[1:] = at[:-1]  # a later hop, when the one before has arrived
  first = layout.first_hops[:-1]
  requested[first] = np.asarray(released)[segments.of_send]
  return Timeline(
    layout, int(size_bytes), int(at.max(initial=0)), requested, start_ns,
    start_ns + times.busy_ns[times.kinds], at,
  )


@dataclasses.dataclass(frozen=True)
class _Segments:
  """What waits for what.

  The transfers that touch one buffer (a chunk at a node), by round, make
  segments: some that arrive, then some that leave. Those that leave wait for
  what arrives in their segment and in the buffer's earlier ones. Segments are
  numbered by their first arrival, so that what happens at one time lies close
  together. The last one has what waits for nothing.

  Attributes:
    of_send: int ``[transfer]``, the segment in which it leaves its source.
    of_arrival: int ``[transfer]``, the one in which it reaches the other end.
    waits: int ``[segment]``, arrivals, and one for an earlier segment.
    later: int ``[segment]``, the next one of the buffer; -1: none.
  """

  of_send: np.ndarray
  of_arrival: np.ndarray
  waits: np.ndarray
  later: np.ndarray


def _segments(layout: Layout, barrier: bool) -> _Segments:
  count = len(layout.rounds)
  nodes = np.concatenate([layout.sources, layout.destinations])
  buffers = nodes * layout.num_chunks + np.tile(layout.chunks, 2)
  if barrier:
    buffers[:] = 0
  rounds = np.tile(layout.rounds, 2)
  arrives = np.repeat([False, True], count)
  # Stable, so a round's sends come before its arrivals.
  order = np.lexsort((rounds, buffers))
  buffers, arrives = buffers[order], arrives[order]
  new_buffer = np.ones(2 * count, bool)
  new_buffer[1:] = buffers[1:] != buffers[:-1]
  begins = new_buffer.copy()
  begins[1:] |= arrives[1:] & ~arrives[:-1]
  segment = np.empty(2 * count, np.int64)
  segment[order] = np.cumsum(begins) - 1
  of_send, of_arrival = segment[:count], segment[count:]
  last = int(begins.sum())
  continues = np.append(~new_buffer[begins], [False, False])
  arrivals = np.bincount(of_arrival, minlength=last)
  free = np.append(arrivals == 0, True)  # these come first in their buffer
  waits = np.append(arrivals, 1) + continues[:-1]
  waits[1:] -= free[:-1] & continues[1:-1]
  of_send = np.where(free[of_send], last, of_send)
  first = np.full(last + 1, count)
  first[of_arrival[::-1]] = np.arange(count)[::-1]  # the last one written stays
  order = np.argsort(first, kind="stable")
  number = np.empty(last + 2, np.int64)
  number[order], number[-1] = np.arange(last + 1), -1
  later = np.where(continues[1:], number[1:], -1)
  return _Segments(
    number[of_send], number[of_arrival], waits[order], later[order]
  )


def _packed(values: np.ndarray, code: str = "i") -> array.array:
  """Without an object for each number: caches hold more."""
  return array.array(code, values.astype(code).tobytes())


def _run(
  layout: Layout, times: HopTimes, segments: _Segments
) -> tuple[array.array, array.array]:
  """The event loop, on integers only.

  An event is a hop, whose message arrives, or the complement of a link, which
  becomes free; a queue holds hops. A bucket holds the events of a nanosecond.

  Returns:
    Start of each hop; release of each segment.
  """
  num_hops, num_segments = len(layout.hop_links), len(segments.waits)
  link_of = (~times.links).tolist()
  busy_ns, arrival_ns = times.busy_ns.tolist(), times.arrival_ns.tolist()
  kinds = _packed(times.kinds)
  then = np.arange(1, num_hops + 2)  # the next hop, or
  then[layout.first_hops[1:] - 1] = ~segments.of_arrival
  then[-1] = ~(num_segments - 1)  # of the event that starts it all
  then = _packed(then)
  order = np.argsort(segments.of_send, kind="stable")
  sends = _packed(layout.first_hops[order])
  bounds = _packed(np.searchsorted(
    segments.of_send[order], np.arange(num_segments + 1)
  ))
  waits, later = _packed(segments.waits), _packed(segments.later)

  starts = _packed(np.zeros(num_hops), "q")
  released = _packed(np.zeros(num_segments), "q")
  busy = [False] * len(layout.links)
  queues = [collections.deque() for _ in layout.links]
  pending: dict[int, list[int]] = {0: [num_hops]}
  moments = [0]
  push, pop, bucket_at = heapq.heappush, heapq.heappop, pending.get
  while moments:
    now = pop(moments)
    for event in pending[now]:  # may grow meanwhile
      if event < 0:
        busy[event] = False  # lists by link are read from their end
        queue = queues[event]
        if not queue:
          continue
        ready = (queue.popleft(),)
      elif then[event] >= 0:
        ready = (then[event],)
      else:
        segment = ~then[event]
        waits[segment] -= 1
        if waits[segment]:
          continue
        released[segment] = now
        ready = sends[bounds[segment]:bounds[segment + 1]]
        while later[segment] >= 0:
          segment = later[segment]
          waits[segment] -= 1
          if waits[segment]:
            break
          released[segment] = now
          ready += sends[bounds[segment]:bounds[segment + 1]]
      for hop in ready:
        kind = kinds[hop]
        link = link_of[kind]
        if busy[link]:
          queues[link].append(hop)
          continue
        busy[link] = True
        starts[hop] = now
        at = now + arrival_ns[kind]
        bucket = bucket_at(at)
        if bucket is None:
          pending[at] = [hop]
          push(moments, at)
        else:
          bucket.append(hop)
        at = now + busy_ns[kind]
        bucket = bucket_at(at)
        if bucket is None:
          pending[at] = [link]
          push(moments, at)
        else:
          bucket.append(link)
    del pending[now]
  assert not any(waits), "a transfer never started"
  return starts, released


def lockstep(layout: Layout, size_bytes: int) -> float:
  """Seconds if every round waits for the one before: alpha-beta.

  A round lasts as long as its slowest transfer: the latencies of its path,
  and the bytes that the round sends over the fullest link of it.
  """
  inverse_bandwidth = 1 / np.array([link.bandwidth for link in layout.links])
  latency = np.array([link.latency_s for link in layout.links])
  sizes = layout.hop_bytes(size_bytes)
  num_links, num_transfers = len(layout.links), len(layout.rounds)
  # A link in one round is a slot: its bytes are what all of them share.
  slots = layout.rounds[layout.hop_transfers] * num_links + layout.hop_links
  used, slot_of_hop = np.unique(slots, return_inverse=True)
  sums = layouts.sum_by(slot_of_hop, sizes, len(used))
  seconds = sums * inverse_bandwidth[used % num_links]
  slowest = np.zeros(num_transfers)
  np.maximum.at(slowest, layout.hop_transfers, seconds[slot_of_hop])
  np.add.at(slowest, layout.hop_transfers, latency[layout.hop_links])
  rounds = np.zeros(layout.rounds.max(initial=-1) + 1)
  np.maximum.at(rounds, layout.rounds, slowest)
  return float(rounds.sum())


def lower_bound(layout: Layout, size_bytes: int) -> int:
  """ns that `events` takes at least, whatever the order on the links.

  The larger of the fullest link's work, up to the last arrival, and of the
  longest chain of transfers that wait for one another, each link free.
  """
  times = layout.hop_ns(size_bytes)
  busy_ns = times.busy_ns[times.kinds]
  arrival_ns = times.arrival_ns[times.kinds]
  work = layouts.sum_by(layout.hop_links, busy_ns, len(layout.links))
  tail = np.full(len(layout.links), np.iinfo(np.int64).max)
  np.minimum.at(tail, layout.hop_links, arrival_ns - busy_ns)
  fullest = (work + tail)[work > 0].max(initial=0)
  transfer_ns = layouts.sum_by(
    layout.hop_transfers, arrival_ns, len(layout.rounds)
  )
  ready = np.zeros(layout.num_nodes * layout.num_chunks, np.int64)
  sources = layout.sources * layout.num_chunks + layout.chunks
  destinations = layout.destinations * layout.num_chunks + layout.chunks
  ends = np.flatnonzero(np.diff(layout.rounds, append=-1))
  for low, high in zip([0, *ends + 1], ends + 1, strict=False):
    at = ready[sources[low:high]] + transfer_ns[low:high]
    np.maximum.at(ready, destinations[low:high], at)
  return int(max(fullest, ready.max(initial=0)))
