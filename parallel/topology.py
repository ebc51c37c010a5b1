"""Graphs of ranks, switches and directed links: plain data and builders.

Nodes are numbered: ranks first, then switches. A builder's `bandwidth` is that
of each direction of each link. The defaults are ASTRA-sim's example set-up:
50 GB/s and 500 ns (astra-network-analytical).
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import itertools
import json
import math
import pathlib
from typing import Any

import networkx

from parallel.hardware import links as hardware

BANDWIDTH = 50e9
LATENCY_S = 500e-9


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

  def shortest_path(self, source: int, destination: int) -> tuple[int, ...]:
    """Nodes of a path with the fewest links, both ends included.

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


def ring(
  num_ranks: int, *, bandwidth: float = BANDWIDTH, latency_s: float = LATENCY_S
) -> Topology:
  """A cycle, both ways."""
  return _grid(
    f"ring {num_ranks}", (num_ranks,), True, bandwidth, latency_s
  )


def torus(
  shape: Sequence[int],
  *,
  bandwidth: float = BANDWIDTH,
  latency_s: float = LATENCY_S,
) -> Topology:
  """A grid of any dimension that wraps around; two in a row share one link."""
  name = f"torus {_by(shape)}"
  return _grid(name, tuple(shape), True, bandwidth, latency_s)


def mesh(
  shape: Sequence[int],
  *,
  bandwidth: float = BANDWIDTH,
  latency_s: float = LATENCY_S,
) -> Topology:
  """A grid of any dimension with ends."""
  name = f"mesh {_by(shape)}"
  return _grid(name, tuple(shape), False, bandwidth, latency_s)


def _by(shape: Sequence[int]) -> str:
  return "x".join(map(str, shape))


def _grid(
  name: str,
  shape: tuple[int, ...],
  wraps: bool,
  bandwidth: float,
  latency_s: float,
) -> Topology:
  if not shape or min(shape) < 1:
    raise ValueError(f"{name}: every dim must be at least 1")
  strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
  pairs = {}  # in the order of directions, the same at every node
  for node, place in enumerate(itertools.product(*map(range, shape))):
    for i, size, stride in zip(place, shape, strides, strict=True):
      for step in (-1, 1):
        if size > 1 and (wraps or 0 <= i + step < size):
          pairs[node, node + ((i + step) % size - i) * stride] = None
  found = tuple(Link(*pair, bandwidth, latency_s) for pair in pairs)
  return Topology(name, math.prod(shape), 0, found, shape)


def fully_connected(
  num_ranks: int, *, bandwidth: float = BANDWIDTH, latency_s: float = LATENCY_S
) -> Topology:
  """A link for every ordered pair."""
  pairs = itertools.permutations(range(num_ranks), 2)
  return Topology(
    f"fully connected {num_ranks}",
    num_ranks,
    0,
    tuple(Link(*pair, bandwidth, latency_s) for pair in pairs),
  )


def _both(
  pairs: Iterable[tuple[int, int]], bandwidth: float, latency_s: float
) -> list[Link]:
  return [
    Link(*ends, bandwidth, latency_s)
    for u, v in pairs
    for ends in ((u, v), (v, u))
  ]


def switch(
  num_ranks: int, *, bandwidth: float = BANDWIDTH, latency_s: float = LATENCY_S
) -> Topology:
  """Every rank has one link to one switch."""
  pairs = [(rank, num_ranks) for rank in range(num_ranks)]
  found = _both(pairs, bandwidth, latency_s)
  return Topology(f"switch {num_ranks}", num_ranks, 1, tuple(found))


