"""Study of one schedule on one topology: times, link loads, export."""

from collections.abc import Mapping
import contextlib
import pathlib
from typing import Any

from caatnet.studies.collectives import exports
from caatnet.studies.collectives.chosen import ChosenSchedule
from caatnet.studies.inputs import check_lists, parse_topology
from parallel.base.naming import prefix_error_keys
from parallel.plans.network import simulate
from parallel.plans.network.routed import RoutedSchedule, on_links
from parallel.plans.schedules.bounds import lower_bound
from parallel.plans.schedules.msccl import exporter, importer
from parallel.plans.schedules.schedule import Collective, Schedule
from parallel.plans.topology.graph import Topology

# Names of arguments in error messages, which get the prefix "config.".
_ARGUMENT_KEYS = ("size_bytes", "bandwidth", "latency_s", "pieces")
# Largest number of ranks for which alternatives are timed; more take minutes.
MAX_COMPARED = 64
# An alternative is reported if it is faster by at least this factor.
LEAST_GAIN = 1.01


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Simulates one schedule.

  Args:
    config: Config like configs/collectives/schedule.py, as nested dicts.

  Returns:
    Plain data: times in us, and "links", the busiest first. "bound_us" is a
    lower bound for all schedules, "lower_bound_us" one for this schedule.
    "faster" is an alternative that takes less time, None if there is none.

  Raises:
    ValueError: The topology, the schedule or the size is invalid.
  """
  check_lists(config, key="alternatives")
  net, schedule, routed = build_from_config(config)
  size = config["size_bytes"]
  with prefix_error_keys("config", _ARGUMENT_KEYS):
    free = simulate.events(routed, size)
    barrier = simulate.events(routed, size, barrier=True)
  share, waiting, queues = (
    free.utilisation.tolist(), free.waiting_ns.tolist(),
    free.longest_queues.tolist(),
  )
  bound_us = lower_bound(net, schedule.collective, size) * 1e6
  sent = routed.link_bytes(size).tolist()
  order = sorted(range(len(net.links)), key=lambda i: (-share[i], -waiting[i]))
  return {
    "study": "schedule",
    "topology": net.name,
    "algorithm": schedule.name,
    "built": "" if config["msccl"] else str(_fastest_schedule(config, net)),
    "collective": schedule.collective,
    "size_bytes": size,
    "num_ranks": schedule.num_ranks,
    "num_rounds": len(schedule.rounds),
    "num_transfers": schedule.num_transfers,
    "events_us": free.finish_ns / 1e3,
    "barrier_us": barrier.finish_ns / 1e3,
    "lockstep_us": simulate.lockstep(routed, size) * 1e6,
    "bound_us": bound_us,
    "faster": _faster(
      config, net, schedule.collective, free.finish_ns / 1e3, bound_us
    ),
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


def build_from_config(
  config: Mapping[str, Any],
) -> tuple[Topology, Schedule, RoutedSchedule]:
  """Builds or reads a config's topology and schedule, and verifies them.

  The schedule has the numbering of ranks that is fastest by `simulate.events`.

  Args:
    config: Config as nested dicts.

  Raises:
    ValueError: The topology or the schedule is invalid, or the schedule does
      not perform its collective; the message names the config key.
  """
  with prefix_error_keys("config.export", config["export"]):
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
    with prefix_error_keys("config", _ARGUMENT_KEYS):
      schedule = _fastest_schedule(config, net).schedule
    return net, schedule, on_links(schedule, net)
  except ValueError as error:
    if str(error).startswith("config."):
      raise
    raise ValueError(
      f"config.algorithm={config['algorithm']!r}, "
      f"config.collective={config['collective']!r}: {error}"
    ) from error


def _fastest_schedule(
  config: Mapping[str, Any], net: Topology
) -> ChosenSchedule:
  """Returns the fastest schedule of the config's algorithm."""
  return exports.tune_algorithm(
    net, config["algorithm"], *_search_arguments(config)
  )


def _search_arguments(config: Mapping[str, Any]) -> tuple[Any, ...]:
  """Returns `exports.tune_algorithm`'s arguments that follow the algorithm."""
  keys = ("collective", "size_bytes", "pieces", "random_numberings")
  return tuple(config[key] for key in keys)


def _faster(
  config: Mapping[str, Any], net: Topology, collective: Collective, us: float,
  bound_us: float,
) -> dict[str, Any] | None:
  """Returns the fastest alternative if it takes less than ``us`` microseconds.

  Each alternative has its fastest number of pieces. `bound_us` is a lower bound
  of all schedules, in microseconds.
  """
  if net.num_ranks > MAX_COMPARED or us < LEAST_GAIN * bound_us:
    return None
  with contextlib.suppress(ValueError):  # none supports the topology
    best = exports.fastest_of(
      config["alternatives"], net, collective, config["size_bytes"],
      random_numberings=config["random_numberings"],
    )
    if best.seconds * 1e6 * LEAST_GAIN <= us:
      return {"algorithm": str(best), "us": best.seconds * 1e6}
  return None


def export(config: Mapping[str, Any], path: pathlib.Path) -> None:
  """Writes the schedule, or one within a runtime's limits (`exports.export`).

  Args:
    config: Config as nested dicts.
    path: File to write, which ends in .xml or in .perfetto-trace.
  """
  net, schedule, _ = build_from_config(config)
  if config["msccl"]:
    exports.write(path, schedule, net, config["size_bytes"], config["export"])
  else:
    others = config["alternatives"]
    exports.export(
      path, config, "algorithm", others, net, *_search_arguments(config)
    )
