"""Report of one schedule: times, busiest links, and a round on its topology."""

from collections.abc import Mapping
from typing import Any

import networkx
import numpy as np

from caatnet.studies.schedule.study import build_from_config
from parallel.base import plot
from parallel.base.labels import size_text
from parallel.base.report import Report, Table
from parallel.plans.network import simulate
from parallel.plans.network.simulate import Timeline
from parallel.plans.schedules.schedule import Schedule
from parallel.plans.topology.graph import Topology

Places = Mapping[int, tuple[float, float]]

_MODELS = {
  "events_us": "events: starts when its chunk is there",
  "barrier_us": "events, a barrier after each round",
  "lockstep_us": "lockstep: alpha-beta, cut-through",
  "lower_bound_us": "lower bound of events",
  "bound_us": "lower bound of all schedules",
}
_MAX_LINKS = 8
_MAX_LABELS = 80


def report(result: Mapping[str, Any]) -> Report:
  """Returns tables of times and of the busiest links, and a figure."""
  links, faster = result["links"], result["faster"]
  built = result["built"] or result["config"]["msccl"]
  # The flag unsets the file, which has precedence over the algorithm.
  flags = "--config.msccl= " * bool(result["config"]["msccl"])
  far = result["events_us"] / result["bound_us"]
  return Report("Schedule of a collective", [
    Table(
      f"{result['collective']} by {result['algorithm']} on "
      f"{result['topology']}, {size_text(result['size_bytes'])}\n"
      f"{result['num_rounds']} rounds, {result['num_transfers']} transfers; "
      f"links send {result['mean_utilisation']:.1%} of the time (predicted, "
      "not measured)",
      "model | us:,.3f",
      [{"model": text, "us": result[key]} for key, text in _MODELS.items()],
    ),
    f"{built}: events take {far:.2f} times the lower bound of all schedules",
    *([
      f"warning: another schedule takes {faster['us']:,.3f} us, "
      f"{faster['us'] / result['events_us'] - 1:.0%}: {flags}"
      f"--config.algorithm={faster['algorithm']}"
    ] if faster else []),
    Table(
      f"the {min(_MAX_LINKS, len(links))} busiest of {len(links)} links",
      "{source} -> {destination}=link | bytes:, | utilisation=busy | "
      "waiting_us:,.1f | longest_queue",
      links[:_MAX_LINKS],
    ),
  ], lambda: _figure(result["config"]))


def _figure(config: Mapping[str, Any]) -> plot.Figure:
  """Plots one round on the topology, and the busy times of each link.

  Raises:
    ValueError: The schedule has no round ``config.picture_round``.
  """
  net, schedule, routed = build_from_config(config)
  timeline = simulate.events(routed, config["size_bytes"])
  number = config["picture_round"]
  if not 0 <= number < len(schedule.rounds):
    raise ValueError(
      f"config.picture_round={number} must lie in [0, {len(schedule.rounds)})"
    )
  return plot.Figure(
    [_round_panel(schedule, net, number), _timeline(timeline)], (12, 5.4), 2,
    f"{schedule.collective} by {schedule.name} on {net.name}",
  )


def _round_panel(schedule: Schedule, net: Topology, number: int) -> plot.Panel:
  """Plots the links of round `number`, shaded by the chunk that they carry."""
  graph = net.graph()
  places = _places(net, graph)
  size = max(30, 4000 // net.num_nodes) ** 0.5
  ends = [(places[a], places[b], (None, None)) for a, b in graph.edges]
  x, y = zip(*(point for edge in ends for point in edge), strict=True)
  marks: list[Any] = [plot.Line(x, y, colour="0.88", width=1)]
  hops: dict[tuple[int, int], list[int]] = {}  # link -> chunks on it
  for t in schedule.rounds[number]:
    for pair in zip(t.path, t.path[1:], strict=False):
      hops.setdefault(pair, []).append(t.chunk)
  ranks = range(net.num_ranks)
  switches = [v for v in graph if v >= net.num_ranks]
  for nodes, marker, fill in (ranks, "o", "white"), (switches, "s", "0.8"):
    marks.append(plot.Line(
      [places[v][0] for v in nodes], [places[v][1] for v in nodes], style="",
      marker=marker, colour="black", fill=fill, size=size,
    ))
  if net.num_nodes <= _MAX_LABELS:
    marks.append(plot.Texts(
      list(map(str, places)), *zip(*places.values(), strict=True),
      offset=(0, 0), align=("center", "center_baseline"), size=7,
    ))
  marks.append(plot.Arrows(
    [places[a] for a, _ in hops], [places[b] for _, b in hops],
    # The shade shows the first chunk on the link.
    [chunks[0] / schedule.num_chunks for chunks in hops.values()],
    gap=size / 2,
  ))
  fullest = max(map(len, hops.values()), default=0)
  return plot.Panel(
    marks,
    f"round {number + 1} of {len(schedule.rounds)}: {len(hops)} of "
    f"{len(net.links)} links, at most {fullest} chunks on one",
    frame="none",
  )


def _timeline(timeline: Timeline) -> plot.Panel:
  """Plots a row for each link, with a bar for each message."""
  routed = timeline.routed
  start, end = timeline.start_ns / 1e3, timeline.end_ns / 1e3
  shade = routed.chunks[routed.hop_transfers] / routed.num_chunks  # 0 to 1
  bars = plot.Bars(
    routed.hop_links.tolist(), (end - start).tolist(), start.tolist(),
    colour=shade.tolist(),
  )
  return plot.Panel(
    [bars],
    f"by events: {timeline.finish_ns / 1e3:,.1f} us, colour is the chunk",
    plot.Axis("us", limits=(0, timeline.finish_ns / 1e3)),
    plot.Axis("link", limits=(len(routed.links) - 0.5, -0.5)),
  )


def _places(net: Topology, graph: networkx.DiGraph) -> Places:
  """Returns node -> (x, y): grids in rows, trees of switches in layers."""
  if net.num_switches == 0 and len(net.shape) == 2:
    return {
      v: (v % net.shape[1], -(v // net.shape[1])) for v in range(net.num_ranks)
    }
  if net.num_switches == 0:
    return networkx.circular_layout(graph)
  if net.shape:  # a BiGraph: each half of the switches next to its ranks
    return _bigraph_places(*net.shape)
  # A node's layer is its distance in links from the nearest rank: edge switches
  # are in layer 1, spines in layer 2.
  layer = networkx.multi_source_dijkstra_path_length(
    graph, set(range(net.num_ranks)), weight=None
  )
  places = {}
  for level in set(layer.values()):
    nodes = sorted(v for v in layer if layer[v] == level)
    for x, v in zip(np.linspace(0, 1, len(nodes) + 2)[1:-1], nodes,
                    strict=True):
      places[v] = (float(x), float(level))
  return places


def _bigraph_places(ranks_per_switch: int, switches: int) -> Places:
  """Returns node -> (x, y): two rows of switches between two rows of ranks."""
  half, places = switches // 2, {}
  for switch in range(switches):
    lower, column = divmod(switch, half)
    first = switch * ranks_per_switch
    number = ranks_per_switch * switches + switch
    places[number] = (float(column), 1.0 - lower)
    for place in range(ranks_per_switch):
      # Ranks are spread evenly below or above their switch.
      x = column - 0.5 + (place + 0.5) / ranks_per_switch
      places[first + place] = (x, 2.0 - 3 * lower)
  return places
