"""Graphs of ranks, switches and directed links: plain data.

Nodes are numbered: ranks first, then switches. The defaults are ASTRA-sim's
example set-up: 50 GB/s and 500 ns (astra-network-analytical). Builders are in
`parallel.topologies`.
"""

import collections
import dataclasses
import functools
import math

import networkx

BANDWIDTH = 50e9
LATENCY_S = 500e-9

Path = tuple[int, ...]  # nodes, both ends included


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
  """One direction of a link.

  Attributes:
    source: Node that sends.
    destination: Node that receives.
    bandwidth: Bytes per second.
    latency_s: Seconds from the first byte's start to its arrival.
  """

  source: int
  destination: int
  bandwidth: float = BANDWIDTH
  latency_s: float = LATENCY_S


@dataclasses.dataclass(frozen=True)
class Topology:
  """Who is joined to whom.

  Attributes:
    name: For tables and messages.
    num_ranks: Nodes 0 to num_ranks - 1 compute.
    num_switches: The nodes after them only forward.
    links: At most one per ordered pair of nodes.
    shape: Of a ring, torus or mesh, whose ranks are in row-major order, or of
      a BiGraph (ranks per switch, switches); () otherwise.

  Raises:
    ValueError: An unknown node, a link twice or from a node to itself, a
      bandwidth that is not positive, a negative latency, or a rank that
      another one cannot reach.
  """

  name: str
  num_ranks: int
  num_switches: int
  links: tuple[Link, ...]
  shape: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    if self.num_ranks < 1 or self.num_switches < 0:
      raise ValueError(
        f"{self.name}: num_ranks={self.num_ranks} must be at least 1, "
        f"num_switches={self.num_switches} at least 0"
      )
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
        raise ValueError(f"{self.name}: {link} leads to its own source")
      if pair in seen:
        raise ValueError(f"{self.name}: two links from {pair[0]} to {pair[1]}")
      seen.add(pair)
      if not 0 < link.bandwidth < math.inf:
        raise ValueError(f"{self.name}: {link}: bandwidth must be positive")
      if not 0 <= link.latency_s < math.inf:
        raise ValueError(f"{self.name}: {link}: latency_s must be at least 0")
    self._check_connected()

  def _check_connected(self) -> None:
    graph = self.graph()
    for view, text in (
      (graph, "from rank 0 to"),
      (graph.reverse(copy=False), "to rank 0 from"),
    ):
      reached = networkx.descendants(view, 0) | {0}
      lost = sorted(set(range(self.num_ranks)) - reached)
      if lost:
        raise ValueError(
          f"{self.name} is not connected: no way {text} "
          f"{'rank' if len(lost) == 1 else 'ranks'} "
          f"{', '.join(map(str, lost[:8]))}{' ...' if len(lost) > 8 else ''}"
        )

  @property
  def num_nodes(self) -> int:
    """Ranks and switches."""
    return self.num_ranks + self.num_switches

  @functools.cached_property
  def links_by_pair(self) -> dict[tuple[int, int], Link]:
    """(source, destination) -> link."""
    return {(link.source, link.destination): link for link in self.links}

  @functools.cached_property
  def multiples(self) -> dict[tuple[int, int], int]:
    """(source, destination) -> whole multiples of the slowest bandwidth."""
    slowest = min((link.bandwidth for link in self.links), default=1.0)
    # Bandwidths that differ by a rounding are alike.
    return {
      pair: int(link.bandwidth / slowest * (1 + 1e-9))
      for pair, link in self.links_by_pair.items()
    }

  @functools.cached_property
  def _neighbours(self) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(self.num_nodes)]
    for link in self.links:
      found[link.source].append(link.destination)
    return tuple(tuple(sorted(nodes)) for nodes in found)

  def neighbours(self, node: int) -> tuple[int, ...]:
    """Nodes that a node's links lead to, in ascending order."""
    return self._neighbours[node]

  @functools.cached_property
  def _hops_to(self) -> dict[int, list[int]]:
    return {}

  def _hops(self, destination: int) -> list[int]:
    """Of every node, links to the destination; -1: no way."""
    if destination not in self._hops_to:
      sources: list[list[int]] = [[] for _ in range(self.num_nodes)]
      for link in self.links:
        sources[link.destination].append(link.source)
      hops = [-1] * self.num_nodes
      hops[destination] = 0
      queue = collections.deque([destination])
      while queue:
        node = queue.popleft()
        for source in sources[node]:
          if hops[source] < 0:
            hops[source] = hops[node] + 1
            queue.append(source)
      self._hops_to[destination] = hops
    return self._hops_to[destination]

  def hops(self, source: int, destination: int) -> int:
    """Links of a shortest path; -1: there is none."""
    return self._hops(destination)[source]

  def shortest_path(self, source: int, destination: int) -> Path:
    """A path with the fewest links.

    Among m next hops, in ascending order, that are equally near, number
    destination mod m is taken (D-mod-k routing, as in fat trees).
    """
    hops = self._hops(destination)
    if hops[source] < 0:
      raise ValueError(f"{self.name}: no way from {source} to {destination}")
    path = [source]
    while path[-1] != destination:
      node = path[-1]
      near = [
        v for v in self.neighbours(node) if hops[v] == hops[node] - 1
      ]
      path.append(near[destination % len(near)])
    return tuple(path)

  def without(self, *pairs: tuple[int, int]) -> "Topology":
    """The same nodes after links failed.

    Args:
      *pairs: (source, destination); name both orders if both directions fail.

    Raises:
      ValueError: No such link, or a rank is cut off.
    """
    for pair in pairs:
      if pair not in self.links_by_pair:
        raise ValueError(f"{self.name} has no link from {pair[0]} to {pair[1]}")
    left = tuple(
      link for link in self.links
      if (link.source, link.destination) not in pairs
    )
    name = f"{self.name} without {len(pairs)} links"
    return Topology(name, self.num_ranks, self.num_switches, left)

  @functools.cached_property
  def symmetric(self) -> bool:
    """Whether every link has one back, of the same bandwidth."""
    links = self.links_by_pair
    return all(
      (v, u) in links and links[v, u].bandwidth == link.bandwidth
      for (u, v), link in links.items()
    )

  def reversed(self) -> "Topology":
    """Every link the other way."""
    turned = tuple(
      dataclasses.replace(x, source=x.destination, destination=x.source)
      for x in self.links
    )
    return dataclasses.replace(self, links=turned)

  def graph(self) -> networkx.DiGraph:
    """Nodes with `switch`, edges with `bandwidth` and `latency_s`."""
    graph = networkx.DiGraph()
    for node in range(self.num_nodes):
      graph.add_node(node, switch=node >= self.num_ranks)
    for link in self.links:
      graph.add_edge(
        link.source,
        link.destination,
        bandwidth=link.bandwidth,
        latency_s=link.latency_s,
      )
    return graph
