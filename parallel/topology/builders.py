"""Builders of topologies: standard networks, by name, from files and graphs.

All builders of standard networks take `bandwidth`, the bytes per second of each
direction of each link, and `latency_s`, the latency of each link. From a config
they are texts, which `parallel.topology.text` reads.
"""

from collections.abc import Callable, Iterable, Sequence
import itertools
import math
from typing import Any

from parallel import checks
from parallel.hardware import links as hardware
from parallel.topology.files import from_file
from parallel.topology.graph import (
  BANDWIDTH,
  LATENCY_S,
  MAX_LINKS,
  Link,
  Topology,
)


def ring(
  num_ranks: int, *, bandwidth: float = BANDWIDTH, latency_s: float = LATENCY_S
) -> Topology:
  """Builds a ring of ranks with links in both directions."""
  return _grid(
    f"ring {num_ranks}", (num_ranks,), True, bandwidth, latency_s
  )


def torus(
  shape: Sequence[int],
  *,
  bandwidth: float = BANDWIDTH,
  latency_s: float = LATENCY_S,
) -> Topology:
  """Builds a grid of any number of dims, each of which wraps around.

  In a dim of size 2 the two ranks are joined by one link each way, not two.

  Args:
    shape: Size of each dim; ranks are in row-major order.
    bandwidth: Bytes per second of each direction of each link.
    latency_s: Latency of each link.
  """
  name = f"torus {_by(shape)}"
  return _grid(name, tuple(shape), True, bandwidth, latency_s)


def mesh(
  shape: Sequence[int],
  *,
  bandwidth: float = BANDWIDTH,
  latency_s: float = LATENCY_S,
) -> Topology:
  """Builds a grid of any number of dims, none of which wraps around.

  Args:
    shape: Size of each dim; ranks are in row-major order.
    bandwidth: Bytes per second of each direction of each link.
    latency_s: Latency of each link.
  """
  name = f"mesh {_by(shape)}"
  return _grid(name, tuple(shape), False, bandwidth, latency_s)


def _check_size(name: str, num_links: int) -> None:
  """Refuses a topology before more links are made than it may have."""
  if num_links > MAX_LINKS:
    raise ValueError(
      f"{name} has {num_links} links; at most {MAX_LINKS} are allowed"
    )


def _by(shape: Sequence[int]) -> str:
  """Writes a shape as in "4x4"."""
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
  _check_size(name, 2 * len(shape) * math.prod(shape))
  strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
  # Every node's links are in the same order of directions, because MultiTree
  # tries them in this order: in the order of node numbers it takes 66 steps on
  # a 16x16 torus, not 64. The dict drops the second of two equal pairs: both
  # directions lead to the same node in a dim of size 2.
  pairs = {}
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
  """Builds a network with a link for every ordered pair of ranks."""
  name = f"fully connected {num_ranks}"
  _check_size(name, num_ranks * (num_ranks - 1))
  pairs = itertools.permutations(range(num_ranks), 2)
  return Topology(
    name,
    num_ranks,
    0,
    tuple(Link(*pair, bandwidth, latency_s) for pair in pairs),
  )


def _both(
  pairs: Iterable[tuple[int, int]], bandwidth: float, latency_s: float
) -> list[Link]:
  """Returns links in both directions between the nodes of each pair."""
  return [
    Link(*ends, bandwidth, latency_s)
    for u, v in pairs
    for ends in ((u, v), (v, u))
  ]


def switch(
  num_ranks: int, *, bandwidth: float = BANDWIDTH, latency_s: float = LATENCY_S
) -> Topology:
  """Builds a network of one switch, to which every rank has one link."""
  name = f"switch {num_ranks}"
  _check_size(name, 2 * num_ranks)
  pairs = [(rank, num_ranks) for rank in range(num_ranks)]
  found = _both(pairs, bandwidth, latency_s)
  return Topology(name, num_ranks, 1, tuple(found))


