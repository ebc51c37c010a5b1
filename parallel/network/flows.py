"""Flows on a leaf-spine network: exact loads under several ways of routing.

A flow between hosts of different leaves takes one spine, or pieces of it take
several. Routers decide which:

- `ecmp`: each flow hashed onto one spine.
- `single_path`: the spine is a function of the destination (D-mod-k).
- `spray`: every packet to the next spine, so equal parts to all of them.
- `ethereal`: whole flows in turn, only the last few of each (source host,
  destination leaf) in as few equal pieces as even loads need (Ethereal, arXiv
  2407.00550). Every link carries what `spray` gives it.
- `coordinated` (ours): no splits at all. The flows of all hosts together are
  an equitable edge colouring of the multigraph of leaves (de Werra 1971), a
  colour for each spine: the fullest uplink carries ceil(degree / spines).
- `coordinated_split` (ours): the load of `spray` where spines do not divide
  the degree, with the fewest splits if all leaves have the same degree.

Loads are exact rationals. A link's time is its load over its bandwidth: the
fluid limit, without packets, queues or reordering, so routers that differ in
these, not in loads, look alike here.
"""

import collections
from collections.abc import Callable, Hashable, Mapping, Sequence
import dataclasses
from fractions import Fraction
import functools
import math
import random
from typing import NamedTuple

from parallel.schedules import colouring
from parallel.topology import Topology


class Flow(NamedTuple):
  """A message from a rank to another, in bytes."""

  source: int
  destination: int
  bytes: int


class Piece(NamedTuple):
  """The part numerator / denominator of a flow, by way of a spine."""

  spine: int
  numerator: int = 1
  denominator: int = 1


Route = tuple[Piece, ...]  # empty: the flow stays below its leaf


@dataclasses.dataclass(frozen=True)
class Fabric:
  """A topology that is a leaf-spine network, as routers see it.

  Attributes:
    topology: All of it.
    leaf_of: Of each rank, its leaf's node.
    spines: Nodes.
  """

  topology: Topology
  leaf_of: tuple[int, ...]
  spines: tuple[int, ...]

  def leaves(self, flow: Flow) -> tuple[int, int]:
    """The leaves of a flow's source and destination."""
    return self.leaf_of[flow.source], self.leaf_of[flow.destination]

  @functools.cached_property
  def live(self) -> dict[tuple[int, int], tuple[int, ...]]:
    """Two leaves -> spines with a link from the one and one to the other."""
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
    """Whether no uplink has failed."""
    return all(live == self.spines for live in self.live.values())


def fabric(topology: Topology) -> Fabric:
  """Reads leaves and spines off a topology.

  Raises:
    ValueError: A rank that does not have exactly one switch, links between
      leaves or between spines, or two leaves that no spine joins.
  """
  leaf_of = []
  for rank in range(topology.num_ranks):
    near = topology.neighbours(rank)
    if len(near) != 1 or near[0] < topology.num_ranks:
      raise ValueError(
        f"{topology.name} is no leaf-spine network: rank {rank} is joined to "
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
        f"{topology.name} is no leaf-spine network: a link joins "
        f"{link.source} and {link.destination}, both "
        f"{'leaves' if ends <= leaves else 'spines'}"
      )
  found = Fabric(topology, tuple(leaf_of), tuple(sorted(spines)))
  for (a, b), live in found.live.items():
    if not live:
      raise ValueError(f"{topology.name}: no spine joins leaves {a} and {b}")
  return found


def ecmp(net: Fabric, flows: Sequence[Flow], seed: int = 0) -> list[Route]:
  """A pseudo-random spine for each flow, drawn in the order of the flows."""
  draw = random.Random(seed)
  return _each(
    net, flows, lambda _, live: (Piece(live[draw.randrange(len(live))]),)
  )


def single_path(net: Fabric, flows: Sequence[Flow]) -> list[Route]:
  """Live spine number destination mod their count."""
  return _each(
    net, flows, lambda flow, live: (Piece(live[flow.destination % len(live)]),)
  )


def spray(net: Fabric, flows: Sequence[Flow]) -> list[Route]:
  """Equal parts of every flow over all live spines."""
  @functools.cache
  def parts(live: tuple[int, ...]) -> Route:
    return tuple(Piece(spine, 1, len(live)) for spine in live)

  return _each(net, flows, lambda _, live: parts(live))


def _each(
  net: Fabric,
  flows: Sequence[Flow],
  choose: Callable[[Flow, tuple[int, ...]], Route],
) -> list[Route]:
  return [
    choose(flow, net.live[ends]) if ends in net.live else ()
    for flow, ends in zip(flows, map(net.leaves, flows), strict=True)
  ]


def ethereal(net: Fabric, flows: Sequence[Flow]) -> list[Route]:
  """The paper's splits: f + r (s / g - 1) pieces of f flows.

  Of the f equal flows from one host to one leaf, over s spines, the last r =
  f mod s split into s / g pieces each, g = gcd(r, s); all pieces take the
  spines in turn. Flows of other sizes are groups of their own, which the
  paper, with one size per step, does not need.
  """
  routes: list[Route] = [()] * len(flows)
  groups = _groups(
    net, flows, lambda f: (f.source, net.leaf_of[f.destination], f.bytes)
  )
  for members in groups.values():
    live = net.live[net.leaves(flows[members[0]])]
    split = len(members) % len(live)
    pieces = len(live) // math.gcd(split, len(live))
    turn = 0
    for place, index in enumerate(members):
      parts = pieces if place >= len(members) - split else 1
      routes[index] = tuple(
        Piece(live[(turn + i) % len(live)], 1, parts) for i in range(parts)
      )
      turn += parts
  return routes


