"""Builders of standard topologies, and their registry by name.

All builders take `bandwidth`, in bytes per second and direction of each link,
and `latency_s`, the latency of each link in seconds. Configs give them as text,
which `parallel.plans.topology.text` parses.

Example:
  >>> from parallel.plans.topology import builders
  >>> net = builders.torus((4, 4))
  >>> net.num_ranks, len(net.links), net.neighbours(0)
  (16, 64, (1, 3, 4, 12))
  >>> builders.fat_tree(4).num_switches
  20
"""

from collections.abc import Callable, Iterable, Sequence
import itertools
import math
from typing import Any

from parallel.base import checks
from parallel.plans.hardware import links as hardware
from parallel.plans.topology.files import from_file
from parallel.plans.topology.graph import (
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
  """Builds a torus: a grid of any number of dims, all of which wrap around.

  In a dim of size 2, one link per direction connects the two ranks, not two.

  Args:
    shape: Size of each dim; ranks are in row-major order.
    bandwidth: Bytes per second and direction of each link.
    latency_s: Latency of each link in seconds.

  Raises:
    ValueError: A dim is smaller than 1, or there are too many links.
  """
  name = f"torus {_format_shape(shape)}"
  return _grid(name, tuple(shape), True, bandwidth, latency_s)


def mesh(
  shape: Sequence[int],
  *,
  bandwidth: float = BANDWIDTH,
  latency_s: float = LATENCY_S,
) -> Topology:
  """Builds a mesh: a grid of any number of dims without wrap-around links.

  Args:
    shape: Size of each dim; ranks are in row-major order.
    bandwidth: Bytes per second and direction of each link.
    latency_s: Latency of each link in seconds.

  Raises:
    ValueError: A dim is smaller than 1, or there are too many links.
  """
  name = f"mesh {_format_shape(shape)}"
  return _grid(name, tuple(shape), False, bandwidth, latency_s)


def _check_size(name: str, num_links: int) -> None:
  """Raises ValueError before more than the allowed links are created."""
  if num_links > MAX_LINKS:
    raise ValueError(
      f"{name} has {num_links} links; at most {MAX_LINKS} are allowed"
    )


def _format_shape(shape: Sequence[int]) -> str:
  """Returns a shape as text, as in "4x4"."""
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
  _check_size(name, 2 * len(shape) * math.prod(shape))  # an upper limit
  # Row-major node numbers: the last dim has stride 1.
  strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
  # All nodes list their links in the same order of directions, because
  # MultiTree tries them in this order: with links in the order of node numbers,
  # it takes 66 steps on a 16x16 torus instead of 64. The dict removes duplicate
  # pairs: in a dim of size 2 both directions lead to the same node.
  pairs = {}
  for node, place in enumerate(itertools.product(*map(range, shape))):
    for i, size, stride in zip(place, shape, strides, strict=True):
      for step in (-1, 1):
        # A dim of size 1 has no links.
        if size > 1 and (wraps or 0 <= i + step < size):
          pairs[node, node + ((i + step) % size - i) * stride] = None
  found = tuple(Link(*pair, bandwidth, latency_s) for pair in pairs)
  return Topology(name, math.prod(shape), 0, found, shape)


def fully_connected(
  num_ranks: int, *, bandwidth: float = BANDWIDTH, latency_s: float = LATENCY_S
) -> Topology:
  """Builds a network with one link for every ordered pair of ranks."""
  name = f"fully connected {num_ranks}"
  _check_size(name, num_ranks * (num_ranks - 1))
  # Both directions of every pair.
  pairs = itertools.permutations(range(num_ranks), 2)
  return Topology(
    name,
    num_ranks,
    0,
    tuple(Link(*pair, bandwidth, latency_s) for pair in pairs),
  )


def _links_both_ways(
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
  """Builds a network of one switch, with one link to and from every rank."""
  name = f"switch {num_ranks}"
  _check_size(name, 2 * num_ranks)
  pairs = [(rank, num_ranks) for rank in range(num_ranks)]  # rank, switch
  found = _links_both_ways(pairs, bandwidth, latency_s)
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
  """Builds a leaf-spine network: two levels of switches.

  Every leaf switch has a link to each of its hosts and to every spine switch.

  Args:
    leaves: Number of leaf switches, which are numbered before the spines.
    spines: Number of spine switches.
    hosts_per_leaf: Number of hosts at each leaf. A host is one rank; hosts are
      numbered leaf by leaf.
    bandwidth: Bytes per second and direction between a host and its leaf.
    uplink_bandwidth: Bytes per second and direction between a leaf and a spine;
      None for ``bandwidth``.
    oversubscription: Ratio of a leaf's total host bandwidth to its total uplink
      bandwidth; an alternative to `uplink_bandwidth`.
    latency_s: Latency of each link in seconds.

  Raises:
    ValueError: Both `uplink_bandwidth` and `oversubscription` are given.
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
    # Total host bandwidth / oversubscription = total uplink bandwidth.
    checks.positive("oversubscription", oversubscription)
    uplink_bandwidth = hosts_per_leaf * bandwidth / spines / oversubscription
  # Nodes: ranks, then leaves, then spines.
  hosts = [(rank, num_ranks + rank // hosts_per_leaf)
           for rank in range(num_ranks)]
  up = [
    (num_ranks + leaf, num_ranks + leaves + spine)
    for leaf in range(leaves)
    for spine in range(spines)
  ]
  found = _links_both_ways(hosts, bandwidth, latency_s)
  if uplink_bandwidth is None:
    uplink_bandwidth = bandwidth
  found += _links_both_ways(up, uplink_bandwidth, latency_s)
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
    bandwidth: Bytes per second and direction of each link.
    latency_s: Latency of each link in seconds.

  Raises:
    ValueError: The number of ports is odd or below 2.

  Source: Al-Fares, Loukissas and Vahdat, "A scalable, commodity data center
  network architecture", SIGCOMM 2008.
  """
  if ports < 2 or ports % 2:
    raise ValueError(f"fat tree: ports={ports} must be even, at least 2")
  _check_size(f"fat tree {ports}", 3 * ports**3 // 2)
  # Each pod has `half` edge and `half` aggregation switches; each edge switch
  # has `half` ranks. Aggregation switch i of every pod connects to core
  # switches i half to i half + half - 1.
  half = ports // 2
  num_ranks = ports * half * half  # ports pods of half^2 ranks
  edge = num_ranks  # first node of each level of switches
  aggregation = edge + ports * half
  core = aggregation + ports * half
  pairs = [(rank, edge + rank // half) for rank in range(num_ranks)]
  for pod, i, j in itertools.product(range(ports), range(half), range(half)):
    pairs.append((edge + pod * half + i, aggregation + pod * half + j))
    pairs.append((aggregation + pod * half + i, core + i * half + j))
  found = _links_both_ways(pairs, bandwidth, latency_s)
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

  Rank i is connected to switch i // ranks_per_switch. The first half of the
  switches are the upper ones. Source: Dong et al., "EFLOPS", HPCA 2020.

  Args:
    ranks_per_switch: Number of ranks at each switch.
    switches: Total number of upper and lower switches; even.
    bandwidth: Bytes per second and direction of each link.
    latency_s: Latency of each link in seconds.

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
  # A complete bipartite graph between both halves.
  upper, lower = range(switches // 2), range(switches // 2, switches)
  pairs += [
    (num_ranks + u, num_ranks + v) for u, v in itertools.product(upper, lower)
  ]
  found = _links_both_ways(pairs, bandwidth, latency_s)
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
  """Builds nodes of GPUs with one switch per node and one switch per rail.

  Args:
    nodes: Number of nodes.
    gpus_per_node: Number of GPUs per node. Rail switch i connects GPU i of all
      nodes.
    bandwidth: Bytes per second and direction between a GPU and its node's
      switch; by default NVLink 4, as in a DGX H100.
    network_bandwidth: Bytes per second and direction between a GPU and its rail
      switch; by default InfiniBand NDR, as in a DGX H100.
    latency_s: Latency of each link in seconds.
  """
  num_ranks = nodes * gpus_per_node
  name = f"dgx {nodes}x{gpus_per_node}"
  _check_size(name, 4 * num_ranks)
  # Nodes: ranks, then the switches inside nodes, then the rail switches.
  inside = [(rank, num_ranks + rank // gpus_per_node)
            for rank in range(num_ranks)]
  rails = [
    (rank, num_ranks + nodes + rank % gpus_per_node)
    for rank in range(num_ranks)
  ] if nodes > 1 else []
  found = _links_both_ways(inside, bandwidth, latency_s)
  found += _links_both_ways(rails, network_bandwidth, latency_s)
  # A single node needs no rail switches.
  num_switches = nodes + (gpus_per_node if rails else 0)
  return Topology(name, num_ranks, num_switches, tuple(found))


# Builders by their names in configs. A new builder becomes available to configs
# and to `parallel.plans.topology.text` by an entry here.
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
  "file": from_file,  # file:PATH in texts
}
GRID_TOPOLOGIES = (
  "torus", "mesh"
)  # builders that take all sizes as one argument


def build(name: str, *args: Any, **kwargs: Any) -> Topology:
  """Builds a topology with a builder given by name.

  Args:
    name: Key of ``BUILDERS``.
    *args: Positional arguments of the builder.
    **kwargs: Keyword arguments of the builder.

  Raises:
    ValueError: The name is unknown, or the arguments do not fit the builder.
  """
  checks.known("topology ", name, BUILDERS)
  try:
    return BUILDERS[name](*args, **kwargs)
  # The number of sizes is wrong, or a keyword is unknown.
  except TypeError as error:
    raise ValueError(f"topology {name!r}: {error}") from error


def of_size(name: str, num_ranks: int) -> Topology:
  """Builds a topology of a given number of ranks, as square as possible.

  A torus or mesh has the two dims whose sizes are closest to each other. In a
  BiGraph, the smaller size is the number of ranks per switch, and the larger
  size is the number of switches.

  Args:
    name: "ring", "torus", "mesh", "bigraph", "switch" or "fully_connected".
    num_ranks: Number of ranks.

  Raises:
    ValueError: The name is unknown, the number of ranks is below 1, or a
      BiGraph's number of switches would be odd.

  Example:
    >>> from parallel.plans.topology import builders
    >>> builders.of_size("mesh", 12).shape
    (3, 4)
  """
  checks.at_least("num_ranks", num_ranks)
  kinds = ("ring", *GRID_TOPOLOGIES, "bigraph", "switch", "fully_connected")
  checks.known("topology ", name, kinds)
  short = max(  # the largest divisor up to the square root
    d for d in checks.divisors(num_ranks) if d * d <= num_ranks
  )
  shape = (short, num_ranks // short)
  if name in GRID_TOPOLOGIES:
    return build(name, shape)
  if name == "bigraph":
    return bigraph(*shape)
  return build(name, num_ranks)
