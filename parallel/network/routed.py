"""A schedule on the links of a topology, as arrays.

`parallel.network.simulate` times these arrays. A hop is one transfer on one
link of its path; hops are numbered transfer by transfer, along the path.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import operator

import numpy as np

from parallel.schedules.check import check
from parallel.schedules.schedule import Schedule
from parallel.topology.graph import Link, Topology

# Sums of bytes and of nanoseconds stay below it, and so within 64 bits.
_MOST = 2**62


@dataclasses.dataclass(frozen=True)
class RoutedSchedule:
  """A schedule whose transfers are cut into hops, one on each link.

  Attributes:
    links: The topology's links.
    num_chunks: Number of chunks of the schedule.
    num_nodes: Number of the topology's nodes, switches included.
    rounds: int ``[transfer]``, number of its round, from 0, ascending.
    sources: int ``[transfer]``, rank that sends.
    destinations: int ``[transfer]``, rank that receives.
    chunks: int ``[transfer]``, number of its chunk.
    first_hops: int ``[transfer + 1]``, number of its first hop; then the
      number of all hops.
    hop_links: int ``[hop]``, place of its link in ``links``.
    hop_transfers: int ``[hop]``, number of its transfer.
  """

  links: tuple[Link, ...]
  num_chunks: int
  num_nodes: int
  rounds: np.ndarray
  sources: np.ndarray
  destinations: np.ndarray
  chunks: np.ndarray
  first_hops: np.ndarray
  hop_links: np.ndarray
  hop_transfers: np.ndarray

  def link_bytes(self, size_bytes: int) -> np.ndarray:
    """Returns the bytes that cross each link in all, int ``[link]``."""
    return sum_by(
      self.hop_links, self.hop_bytes(size_bytes), len(self.links)
    )

  def hop_bytes(self, size_bytes: int) -> np.ndarray:
    """Returns the bytes of each message, int ``[hop]``.

    Raises:
      ValueError: There are fewer bytes than chunks, or more in all than can be
        counted.
    """
    sizes = chunk_bytes(size_bytes, self.num_chunks)
    hops = sizes[self.chunks][self.hop_transfers]
    if np.bincount(self.hop_links, hops).max(initial=0) > _MOST:
      raise ValueError(
        f"size_bytes={size_bytes} must be so few that a link carries at most "
        f"{_MOST} bytes in all"
      )
    return hops

  def hop_ns(self, size_bytes: int) -> "HopTimes":
    """Returns how long hops take, in whole nanoseconds.

    Args:
      size_bytes: Bytes of the collective's buffer, all chunks together.

    Raises:
      ValueError: There are fewer bytes than chunks, or the clock cannot count
        so many nanoseconds.
    """
    bytes_per_ns = np.array([link.bandwidth for link in self.links]) / 1e9
    latency_ns = np.array([link.latency_s for link in self.links]) * 1e9
    # n ns in seconds, times 1e9, may be a little less than n, and the floor
    # below would make it n - 1.
    near = np.round(latency_ns)
    latency_ns = np.where(np.abs(latency_ns - near) < 1e-6, near, latency_ns)
    sizes, of_chunk = np.unique(
      chunk_bytes(size_bytes, self.num_chunks), return_inverse=True
    )
    send = sizes / bytes_per_ns[:, None]  # [link, size of message]
    arrival = latency_ns[:, None] + send
    of_hop = of_chunk[self.chunks][self.hop_transfers]
    kinds = self.hop_links * len(sizes) + of_hop
    # No order of hops takes longer than one after another.
    if arrival.ravel()[kinds].sum() > _MOST:
      link = self.links[self.hop_links[arrival.ravel()[kinds].argmax()]]
      raise ValueError(
        f"bandwidth={link.bandwidth:g} and latency_s={link.latency_s:g} from "
        f"{link.source} to {link.destination} make {size_bytes} bytes take "
        f"more than {_MOST / 1e9:.0e} s, which the clock cannot count"
      )
    return HopTimes(
      np.repeat(np.arange(len(self.links)), len(sizes)),
      # A link without hops may be too slow to count.
      np.floor(np.minimum(send, _MOST)).astype(np.int64).ravel(),
      np.floor(np.minimum(arrival, _MOST)).astype(np.int64).ravel(),
      kinds,
    )


@dataclasses.dataclass(frozen=True)
class HopTimes:
  """How long hops take.

  Hops on the same link with messages of the same size are of one kind and take
  equally long. There are few kinds, so times per kind stay in caches.

  Attributes:
    links: int ``[kind]``, place in the topology's links.
    busy_ns: int ``[kind]``, time for which the link sends.
    arrival_ns: int ``[kind]``, time from the start of sending until the message
      is at the link's far end.
    kinds: int ``[hop]``, the kind of each hop.
  """

  links: np.ndarray
  busy_ns: np.ndarray
  arrival_ns: np.ndarray
  kinds: np.ndarray


def on_links(
  schedule: Schedule, topology: Topology, *, prove: bool = True
) -> RoutedSchedule:
  """Proves a schedule and finds the links that its transfers take.

  Args:
    schedule: What is sent.
    topology: The links over which it is sent.
    prove: Whether the schedule is a collective, which is proven first. False is
      for other traffic.

  Raises:
    ValueError: The schedule is wrong or has more ranks than the topology, a
      path does not join its source and destination, or the topology lacks one
      of its links.
  """
  if prove:
    check(schedule, topology)
  if schedule.num_ranks > topology.num_ranks:
    raise ValueError(
      f"{schedule.name} has {schedule.num_ranks} ranks, {topology.name} only "
      f"{topology.num_ranks}"
    )
  transfers = list(itertools.chain.from_iterable(schedule.rounds))

  def column(field: str) -> np.ndarray:
    values = map(operator.attrgetter(field), transfers)
    return np.fromiter(values, np.int64, len(transfers))

  rounds = np.repeat(
    np.arange(len(schedule.rounds)), [len(r) for r in schedule.rounds]
  )
  parts = [rounds, column("source"), column("destination"), column("chunk")]
  paths = [t.path for t in transfers]
  lengths = np.fromiter(map(len, paths), np.int64, len(paths))
  first_hops = np.append(0, np.cumsum(lengths - 1))
  return RoutedSchedule(
    topology.links, schedule.num_chunks, topology.num_nodes, *parts,
    first_hops, _links_of(schedule, topology, parts, paths, lengths),
    np.repeat(np.arange(len(paths)), lengths - 1),
  )


def _links_of(
  schedule: Schedule,
  topology: Topology,
  parts: Sequence[np.ndarray],
  paths: Sequence[tuple[int, ...]],
  lengths: np.ndarray,
) -> np.ndarray:
  """Returns the places of all paths' links in the topology, int ``[hop]``.

  Args:
    schedule: Named in errors.
    topology: Has the links.
    parts: Rounds, sources, destinations and chunks, each ``[transfer]``.
    paths: The nodes of each transfer's path.
    lengths: int ``[transfer]``, the number of nodes of each path.
  """
  # All paths one after another; ``last`` is where each of them ends.
  nodes = np.fromiter(
    itertools.chain.from_iterable(paths), np.int64, lengths.sum()
  )
  last = np.cumsum(lengths) - 1
  rounds, sources, destinations, _ = parts
  joins = lengths > 1
  # An empty path has no ends that could be compared.
  if joins.all():
    first = last - lengths + 1
    joins = (nodes[first] == sources) & (nodes[last] == destinations)
  if not joins.all():
    t = int(np.flatnonzero(~joins)[0])
    raise ValueError(
      f"{schedule.name}, round {rounds[t]}: path {paths[t]} must lead from "
      f"{sources[t]} to {destinations[t]}"
    )
  # Every node but the last of a path leads on by a link to the next node.
  leads_on = np.ones(len(nodes), bool)
  leads_on[last] = False
  place = np.flatnonzero(leads_on)
  ends = np.stack([nodes[place], nodes[place + 1]])
  there = np.all((ends >= 0) & (ends < topology.num_nodes), axis=0)
  # A pair of nodes as one number, so that links can be found by binary search;
  # -1, which no link has, for nodes that the topology does not have.
  codes = np.where(there, ends[0] * topology.num_nodes + ends[1], -1)
  known = np.array(
    [x.source * topology.num_nodes + x.destination for x in topology.links],
    np.int64,
  )
  order = np.argsort(known)
  # The remainder keeps the place of a code beyond the last link within bounds;
  # the comparison below shows that it is no link's.
  found = order[np.searchsorted(known[order], codes) % max(len(order), 1)]
  missing = np.flatnonzero(known[found] != codes)
  if len(missing):
    u, v = ends[:, missing[0]]
    raise ValueError(
      f"{schedule.name}: {topology.name} has no link from {u} to {v}"
    )
  return found


def chunk_bytes(size_bytes: int, num_chunks: int) -> np.ndarray:
  """Returns bytes of chunks as equal as whole bytes allow, int ``[chunk]``.

  Raises:
    ValueError: There are fewer bytes than chunks, or not a whole number.
  """
  if not num_chunks <= size_bytes <= _MOST or size_bytes != int(size_bytes):
    raise ValueError(
      f"size_bytes={size_bytes} must be an integer, at least one byte for "
      f"each of {num_chunks} chunks and at most {_MOST}"
    )
  each, rest = divmod(int(size_bytes), num_chunks)
  return each + np.diff(np.arange(num_chunks + 1) * rest // num_chunks)


def sum_by(groups: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
  """Sums integers by group, exactly.

  Args:
    groups: int ``[value]``, the group of each value.
    values: int ``[value]``.
    count: Number of groups.

  Returns:
    int ``[group]``.
  """
  # Not `np.bincount`, which sums weights as floats.
  sums = np.zeros(count, np.int64)
  np.add.at(sums, groups, values)
  return sums
