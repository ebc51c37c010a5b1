"""Draws a schedule on its topology; needs the ``plot`` extra."""

from collections.abc import Mapping
import pathlib
from typing import Any

import networkx
import numpy as np

from caatnet.show import pictures
from caatnet.studies.schedule.study import of_config
from parallel.network import simulate
from parallel.network.simulate import Timeline
from parallel.schedules.schedule import Schedule
from parallel.topology.graph import Topology


def plot_schedule(
  schedule: Schedule,
  net: Topology,
  timeline: Timeline,
  number: int,
  path: pathlib.Path,
) -> None:
  """Draws one round on the topology, beside the timeline of the links.

  Args:
    schedule: The schedule.
    net: The network that it runs on.
    timeline: The timeline of the whole schedule.
    number: The number of the round, from 0.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(12, 5.4), layout="constrained"
  )
  draw_round(schedule, net, number, left)
  draw_timeline(timeline, right)
  figure.suptitle(f"{schedule.collective} by {schedule.name} on {net.name}")
  pictures.save(figure, path)


def draw_round(
  schedule: Schedule, net: Topology, number: int, panel: Any
) -> None:
  """Draws the links that a round uses, coloured by the chunk that they carry.

  Args:
    schedule: The schedule.
    net: The network that it runs on.
    number: The number of the round, from 0.
    panel: The matplotlib axes to draw on.
  """
  graph = net.graph()
  places = _places(net, graph)
  switches = [v for v in graph if v >= net.num_ranks]
  small = max(30, 4000 // net.num_nodes)
  networkx.draw_networkx_edges(
    graph, places, ax=panel, edge_color="0.88", arrows=False
  )
  shapes = (range(net.num_ranks), "o", "white"), (switches, "s", "0.8")
  for nodes, shape, colour in shapes:
    networkx.draw_networkx_nodes(
      graph, places, nodelist=list(nodes), ax=panel, node_size=small,
      node_shape=shape, node_color=colour, edgecolors="black",
    )
  if net.num_nodes <= 80:
    networkx.draw_networkx_labels(graph, places, ax=panel, font_size=7)
  hops: dict[tuple[int, int], list[int]] = {}  # link -> chunks on it
  for t in schedule.rounds[number]:
    for pair in zip(t.path, t.path[1:], strict=False):
      hops.setdefault(pair, []).append(t.chunk)
  networkx.draw_networkx_edges(
    graph, places, edgelist=list(hops), ax=panel, width=1.6,
    node_size=small, arrowsize=9, connectionstyle="arc3,rad=0.12",
    edge_color=[chunks[0] / schedule.num_chunks for chunks in hops.values()],
    edge_cmap=_colours(), edge_vmin=0, edge_vmax=1,
  )
  fullest = max(map(len, hops.values()), default=0)
  panel.set_title(
    f"round {number + 1} of {len(schedule.rounds)}: {len(hops)} of "
    f"{len(net.links)} links, at most {fullest} chunks on one",
    fontsize="medium",
  )
  panel.set_axis_off()


def draw_timeline(timeline: Timeline, panel: Any) -> None:
  """Draws a row for each link, with a bar for each message."""
  routed = timeline.routed
  start, end = timeline.start_ns / 1e3, timeline.end_ns / 1e3
  shade = routed.chunks[routed.hop_transfers] / routed.num_chunks
  panel.barh(
    routed.hop_links, end - start, left=start, height=0.8,
    color=_colours()(shade), linewidth=0,
  )
  panel.set(
    xlabel="us", ylabel="link", xlim=(0, timeline.finish_ns / 1e3),
    ylim=(len(routed.links) - 0.5, -0.5),
  )
  panel.set_title(
    f"by events: {timeline.finish_ns / 1e3:,.1f} us, colour is the chunk",
    fontsize="medium",
  )


def _colours() -> Any:
  """Returns the colour map of chunks."""
  pictures.pyplot()
  from matplotlib import colormaps

  return colormaps["turbo"]


def _places(
  net: Topology, graph: networkx.DiGraph
) -> dict[int, tuple[float, float]]:
  """Places nodes: grids in rows and columns, trees of switches in layers."""
  if net.num_switches == 0 and len(net.shape) == 2:
    return {
      v: (v % net.shape[1], -(v // net.shape[1])) for v in range(net.num_ranks)
    }
  if net.num_switches == 0:
    return networkx.circular_layout(graph)
  if net.shape:  # a BiGraph: each half of the switches beside its ranks
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


def _bigraph_places(
  ranks_per_switch: int, switches: int
) -> dict[int, tuple[float, float]]:
  """Places a BiGraph: upper ranks, upper switches, lower switches and ranks."""
  half, places = switches // 2, {}
  for switch in range(switches):
    lower, column = divmod(switch, half)
    first = switch * ranks_per_switch
    number = ranks_per_switch * switches + switch
    places[number] = (float(column), 1.0 - lower)
    for place in range(ranks_per_switch):
      x = column - 0.5 + (place + 0.5) / ranks_per_switch
      places[first + place] = (x, 2.0 - 3 * lower)
  return places


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws one round on the topology, and when each link sends.

  Args:
    result: What `caatnet.studies.schedule.study.run` returned.
    path: The PNG to write.

  Raises:
    ValueError: The schedule has no round ``config.picture_round``.
  """
  config = result["config"]
  net, schedule, routed = of_config(config)
  timeline = simulate.events(routed, config["size_bytes"])
  number = config["picture_round"]
  if not 0 <= number < len(schedule.rounds):
    raise ValueError(
      f"config.picture_round={number} must lie in [0, {len(schedule.rounds)})"
    )
  plot_schedule(schedule, net, timeline, number, path)
