"""A schedule laid out over the links of a topology, as arrays.

What `parallel.network.simulate` times. A hop is one transfer on one link of
its path; hops are numbered transfer by transfer, along the path.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import operator

import numpy as np

from parallel.schedules.schedule import Schedule
from parallel.topology import Link, Topology


@dataclasses.dataclass(frozen=True)
class Layout:
  """A schedule laid out over the links of a topology.

  Attributes:
    links: Of the topology.
    num_chunks: Of the schedule.
    num_nodes: Of the topology, switches included.
    rounds: int ``[transfer]``, from 0.
    sources: int ``[transfer]``.
    destinations: int ``[transfer]``.
    chunks: int ``[transfer]``.
    first_hops: int ``[transfer + 1]``.
    hop_links: int ``[hop]``, place in ``links``.
    hop_transfers: int ``[hop]``.
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
    """int ``[link]``: what crosses each link in all."""
    return sum_by(
      self.hop_links, self.hop_bytes(size_bytes), len(self.links)
    )

  def hop_bytes(self, size_bytes: int) -> np.ndarray:
    """int ``[hop]``: of each message."""
    sizes = chunk_bytes(size_bytes, self.num_chunks)
    return sizes[self.chunks][self.hop_transfers]

  def hop_ns(self, size_bytes: int) -> "HopTimes":
    """How long hops take, in whole nanoseconds."""
    bytes_per_ns = np.array([link.bandwidth for link in self.links]) / 1e9
    latency_ns = np.array([link.latency_s for link in self.links]) * 1e9
    # A latency of n ns as seconds is not n once multiplied by 1e9.
    near = np.round(latency_ns)
    latency_ns = np.where(np.abs(latency_ns - near) < 1e-6, near, latency_ns)
    sizes, of_chunk = np.unique(
      chunk_bytes(size_bytes, self.num_chunks), return_inverse=True
    )
    send = sizes / bytes_per_ns[:, None]
    arrival = latency_ns[:, None] + send
    of_hop = of_chunk[self.chunks][self.hop_transfers]
    return HopTimes(
      np.repeat(np.arange(len(self.links)), len(sizes)),
      np.floor(send).astype(np.int64).ravel(),
      np.floor(arrival).astype(np.int64).ravel(),
      self.hop_links * len(sizes) + of_hop,
    )


@dataclasses.dataclass(frozen=True)
class HopTimes:
  """How long hops take; a kind of hop is a link and a size of message.

  Attributes:
    links: int ``[kind]``, place in the topology's links.
    busy_ns: int ``[kind]``, how long the link sends.
    arrival_ns: int ``[kind]``, from the start until the message is there.
    kinds: int ``[hop]``.
  """

  links: np.ndarray
  busy_ns: np.ndarray
  arrival_ns: np.ndarray
  kinds: np.ndarray


def lay_out(schedule: Schedule, topology: Topology) -> Layout:
  """Looks the paths of a schedule up in a topology.

  Args:
    schedule: What is sent.
    topology: Over what.

  Raises:
    ValueError: More ranks than the topology has, a path that does not join
      source and destination, or a link that is not there.
  """
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
  return Layout(
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
  """int ``[hop]``: the places in the topology of the links of all paths."""
  nodes = np.fromiter(
    itertools.chain.from_iterable(paths), np.int64, lengths.sum()
  )
  last = np.cumsum(lengths) - 1
  rounds, sources, destinations, _ = parts
  joins = lengths > 1
  if joins.all():
    first = last - lengths + 1
    joins = (nodes[first] == sources) & (nodes[last] == destinations)
  if not joins.all():
    t = int(np.flatnonzero(~joins)[0])
    raise ValueError(
      f"{schedule.name}, round {rounds[t]}: path {paths[t]} must lead from "
      f"{sources[t]} to {destinations[t]}"
    )
  leads_on = np.ones(len(nodes), bool)
  leads_on[last] = False
  place = np.flatnonzero(leads_on)
  ends = np.stack([nodes[place], nodes[place + 1]])
  there = np.all((ends >= 0) & (ends < topology.num_nodes), axis=0)
  codes = np.where(there, ends[0] * topology.num_nodes + ends[1], -1)
  known = np.array(
    [x.source * topology.num_nodes + x.destination for x in topology.links],
    np.int64,
  )
  order = np.argsort(known)
  found = order[np.searchsorted(known[order], codes) % max(len(order), 1)]
  missing = np.flatnonzero(known[found] != codes)
  if len(missing):
    u, v = ends[:, missing[0]]
    raise ValueError(
      f"{schedule.name}: {topology.name} has no link from {u} to {v}"
    )
  return found


def chunk_bytes(size_bytes: int, num_chunks: int) -> np.ndarray:
  """int ``[chunk]``: a buffer cut as evenly as whole bytes allow."""
  if size_bytes < num_chunks or size_bytes != int(size_bytes):
    raise ValueError(
      f"size_bytes={size_bytes} must be an integer, at least one byte for "
      f"each of {num_chunks} chunks"
    )
  return np.diff(np.arange(num_chunks + 1) * int(size_bytes) // num_chunks)


def sum_by(groups: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
  """Exact sums of integers by group; bincount's weights are floats."""
  sums = np.zeros(count, np.int64)
  np.add.at(sums, groups, values)
  return sums
