"""Topologies from a JSON file or a networkx graph."""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

import networkx

from parallel.topology.graph import BANDWIDTH, LATENCY_S, Link, Topology


def from_networkx(
  graph: networkx.Graph,
  *,
  name: str = "graph",
  bandwidth: float = BANDWIDTH,
  latency_s: float = LATENCY_S,
) -> Topology:
  """Builds a topology from a networkx graph.

  Nodes keep their order, but those with a true attribute `switch` become
  switches and come after the ranks.

  Args:
    graph: The graph. Its edges may have the attributes `bandwidth` and
      `latency_s`. An undirected edge becomes two links.
    name: Name of the topology.
    bandwidth: Bytes per second of edges without the attribute.
    latency_s: Latency of edges without the attribute.
  """
  # The sort is stable: ranks stay in the graph's order, and so do switches.
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
  "latency_s": 5e-7}``. Bandwidth and latency may be left out. With
  ``"both_ways": true`` it stands for two links, one in each direction.

  Args:
    path: Path of the JSON file.

  Raises:
    ValueError: There is no such file, or it is not such an object. The message
      names the file and the place in it.
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
  """Checks the keys of a JSON object and the types of their values."""
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
    # JSON may write a float as an integer. In Python a bool is an int, too, and
    # must not pass for a number.
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
      raise ValueError(
        f"{place}: {key}={value!r} must be of type {kind.__name__}"
      )