def _groups(
  net: Fabric, flows: Sequence[Flow], key: Callable[[Flow], Hashable]
) -> dict[Hashable, list[int]]:
  """Places of the flows that leave their leaf, by a key."""
  groups = collections.defaultdict(list)
  for index, flow in enumerate(flows):
    if net.leaves(flow) in net.live:
      groups[key(flow)].append(index)
  return groups


def coordinated(net: Fabric, flows: Sequence[Flow]) -> list[Route]:
  """One spine for each flow, by an equitable edge colouring of the leaves.

  Each size of flow is coloured by itself. Flows whose spine has a failed link
  on their way move to the live spine that is least loaded, one by one.
  """
  def whole(ends: Sequence[colouring.Edge], count: int) -> list[_Shares]:
    return [((c, Fraction(1)),) for c in colouring.equitable(ends, count)]

  routes = _coloured(net, flows, whole)
  if not net.whole:
    _avoid_failures(net, flows, routes)
  return routes


def coordinated_split(net: Fabric, flows: Sequence[Flow]) -> list[Route]:
  """The least fullest uplink there is, with few splits.

  Each size of flow is spread by itself.

  Raises:
    ValueError: A failed uplink.
  """
  if not net.whole:
    raise ValueError(
      f"coordinated_split needs every uplink; {net.topology.name} lacks some"
    )
  return _coloured(net, flows, colouring.even)


_Shares = tuple[tuple[int, Fraction], ...]


def _coloured(
  net: Fabric,
  flows: Sequence[Flow],
  colour: Callable[[Sequence[colouring.Edge], int], list[_Shares]],
) -> list[Route]:
  """Colours, which are spines, of the flows of each size."""
  routes: list[Route] = [()] * len(flows)
  for members in _groups(net, flows, lambda f: f.bytes).values():
    ends = [net.leaves(flows[i]) for i in members]
    shares = colour(ends, len(net.spines))
    for index, parts in zip(members, shares, strict=True):
      routes[index] = tuple(
        Piece(net.spines[c], *share.as_integer_ratio()) for c, share in parts
      )
  return routes


def _avoid_failures(
  net: Fabric, flows: Sequence[Flow], routes: list[Route]
) -> None:
  load: collections.Counter[tuple[int, int]] = collections.Counter()
  displaced = []
  for index, route in enumerate(routes):
    if not route:
      continue
    a, b = net.leaves(flows[index])
    spine = route[0].spine
    if spine in net.live[a, b]:
      load[a, spine] += flows[index].bytes
      load[spine, b] += flows[index].bytes
    else:
      displaced.append((index, a, b))
  for index, a, b in displaced:
    spine = min(
      net.live[a, b], key=lambda s: max(load[a, s], load[s, b])
    )
    routes[index] = (Piece(spine),)
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
  """Flows and pieces of flows between leaves."""
  return sum(map(len, routes))


def loads(
  net: Fabric, flows: Sequence[Flow], routes: Sequence[Route]
) -> dict[tuple[int, int], Fraction]:
  """Bytes on each link that carries any, hosts' links included."""
  found: dict[tuple[int, int], Fraction] = collections.defaultdict(Fraction)
  ways: collections.Counter[tuple[int, int, Route]] = collections.Counter()
  for flow, route in zip(flows, routes, strict=True):
    a, b = net.leaves(flow)
    if flow.source != flow.destination:
      found[flow.source, a] += flow.bytes
      found[b, flow.destination] += flow.bytes
    ways[a, b, route] += flow.bytes
  for (a, b, route), amount in ways.items():
    for piece in route:
      part = Fraction(amount * piece.numerator, piece.denominator)
      found[a, piece.spine] += part
      found[piece.spine, b] += part
  return dict(found)


def fullest_uplink(
  net: Fabric, link_loads: Mapping[tuple[int, int], Fraction]
) -> Fraction:
  """Bytes on the fullest link between a leaf and a spine, either way."""
  spines = set(net.spines)
  return max(
    (x for pair, x in link_loads.items() if spines & set(pair)),
    default=Fraction(0),
  )


def least_fullest_uplink(net: Fabric, flows: Sequence[Flow]) -> Fraction:
  """What no routing beats: the bytes that some links share, evenly.

  A leaf's links to all live spines, from them, and those of two leaves to the
  spines that join the two.
  """
  links = net.topology.links_by_pair
  shared: collections.Counter[tuple[int, int]] = collections.Counter()
  for flow in flows:
    a, b = net.leaves(flow)
    if a != b:
      for ends in ((a, -1), (-1, b), (a, b)):
        shared[ends] += flow.bytes
  least = Fraction(0)
  for (a, b), amount in shared.items():
    ways = len(net.live[a, b]) if -1 not in (a, b) else sum(
      ((a, s) in links) if b < 0 else ((s, b) in links) for s in net.spines
    )
    least = max(least, Fraction(amount, ways))
  return least


def step_seconds(
  net: Fabric,
  link_loads: Mapping[tuple[int, int], Fraction],
  scale: int = 1,
) -> float:
  """Until the last byte of a step: the slowest link, and one path's latency.

  Args:
    net: Of the links.
    link_loads: Of one step, from `loads`.
    scale: Bytes for each byte of the loads.
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
