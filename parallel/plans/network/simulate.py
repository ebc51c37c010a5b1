"""Simulated time of a schedule on a topology, by events and by formulas.

`events` is an event-driven simulation with store-and-forward nodes. A link
sends one message at a time, first come, first served. A transfer starts when
the transfers of earlier rounds have brought its chunk to its source; with
``barrier=True``, when all transfers of earlier rounds have arrived. The
arithmetic is that of ASTRA-sim's congestion-aware analytical network
(astra-network-analytical, Link.cpp): a message of s bytes occupies a link of B
bytes per nanosecond for floor(s / B) ns and arrives after
floor(latency + s / B) ns. Events in the same nanosecond are processed in the
order of their creation. Deviations from ASTRA-sim: the topology may be any
graph, and messages follow the paths of the schedule.

`lockstep` is the alpha-beta model with a barrier after every round and
cut-through switches: the time of a round is the latency of a path plus the time
of the round's bytes on the path's most loaded link.

`lower_bound` is a lower bound on the time of any order of messages.

Example:
  >>> from parallel.plans.network import routed, simulate
  >>> from parallel.plans.schedules import builders
  >>> from parallel.plans.topology.builders import ring
  >>> net = ring(4, bandwidth=1e9, latency_s=1e-6)
  >>> hops = routed.on_links(builders.build("ring", net), net)
  >>> simulate.events(hops, 4000).finish_ns  # 6 rounds of 1 us + 1000 bytes
  12000
"""

import array
import collections
import dataclasses
import heapq

import numpy as np

from parallel.plans.network.routed import HopTimes, RoutedSchedule, sum_by


@dataclasses.dataclass(frozen=True)
class Timeline:
  """Times of all hops, in nanoseconds from the start.

  Attributes:
    routed: Simulated schedule.
    size_bytes: Size of the collective's buffer in bytes, all chunks together.
    finish_ns: Time of the last arrival.
    requested_ns: int ``[hop]``, time at which the message is ready to be sent.
    start_ns: int ``[hop]``, time at which the link starts to send it.
    end_ns: int ``[hop]``, time at which the link is free again.
    arrival_ns: int ``[hop]``, time at which the message has arrived at the
      link's destination.
  """

  routed: RoutedSchedule
  size_bytes: int
  finish_ns: int
  requested_ns: np.ndarray
  start_ns: np.ndarray
  end_ns: np.ndarray
  arrival_ns: np.ndarray

  @property
  def utilisation(self) -> np.ndarray:
    """Fraction of the time that each link sends, float ``[link]`` in [0, 1]."""
    busy = self._by_link(self.end_ns - self.start_ns)
    return busy / max(self.finish_ns, 1)

  @property
  def waiting_ns(self) -> np.ndarray:
    """Total waiting time of messages for each link, int ``[link]``, in ns."""
    return self._by_link(self.start_ns - self.requested_ns)

  @property
  def longest_queues(self) -> np.ndarray:
    """Maximum number of messages waiting for each link, int ``[link]``."""
    # A waiting message enters the queue (+1) and leaves it (-1).
    links = self.routed.hop_links
    waits = self.start_ns > self.requested_ns
    at = np.concatenate([self.requested_ns[waits], self.start_ns[waits]])
    link = np.concatenate([links[waits]] * 2)
    step = np.repeat([1, -1], waits.sum())
    # By link, then time; at equal times, messages leave before others enter.
    order = np.lexsort((step, at, link))
    longest = np.zeros(len(self.routed.links), np.int64)
    # Each link's steps sum to 0, so one running sum serves all links.
    np.maximum.at(longest, link[order], np.cumsum(step[order]))
    return longest

  def _by_link(self, values: np.ndarray) -> np.ndarray:
    """Returns the sum of ``values``, int ``[hop]``, by link, int ``[link]``."""
    return sum_by(self.routed.hop_links, values, len(self.routed.links))


