"""Exact link loads of flows on a leaf-spine network, by routing algorithm.

A flow between hosts of different leaves takes one spine, or is split into parts
("pieces") that take several. Routing algorithms differ in the choice of spines:

- `ecmp` hashes each flow onto one spine.
- `single_path` derives the spine from the destination (D-mod-k).
- `spray` sends each packet to the next spine, so all spines get equal parts.
- `ethereal` assigns whole flows to spines in turn. Only the last few flows of
  each source host and destination leaf are split, into as few equal pieces as
  even loads need (Ethereal, arXiv 2407.00550). Every link carries the same load
  as with `spray`.
- `coordinated` (not from the paper) splits nothing. It colours the flows of all
  hosts, as edges of the multigraph of leaves, by an equitable edge colouring
  (de Werra 1971) with a colour per spine. The fullest uplink carries
  ceil(degree / spines) flows.
- `coordinated_split` (not from the paper) loads the fullest uplink as little as
  `spray`, for any sizes of flows, with the fewest splits if all leaves have the
  same degree and all flows the same size.

Loads are exact rationals. A link's time is its load over its bandwidth, without
packets, queues or reordering (the fluid limit). Routing algorithms that differ
only in the effects that this limit ignores have equal results.
"""

import collections
from collections.abc import Callable, Hashable, Mapping, Sequence
import dataclasses
from fractions import Fraction
import functools
import math
import random
from typing import NamedTuple

import numpy as np
from scipy import optimize, sparse

from parallel.plans.schedules import colouring
from parallel.plans.topology.graph import Topology


class Flow(NamedTuple):
  """Message from one rank to another, in bytes."""

  source: int
  destination: int
  bytes: int


class SpineShare(NamedTuple):
  """Fraction, numerator / denominator, of a flow that takes one spine."""

  spine: int
  numerator: int = 1
  denominator: int = 1


# A flow's parts by spine; empty if both hosts are on one leaf (no spine used).
Route = tuple[SpineShare, ...]


@dataclasses.dataclass(frozen=True)
class Fabric:
  """Leaf-spine network with its leaves and spines.

  Attributes:
    topology: The whole topology.
    leaf_of: Rank -> node number of its leaf.
    spines: Node numbers of the spines, ascending.
  """

  topology: Topology
  leaf_of: tuple[int, ...]
  spines: tuple[int, ...]

  def leaves(self, flow: Flow) -> tuple[int, int]:
    """Returns the leaves of a flow's source and destination."""
    return self.leaf_of[flow.source], self.leaf_of[flow.destination]

  @functools.cached_property
  def live_spines(self) -> dict[tuple[int, int], tuple[int, ...]]:
    """(leaf, other leaf) -> spines with links from the first to the second.

    Links between leaves and spines that the topology lacks count as failed.
    """
    links = self.topology.links_by_pair
    leaves = sorted(set(self.leaf_of))
    return {
      (a, b): tuple(
        s for s in self.spines if (a, s) in links and (s, b) in links
      )
      for a in leaves
      for b in leaves
      if a != b
    }

  @property
  def whole(self) -> bool:
    """Whether every leaf has a link to and from every spine."""
    return all(live == self.spines for live in self.live_spines.values())


def fabric(topology: Topology) -> Fabric:
  """Identifies the leaves and spines of a topology.

  Args:
    topology: Switches joined to ranks are leaves, the others spines.

  Raises:
    ValueError: A rank is not joined to exactly one switch, a link joins two
      leaves or two spines, or some pair of leaves has no common spine.
  """
  leaf_of = []
  for rank in range(topology.num_ranks):
    near = topology.neighbours(rank)
    if len(near) != 1 or near[0] < topology.num_ranks:  # no switch, or several
      raise ValueError(
        f"{topology.name} is not leaf-spine: rank {rank} is joined to "
        f"{list(near)}, not to one switch"
      )
    leaf_of.append(near[0])
  leaves = set(leaf_of)
  switches = set(range(topology.num_ranks, topology.num_nodes))
  spines = switches - leaves
  for link in topology.links:
    ends = {link.source, link.destination}
    if ends <= leaves or ends <= spines:
      raise ValueError(
        f"{topology.name} is not leaf-spine: a link joins "
        f"{link.source} and {link.destination}, both "
        f"{'leaves' if ends <= leaves else 'spines'}"
      )
  found = Fabric(topology, tuple(leaf_of), tuple(sorted(spines)))
  for (a, b), live in found.live_spines.items():
    if not live:
      raise ValueError(f"{topology.name}: no spine joins leaves {a} and {b}")
  return found


