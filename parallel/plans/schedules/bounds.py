"""Lower bounds on the time of a collective on a topology, for any schedule."""

import math

import networkx

from parallel.plans.schedules.optimal.cut_bound import cut_bound
from parallel.plans.schedules.schedule import Collective
from parallel.plans.topology.graph import Topology


def lower_bound(
  topology: Topology, collective: Collective, size_bytes: int
) -> float:
  """Returns a lower bound, in seconds, on the time of any schedule.

  It is the larger of the longest latency between two ranks and a bound from
  bandwidths. For an all-gather or reduce-scatter, the latter is the bound of
  the tightest cut, which packed trees (`optimal.trees`) nearly reach for large
  messages. For an all-reduce, it is the largest of `injection_bound`, the time
  of the whole buffer over the tightest cut, and the bounds of
  `_group_bound`.

  Example:
    A ring of 4 ranks, each of which sends 1.5 times the 8 bytes over two links:

    >>> from parallel.plans.topology.builders import ring
    >>> lower_bound(ring(4, bandwidth=1.0), "all_reduce", 8)
    6.0

  Args:
    topology: Topology of at least two ranks.
    collective: "all_reduce", "reduce_scatter" or "all_gather".
    size_bytes: Size of the buffer, all slices together.
  """
  graph = networkx.DiGraph()
  graph.add_weighted_edges_from(
    (link.source, link.destination, link.latency_s) for link in topology.links
  )
  n = topology.num_ranks
  latency = max(
    seconds
    for source in range(n)
    for node, seconds in networkx.single_source_dijkstra_path_length(
      graph, source
    ).items()
    if node < n
  )
  if collective != "all_reduce":
    # A reduce-scatter is a reversed all-gather.
    gathers = collective == "all_gather"
    bound = cut_bound(topology if gathers else topology.reversed())
    return max(latency, size_bytes * bound.seconds_per_byte)
  # Ranks on both sides of a cut need the summands of the other side.
  cuts = (cut_bound(x) for x in (topology, topology.reversed()))
  return max(
    latency,
    injection_bound(topology, size_bytes),
    *(size_bytes / cut.leaving for cut in cuts),
    *(
      _group_bound(topology, bandwidth, size_bytes)
      for bandwidth in {link.bandwidth for link in topology.links}
    ),
  )


def injection_bound(net: Topology, size_bytes: int) -> float:
  """Returns a lower bound in seconds on an all-reduce, from the ranks' links.

  Each rank must send and receive at least the size of the buffer over its own
  links. All n ranks together must send 2 (n - 1) times that size (Patarasuk and
  Yuan, 2009), which is the tighter bound if all ranks have equal links. There
  is no such bound per rank: one that reduces nothing for others may send less
  than 2 (n - 1) / n of the buffer, since its sends of the reduce-scatter may
  overlap its receives of the all-gather. Latency is ignored.

  Args:
    net: The network.
    size_bytes: Size of the buffer.
  """
  out = [0.0] * net.num_nodes
  into = [0.0] * net.num_nodes
  for link in net.links:
    out[link.source] += link.bandwidth
    into[link.destination] += link.bandwidth
  # Ranks are nodes 0 to n - 1.
  slowest = min(*out[:net.num_ranks], *into[:net.num_ranks])
  return max(
    size_bytes / slowest, _group_bound(net, math.inf, size_bytes)
  )


def _group_bound(
  net: Topology, bandwidth: float, size_bytes: int
) -> float:
  """Returns a lower bound in seconds on an all-reduce, from groups' links.

  A group consists of nodes that links faster than ``bandwidth`` connect; if
  ``bandwidth`` is infinite, each rank is a group. The k groups together must
  send and receive 2 (k - 1) times the buffer over the links between groups.
  """
  fast = networkx.Graph()
  fast.add_nodes_from(range(net.num_nodes))
  fast.add_edges_from(
    (link.source, link.destination) for link in net.links
    if link.bandwidth > bandwidth
  )
  group_of = {
    node: number
    for number, group in enumerate(networkx.connected_components(fast))
    if min(group) < net.num_ranks  # has a rank: ranks precede switches
    for node in group
  }
  out = into = 0.0
  for link in net.links:
    source, there = map(group_of.get, (link.source, link.destination))
    if source != there:
      out += link.bandwidth if source is not None else 0
      into += link.bandwidth if there is not None else 0
  num_groups = len(set(group_of.values()))
  if num_groups < 2:
    return 0.0
  return size_bytes * 2 * (num_groups - 1) / min(out, into)
