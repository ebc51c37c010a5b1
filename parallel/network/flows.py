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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
import dataclasses
from fractions import Fraction
import functools
import math
import random
from typing import NamedTuple

from parallel.schedules import colouring
from parallel.schedules.schedule import Schedule
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
  """A topology that is a leaf-spine network, as `routing` sees it.

  Attributes:
    topology: All of it.
    leaf_of: Of each rank, its leaf's node.
    spines: Nodes.
  """

  topology: Topology
  leaf_of: tuple[int, ...]
  spines: tuple[int, ...]

  def live(self, leaf: int, other: int) -> tuple[int, ...]:
    """Spines with a link from the one leaf and one to the other."""
    return self._live[leaf, other]

  @functools.cached_property
  def _live(self) -> dict[tuple[int, int], tuple[int, ...]]:
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
    return all(live == self.spines for live in self._live.values())


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
  for (a, b), live in found._live.items():
    if not live:
      raise ValueError(f"{topology.name}: no spine joins leaves {a} and {b}")
  return found


def demands(schedule: Schedule, size_bytes: int) -> list[tuple[Flow, ...]]:
  """The flows of each round: what one rank sends another is one flow.

  Chunks count size_bytes / num_chunks, which must be whole bytes.
  """
  each, rest = divmod(size_bytes, schedule.num_chunks)
  if rest or not each:
    raise ValueError(
      f"size_bytes={size_bytes} must be a multiple of the "
      f"{schedule.num_chunks} chunks of {schedule.name}"
    )
  rounds = []
  for transfers in schedule.rounds:
    pairs = collections.Counter((t.source, t.destination) for t in transfers)
    rounds.append(tuple(
      Flow(*pair, count * each) for pair, count in sorted(pairs.items())
    ))
  return rounds


def ring_demands(
  kind: str, groups: Sequence[Sequence[int]], operand_bytes: int
) -> tuple[tuple[Flow, ...], int]:
  """What the ring algorithm makes of a collective of a program.

  Args:
    kind: As in `parallel.xla.ledger`: "all_reduce", "all_gather",
      "reduce_scatter", "all_to_all", "permute" or "broadcast".
    groups: Ranks of each replica group, in ring order.
    operand_bytes: Of one rank's operand.

  Returns:
    The flows of a step, and how many such steps follow one another. Bytes
    that do not divide are rounded up.
  """
  size = len(groups[0])
  steps, parts = {
    "all_reduce": (2 * (size - 1), size),
    "reduce_scatter": (size - 1, size),
    "all_gather": (size - 1, 1),
    "all_to_all": (1, size),
    "permute": (1, 1),
    "broadcast": (1, 1),
  }.get(kind, (0, 0))
  if not parts:
    raise ValueError(f"no ring algorithm for the kind {kind!r}")
  amount = -(-operand_bytes // parts)
  flows = []
  for group in groups:
    for place, source in enumerate(group):
      far = range(1, size if kind == "all_to_all" else min(size, 2))
      flows += [Flow(source, group[(place + k) % size], amount) for k in far]
  return tuple(flows), steps


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
  routes = []
  for flow in flows:
    ends = net.leaf_of[flow.source], net.leaf_of[flow.destination]
    routes.append(
      choose(flow, net.live(*ends)) if ends[0] != ends[1] else ()
    )
  return routes


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
    first = flows[members[0]]
    live = net.live(net.leaf_of[first.source], net.leaf_of[first.destination])
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
    if net.leaf_of[flow.source] != net.leaf_of[flow.destination]:
      groups[key(flow)].append(index)
  return groups


def coordinated(net: Fabric, flows: Sequence[Flow]) -> list[Route]:
  """One spine for each flow, by an equitable edge colouring of the leaves.

  Each size of flow is coloured by itself. Flows whose spine has a failed link
  on their way move to the live spine that is least loaded, one by one.
  """
  routes: list[Route] = [()] * len(flows)
  for members, ends in _by_size(net, flows):
    colours = colouring.equitable(ends, len(net.spines))
    for index, colour in zip(members, colours, strict=True):
      routes[index] = (Piece(net.spines[colour]),)
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
  routes: list[Route] = [()] * len(flows)
  for members, ends in _by_size(net, flows):
    shares = colouring.even(ends, len(net.spines))
    for index, parts in zip(members, shares, strict=True):
      routes[index] = tuple(
        Piece(net.spines[colour], *share.as_integer_ratio())
        for colour, share in parts
      )
  return routes


def _by_size(
  net: Fabric, flows: Sequence[Flow]
) -> Iterable[tuple[list[int], list[tuple[int, int]]]]:
  """Places and (leaf, leaf) of the flows of each size, largest first."""
  sizes = _groups(net, flows, lambda f: f.bytes)
  for _, members in sorted(sizes.items(), reverse=True):
    yield members, [
      (net.leaf_of[flows[i].source], net.leaf_of[flows[i].destination])
      for i in members
    ]


def _avoid_failures(
  net: Fabric, flows: Sequence[Flow], routes: list[Route]
) -> None:
  load: collections.Counter[tuple[int, int]] = collections.Counter()
  displaced = []
  for index, route in enumerate(routes):
    if not route:
      continue
    a, b = (net.leaf_of[rank] for rank in flows[index][:2])
    spine = route[0].spine
    if spine in net.live(a, b):
      load[a, spine] += flows[index].bytes
      load[spine, b] += flows[index].bytes
    else:
      displaced.append((index, a, b))
  for index, a, b in displaced:
    spine = min(
      net.live(a, b), key=lambda s: max(load[a, s], load[s, b])
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
    a, b = net.leaf_of[flow.source], net.leaf_of[flow.destination]
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
    a, b = net.leaf_of[flow.source], net.leaf_of[flow.destination]
    if a != b:
      for ends in ((a, -1), (-1, b), (a, b)):
        shared[ends] += flow.bytes
  least = Fraction(0)
  for (a, b), amount in shared.items():
    ways = len(net.live(a, b)) if -1 not in (a, b) else sum(
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