def ecmp(net: Fabric, flows: Sequence[Flow], seed: int = 0) -> list[Route]:
  """Routes each flow over a pseudo-random spine, drawn in the flows' order."""
  draw = random.Random(seed)
  return _route_each_flow(
    net, flows, lambda _, live: (SpineShare(live[draw.randrange(len(live))]),)
  )


def single_path(net: Fabric, flows: Sequence[Flow]) -> list[Route]:
  """Routes each flow over the live spine that its destination selects."""
  return _route_each_flow(
    net, flows,
    lambda flow, live: (SpineShare(live[flow.destination % len(live)]),),
  )


def spray(net: Fabric, flows: Sequence[Flow]) -> list[Route]:
  """Routes equal parts of every flow over all live spines."""
  # One tuple per set of spines, shared by all flows: `loads` adds up flows of
  # equal routes before it does exact arithmetic.
  @functools.cache
  def parts(live: tuple[int, ...]) -> Route:
    return tuple(SpineShare(spine, 1, len(live)) for spine in live)

  return _route_each_flow(net, flows, lambda _, live: parts(live))


def _route_each_flow(
  net: Fabric,
  flows: Sequence[Flow],
  choose: Callable[[Flow, tuple[int, ...]], Route],
) -> list[Route]:
  """Routes each flow by ``choose``, from the flow and its live spines."""
  return [
    choose(flow, net.live_spines[ends]) if ends in net.live_spines else ()
    for flow, ends in zip(flows, map(net.leaves, flows), strict=True)
  ]


def ethereal(net: Fabric, flows: Sequence[Flow]) -> list[Route]:
  """Routes whole flows over the spines in turn, and splits as few as needed.

  Let f flows of equal size go from one host to one leaf, over s spines. The
  last r = f mod s flows are split into s / g pieces each, g = gcd(r, s), and
  all pieces take the spines in turn. This makes f + r (s / g - 1) pieces.
  Extension: flows of different sizes form separate groups. The paper has one
  size per step.

  Source: Ethereal, arXiv 2407.00550.
  """
  routes: list[Route] = [()] * len(flows)
  groups = _groups(
    net, flows, lambda f: (f.source, net.leaf_of[f.destination], f.bytes)
  )
  for members in groups.values():
    live = net.live_spines[net.leaves(flows[members[0]])]
    split = len(members) % len(live)  # r
    pieces = len(live) // math.gcd(split, len(live))  # s / g; 1 if r = 0
    turn = 0  # next spine
    # The last r flows make r s / g pieces, a multiple of s since g divides r.
    # So the rotation over the spines ends where it began, and loads are even.
    for place, index in enumerate(members):
      parts = pieces if place >= len(members) - split else 1
      routes[index] = tuple(
        SpineShare(live[(turn + i) % len(live)], 1, parts) for i in range(parts)
      )
      turn += parts
  return routes


def _groups(
  net: Fabric, flows: Sequence[Flow], key: Callable[[Flow], Hashable]
) -> dict[Hashable, list[int]]:
  """Returns ``key(flow)`` -> indices of flows between different leaves."""
  groups = collections.defaultdict(list)
  for index, flow in enumerate(flows):
    if net.leaves(flow) in net.live_spines:
      groups[key(flow)].append(index)
  return groups


def coordinated(net: Fabric, flows: Sequence[Flow]) -> list[Route]:
  """Routes each flow over one spine, by an equitable edge colouring.

  Flows are edges of the multigraph of leaves and colours are spines. Flows of
  each size are coloured separately. If the path of a flow has a failed link,
  the flow moves to the least loaded spine that is connected to both leaves.
  """
  def whole(
    ends: Sequence[colouring.Edge], count: int, sizes: Sequence[int]
  ) -> list[_Shares]:
    del sizes  # all equal
    return [((c, Fraction(1)),) for c in colouring.equitable(ends, count)]

  routes = _route_by_colouring(
    net, flows, _groups(net, flows, lambda f: f.bytes), whole
  )
  if not net.whole:
    _avoid_failures(net, flows, routes)
  return routes


def coordinated_split(net: Fabric, flows: Sequence[Flow]) -> list[Route]:
  """Routes flows with the minimum load of the fullest uplink and few splits.

  The load of the fullest uplink equals `max_load_lower_bound`. Flows of one
  size are split as little as that allows if all leaves send and receive equal
  numbers of them.

  Raises:
    ValueError: An uplink has failed.
  """
  if not net.whole:
    raise ValueError(
      f"coordinated_split needs every uplink; {net.topology.name} lacks some"
    )
  return _route_by_colouring(
    net,
    flows,
    _groups(net, flows, lambda _: None),
    colouring.split_evenly,
  )