def events(
  routed: RoutedSchedule, size_bytes: int, *, barrier: bool = False
) -> Timeline:
  """Simulates a schedule event by event.

  Args:
    routed: Schedule on the links of a topology.
    size_bytes: Size of the collective's buffer in bytes, all chunks together.
    barrier: Whether a round waits for all transfers of earlier rounds.

  Returns:
    Times of all hops.

  Raises:
    ValueError: There are fewer bytes than chunks, or sums exceed 64 bits.

  Source: astra-network-analytical, congestion_aware.
  """
  times, segments = routed.hop_ns(size_bytes), _build_segments(routed, barrier)
  starts, released = _run_event_loop(routed, times, segments)
  start_ns = np.asarray(starts)
  at = start_ns + times.arrival_ns[times.kinds]
  requested = np.empty_like(at)
  # A message is ready for a hop when it has arrived over the previous hop of
  # its path, and for the first hop when its segment is released.
  requested[1:] = at[:-1]
  first = routed.first_hops[:-1]
  requested[first] = np.asarray(released)[segments.of_send]
  return Timeline(
    routed, int(size_bytes), int(at.max(initial=0)), requested, start_ns,
    start_ns + times.busy_ns[times.kinds], at,
  )


@dataclasses.dataclass(frozen=True)
class _DependencySegments:
  """Dependencies between transfers, grouped into segments.

  A buffer is a chunk at a node. The transfers from and to a buffer, in the
  order of rounds, are divided into segments of arrivals followed by sends. The
  sends wait for the arrivals of their segment and of the buffer's earlier
  segments; then the segment is released. Dependencies are stored per segment
  instead of per pair of transfers.

  Segments are numbered by their first arrival, so that simultaneous events are
  close in memory. The last segment contains the transfers without dependencies.

  Attributes:
    of_send: int ``[transfer]``, segment in which a transfer leaves its source.
    of_arrival: int ``[transfer]``, segment in which a transfer arrives.
    waits: int ``[segment]``, number of events that the segment's release waits
      for: arrivals, and the release of the buffer's previous segment, if any.
    later: int ``[segment]``, next segment of the buffer; -1 for none.
  """

  of_send: np.ndarray
  of_arrival: np.ndarray
  waits: np.ndarray
  later: np.ndarray


def _build_segments(
  routed: RoutedSchedule, barrier: bool
) -> _DependencySegments:
  """Divides the transfers at each buffer (chunk at a node) into segments.

  With ``barrier``, a send waits for all transfers of earlier rounds.
  """
  count = len(routed.rounds)
  # Each transfer twice, [2 * transfer]: its sends, then its arrivals.
  nodes = np.concatenate([routed.sources, routed.destinations])
  buffers = nodes * routed.num_chunks + np.tile(routed.chunks, 2)
  if barrier:
    buffers[:] = 0  # one buffer: a send waits for all earlier rounds
  rounds = np.tile(routed.rounds, 2)
  arrives = np.repeat([False, True], count)
  # Sort by buffer and round. The sort is stable, so a round's sends precede its
  # arrivals: transfers of a round read the state before the round.
  order = np.lexsort((rounds, buffers))
  buffers, arrives = buffers[order], arrives[order]
  new_buffer = np.ones(2 * count, bool)
  new_buffer[1:] = buffers[1:] != buffers[:-1]
  # A segment starts at each new buffer, and at each arrival after a send.
  begins = new_buffer.copy()
  begins[1:] |= arrives[1:] & ~arrives[:-1]
  segment = np.empty(2 * count, np.int64)
  segment[order] = np.cumsum(begins) - 1
  of_send, of_arrival = segment[:count], segment[count:]
  # An extra segment, number ``last``, contains transfers without dependencies.
  # The start event of the simulation releases it.
  last = int(begins.sum())
  # Whether a segment has a predecessor in its buffer. With two extra entries,
  # ``continues[1:]`` is whether each segment has a successor.
  continues = np.append(~new_buffer[begins], [False, False])
  arrivals = np.bincount(of_arrival, minlength=last)
  # Segments without arrivals are the first of their buffers. Their sends move
  # to segment ``last``, so they are never released, and no segment may wait for
  # their release.
  free = np.append(arrivals == 0, True)
  waits = np.append(arrivals, 1) + continues[:-1]
  waits[1:] -= free[:-1] & continues[1:-1]
  of_send = np.where(free[of_send], last, of_send)
  # First arriving transfer of each segment. Writing in reverse order leaves the
  # smallest number. Segments without arrivals, and then ``last``, keep the
  # largest number, so they are at the end.
  first = np.full(last + 1, count)
  first[of_arrival[::-1]] = np.arange(count)[::-1]
  order = np.argsort(first, kind="stable")
  number = np.empty(last + 2, np.int64)  # old -> new
  number[order], number[-1] = np.arange(last + 1), -1
  later = np.where(continues[1:], number[1:], -1)
  return _DependencySegments(
    number[of_send], number[of_arrival], waits[order], later[order]
  )


