"""Times a schedule on a topology, event by event and by closed formulas.

`events` is event-driven. A node receives a whole message before it sends it
on. A link sends one message at a time, first come first served. A transfer
starts when the transfers of earlier rounds have brought its chunk to its
source; with ``barrier=True``, when all transfers of earlier rounds have
arrived. The arithmetic is that of ASTRA-sim's congestion-aware analytical
network (astra-network-analytical, Link.cpp): a message of s bytes occupies a
link of B bytes per nanosecond for floor(s / B) ns and arrives after
floor(latency + s / B) ns. Events of the same nanosecond happen in the order in
which they were made. It differs from ASTRA-sim in taking any graph, and the
schedule's own paths.

`lockstep` is the alpha-beta model of a machine that waits after every round
and whose switches send a message on while it arrives: a round lasts as long as
the latency of a path plus the time of the round's bytes on its fullest link.

`lower_bound` is the time that no order of messages on the links can beat.
"""

import array
import collections
import dataclasses
import heapq

import numpy as np

from parallel.network.routed import HopTimes, RoutedSchedule, sum_by


@dataclasses.dataclass(frozen=True)
class Timeline:
  """When each hop happens, in ns from the start.

  Attributes:
    routed: The schedule over the links, as it was run.
    size_bytes: Bytes of the collective's buffer, all chunks together.
    finish_ns: Time of the last arrival.
    requested_ns: int ``[hop]``, when the message is ready to be sent.
    start_ns: int ``[hop]``, when the link begins to send it.
    end_ns: int ``[hop]``, when the link is free again.
    arrival_ns: int ``[hop]``, when the message is at the link's far end.
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
    """The part of the time that each link sends, float ``[link]`` in [0, 1]."""
    busy = self._by_link(self.end_ns - self.start_ns)
    return busy / max(self.finish_ns, 1)

  @property
  def waiting_ns(self) -> np.ndarray:
    """The time that messages waited for each link, summed, int ``[link]``."""
    return self._by_link(self.start_ns - self.requested_ns)

  @property
  def longest_queues(self) -> np.ndarray:
    """The most messages that waited for each link at a time, int ``[link]``."""
    # A message that waits joins the queue (+1) and leaves it again (-1).
    links = self.routed.hop_links
    waits = self.start_ns > self.requested_ns
    at = np.concatenate([self.requested_ns[waits], self.start_ns[waits]])
    link = np.concatenate([links[waits]] * 2)
    step = np.repeat([1, -1], waits.sum())
    # By link, then time; at one time, messages leave before others join.
    order = np.lexsort((step, at, link))
    longest = np.zeros(len(self.routed.links), np.int64)
    # Each link's steps sum to 0, so one running sum serves all of them.
    np.maximum.at(longest, link[order], np.cumsum(step[order]))
    return longest

  def _by_link(self, values: np.ndarray) -> np.ndarray:
    """Sums int ``[hop]`` over the hops of each link."""
    return sum_by(self.routed.hop_links, values, len(self.routed.links))


def events(
  routed: RoutedSchedule, size_bytes: int, *, barrier: bool = False
) -> Timeline:
  """Runs a schedule event by event.

  Args:
    routed: What is sent over which links.
    size_bytes: Bytes of the collective's buffer, all chunks together.
    barrier: Whether a round waits for all transfers of the rounds before.

  Returns:
    When each hop happens.

  Raises:
    ValueError: There are fewer bytes than chunks.

  Source: astra-network-analytical, congestion_aware.
  """
  times, segments = routed.hop_ns(size_bytes), _segments(routed, barrier)
  starts, released = _run(routed, times, segments)
  start_ns = np.asarray(starts)
  at = start_ns + times.arrival_ns[times.kinds]
  requested = np.empty_like(at)
  # A message is ready for a later hop of its path when the hop before has
  # arrived, and for the first hop when its segment is released.
  requested[1:] = at[:-1]
  first = routed.first_hops[:-1]
  requested[first] = np.asarray(released)[segments.of_send]
  return Timeline(
    routed, int(size_bytes), int(at.max(initial=0)), requested, start_ns,
    start_ns + times.busy_ns[times.kinds], at,
  )


@dataclasses.dataclass(frozen=True)
class _Segments:
  """Which transfers wait for which others.

  A buffer is a chunk at a node. The transfers that touch it, in the order of
  rounds, are cut into segments: some that arrive, then some that leave. Those
  that leave wait for what arrives in their segment and in the buffer's earlier
  segments; a segment whose wait is over is released. So dependencies are kept
  per segment, and not for each pair of transfers.

  Segments are numbered by their first arrival, so that what happens at one
  time lies close together in memory. The last segment holds the transfers that
  wait for nothing.

  Attributes:
    of_send: int ``[transfer]``, the segment in which it leaves its source.
    of_arrival: int ``[transfer]``, the segment in which it arrives.
    waits: int ``[segment]``, how many events it waits for: its arrivals, and
      the release of the buffer's segment before, if there is one.
    later: int ``[segment]``, the next segment of the buffer; -1: none.
  """

  of_send: np.ndarray
  of_arrival: np.ndarray
  waits: np.ndarray
  later: np.ndarray


def _segments(routed: RoutedSchedule, barrier: bool) -> _Segments:
  """Cuts the transfers at each buffer into segments."""
  count = len(routed.rounds)
  # Each transfer twice, [2 * transfer]: where it leaves, then where it arrives.
  nodes = np.concatenate([routed.sources, routed.destinations])
  buffers = nodes * routed.num_chunks + np.tile(routed.chunks, 2)
  if barrier:
    buffers[:] = 0  # one buffer: who leaves waits for all earlier rounds
  rounds = np.tile(routed.rounds, 2)
  arrives = np.repeat([False, True], count)
  # By buffer and round. The sort is stable, so a round's sends come before its
  # arrivals: transfers of a round read the state before it.
  order = np.lexsort((rounds, buffers))
  buffers, arrives = buffers[order], arrives[order]
  new_buffer = np.ones(2 * count, bool)
  new_buffer[1:] = buffers[1:] != buffers[:-1]
  # A segment begins with a buffer, and with each arrival that follows a send.
  begins = new_buffer.copy()
  begins[1:] |= arrives[1:] & ~arrives[:-1]
  segment = np.empty(2 * count, np.int64)
  segment[order] = np.cumsum(begins) - 1
  of_send, of_arrival = segment[:count], segment[count:]
  # One more segment, number ``last``, for what waits for nothing. It waits for
  # the event that starts it all.
  last = int(begins.sum())
  # Whether a segment has one before it in its buffer; a second entry beyond the
  # end lets ``continues[1:]`` say of every segment whether one comes after it.
  continues = np.append(~new_buffer[begins], [False, False])
  arrivals = np.bincount(of_arrival, minlength=last)
  # Segments without arrivals are the first of their buffers. Their sends move
  # to segment ``last``. They are never released, so nothing may wait for them.
  free = np.append(arrivals == 0, True)
  waits = np.append(arrivals, 1) + continues[:-1]
  waits[1:] -= free[:-1] & continues[1:-1]
  of_send = np.where(free[of_send], last, of_send)
  # Each segment's first transfer to arrive: written backwards, so that the
  # smallest number is written last and stays. Segments without arrivals, and
  # ``last`` behind them, keep the largest number and so come at the end.
  first = np.full(last + 1, count)
  first[of_arrival[::-1]] = np.arange(count)[::-1]
  order = np.argsort(first, kind="stable")
  number = np.empty(last + 2, np.int64)  # old -> new
  number[order], number[-1] = np.arange(last + 1), -1
  later = np.where(continues[1:], number[1:], -1)
  return _Segments(
    number[of_send], number[of_arrival], waits[order], later[order]
  )


def _packed(values: np.ndarray, code: str = "i") -> array.array:
  """Packs values without an object for each, so that caches hold more."""
  return array.array(code, values.astype(code).tobytes())


def _successors(
  routed: RoutedSchedule, segments: _Segments
) -> tuple[array.array, array.array, array.array]:
  """What follows an arrival, and what follows the release of a segment.

  Returns:
    For each hop the next hop, or the complement of the segment that waits for
    its arrival; first hops in the order of the segments that release them; and
    where each segment's begin among these.
  """
  num_hops, num_segments = len(routed.hop_links), len(segments.waits)
  # What follows an arrival: the next hop of the path, or after the last one the
  # complement of the segment that waits for it. Hop number num_hops, which is
  # no hop, is the event that starts it all: the last segment waits for it.
  then = np.arange(1, num_hops + 2)
  then[routed.first_hops[1:] - 1] = ~segments.of_arrival
  then[-1] = ~(num_segments - 1)
  then = _packed(then)
  # The first hops that a segment's release makes ready, segment by segment:
  # sends[bounds[s]:bounds[s + 1]], in the order of transfers.
  order = np.argsort(segments.of_send, kind="stable")
  sends = _packed(routed.first_hops[order])
  bounds = _packed(np.searchsorted(
    segments.of_send[order], np.arange(num_segments + 1)
  ))
  return then, sends, bounds


def _run(
  routed: RoutedSchedule, times: HopTimes, segments: _Segments
) -> tuple[array.array, array.array]:
  """Runs the event loop, on integers only.

  An event is the number of a hop, whose message arrives, or the complement
  ~link of a link, which becomes free. A link's queue holds the hops that wait.
  A bucket holds the events of one nanosecond in the order of their making; a
  heap holds the nanoseconds that have a bucket.

  Returns:
    When each hop starts; when each segment is released.
  """
  num_hops, num_segments = len(routed.hop_links), len(segments.waits)
  # A link is written as its complement, a negative number. As an index into a
  # list by link it counts from the end; each link still has its own item.
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
    # The bucket may grow meanwhile, by hops that take no time.
    for event in pending[now]:
      if event < 0:
        busy[event] = False
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
        # A release may end the wait of the buffer's next segment, and so on.
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
        # Arrival and free link are made in this order, which counts where both
        # happen in one nanosecond. Written out twice: this is the inner loop.
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
  """Returns the seconds of a schedule by the alpha-beta model.

  Every round waits for the one before. A round lasts as long as its slowest
  transfer, which takes the latencies of its path plus the time of the bytes
  that the round sends over the slowest link of that path.

  Args:
    routed: What is sent over which links.
    size_bytes: Bytes of the collective's buffer, all chunks together.
  """
  inverse_bandwidth = 1 / np.array([link.bandwidth for link in routed.links])
  latency = np.array([link.latency_s for link in routed.links])
  sizes = routed.hop_bytes(size_bytes)
  num_links, num_transfers = len(routed.links), len(routed.rounds)
  # A link in one round is a slot: its bytes are what all of them share.
  slots = routed.rounds[routed.hop_transfers] * num_links + routed.hop_links
  used, slot_of_hop = np.unique(slots, return_inverse=True)
  sums = sum_by(slot_of_hop, sizes, len(used))
  seconds = sums * inverse_bandwidth[used % num_links]
  slowest = np.zeros(num_transfers)
  np.maximum.at(slowest, routed.hop_transfers, seconds[slot_of_hop])
  np.add.at(slowest, routed.hop_transfers, latency[routed.hop_links])
  rounds = np.zeros(routed.rounds.max(initial=-1) + 1)
  np.maximum.at(rounds, routed.rounds, slowest)
  return float(rounds.sum())


def lower_bound(routed: RoutedSchedule, size_bytes: int) -> int:
  """Returns the ns that `events` takes at least, in any order on the links.

  It is the larger of two times: that of the link with the most to send, until
  its last message has arrived; and that of the longest chain of transfers that
  wait for one another, if none of them had to wait for a link.

  Args:
    routed: What is sent over which links.
    size_bytes: Bytes of the collective's buffer, all chunks together.
  """
  times = routed.hop_ns(size_bytes)
  busy_ns = times.busy_ns[times.kinds]
  arrival_ns = times.arrival_ns[times.kinds]
  # After its last byte a link needs at least the shortest latency of its
  # messages, whichever of them comes last.
  work = sum_by(routed.hop_links, busy_ns, len(routed.links))
  tail = np.full(len(routed.links), np.iinfo(np.int64).max)
  np.minimum.at(tail, routed.hop_links, arrival_ns - busy_ns)
  fullest = (work + tail)[work > 0].max(initial=0)
  transfer_ns = sum_by(
    routed.hop_transfers, arrival_ns, len(routed.rounds)
  )
  # When each buffer (a chunk at a node) has all that earlier rounds bring.
  ready = np.zeros(routed.num_nodes * routed.num_chunks, np.int64)
  sources = routed.sources * routed.num_chunks + routed.chunks
  destinations = routed.destinations * routed.num_chunks + routed.chunks
  # Place of the last transfer of each round.
  ends = np.flatnonzero(np.diff(routed.rounds, append=-1))
  for low, high in zip([0, *ends + 1], ends + 1, strict=False):
    at = ready[sources[low:high]] + transfer_ns[low:high]
    np.maximum.at(ready, destinations[low:high], at)
  return int(max(fullest, ready.max(initial=0)))