# (colour, fraction of the edge) pairs of one edge; the fractions sum to 1.
_Shares = tuple[tuple[int, Fraction], ...]


def _route_by_colouring(
  net: Fabric,
  flows: Sequence[Flow],
  groups: Mapping[Hashable, Sequence[int]],
  colour: Callable[[Sequence[colouring.Edge], int, Sequence[int]],
                   list[_Shares]],
) -> list[Route]:
  """Routes each group of flows by a colouring whose colours are spines.

  Args:
    net: The network.
    flows: Flows that are sent.
    groups: Indices of the flows of each group, which are coloured together.
    colour: Maps the (source leaf, destination leaf) of flows, the number of
      spines and the flows' bytes to the fraction of each flow by spine.
  """
  routes: list[Route] = [()] * len(flows)
  for members in groups.values():
    ends = [net.leaves(flows[i]) for i in members]  # edges: (leaf, leaf)
    sizes = [flows[i].bytes for i in members]
    shares = colour(ends, len(net.spines), sizes)
    for index, parts in zip(members, shares, strict=True):
      routes[index] = tuple(
        SpineShare(net.spines[c], *share.as_integer_ratio())
        for c, share in parts
      )
  return routes


def _avoid_failures(
  net: Fabric, flows: Sequence[Flow], routes: list[Route]
) -> None:
  """Changes `routes` of flows whose spine lacks a link to one of the leaves."""
  load: collections.Counter[tuple[int, int]] = collections.Counter()
  displaced = []
  for index, route in enumerate(routes):
    if not route:
      continue
    a, b = net.leaves(flows[index])
    spine = route[0].spine
    if spine in net.live_spines[a, b]:
      load[a, spine] += flows[index].bytes
      load[spine, b] += flows[index].bytes
    else:
      displaced.append((index, a, b))
  # All other flows are counted now. Each displaced flow takes the spine that
  # minimises the larger load of its two links, to the spine and from it.
  for index, a, b in displaced:
    spine = min(
      net.live_spines[a, b], key=lambda s: max(load[a, s], load[s, b])
    )
    routes[index] = (SpineShare(spine),)
    load[a, spine] += flows[index].bytes
    load[spine, b] += flows[index].bytes


ROUTERS: dict[str, Callable[[Fabric, Sequence[Flow]], list[Route]]] = {
  "ecmp": ecmp,
  "single_path": single_path,
  "spray": spray,
  "ethereal": ethereal,
  "coordinated": coordinated,
  "coordinated_split": coordinated_split,
}


def num_sent(routes: Sequence[Route]) -> int:
  """Counts messages between leaves: unsplit flows, and pieces of split ones."""
  return sum(map(len, routes))


def loads(
  net: Fabric, flows: Sequence[Flow], routes: Sequence[Route]
) -> dict[tuple[int, int], Fraction]:
  """Returns the bytes on each link that carries any, including hosts' links.

  Example:
    Two hosts of leaf 0 send 8 bytes each to leaf 1, sprayed over two spines:

    >>> from parallel.plans.topology.builders import leaf_spine
    >>> net = fabric(leaf_spine(2, 2, 2))
    >>> flows = [Flow(0, 2, 8), Flow(1, 3, 8)]
    >>> int(max_spine_link_load(net, loads(net, flows, spray(net, flows))))
    8

  Args:
    net: The network.
    flows: Flows that are sent.
    routes: Route of each flow, from a routing algorithm.

  Returns:
    (source node, destination node) -> bytes.
  """
  found: dict[tuple[int, int], Fraction] = collections.defaultdict(Fraction)
  ways: collections.Counter[tuple[int, int, Route]] = collections.Counter()
  for flow, route in zip(flows, routes, strict=True):
    a, b = net.leaves(flow)
    if flow.source != flow.destination:
      # Links of hosts carry whole flows, whatever the route.
      found[flow.source, a] += flow.bytes
      found[b, flow.destination] += flow.bytes
    ways[a, b, route] += flow.bytes
  # Exact fractions are slow, so they are used once per pair of leaves and
  # route.
  for (a, b, route), amount in ways.items():
    for piece in route:
      part = Fraction(amount * piece.numerator, piece.denominator)
      found[a, piece.spine] += part
      found[piece.spine, b] += part
  return dict(found)