def leaf_spine(
  leaves: int,
  spines: int,
  hosts_per_leaf: int,
  *,
  bandwidth: float = BANDWIDTH,
  uplink_bandwidth: float | None = None,
  latency_s: float = LATENCY_S,
) -> Topology:
  """Every leaf switch has a link to each of its hosts and to every spine.

  Args:
    leaves: Their switches come first.
    spines: Number of spine switches.
    hosts_per_leaf: One rank each, in the order of the leaves.
    bandwidth: Of hosts.
    uplink_bandwidth: Between leaves and spines; None: the hosts'.
    latency_s: Of all links.
  """
  num_ranks = leaves * hosts_per_leaf
  hosts = [(rank, num_ranks + rank // hosts_per_leaf)
           for rank in range(num_ranks)]
  up = [
    (num_ranks + leaf, num_ranks + leaves + spine)
    for leaf in range(leaves)
    for spine in range(spines)
  ]
  found = _both(hosts, bandwidth, latency_s)
  found += _both(up, uplink_bandwidth or bandwidth, latency_s)
  return Topology(
    f"leaf-spine {leaves}x{spines}x{hosts_per_leaf}",
    num_ranks,
    leaves + spines,
    tuple(found),
  )


def fat_tree(
  ports: int, *, bandwidth: float = BANDWIDTH, latency_s: float = LATENCY_S
) -> Topology:
  """Three levels of switches with an even number of ports: ports^3 / 4 ranks.

  Source: Al-Fares, Loukissas and Vahdat, "A scalable, commodity data center
  network architecture", SIGCOMM 2008.
  """
  if ports < 2 or ports % 2:
    raise ValueError(f"fat tree: ports={ports} must be even, at least 2")
  half = ports // 2
  num_ranks = ports * half * half
  edge = num_ranks
  aggregation = edge + ports * half
  core = aggregation + ports * half
  pairs = [(rank, edge + rank // half) for rank in range(num_ranks)]
  for pod, i, j in itertools.product(range(ports), range(half), range(half)):
    pairs.append((edge + pod * half + i, aggregation + pod * half + j))
    pairs.append((aggregation + pod * half + i, core + i * half + j))
  found = _both(pairs, bandwidth, latency_s)
  return Topology(
    f"fat tree {ports}", num_ranks, core + half * half - num_ranks, tuple(found)
  )


def bigraph(
  ranks_per_switch: int,
  switches: int,
  *,
  bandwidth: float = BANDWIDTH,
  latency_s: float = LATENCY_S,
) -> Topology:
  """Upper and lower switches, a link for every pair of one and the other.

  Rank i is at switch i // ranks_per_switch; the first half of the switches is
  the upper one. Source: Dong et al., "EFLOPS", HPCA 2020.
  """
  if switches < 2 or switches % 2:
    raise ValueError(f"BiGraph: switches={switches} must be even, at least 2")
  num_ranks = ranks_per_switch * switches
  pairs = [(rank, num_ranks + rank // ranks_per_switch)
           for rank in range(num_ranks)]
  upper, lower = range(switches // 2), range(switches // 2, switches)
  pairs += [
    (num_ranks + u, num_ranks + v) for u, v in itertools.product(upper, lower)
  ]
  found = _both(pairs, bandwidth, latency_s)
  return Topology(
    f"BiGraph {ranks_per_switch}x{switches}",
    num_ranks,
    switches,
    tuple(found),
    (ranks_per_switch, switches),
  )


def dgx(
  nodes: int,
  gpus_per_node: int = 8,
  *,
  bandwidth: float = hardware.NVLINK_4.bandwidth,
  network_bandwidth: float = hardware.INFINIBAND_NDR.bandwidth,
  latency_s: float = LATENCY_S,
) -> Topology:
  """Nodes with one switch inside, and between nodes one switch per rail.

  Args:
    nodes: Number of nodes.
    gpus_per_node: GPU i of every node has its adapter at rail i.
    bandwidth: Of a GPU's link to the switch inside; DGX H100's NVLink.
    network_bandwidth: Of a GPU's adapter; DGX H100's InfiniBand.
    latency_s: Of all links.
  """
  num_ranks = nodes * gpus_per_node
  inside = [(rank, num_ranks + rank // gpus_per_node)
            for rank in range(num_ranks)]
  rails = [
    (rank, num_ranks + nodes + rank % gpus_per_node)
    for rank in range(num_ranks)
  ] if nodes > 1 else []
  found = _both(inside, bandwidth, latency_s)
  found += _both(rails, network_bandwidth, latency_s)
  num_switches = nodes + (gpus_per_node if rails else 0)
  return Topology(
    f"dgx {nodes}x{gpus_per_node}", num_ranks, num_switches, tuple(found)
  )


def from_networkx(
  graph: networkx.Graph,
  *,
  name: str = "graph",
  bandwidth: float = BANDWIDTH,
  latency_s: float = LATENCY_S,
) -> Topology:
  """Numbers a graph's nodes: ranks in its order, then those with `switch`.

  Args:
    graph: Edges may have `bandwidth` and `latency_s`; an undirected edge is
      two links.
    name: Of the topology.
    bandwidth: Of edges that say nothing.
    latency_s: Of edges that say nothing.
  """
  nodes = sorted(graph, key=lambda node: bool(graph.nodes[node].get("switch")))
  number = {node: i for i, node in enumerate(nodes)}
  num_switches = sum(bool(graph.nodes[n].get("switch")) for n in nodes)
  found = tuple(
    Link(
      number[u],
      number[v],
      float(data.get("bandwidth", bandwidth)),
      float(data.get("latency_s", latency_s)),
    )
    for u, v, data in graph.to_directed().edges(data=True)
  )
  return Topology(name, len(nodes) - num_switches, num_switches, found)


def from_file(path: str | pathlib.Path) -> Topology:
  """Reads a JSON object with the fields of `Topology`.

  A link is ``{"source": 0, "destination": 1, "bandwidth": 5e10,
  "latency_s": 5e-7}``; ``"both_ways": true`` stands for two, and bandwidth and
  latency may be left out.

  Raises:
    ValueError: Not such an object, with the file's name and the place.
  """
  path = pathlib.Path(path)
  try:
    data = json.loads(path.read_text())
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} is not JSON: {error}") from error
  keys = {"name": str, "num_ranks": int, "num_switches": int, "links": list}
  _check_fields(str(path), data, keys, {"num_ranks", "links"})
  found: list[Link] = []
  for number, entry in enumerate(data["links"]):
    kinds = {
      "source": int, "destination": int, "bandwidth": float,
      "latency_s": float, "both_ways": bool,
    }
    place = f"{path}: links[{number}]"
    _check_fields(place, entry, kinds, {"source", "destination"})
    ends = (entry["source"], entry["destination"])
    numbers = (
      float(entry.get("bandwidth", BANDWIDTH)),
      float(entry.get("latency_s", LATENCY_S)),
    )
    found.append(Link(*ends, *numbers))
    if entry.get("both_ways", False):
      found.append(Link(*reversed(ends), *numbers))
  name = data.get("name", path.stem)
  switches = data.get("num_switches", 0)
  try:
    return Topology(name, data["num_ranks"], switches, tuple(found))
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def _check_fields(
  place: str, data: Any, kinds: Mapping[str, type], required: set[str]
) -> None:
  if not isinstance(data, dict):
    raise ValueError(f"{place} must be an object, not {data!r}")
  missing = sorted(required - data.keys())
  if missing:
    raise ValueError(f"{place} lacks {', '.join(missing)}")
  for key, value in data.items():
    if key not in kinds:
      raise ValueError(
        f"{place} has the key {key!r}; the keys are {', '.join(kinds)}"
      )
    kind = kinds[key]
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
      raise ValueError(
        f"{place}: {key}={value!r} must be of type {kind.__name__}"
      )


# By the names that configs use.
BUILDERS: dict[str, Callable[..., Topology]] = {
  "ring": ring,
  "torus": torus,
  "mesh": mesh,
  "fully_connected": fully_connected,
  "switch": switch,
  "leaf_spine": leaf_spine,
  "fat_tree": fat_tree,
  "bigraph": bigraph,
  "dgx": dgx,
  "file": from_file,
}


def build(name: str, **kwargs: Any) -> Topology:
  """A topology by the name of its builder.

  Raises:
    ValueError: An unknown name, or arguments that the builder does not take.
  """
  if name not in BUILDERS:
    raise ValueError(
      f"topology {name!r} must be one of {', '.join(BUILDERS)}"
    )
  try:
    return BUILDERS[name](**kwargs)
  except TypeError as error:
    raise ValueError(f"topology {name!r}: {error}") from error


def of_size(name: str, num_ranks: int) -> Topology:
  """A topology of that many ranks, as square as its kind can be.

  Args:
    name: "ring", "torus", "mesh", "bigraph", "switch" or "fully_connected".
    num_ranks: How many ranks; a BiGraph needs a multiple of its switches.
  """
  kinds = ("ring", "torus", "mesh", "bigraph", "switch", "fully_connected")
  if name not in kinds:
    raise ValueError(f"topology {name!r} must be one of {', '.join(kinds)}")
  short = max(
    d for d in range(1, math.isqrt(num_ranks) + 1) if num_ranks % d == 0
  )
  shape = (short, num_ranks // short)
  if name in ("torus", "mesh"):
    return build(name, shape=shape)
  if name == "bigraph":
    return bigraph(*shape)
  return build(name, num_ranks=num_ranks)
