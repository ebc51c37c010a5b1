"""Builders of topologies: standard networks, by name, from files and graphs.

A builder's `bandwidth` is that of each direction of each link.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import itertools
import json
import math
import pathlib
from typing import Any

import networkx

from parallel.hardware import links as hardware
from parallel.topology import BANDWIDTH, LATENCY_S, Link, Topology


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
    ValueError: No such file or object, with the file's name and the place.
  """
  path = pathlib.Path(path)
  try:
    data = json.loads(path.read_text())
  except OSError as error:
    raise ValueError(f"{path}: {error.strerror}") from error
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
_SHAPED = ("torus", "mesh")  # they take all their sizes as one argument


def build(name: str, *args: Any, **kwargs: Any) -> Topology:
  """A topology by the name of its builder.

  Raises:
    ValueError: An unknown name, or arguments that the builder does not take.
  """
  if name not in BUILDERS:
    raise ValueError(
      f"topology {name!r} must be one of {', '.join(BUILDERS)}"
    )
  try:
    return BUILDERS[name](*args, **kwargs)
  except TypeError as error:
    raise ValueError(f"topology {name!r}: {error}") from error


def parse(text: str, **kwargs: Any) -> Topology:
  """``torus:4x4``, a builder and its sizes, or ``file:PATH``, as a topology.

  Args:
    text: Sizes are in the order of the builder's arguments.
    **kwargs: The builder's others; a file has numbers of its own.

  Raises:
    ValueError: Not such a text, or sizes that the builder refuses.
  """
  name, _, argument = text.partition(":")
  if name == "file":
    return from_file(argument)
  try:
    sizes = tuple(int(part) for part in argument.split("x"))
  except ValueError as error:
    raise ValueError(
      f"{text!r} is not NAME:SIZExSIZE as in torus:4x4 or leaf_spine:4x2x8"
    ) from error
  return build(name, *((sizes,) if name in _SHAPED else sizes), **kwargs)


def of_size(name: str, num_ranks: int) -> Topology:
  """A topology of that many ranks, as square as its kind can be.

  Args:
    name: "ring", "torus", "mesh", "bigraph", "switch" or "fully_connected".
    num_ranks: How many ranks; a BiGraph needs a multiple of its switches.
  """
  kinds = ("ring", *_SHAPED, "bigraph", "switch", "fully_connected")
  if name not in kinds:
    raise ValueError(f"topology {name!r} must be one of {', '.join(kinds)}")
  short = max(
    d for d in range(1, math.isqrt(num_ranks) + 1) if num_ranks % d == 0
  )
  shape = (short, num_ranks // short)
  if name in _SHAPED:
    return build(name, shape)
  if name == "bigraph":
    return bigraph(*shape)
  return build(name, num_ranks)
