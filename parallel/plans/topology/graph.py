"""Topology of a network as plain data: ranks, switches and directed links.

Nodes are numbered, ranks before switches. The default bandwidth and latency are
those of ASTRA-sim's examples, 50 GB/s and 500 ns (astra-network-analytical).
`parallel.plans.topology.builders` builds the standard topologies.

Example:
  >>> from parallel.plans.topology.graph import Link, Topology
  >>> links = [Link(a, b) for a, b in [(0, 2), (2, 0), (1, 2), (2, 1)]]
  >>> net = Topology("star", num_ranks=2, num_switches=1, links=tuple(links))
  >>> net.shortest_path(0, 1)  # node 2 is the switch
  (0, 2, 1)
"""

import collections
from collections.abc import Hashable
import dataclasses
import functools
import math

import networkx

BANDWIDTH = 50e9  # bytes per second
LATENCY_S = 500e-9
MAX_NODES = MAX_LINKS = 2**20  # about a gigabyte of Python objects

Path = tuple[int, ...]  # nodes, both ends included


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
  """Directed link between two nodes.

  Attributes:
    source: Sending node.
    destination: Receiving node.
    bandwidth: Bandwidth in bytes per second.
    latency_s: Seconds from the start of a message until its first byte arrives.
  """

  source: int
  destination: int
  bandwidth: float = BANDWIDTH
  latency_s: float = LATENCY_S


