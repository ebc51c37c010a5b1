"""Collective schedule mapped to the links of a topology, as arrays.

`parallel.plans.network.simulate` computes times from these arrays. A hop is one
transfer on one link of its path; hops are numbered transfer by transfer, along
the path.

Example:
  >>> from parallel.plans.network import routed
  >>> from parallel.plans.schedules import builders
  >>> from parallel.plans.topology.builders import ring
  >>> net = ring(4)
  >>> hops = routed.on_links(builders.build("ring", net), net)
  >>> hops.link_bytes(4000).tolist()  # reduce-scatter one way, all-gather back
  [3000, 3000, 3000, 3000, 3000, 3000, 3000, 3000]
"""

from collections.abc import Sequence
import dataclasses
import itertools
import operator

import numpy as np

from parallel.plans.schedules.check import check
from parallel.plans.schedules.schedule import Schedule
from parallel.plans.topology.graph import Link, Topology

# Limit on sums of bytes and of nanoseconds, so that they fit into 64 bits.
_MAX_SUM = 2**62


@dataclasses.dataclass(frozen=True)
class RoutedSchedule:
  """Schedule whose transfers are divided into hops, one per link.

  Attributes:
    links: Links of the topology.
    num_chunks: Number of chunks of the schedule.
    num_nodes: Number of nodes of the topology, switches included.
    rounds: int ``[transfer]``, round of each transfer, from 0, ascending.
    sources: int ``[transfer]``, sending rank.
    destinations: int ``[transfer]``, receiving rank.
    chunks: int ``[transfer]``, chunk that is sent.
    first_hops: int ``[transfer + 1]``, index of the first hop of each transfer;
      the last entry is the total number of hops.
    hop_links: int ``[hop]``, index of the hop's link in ``links``.
    hop_transfers: int ``[hop]``, index of the hop's transfer.
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
    """Returns the total bytes sent over each link, int ``[link]``.

    Args:
      size_bytes: Size of the collective's buffer in bytes, all chunks together.

    Raises:
      ValueError: The size is invalid, as for `hop_bytes`.
    """
    return sum_by(
      self.hop_links, self.hop_bytes(size_bytes), len(self.links)
    )

  def hop_bytes(self, size_bytes: int) -> np.ndarray:
    """Returns the size of each hop's message in bytes, int ``[hop]``.

    Args:
      size_bytes: Size of the collective's buffer in bytes, all chunks together.

    Raises:
      ValueError: There are fewer bytes than chunks, or a link's total exceeds
        64-bit integers.
    """
    sizes = chunk_bytes(size_bytes, self.num_chunks)
    hops = sizes[self.chunks][self.hop_transfers]
    if np.bincount(self.hop_links, hops).max(initial=0) > _MAX_SUM:
      raise ValueError(
        f"size_bytes={size_bytes} is too large: a link may carry at most "
        f"{_MAX_SUM} bytes in total"
      )
    return hops

  def hop_ns(self, size_bytes: int) -> "HopTimes":
    """Returns the durations of hops in integer nanoseconds.

    Args:
      size_bytes: Size of the collective's buffer in bytes, all chunks together.

    Raises:
      ValueError: There are fewer bytes than chunks, or the total time exceeds
        64-bit integers.
    """
    bytes_per_ns = np.array([link.bandwidth for link in self.links]) / 1e9
    latency_ns = np.array([link.latency_s for link in self.links]) * 1e9
    # Converting n ns to seconds and back may give slightly less than n, which
    # the floor below would round to n - 1.
    near = np.round(latency_ns)
    latency_ns = np.where(np.abs(latency_ns - near) < 1e-6, near, latency_ns)
    sizes, of_chunk = np.unique(
      chunk_bytes(size_bytes, self.num_chunks), return_inverse=True
    )
    send = sizes / bytes_per_ns[:, None]  # [link, size of message]
    arrival = latency_ns[:, None] + send  # [link, size of message]
    of_hop = of_chunk[self.chunks][self.hop_transfers]
    kinds = self.hop_links * len(sizes) + of_hop
    # Executing all hops sequentially is an upper bound for any order.
    if arrival.ravel()[kinds].sum() > _MAX_SUM:
      link = self.links[self.hop_links[arrival.ravel()[kinds].argmax()]]
      raise ValueError(
        f"bandwidth={link.bandwidth:g} and latency_s={link.latency_s:g} from "
        f"{link.source} to {link.destination} make {size_bytes} bytes take "
        f"more than {_MAX_SUM / 1e9:.0e} s, which exceeds the 64-bit clock"
      )
    return HopTimes(
      np.repeat(np.arange(len(self.links)), len(sizes)),
      # Clipped, since times of links without hops were not checked above.
      np.floor(np.minimum(send, _MAX_SUM)).astype(np.int64).ravel(),
      np.floor(np.minimum(arrival, _MAX_SUM)).astype(np.int64).ravel(),
      kinds,
    )


@dataclasses.dataclass(frozen=True)
class HopTimes:
  """Durations of hops, grouped by kind.

  Hops on the same link with messages of the same size form one kind and have
  equal durations. There are few kinds, so their times fit into CPU caches.

  Attributes:
    links: int ``[kind]``, index in the topology's links.
    busy_ns: int ``[kind]``, time for which the link is occupied.
    arrival_ns: int ``[kind]``, time from the start of sending until the message
      has arrived at the link's destination.
    kinds: int ``[hop]``, kind of each hop.
  """

  links: np.ndarray
  busy_ns: np.ndarray
  arrival_ns: np.ndarray
  kinds: np.ndarray


def on_links(
  schedule: Schedule, topology: Topology, *, prove: bool = True
) -> RoutedSchedule:
  """Verifies a schedule and maps its transfers to links.

  Args:
    schedule: Collective schedule, or other traffic.
    topology: Topology that has the links of all paths.
    prove: Whether to verify first that the schedule computes its collective;
      False for other traffic.

  Raises:
    ValueError: The schedule is incorrect or has more ranks than the topology, a
      path does not connect its source and destination, or the topology lacks a
      link of a path.
  """
  if prove:
    check(schedule, topology)
  if schedule.num_ranks > topology.num_ranks:
    raise ValueError(
      f"schedule {schedule.name} has {schedule.num_ranks} ranks, but topology "
      f"{topology.name} has only {topology.num_ranks}"
    )
  transfers = list(itertools.chain.from_iterable(schedule.rounds))

  def column(field: str) -> np.ndarray:  # int [transfer]
    values = map(operator.attrgetter(field), transfers)
    return np.fromiter(values, np.int64, len(transfers))

  rounds = np.repeat(
    np.arange(len(schedule.rounds)), [len(r) for r in schedule.rounds]
  )
  parts = [rounds, column("source"), column("destination"), column("chunk")]
  paths = [t.path for t in transfers]
  lengths = np.fromiter(map(len, paths), np.int64, len(paths))  # nodes
  first_hops = np.append(0, np.cumsum(lengths - 1))
  return RoutedSchedule(
    topology.links, schedule.num_chunks, topology.num_nodes, *parts,
    first_hops, _find_hop_links(schedule, topology, parts, paths, lengths),
    np.repeat(np.arange(len(paths)), lengths - 1),
  )


def _find_hop_links(
  schedule: Schedule,
  topology: Topology,
  parts: Sequence[np.ndarray],
  paths: Sequence[tuple[int, ...]],
  lengths: np.ndarray,
) -> np.ndarray:
  """Returns the index in the topology of each hop's link, int ``[hop]``.

  Args:
    schedule: Schedule whose name error messages contain.
    topology: Topology that has the links.
    parts: Rounds, sources, destinations and chunks, each int ``[transfer]``.
    paths: Nodes of each transfer's path.
    lengths: int ``[transfer]``, number of nodes of each path.
  """
  # All paths concatenated; ``last`` is the index of each path's last node.
  nodes = np.fromiter(
    itertools.chain.from_iterable(paths), np.int64, lengths.sum()
  )
  last = np.cumsum(lengths) - 1
  rounds, sources, destinations, _ = parts
  joins = lengths > 1
  # An empty path has no ends to compare.
  if joins.all():
    first = last - lengths + 1
    joins = (nodes[first] == sources) & (nodes[last] == destinations)
  if not joins.all():
    t = int(np.flatnonzero(~joins)[0])
    raise ValueError(
      f"{schedule.name}, round {rounds[t]}: path {paths[t]} must lead from "
      f"{sources[t]} to {destinations[t]}"
    )
  # Every node of a path except the last one has a link to the next node.
  leads_on = np.ones(len(nodes), bool)
  leads_on[last] = False
  place = np.flatnonzero(leads_on)
  ends = np.stack([nodes[place], nodes[place + 1]])
  there = np.all((ends >= 0) & (ends < topology.num_nodes), axis=0)
  # Encode a pair of nodes as one number for a binary search; -1, which no link
  # has, stands for nodes outside the topology.
  codes = np.where(there, ends[0] * topology.num_nodes + ends[1], -1)
  known = np.array(
    [x.source * topology.num_nodes + x.destination for x in topology.links],
    np.int64,
  )
  order = np.argsort(known)
  # The remainder keeps the index of a code beyond the last link within bounds;
  # the comparison below rejects it.
  found = order[np.searchsorted(known[order], codes) % max(len(order), 1)]
  missing = np.flatnonzero(known[found] != codes)
  if len(missing):
    u, v = ends[:, missing[0]]
    raise ValueError(
      f"{schedule.name}: {topology.name} has no link from {u} to {v}"
    )
  return found


def chunk_bytes(size_bytes: int, num_chunks: int) -> np.ndarray:
  """Divides bytes over chunks as evenly as possible.

  Args:
    size_bytes: Total number of bytes.
    num_chunks: Number of chunks.

  Returns:
    int ``[chunk]``, bytes of each chunk; they differ by at most one.

  Raises:
    ValueError: The bytes are fewer than the chunks, or not an integer.

  Example:
    >>> from parallel.plans.network.routed import chunk_bytes
    >>> chunk_bytes(10, 4).tolist()
    [2, 3, 2, 3]
  """
  if not num_chunks <= size_bytes <= _MAX_SUM or size_bytes != int(size_bytes):
    raise ValueError(
      f"size_bytes={size_bytes} must be an integer, at least one byte for "
      f"each of {num_chunks} chunks and at most {_MAX_SUM}"
    )
  each, rest = divmod(int(size_bytes), num_chunks)
  return each + np.diff(np.arange(num_chunks + 1) * rest // num_chunks)


def sum_by(groups: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
  """Sums integers by group, exactly.

  Args:
    groups: int ``[value]``, group of each value.
    values: int ``[value]``.
    count: Number of groups.

  Returns:
    int ``[group]``.
  """
  # np.bincount would sum weights as floats.
  sums = np.zeros(count, np.int64)
  np.add.at(sums, groups, values)
  return sums
