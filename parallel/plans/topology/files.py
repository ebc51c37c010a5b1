"""Topologies from JSON files and from networkx graphs."""

import json
import pathlib
from typing import Any
import warnings

import networkx

from parallel.base import schema
from parallel.base.checks import known
from parallel.plans.topology.graph import BANDWIDTH, LATENCY_S, Link, Topology


class _Link(schema.Schema):
  source: int
  destination: int
  # null is not allowed; missing values get the defaults of `from_file`.
  bandwidth: schema.Rate = None
  latency_s: schema.Seconds = None
  both_ways: bool = False


class _File(schema.Schema):
  name: str = ""
  num_ranks: int
  num_switches: int = 0
  links: list[_Link]


def from_networkx(
  graph: networkx.Graph,
  *,
  name: str = "graph",
  bandwidth: float = BANDWIDTH,
  latency_s: float = LATENCY_S,
) -> Topology:
  """Builds a topology from a networkx graph.

  Nodes with a true attribute `switch` become switches. If the graph's nodes are
  numbered from 0 with switches last, the numbers are kept. Otherwise nodes are
  renumbered in the graph's order, switches after ranks, and `Topology.labels`
  has their names. A warning is emitted if integer nodes are renumbered, since a
  rank's number then differs from that of its node in the graph.

  Args:
    graph: Directed or undirected graph. Its edges may have the attributes
      `bandwidth` and `latency_s`. An undirected edge becomes two links.
    name: Name of the topology.
    bandwidth: Bytes per second of edges without the attribute.
    latency_s: Seconds of latency of edges without the attribute.

  Raises:
    ValueError: A node or edge has an unknown attribute, or an attribute is not
      a number.

  Example:
    >>> import networkx
    >>> from parallel.plans.topology.files import from_networkx
    >>> net = from_networkx(networkx.cycle_graph(4))
    >>> net.num_ranks, len(net.links), net.hops(0, 2)
    (4, 8, 2)
  """
  for node, data in graph.nodes(data=True):
    for key in data:
      known(f"{name}: node {node!r}: the attribute ", key, ["switch"])
  # The sort is stable: ranks stay in the graph's order, and so do switches.
  nodes = sorted(graph, key=lambda node: bool(graph.nodes[node].get("switch")))
  num_switches = sum(bool(graph.nodes[n].get("switch")) for n in nodes)
  num_ranks = len(nodes) - num_switches
  if set(nodes) == set(range(len(nodes))) and (
    set(nodes[:num_ranks]) == set(range(num_ranks))
  ):
    nodes = list(range(len(nodes)))  # keep the numbers
  elif any(isinstance(node, int) for node in nodes):
    warnings.warn(
      f"{name}: nodes are renumbered: the graph's node {nodes[0]!r} is rank 0; "
      "Topology.labels has the graph's nodes",
      stacklevel=2,
    )
  number = {node: i for i, node in enumerate(nodes)}  # name -> number
  found = []
  # A directed graph is unchanged; an undirected edge becomes two.
  for u, v, data in graph.to_directed().edges(data=True):
    place = f"{name}: edge {u!r} to {v!r}"
    for key in data:
      known(f"{place}: the attribute ", key, ["bandwidth", "latency_s"])
    found.append(Link(
      number[u], number[v],
      _number(place, "bandwidth", data.get("bandwidth", bandwidth)),
      _number(place, "latency_s", data.get("latency_s", latency_s)),
    ))
  labels = () if nodes == list(range(len(nodes))) else tuple(nodes)
  return Topology(name, num_ranks, num_switches, tuple(found), labels=labels)


def from_file(
  path: str | pathlib.Path,
  *,
  bandwidth: float | None = None,
  latency_s: float | None = None,
) -> Topology:
  """Reads a topology from a JSON object with the fields of `Topology`.

  A link is ``{"source": 0, "destination": 1, "bandwidth": 5e10,
  "latency_s": 5e-7}``. Bandwidth and latency are optional. A link with
  ``"both_ways": true`` stands for two links, one in each direction.

  Args:
    path: Path of the JSON file.
    bandwidth: Bytes per second of links without one; None for ``BANDWIDTH``.
    latency_s: Seconds of latency of links without one; None for ``LATENCY_S``.

  Raises:
    ValueError: The file does not exist or is invalid; the message names the
      file and the position in it. Or a default bandwidth or latency is given
      although all links have one.
  """
  path = pathlib.Path(path)
  try:
    data = schema.read(_File, path)
  except OSError as error:
    raise ValueError(f"{path}: {error.strerror}") from error
  except ValueError as error:
    if "is not JSON" not in str(error):
      raise
    raise ValueError(
      f"{error}; a topology is a JSON object with num_ranks and links, and "
      "NCCL's XML is not read"
    ) from error
  defaults = {"bandwidth": bandwidth, "latency_s": latency_s}
  # Attributes that at least one link lacks, for which a default has an effect.
  lacking = set()
  found: list[Link] = []
  for entry in data.links:
    lacking |= defaults.keys() - entry.model_fields_set
    numbers = []
    for key, usual in (("bandwidth", BANDWIDTH), ("latency_s", LATENCY_S)):
      default = usual if defaults[key] is None else defaults[key]
      own = getattr(entry, key)
      numbers.append(default if own is None else own)
    ends = (entry.source, entry.destination)
    found.append(Link(*ends, *numbers))
    if entry.both_ways:
      found.append(Link(*reversed(ends), *numbers))  # the other direction
  for key, value in defaults.items():
    if value is not None and key not in lacking:
      raise ValueError(
        f"{key}={value:g} has no effect, since each link in {path} has its "
        "own; leave it out"
      )
  try:
    return Topology(
      data.name or path.stem, data.num_ranks, data.num_switches, tuple(found)
    )
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def read_json(path: pathlib.Path) -> Any:
  """Reads a JSON file.

  Args:
    path: Path of the file.

  Raises:
    ValueError: The file does not exist, or is not valid JSON; the message names
      the file.
  """
  try:
    return json.loads(path.read_text())
  except OSError as error:
    raise ValueError(f"{path}: {error.strerror}") from error
  except ValueError as error:
    raise ValueError(f"{path} is not JSON: {error}") from error
  # Python's parser recurses for each nested list or object.
  except RecursionError as error:
    raise ValueError(f"{path} is nested too deeply") from error


def _number(place: str, key: str, value: Any) -> float:
  """Returns the attribute ``key`` of an edge or link as a float.

  ``place`` names the edge or link in error messages.
  """
  try:
    return float(value)
  except (OverflowError, TypeError, ValueError) as error:
    raise ValueError(f"{place}: {key}={value!r} must be a number") from error