@dataclasses.dataclass(frozen=True)
class Topology:
  """Network of ranks and switches, connected by directed links.

  Attributes:
    name: Name in tables and error messages.
    num_ranks: Number of ranks. Ranks are nodes 0 to num_ranks - 1.
    num_switches: Number of switches, which are the nodes after the ranks.
      Switches forward messages and do not compute.
    links: Links, at most one per ordered pair of nodes.
    shape: Sizes of the dims of a ring, torus or mesh, whose ranks are in
      row-major order; (ranks per switch, switches) of a BiGraph; () otherwise.
    labels: ``[node]``: the node's name in the graph that the topology was built
      from; () if the numbers are the names.

  Raises:
    ValueError: A link names an unknown node, is duplicated, or connects a node
      to itself; a bandwidth is not positive or a latency is negative; or a rank
      cannot reach another one.
  """

  name: str
  num_ranks: int
  num_switches: int
  links: tuple[Link, ...]
  shape: tuple[int, ...] = ()
  labels: tuple[Hashable, ...] = ()

  def __post_init__(self) -> None:
    if self.num_ranks < 1 or self.num_switches < 0:
      raise ValueError(
        f"{self.name}: num_ranks={self.num_ranks} must be at least 1, "
        f"num_switches={self.num_switches} at least 0"
      )
    if self.num_nodes > MAX_NODES or len(self.links) > MAX_LINKS:
      raise ValueError(
        f"{self.name} has {self.num_nodes} nodes and {len(self.links)} links; "
        f"at most {MAX_NODES} and {MAX_LINKS} are allowed"
      )
    # One pass, which stops at the first invalid link and names it.
    seen = set()
    for link in self.links:
      pair = (link.source, link.destination)
      for node in pair:
        if not 0 <= node < self.num_nodes:
          raise ValueError(
            f"{self.name}: {link} names node {node}; nodes are 0 to "
            f"{self.num_nodes - 1}"
          )
      if pair[0] == pair[1]:
        raise ValueError(
          f"{self.name}: {link} connects a node to itself; it must connect two "
          "nodes"
        )
      if pair in seen:
        raise ValueError(
          f"{self.name}: there are two links from {pair[0]} to {pair[1]}; "
          "there must be at most one"
        )
      seen.add(pair)
      if not 0 < link.bandwidth < math.inf:  # also rejects NaN
        raise ValueError(f"{self.name}: {link}: bandwidth must be positive")
      if not 0 <= link.latency_s < math.inf:
        raise ValueError(f"{self.name}: {link}: latency_s must be at least 0")
    self._check_connected()

  def _check_connected(self) -> None:
    """Checks that every rank can reach every other rank."""
    graph = self.graph()
    # Two searches suffice: if rank 0 reaches all ranks and all ranks reach rank
    # 0, then any rank reaches any other through rank 0.
    for view, text in (
      (graph, "from rank 0 to"),
      (graph.reverse(copy=False), "to rank 0 from"),
    ):
      reached = networkx.descendants(view, 0) | {0}
      lost = sorted(set(range(self.num_ranks)) - reached)
      if lost:
        raise ValueError(
          f"{self.name} is not connected: no path {text} "
          f"{'rank' if len(lost) == 1 else 'ranks'} "
          f"{', '.join(map(str, lost[:8]))}{' ...' if len(lost) > 8 else ''}"
        )

  @property
  def num_nodes(self) -> int:
    """Total number of ranks and switches."""
    return self.num_ranks + self.num_switches

  @functools.cached_property
  def links_by_pair(self) -> dict[tuple[int, int], Link]:
    """(source, destination) -> link, in the order of `links`."""
    return {(link.source, link.destination): link for link in self.links}

  @functools.cached_property
  def relative_bandwidths(self) -> dict[tuple[int, int], int]:
    """(source, destination) -> bandwidth over the slowest link's, rounded down.

    Entries are in the order of `links`.
    """
    return self.link_capacities(1)

  def link_capacities(self, amount: float) -> dict[tuple[int, int], int]:
    """Returns the capacity of each link per round, rounded down.

    Args:
      amount: Capacity of the slowest link per round, e.g. in chunks.

    Returns:
      (source, destination) -> ``amount`` times the link's bandwidth over the
      slowest link's, in the order of `links`.
    """
    # A single rank has no links.
    slowest = min((link.bandwidth for link in self.links), default=1.0)
    # The factor compensates for rounding errors, so that a ratio just below an
    # integer is not rounded down.
    return {
      pair: int(amount * link.bandwidth / slowest * (1 + 1e-9))
      for pair, link in self.links_by_pair.items()
    }

  @functools.cached_property
  def _neighbours(self) -> tuple[tuple[int, ...], ...]:
    """Ascending destinations of each node's links, ``[node][link]``."""
    found: list[list[int]] = [[] for _ in range(self.num_nodes)]  # by source
    for link in self.links:
      found[link.source].append(link.destination)
    return tuple(tuple(sorted(nodes)) for nodes in found)

  def neighbours(self, node: int) -> tuple[int, ...]:
    """Returns the destinations of a node's links, in ascending order."""
    return self._neighbours[node]

  @functools.cached_property
  def _hops_to(self) -> dict[int, list[int]]:
    """Cache of `_hops`: destination -> number of links from each node."""
    return {}

  def _hops(self, destination: int) -> list[int]:
    """Returns each node's number of links to `destination`; -1 for no path."""
    # Breadth-first search from the destination over reversed links.
    if destination not in self._hops_to:
      sources: list[list[int]] = [[] for _ in range(self.num_nodes)]
      for link in self.links:
        sources[link.destination].append(link.source)
      hops = [-1] * self.num_nodes  # -1: not reached yet
      hops[destination] = 0
      queue = collections.deque([destination])
      while queue:
        node = queue.popleft()
        for source in sources[node]:
          if hops[source] < 0:
            hops[source] = hops[node] + 1
            queue.append(source)
      # Cached per destination: routing all pairs takes one search per node.
      self._hops_to[destination] = hops
    return self._hops_to[destination]

  def hops(self, source: int, destination: int) -> int:
    """Returns the number of links on a shortest path; -1 if there is none."""
    return self._hops(destination)[source]

  def shortest_path(self, source: int, destination: int) -> Path:
    """Returns a path with the fewest links.

    If m next nodes are equally close to the destination, the path continues
    with number (destination mod m) of them, in ascending order. This is D-mod-k
    routing, as in fat trees: it distributes the paths to different destinations
    over the links.

    Args:
      source: First node of the path.
      destination: Last node of the path.

    Returns:
      Nodes of the path, both ends included.

    Raises:
      ValueError: No path leads from the source to the destination.
    """
    # Avoids a search, whose time is proportional to the number of links, n^2 in
    # a fully connected network.
    if (source, destination) in self.links_by_pair:
      return source, destination
    hops = self._hops(destination)
    if hops[source] < 0:
      raise ValueError(f"{self.name}: no path from {source} to {destination}")
    path = [source]
    while path[-1] != destination:
      node = path[-1]
      # Candidates: neighbours that are one link closer to the destination.
      near = [
        v for v in self.neighbours(node) if hops[v] == hops[node] - 1
      ]
      path.append(near[destination % len(near)])
    return tuple(path)

  def without(self, *pairs: tuple[int, int]) -> "Topology":
    """Returns the topology without failed links.

    Its `shape` is (), so that schedule builders do not treat it as a complete
    grid.

    Args:
      *pairs: (source, destination) of each failed link. Both directions of a
        link are two pairs.

    Raises:
      ValueError: A link does not exist, or a rank becomes unreachable.
    """
    for pair in pairs:
      if pair not in self.links_by_pair:
        raise ValueError(f"{self.name} has no link from {pair[0]} to {pair[1]}")
    left = tuple(
      link for link in self.links
      if (link.source, link.destination) not in pairs
    )
    name = f"{self.name} without {len(pairs)} links"
    # Validates the result: a rank may have become unreachable.
    return dataclasses.replace(self, name=name, links=left, shape=())

  @functools.cached_property
  def symmetric(self) -> bool:
    """Whether every link has a reverse link of the same bandwidth."""
    links = self.links_by_pair
    return all(
      (v, u) in links and links[v, u].bandwidth == link.bandwidth
      for (u, v), link in links.items()
    )

  @functools.cached_property
  def even(self) -> bool:
    """Whether all links have the same bandwidth."""
    return len({link.bandwidth for link in self.links}) < 2

  def reversed(self) -> "Topology":
    """Returns the topology with the direction of every link reversed."""
    turned = tuple(
      dataclasses.replace(x, source=x.destination, destination=x.source)
      for x in self.links
    )
    return dataclasses.replace(self, links=turned)

  def graph(self) -> networkx.DiGraph:
    """Returns a networkx graph of the same nodes and links.

    Nodes have the attribute `switch`, a bool; edges have `bandwidth` in bytes
    per second and `latency_s`.
    """
    graph = networkx.DiGraph()
    for node in range(self.num_nodes):
      # The attributes are those that `files.from_networkx` reads.
      graph.add_node(node, switch=node >= self.num_ranks)
    for link in self.links:
      graph.add_edge(
        link.source,
        link.destination,
        bandwidth=link.bandwidth,
        latency_s=link.latency_s,
      )
    return graph
