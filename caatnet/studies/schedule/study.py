"""Study of one schedule on one topology: times, link loads, export."""

from collections.abc import Mapping
import pathlib
from typing import Any

from caatnet.studies.collectives import chosen
from caatnet.studies.inputs import parse_topology
from parallel.base import files
from parallel.base.naming import naming
from parallel.plans.network import perfetto_trace, simulate, trace
from parallel.plans.network.routed import RoutedSchedule, on_links
from parallel.plans.schedules import builders
from parallel.plans.schedules.msccl import exporter, importer
from parallel.plans.schedules.schedule import Schedule
from parallel.plans.topology.graph import Topology

# Config keys that appear in errors of times.
_NAMED = ("size_bytes", "bandwidth", "latency_s")


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Simulates one schedule.

  Args:
    config: Config like configs/collectives/schedule.py, as nested dicts.

  Returns:
    Plain data: times in us, and the links, the busiest ones first.

  Raises:
    ValueError: The topology, the schedule or the size is invalid.
  """
  net, schedule, routed = of_config(config)
  size = config["size_bytes"]
  with naming("config", _NAMED):
    free = simulate.events(routed, size)
    barrier = simulate.events(routed, size, barrier=True)
  share, waiting, queues = (
    free.utilisation.tolist(), free.waiting_ns.tolist(),
    free.longest_queues.tolist(),
  )
  sent = routed.link_bytes(size).tolist()
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
    "lockstep_us": simulate.lockstep(routed, size) * 1e6,
    "lower_bound_us": simulate.lower_bound(routed, size) / 1e3,
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


def of_config(
  config: Mapping[str, Any],
) -> tuple[Topology, Schedule, RoutedSchedule]:
  """Builds or reads the topology and the schedule of a config, and proves it.

  A schedule is built with the numbering of the ranks that is fastest by events.

  Args:
    config: Config as nested dicts.

  Raises:
    ValueError: The topology or the schedule is invalid, or the schedule does
      not perform its collective; the message names the config key.
  """
  with naming("config.export", config["export"]):
    exporter.check_options(**config["export"])
  net = parse_topology(config, "topology", config["topology"])
  if config["msccl"]:
    path = pathlib.Path(config["msccl"])
    try:
      schedule = importer.import_xml(path.read_text(), net)
      return net, schedule, on_links(schedule, net)
    except OSError as error:
      raise ValueError(f"config.msccl={path}: {error.strerror}") from error
    except ValueError as error:
      raise ValueError(f"config.msccl={path}: {error}") from error
  try:
    name, options = builders.named(config["algorithm"])
    with naming("config", _NAMED):
      schedule = chosen.fastest(
        name, net, config["collective"], config["size_bytes"],
        random_numberings=config["random_numberings"],
        **{"pieces": 1} | options,
      ).schedule
    return net, schedule, on_links(schedule, net)
  except ValueError as error:
    if str(error).startswith("config."):
      raise
    raise ValueError(
      f"config.algorithm={config['algorithm']!r}, "
      f"config.collective={config['collective']!r}: {error}"
    ) from error


def export(config: Mapping[str, Any], path: pathlib.Path) -> None:
  """Writes the schedule as MSCCL XML, or its timeline for https://ui.perfetto.dev.

  Args:
    config: Config as nested dicts.
    path: File to write, which ends in .xml or in .perfetto-trace.

  Raises:
    ValueError: The file has another suffix, or perfetto is not installed.
  """
  net, schedule, routed = of_config(config)
  if path.suffix == ".xml":
    options = config["export"]
    with naming("config.export", options):
      text = exporter.export_xml(schedule, **options)
    files.replace(path, text)
  elif path.suffix == perfetto_trace.SUFFIX:
    rows, bars = trace.messages(simulate.events(routed, config["size_bytes"]))
    with files.whole(path) as temporary:
      perfetto_trace.write(
        bars, temporary, f"{schedule.name} on {net.name}", rows
      )
  else:
    raise ValueError(
      f"--export={path} must end in .xml (MSCCL) or {perfetto_trace.SUFFIX}"
    )