def _packed(values: np.ndarray, code: str = "i") -> array.array:
  """Returns integers as an array of C type ``code``, which uses less cache."""
  return array.array(code, values.astype(code).tobytes())


def _successors(
  routed: RoutedSchedule, segments: _DependencySegments
) -> tuple[array.array, array.array, array.array]:
  """Returns what follows each arrival and each release of a segment.

  Returns:
    then: int ``[hop + 1]``, next hop, or the complement of the segment that
      waits for the arrival; the last entry belongs to the start event.
    sends: int ``[transfer]``, first hops, grouped by the segments that release
      them.
    bounds: int ``[segment + 1]``, start of each segment's group in ``sends``.
  """
  num_hops, num_segments = len(routed.hop_links), len(segments.waits)
  # Successor of an arrival: the next hop of the path, or after the last hop the
  # complement ~segment of the waiting segment. Index num_hops is not a hop but
  # the start event, which releases the last segment.
  then = np.arange(1, num_hops + 2)
  then[routed.first_hops[1:] - 1] = ~segments.of_arrival
  then[-1] = ~(num_segments - 1)
  then = _packed(then)
  # The release of segment s makes the first hops sends[bounds[s]:bounds[s + 1]]
  # ready, in the order of transfers.
  order = np.argsort(segments.of_send, kind="stable")
  sends = _packed(routed.first_hops[order])
  bounds = _packed(np.searchsorted(
    segments.of_send[order], np.arange(num_segments + 1)
  ))
  return then, sends, bounds


def _run_event_loop(
  routed: RoutedSchedule, times: HopTimes, segments: _DependencySegments
) -> tuple[array.array, array.array]:
  """Runs the event loop; returns the times at which sends become possible.

  An event is the index of a hop, whose message arrives, or the complement ~link
  of a link that becomes free. Each link has a queue of waiting hops. A bucket
  contains the events of one nanosecond in the order of their creation; a heap
  contains the times that have a bucket.

  Returns:
    Nanoseconds: start of sending of each hop, and release of each segment.
  """
  num_hops, num_segments = len(routed.hop_links), len(segments.waits)
  # Links are encoded as ~link, a negative number. As an index into a list by
  # link it counts from the end, so each link still has its own item.
  link_of = (~times.links).tolist()
  busy_ns, arrival_ns = times.busy_ns.tolist(), times.arrival_ns.tolist()
  kinds = _packed(times.kinds)
  then, sends, bounds = _successors(routed, segments)
  waits, later = _packed(segments.waits), _packed(segments.later)

  starts = _packed(np.zeros(num_hops), "q")
  released = _packed(np.zeros(num_segments), "q")
  busy = [False] * len(routed.links)
  queues = [collections.deque() for _ in routed.links]
  pending: dict[int, list[int]] = {0: [num_hops]}
  moments = [0]
  push, pop, bucket_at = heapq.heappush, heapq.heappop, pending.get
  while moments:
    now = pop(moments)
    # The bucket may grow during the loop, by hops with a duration of 0.
    for event in pending[now]:
      if event < 0:  # a link becomes free: send the next waiting message
        busy[event] = False
        queue = queues[event]
        if not queue:
          continue
        ready = (queue.popleft(),)
      elif then[event] >= 0:  # arrival at an intermediate node
        ready = (then[event],)
      else:  # arrival at the destination: may release a segment
        segment = ~then[event]
        waits[segment] -= 1
        if waits[segment]:
          continue
        released[segment] = now
        ready = sends[bounds[segment]:bounds[segment + 1]]
        # A release may release the buffer's next segment, and so on.
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
        # The arrival is created before the event of the free link; the order
        # matters if both are in the same nanosecond. The code is duplicated
        # because this is the innermost loop.
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


