"""Studies of collective algorithms on topologies: times, bounds, tables.

`compare` times all-reduce algorithms over sizes and topologies, as in figures
of MultiTree (Huang et al., ISCA 2021), whose simulator sends flits; ours sends
whole messages (`parallel.network.simulate`). `run_one` looks closely at one
schedule.
"""

from collections.abc import Collection, Mapping, Sequence
import math
import pathlib
from typing import Any

from rich.console import Console
from rich.progress import track

from caatnet import collective_plots, report
from parallel import topologies
from parallel.network import layout as layouts
from parallel.network import simulate, trace
from parallel.schedules import builders, msccl
from parallel.schedules.schedule import Schedule
from parallel.topology import Topology

# Huang et al., ISCA 2021, abstract.
PUBLISHED = {"over ring": 2.3, "over prior art": 1.56}


def parse_topology(
  text: str, key: str, bandwidth: float, latency_s: float
) -> Topology:
  """A config's topology.

  Args:
    text: As `parallel.topologies.parse` reads it.
    key: Of the config, for messages.
    bandwidth: Of each link, bytes per second.
    latency_s: Of each link.

  Raises:
    ValueError: What is wrong with the text, and the key; or a single rank,
      which has nobody to send to.
  """
  if not 0 < bandwidth < math.inf:
    raise ValueError(f"config.bandwidth={bandwidth} must be positive")
  if not 0 <= latency_s < math.inf:
    raise ValueError(f"config.latency_s={latency_s} must be at least 0")
  try:
    net = topologies.parse(text, bandwidth=bandwidth, latency_s=latency_s)
  except ValueError as error:
    raise ValueError(f"{key}={text!r}: {error}") from error
  if net.num_ranks < 2:
    raise ValueError(f"{key}={text!r} has 1 rank; must have at least 2")
  return net


def check_lists(
  config: Mapping[str, Any], **allowed: Collection[str]
) -> None:
  """Refuses lists that are empty or have unknown names.

  Args:
    config: With "topologies", "size_bytes", and a list for each keyword.
    **allowed: The names that may be in that list.
  """
  for key in ("topologies", "size_bytes", *allowed):
    if not config[key]:
      raise ValueError(f"config.{key}=() must have at least one entry")
  for key, names in allowed.items():
    for name in config[key]:
      if name not in names:
        raise ValueError(
          f"config.{key}={tuple(config[key])}: {name!r} must be one of "
          f"{', '.join(names)}"
        )


def compare(config: Mapping[str, Any]) -> dict[str, Any]:
  """Times every algorithm on every topology.

  Args:
    config: As configs/collectives/multitree.py has it, as nested dicts.

  Returns:
    Plain data: "rows", one for each topology, algorithm and size, in us;
    "skipped", algorithms that do not run on a topology, and why; "speedups" of
    MultiTree, geometric means over sizes and topologies.

  Raises:
    ValueError: An unknown topology or algorithm, none of them, or a size that
      is not a whole number of bytes for each chunk.
  """
  sizes, barrier = config["size_bytes"], config["barrier"]
  check_lists(config, algorithms=builders.BUILDERS)
  nets = [
    parse_topology(
      text, "config.topologies", config["bandwidth"], config["latency_s"]
    )
    for text in config["topologies"]
  ]
  cases = [(net, name) for net in nets for name in config["algorithms"]]
  rows, skipped = [], []
  for net, name in track(
    cases, "simulating", transient=True, console=Console(stderr=True)
  ):
    try:
      schedule = builders.build(name, net)
    except ValueError as error:
      skipped.append(
        {"topology": net.name, "algorithm": name, "why": str(error)}
      )
      continue
    layout = layouts.lay_out(schedule, net)
    for size in sizes:
      try:
        timeline = simulate.events(layout, size, barrier=barrier)
      except ValueError as error:
        raise ValueError(f"config.size_bytes: {error}") from error
      rows.append({
        "topology": net.name,
        "num_ranks": net.num_ranks,
        "algorithm": name,
        "num_rounds": len(schedule.rounds),
        "size_bytes": size,
        "events_us": timeline.finish_ns / 1e3,
        "lockstep_us": simulate.lockstep(layout, size) * 1e6,
        "bound_us": injection_bound(net, size) * 1e6,
        "mean_utilisation": float(timeline.utilisation.mean()),
      })
  return {
    "study": "collectives",
    "bandwidth": config["bandwidth"],
    "latency_s": config["latency_s"],
    "barrier": barrier,
    "rows": rows,
    "skipped": skipped,
    "speedups": _speedups(rows),
    "published": PUBLISHED,
  }