def leaf_spine(
  leaves: int,
  spines: int,
  hosts_per_leaf: int,
  *,
  bandwidth: float = BANDWIDTH,
  uplink_bandwidth: float | None = None,
  oversubscription: float | None = None,
  latency_s: float = LATENCY_S,
) -> Topology:
  """Builds a network of two levels of switches, leaves and spines.

  Every leaf switch has a link to each of its hosts and one to every spine.

  Args:
    leaves: Number of leaf switches. They are numbered before the spines.
    spines: Number of spine switches.
    hosts_per_leaf: Number of hosts at each leaf. A host is one rank, and hosts
      are numbered leaf by leaf.
    bandwidth: Bytes per second of a link between a host and its leaf.
    uplink_bandwidth: Bytes per second of a link between a leaf and a spine.
      None takes that of the hosts.
    oversubscription: The bandwidth of a leaf's hosts over that of its links to
      the spines, in place of `uplink_bandwidth`.
    latency_s: Latency of each link.

  Raises:
    ValueError: Both bandwidth and oversubscription of the uplinks are given.
  """
  name = f"leaf-spine {leaves}x{spines}x{hosts_per_leaf}"
  num_ranks = leaves * hosts_per_leaf
  _check_size(name, 2 * (num_ranks + leaves * spines))
  if oversubscription is not None:
    if uplink_bandwidth is not None:
      raise ValueError(
        f"{name}: uplink_bandwidth={uplink_bandwidth:g} and oversubscription="
        f"{oversubscription:g} cannot both be given"
      )
    checks.positive("oversubscription", oversubscription)
    uplink_bandwidth = hosts_per_leaf * bandwidth / spines / oversubscription
  hosts = [(rank, num_ranks + rank // hosts_per_leaf)
           for rank in range(num_ranks)]
  up = [
    (num_ranks + leaf, num_ranks + leaves + spine)
    for leaf in range(leaves)
    for spine in range(spines)
  ]
  found = _both(hosts, bandwidth, latency_s)
  if uplink_bandwidth is None:
    uplink_bandwidth = bandwidth
  found += _both(up, uplink_bandwidth, latency_s)
  return Topology(
    name,
    num_ranks,
    leaves + spines,
    tuple(found),
  )


def fat_tree(
  ports: int, *, bandwidth: float = BANDWIDTH, latency_s: float = LATENCY_S
) -> Topology:
  """Builds a fat tree: three levels of switches and ports^3 / 4 ranks.

  Args:
    ports: Number of ports of each switch; even.
    bandwidth: Bytes per second of each direction of each link.
    latency_s: Latency of each link.

  Raises:
    ValueError: The number of ports is odd or below 2.

  Source: Al-Fares, Loukissas and Vahdat, "A scalable, commodity data center
  network architecture", SIGCOMM 2008.
  """
  if ports < 2 or ports % 2:
    raise ValueError(f"fat tree: ports={ports} must be even, at least 2")
  _check_size(f"fat tree {ports}", 3 * ports**3 // 2)
  # Each pod has `half` edge and `half` aggregation switches, and an edge switch
  # has `half` ranks. Aggregation switch i of every pod is joined to core
  # switches i half to i half + half - 1.
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
  """Builds a BiGraph: each upper switch has a link to each lower switch.

  Rank i is at switch i // ranks_per_switch. The first half of the switches is
  the upper one. Source: Dong et al., "EFLOPS", HPCA 2020.

  Args:
    ranks_per_switch: Number of ranks at each switch.
    switches: Number of switches, upper and lower together; even.
    bandwidth: Bytes per second of each direction of each link.
    latency_s: Latency of each link.

  Raises:
    ValueError: The number of switches is odd or below 2.
  """
  if switches < 2 or switches % 2:
    raise ValueError(f"BiGraph: switches={switches} must be even, at least 2")
  num_ranks = ranks_per_switch * switches
  name = f"BiGraph {ranks_per_switch}x{switches}"
  _check_size(name, 2 * num_ranks + switches**2 // 2)
  pairs = [(rank, num_ranks + rank // ranks_per_switch)
           for rank in range(num_ranks)]
  upper, lower = range(switches // 2), range(switches // 2, switches)
  pairs += [
    (num_ranks + u, num_ranks + v) for u, v in itertools.product(upper, lower)
  ]
  found = _both(pairs, bandwidth, latency_s)
  return Topology(
    name,
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
  """Builds nodes of GPUs with one switch inside each, and one switch per rail.

  Args:
    nodes: Number of nodes.
    gpus_per_node: Number of GPUs in a node. Switch i of the rails joins the
      GPUs with number i of all nodes.
    bandwidth: Bytes per second and direction between a GPU and the switch of
      its node. The default is NVLink's in a DGX H100.
    network_bandwidth: Bytes per second and direction between a GPU and its
      rail. The default is InfiniBand's in a DGX H100.
    latency_s: Latency of each link.
  """
  num_ranks = nodes * gpus_per_node
  name = f"dgx {nodes}x{gpus_per_node}"
  _check_size(name, 4 * num_ranks)
  inside = [(rank, num_ranks + rank // gpus_per_node)
            for rank in range(num_ranks)]
  rails = [
    (rank, num_ranks + nodes + rank % gpus_per_node)
    for rank in range(num_ranks)
  ] if nodes > 1 else []
  found = _both(inside, bandwidth, latency_s)
  found += _both(rails, network_bandwidth, latency_s)
  num_switches = nodes + (gpus_per_node if rails else 0)
  return Topology(name, num_ranks, num_switches, tuple(found))


# Builders by the names that configs use.
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
SHAPED = ("torus", "mesh")  # they take all their sizes as one argument


def build(name: str, *args: Any, **kwargs: Any) -> Topology:
  """Builds a topology with the builder of that name.

  Args:
    name: A key of ``BUILDERS``.
    *args: Positional arguments of the builder.
    **kwargs: Keyword arguments of the builder.

  Raises:
    ValueError: The name is unknown, or the builder does not take the arguments.
  """
  checks.known("topology ", name, BUILDERS)
  try:
    return BUILDERS[name](*args, **kwargs)
  except TypeError as error:
    raise ValueError(f"topology {name!r}: {error}") from error


def of_size(name: str, num_ranks: int) -> Topology:
  """Builds a topology of that many ranks, as square as they allow.

  Tori and meshes get the two dims that are nearest to each other. A BiGraph
  gets the smaller of these as its ranks per switch and the larger one as its
  number of switches.

  Args:
    name: "ring", "torus", "mesh", "bigraph", "switch" or "fully_connected".
    num_ranks: Number of ranks.

  Raises:
    ValueError: The name is unknown, there are no ranks, or a BiGraph's number
      of switches would be odd.
  """
  checks.at_least("num_ranks", num_ranks)
  kinds = ("ring", *SHAPED, "bigraph", "switch", "fully_connected")
  checks.known("topology ", name, kinds)
  short = max(
    d for d in range(1, math.isqrt(num_ranks) + 1) if num_ranks % d == 0
  )
  shape = (short, num_ranks // short)
  if name in SHAPED:
    return build(name, shape)
  if name == "bigraph":
    return bigraph(*shape)
  return build(name, num_ranks)