def lockstep(routed: RoutedSchedule, size_bytes: int) -> float:
  """Returns the time of a schedule in the alpha-beta model, in seconds.

  Each round waits for the previous one. The time of a round is that of its
  slowest transfer: the sum of the latencies of its path, plus the largest time
  that a link of the path needs for all bytes of the round.

  Args:
    routed: Schedule on the links of a topology.
    size_bytes: Size of the collective's buffer in bytes, all chunks together.

  Raises:
    ValueError: The size is invalid, as for `RoutedSchedule.hop_bytes`.
  """
  inverse_bandwidth = 1 / np.array([link.bandwidth for link in routed.links])
  latency = np.array([link.latency_s for link in routed.links])
  sizes = routed.hop_bytes(size_bytes)
  num_links, num_transfers = len(routed.links), len(routed.rounds)
  # A slot is a link in one round; its transfers share the bandwidth.
  slots = routed.rounds[routed.hop_transfers] * num_links + routed.hop_links
  used, slot_of_hop = np.unique(slots, return_inverse=True)
  sums = sum_by(slot_of_hop, sizes, len(used))
  seconds = sums * inverse_bandwidth[used % num_links]  # [slot]
  slowest = np.zeros(num_transfers)
  np.maximum.at(slowest, routed.hop_transfers, seconds[slot_of_hop])
  np.add.at(slowest, routed.hop_transfers, latency[routed.hop_links])
  rounds = np.zeros(routed.rounds.max(initial=-1) + 1)
  np.maximum.at(rounds, routed.rounds, slowest)
  return float(rounds.sum())


def lower_bound(routed: RoutedSchedule, size_bytes: int) -> int:
  """Returns a lower bound on the time of `events`, in ns, for any link order.

  The bound is the larger of two times: that of the most loaded link until its
  last message has arrived, and that of the longest chain of dependent transfers
  without contention for links.

  Args:
    routed: Schedule on the links of a topology.
    size_bytes: Size of the collective's buffer in bytes, all chunks together.

  Raises:
    ValueError: The size is invalid, as for `events`.
  """
  times = routed.hop_ns(size_bytes)
  busy_ns = times.busy_ns[times.kinds]
  arrival_ns = times.arrival_ns[times.kinds]
  # After its last byte, a link needs at least the smallest latency of its
  # messages, independently of their order.
  work = sum_by(routed.hop_links, busy_ns, len(routed.links))
  tail = np.full(len(routed.links), np.iinfo(np.int64).max)
  np.minimum.at(tail, routed.hop_links, arrival_ns - busy_ns)
  fullest = (work + tail)[work > 0].max(initial=0)
  transfer_ns = sum_by(
    routed.hop_transfers, arrival_ns, len(routed.rounds)
  )
  # Critical path: time at which each buffer (a chunk at a node) has received
  # the transfers of all earlier rounds.
  ready = np.zeros(routed.num_nodes * routed.num_chunks, np.int64)
  sources = routed.sources * routed.num_chunks + routed.chunks
  destinations = routed.destinations * routed.num_chunks + routed.chunks
  # Index of the last transfer of each round.
  ends = np.flatnonzero(np.diff(routed.rounds, append=-1))
  for low, high in zip([0, *ends + 1], ends + 1, strict=False):
    at = ready[sources[low:high]] + transfer_ns[low:high]
    np.maximum.at(ready, destinations[low:high], at)
  return int(max(fullest, ready.max(initial=0)))