def injection_bound(net: Topology, size_bytes: int) -> float:
  """Seconds that an all-reduce takes at least, by one rank's own links.

  Each rank sends and receives 2 (n - 1) / n of the buffer; latency left out.
  """
  out = [0.0] * net.num_nodes
  into = [0.0] * net.num_nodes
  for link in net.links:
    out[link.source] += link.bandwidth
    into[link.destination] += link.bandwidth
  slowest = min(min(out[: net.num_ranks]), min(into[: net.num_ranks]))
  return 2 * (net.num_ranks - 1) / net.num_ranks * size_bytes / slowest


def _speedups(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """MultiTree over ring, and over the best of the others, per model."""
  cells: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
  for row in rows:
    cell = cells.setdefault((row["topology"], row["size_bytes"]), {})
    cell[row["algorithm"]] = row
  found: dict[str, Any] = {}
  for model in ("events_us", "lockstep_us"):
    over: dict[str, list[float]] = {"over ring": [], "over the best other": []}
    for cell in cells.values():
      ours = cell.get("multitree")
      others = [r[model] for name, r in cell.items() if name != "multitree"]
      if ours and "ring" in cell:
        over["over ring"].append(cell["ring"][model] / ours[model])
      if ours and others:
        over["over the best other"].append(min(others) / ours[model])
    found[model] = {
      name: {
        "mean": math.exp(sum(map(math.log, values)) / len(values)),
        "least": min(values),
        "most": max(values),
      }
      for name, values in over.items()
      if values
    }
  return found


def show_comparison(result: Mapping[str, Any]) -> None:
  """A table for each topology, and MultiTree's speed-ups."""
  nets: dict[str, list[Mapping[str, Any]]] = {}
  for row in result["rows"]:
    nets.setdefault(row["topology"], []).append(row)
  for name, rows in nets.items():
    sizes = sorted({r["size_bytes"] for r in rows})
    cells = {(r["algorithm"], r["size_bytes"]): r for r in rows}
    lines = []
    for algorithm in dict.fromkeys(r["algorithm"] for r in rows):
      of_size = [cells[algorithm, size] for size in sizes]
      line = [algorithm, str(of_size[0]["num_rounds"])]
      for cell in of_size:
        ring = cells.get(("ring", cell["size_bytes"]))
        gain = f" {ring['events_us'] / cell['events_us']:.2f}x" if ring else ""
        line.append(f"{cell['events_us']:,.1f}{gain}")
      last = of_size[-1]
      line.append(f"{last['lockstep_us']:,.1f}")
      line.append(f"{last['bound_us'] / last['lockstep_us']:.0%}")
      lines.append(line)
    largest = cells[rows[0]["algorithm"], sizes[-1]]
    report.table(
      f"all-reduce on {name}, {rows[0]['num_ranks']} ranks: us by events"
      f"{' with barriers' if result['barrier'] else ''}, speed-up over ring; "
      f"lockstep us of {size_text(sizes[-1])}\nand its bound's share "
      f"({largest['bound_us']:,.1f} us: every rank's own links)",
      ["algorithm", "rounds", *map(size_text, sizes), "lockstep", "bound"],
      lines,
    )
  lines = [
    [f"{model.removesuffix('_us')}, {name}", f"{gain['mean']:.2f}x",
     f"{gain['least']:.2f}x to {gain['most']:.2f}x"]
    for model, gains in result["speedups"].items()
    for name, gain in gains.items()
  ]
  if lines:
    report.table(
      "MultiTree's speed-up: geometric mean and range over the sizes and "
      "topologies above\n(its paper, in a simulator of its own, over its own "
      f"sizes: {PUBLISHED['over ring']}x over ring, "
      f"{PUBLISHED['over prior art']}x over prior art)",
      ["model", "mean", "range"],
      lines,
    )
  skipped: dict[str, list[str]] = {}
  for row in result["skipped"]:
    skipped.setdefault(row["algorithm"], []).append(row["topology"])
  for name, nets_without in skipped.items():
    print(f"{name} does not run on {', '.join(nets_without)}")


def size_text(size_bytes: int) -> str:
  """``65536 -> "64 KiB"``."""
  for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
    if size_bytes >= unit:
      return f"{size_bytes / unit:g} {name}"
  return f"{size_bytes} B"


def run_one(config: Mapping[str, Any]) -> dict[str, Any]:
  """Looks closely at one schedule.

  Args:
    config: As configs/collectives/schedule.py has it, as nested dicts.

  Returns:
    Plain data: times in us, and the links by utilisation.
  """
  net, schedule = _of_config(config)
  layout = layouts.lay_out(schedule, net)
  size = config["size_bytes"]
  try:
    free = simulate.events(layout, size)
    barrier = simulate.events(layout, size, barrier=True)
  except ValueError as error:
    raise ValueError(f"config.{error}") from error
  share, waiting, queues = (
    free.utilisation.tolist(), free.waiting_ns.tolist(),
    free.longest_queues.tolist(),
  )
  sent = layout.link_bytes(size).tolist()
  order = sorted(range(len(net.links)), key=lambda i: (-share[i], -waiting[i]))
  return {
    "study": "schedule",
    "topology": net.name,
    "algorithm": schedule.name,
    "collective": schedule.collective,
    "size_bytes": size,
    "num_ranks": schedule.num_ranks,
    "num_rounds": len(schedule.rounds),
    "num_transfers": schedule.num_transfers,
    "events_us": free.finish_ns / 1e3,
    "barrier_us": barrier.finish_ns / 1e3,
    "lockstep_us": simulate.lockstep(layout, size) * 1e6,
    "lower_bound_us": simulate.lower_bound(layout, size) / 1e3,
    "mean_utilisation": sum(share) / len(share),
    "links": [
      {
        "source": net.links[i].source,
        "destination": net.links[i].destination,
        "bytes": sent[i],
        "utilisation": share[i],
        "waiting_us": waiting[i] / 1e3,
        "longest_queue": queues[i],
      }
      for i in order
    ],
    "config": dict(config),
  }


def _of_config(config: Mapping[str, Any]) -> tuple[Topology, Schedule]:
  net = parse_topology(
    config["topology"], "config.topology", config["bandwidth"],
    config["latency_s"],
  )
  if config["msccl"]:
    path = pathlib.Path(config["msccl"])
    try:
      return net, msccl.import_xml(path.read_text(), net)
    except ValueError as error:
      raise ValueError(f"config.msccl={path}: {error}") from error
  try:
    return net, builders.build(config["algorithm"], net, config["collective"])
  except ValueError as error:
    raise ValueError(
      f"config.algorithm={config['algorithm']!r}, "
      f"config.collective={config['collective']!r}: {error}"
    ) from error


def show_one(result: Mapping[str, Any]) -> None:
  """Times, and the busiest links."""
  report.table(
    f"{result['collective']} by {result['algorithm']} on {result['topology']}"
    f", {size_text(result['size_bytes'])}\n{result['num_rounds']} rounds, "
    f"{result['num_transfers']} transfers; links send "
    f"{result['mean_utilisation']:.1%} of the time (predicted, not measured)",
    ["model", "us"],
    [
      ["events: starts when its chunk is there", f"{result['events_us']:,.3f}"],
      ["events, a barrier after each round", f"{result['barrier_us']:,.3f}"],
      ["lockstep: alpha-beta, cut-through", f"{result['lockstep_us']:,.3f}"],
      ["lower bound of events", f"{result['lower_bound_us']:,.3f}"],
    ],
  )
  links = result["links"]
  report.table(
    f"the {min(8, len(links))} busiest of {len(links)} links",
    ["link", "bytes", "busy", "waiting us", "longest queue"],
    [
      [
        f"{x['source']} -> {x['destination']}", f"{x['bytes']:,}",
        f"{x['utilisation']:.1%}", f"{x['waiting_us']:,.1f}",
        str(x["longest_queue"]),
      ]
      for x in links[:8]
    ],
  )


def plot_one(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws one round on the topology, and when each link sends."""
  config = result["config"]
  net, schedule = _of_config(config)
  timeline = simulate.events(
    layouts.lay_out(schedule, net), config["size_bytes"]
  )
  number = config["picture_round"]
  if not 0 <= number < len(schedule.rounds):
    raise ValueError(
      f"config.picture_round={number} must lie in [0, {len(schedule.rounds)})"
    )
  collective_plots.plot_schedule(schedule, net, timeline, number, path)


def export_one(config: Mapping[str, Any], path: pathlib.Path) -> None:
  """Writes the schedule as MSCCL XML, or its timeline as a Chrome trace.

  Raises:
    ValueError: A file that ends neither in .xml nor in .json.
  """
  net, schedule = _of_config(config)
  if path.suffix == ".xml":
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(msccl.export_xml(schedule))
  elif path.suffix == ".json":
    layout = layouts.lay_out(schedule, net)
    timeline = simulate.events(layout, config["size_bytes"])
    trace.write(timeline, path, f"{schedule.name} on {net.name}")
  else:
    raise ValueError(
      f"--export={path} must end in .xml (MSCCL) or .json (Chrome trace)"
    )