def max_spine_link_load(
  net: Fabric, link_loads: Mapping[tuple[int, int], Fraction]
) -> Fraction:
  """Returns the bytes on the fullest link between a leaf and a spine.

  Args:
    net: The network.
    link_loads: Bytes on each link, from `loads`. Both directions count.
  """
  spines = set(net.spines)
  return max(
    (x for pair, x in link_loads.items() if spines & set(pair)),
    default=Fraction(0),
  )


def max_load_lower_bound(net: Fabric, flows: Sequence[Flow]) -> Fraction:
  """Returns a lower bound on `max_spine_link_load` over all routings.

  If bytes must cross one of n links, the fullest of these links carries at
  least 1 / n of the bytes. Three kinds of sets of links are tried: a leaf's
  links to all spines, its links from all spines, and, for the flows between two
  leaves, the links to the spines that join the two.
  """
  # Bytes by (leaf, -1): all that leave a leaf; by (-1, leaf): all that reach
  # it; by (leaf, leaf): those between two leaves.
  links = net.topology.links_by_pair
  shared: collections.Counter[tuple[int, int]] = collections.Counter()
  for flow in flows:
    a, b = net.leaves(flow)
    if a != b:
      for ends in ((a, -1), (-1, b), (a, b)):
        shared[ends] += flow.bytes
  least = Fraction(0)
  for (a, b), amount in shared.items():
    ways = len(net.live_spines[a, b]) if -1 not in (a, b) else sum(
      ((a, s) in links) if b < 0 else ((s, b) in links) for s in net.spines
    )
    least = max(least, Fraction(amount, ways))
  return least


def optimal_max_load(net: Fabric, flows: Sequence[Flow]) -> float:
  """Returns the least `max_spine_link_load` of all routings, also with splits.

  A linear program chooses the bytes that each pair of leaves sends over each
  live spine. Without failures `spray` reaches the optimum. With failures no
  algorithm of this module always does: `spray` and `ethereal` ignore what other
  leaves send over the remaining links.

  Args:
    net: The network, which may have failures.
    flows: Flows that are sent.

  Returns:
    Bytes on the fullest link between a leaf and a spine, within the tolerance
    of HiGHS.
  """
  sent: collections.Counter[tuple[int, int]] = collections.Counter()
  for flow in flows:
    if net.leaves(flow) in net.live_spines:
      sent[net.leaves(flow)] += flow.bytes
  if not sent:
    return 0.0
  ways = [(pair, s) for pair in sent for s in net.live_spines[pair]]
  pairs = {pair: i for i, pair in enumerate(sent)}
  links: dict[tuple[int, int], int] = {}
  ends = [
    (links.setdefault((a, s), len(links)), links.setdefault((s, b), len(links)))
    for (a, b), s in ways
  ]
  columns = np.arange(len(ways))
  ones = np.ones(len(ways))
  # The last variable is the load of the fullest link.
  over = sparse.coo_array((
    np.r_[ones, ones, np.full(len(links), -1.0)],
    (
      np.r_[[up for up, _ in ends], [down for _, down in ends],
            np.arange(len(links))],
      np.r_[columns, columns, np.full(len(links), len(ways))],
    ),
  ))
  whole = sparse.coo_array(
    (ones, ([pairs[pair] for pair, _ in ways], columns)),
    shape=(len(pairs), len(ways) + 1),
  )
  found = optimize.linprog(
    np.r_[np.zeros(len(ways)), 1.0], A_ub=over.tocsr(),
    b_ub=np.zeros(len(links)), A_eq=whole.tocsr(), b_eq=list(sent.values()),
    method="highs",
  )
  assert found.success, found.message
  return float(found.fun)


def step_seconds(
  net: Fabric,
  link_loads: Mapping[tuple[int, int], Fraction],
  scale: int = 1,
) -> float:
  """Returns the seconds until a step's last byte arrives.

  This is the time of the slowest link plus the latency of one path: four links
  between hosts of two leaves, two below one leaf.

  Args:
    net: Network, with bandwidth and latency of its links.
    link_loads: Bytes on each link in one step, from `loads`.
    scale: Factor by which the loads are multiplied.
  """
  links = net.topology.links_by_pair
  slowest = max(
    (float(x * scale) / links[pair].bandwidth
     for pair, x in link_loads.items()),
    default=0.0,
  )
  spines = set(net.spines)
  hops = 4 if any(spines & set(pair) for pair in link_loads) else 2
  latency = max((links[pair].latency_s for pair in link_loads), default=0.0)
  return slowest + hops * latency
