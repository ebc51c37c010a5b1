"""Study of routing flows over leaf-spine networks.

It computes the loads of the fullest uplink for traffic patterns, with and
without failed links, and completion times of collectives, also those of a
compiled program. The models are in `caatnet.studies.flows.link_loads`.

The study follows Ethereal (arXiv 2407.00550), whose own times come from a
packet simulator.
"""

import collections
from collections.abc import Mapping, Sequence
from fractions import Fraction
import math
import pathlib
from typing import Any

import numpy as np

from caatnet.studies.flows import link_loads, patterns
from caatnet.studies.flows.link_loads import Fabric, Flow
from caatnet.studies.inputs import (
  build_schedule,
  check_lists,
  parse_topology,
)
from parallel.base import schema
from parallel.base.checks import known
from parallel.ledger.groups import groups_along_dims
from parallel.plans.schedules.check import check
from parallel.plans.topology.files import read_json


class _Collective(schema.OpenSchema):
  kind: str
  axes: list[str]
  phase: str
  bytes: schema.Count
  count: schema.Count | None
  where: str


class _Compiled(schema.OpenSchema):
  mesh: dict[str, schema.Count]
  collectives: list[_Collective]


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes the study.

  Args:
    config: Config like configs/collectives/spraying.py, as nested dicts.

  Returns:
    Plain data: "patterns" and "failures" with loads of the fullest uplink, in
    flows, as text of exact fractions; "over_bound" is relative to the lower
    bound, and "failures" also has "optimum", the load of the best routes.
    "collectives" and "program" have times in us.

  Raises:
    ValueError: A topology, traffic pattern, routing algorithm, collective
      algorithm or uplink is unknown.
  """
  check_lists(
    config, ("all_to_all",), routers=link_loads.ROUTERS,
    patterns=patterns.PATTERNS,
  )
  nets = [_fabric(config, text) for text in config["topologies"]]
  failed = _remove_failed_links(config, nets[0])
  return {
    "study": "flows",
    "seed": config["seed"],
    "bandwidth": config["bandwidth"],
    "latency_s": config["latency_s"],
    "patterns": [r for net in nets for r in _loads(config, net)],
    "failed_uplinks": [list(pair) for pair in config["failed_uplinks"]],
    "failures": _loads(config, failed),
    "collectives": _collective_times(config, nets[0]),
    "program": _program_times(config, nets[0]) if config["program"] else [],
  }


def _fabric(config: Mapping[str, Any], text: str) -> Fabric:
  """Builds the leaf-spine network that a text names."""
  net = parse_topology(config, "topologies", text)
  try:
    return link_loads.fabric(net)
  except ValueError as error:
    raise ValueError(f"config.topologies={text!r}: {error}") from error


def _remove_failed_links(config: Mapping[str, Any], net: Fabric) -> Fabric:
  """Returns the network without ``config.failed_uplinks``, both directions."""
  # The config numbers leaves and spines from 0; node numbers are larger.
  leaves = sorted(set(net.leaf_of))
  pairs = []
  for pair in config["failed_uplinks"]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
      raise ValueError(f"config.failed_uplinks: {pair!r} must be (leaf, spine)")
    leaf, spine = pair
    if not (0 <= leaf < len(leaves) and 0 <= spine < len(net.spines)):
      raise ValueError(
        f"config.failed_uplinks: ({leaf}, {spine}) must have a leaf below "
        f"{len(leaves)} and a spine below {len(net.spines)}"
      )
    ends = (leaves[leaf], net.spines[spine])
    pairs += [ends, ends[::-1]]
  try:
    return link_loads.fabric(net.topology.without(*pairs))
  except ValueError as error:
    raise ValueError(f"config.failed_uplinks: {error}") from error


def _route(
  config: Mapping[str, Any], net: Fabric, router: str, sent: Sequence[Flow]
) -> list[link_loads.Route]:
  """Routes flows by the routing algorithm `router`; only "ecmp" is random."""
  options = {"seed": config["seed"]} if router == "ecmp" else {}
  return link_loads.ROUTERS[router](net, sent, **options)


def _routers(config: Mapping[str, Any], net: Fabric) -> list[str]:
  """Returns the routing algorithms that support a network with failures."""
  return [
    name for name in config["routers"]
    if net.whole or name != "coordinated_split"  # needs all uplinks
  ]


def _loads(config: Mapping[str, Any], net: Fabric) -> list[dict[str, Any]]:
  """Returns a row for each traffic pattern and routing algorithm.

  A row has the load of the fullest uplink, in flows and relative to its lower
  bound, the numbers of flows and of messages and, with failures, the optimum.
  """
  rows = []
  for pattern in config["patterns"]:
    sent = patterns.PATTERNS[pattern](net, config["seed"])
    least = link_loads.max_load_lower_bound(net, sent)
    best = {} if net.whole else {
      "optimum": link_loads.optimal_max_load(net, sent)
    }
    for router in _routers(config, net):
      routes = _route(config, net, router, sent)
      loads = link_loads.loads(net, sent, routes)
      fullest = link_loads.max_spine_link_load(net, loads)
      rows.append({
        "topology": net.topology.name,
        "pattern": pattern,
        "router": router,
        "num_flows": len(sent),
        "num_sent": link_loads.num_sent(routes),
        "fullest_uplink": str(fullest),
        "over_bound": float(fullest / least) if least else 1.0,
        "bound": str(least),
        **best,
      })
  return rows


def _collective_times(config: Mapping[str, Any], net: Fabric) -> list[
  dict[str, Any]
]:
  """Returns completion times of collectives, by size and routing algorithm.

  Flows are routed with one byte per chunk, and loads are scaled to each size.
  """
  rows = []
  for name in config["algorithms"]:
    chunks, steps = _steps(net, name)
    for size in config["size_bytes"]:
      if size < 1 or size % chunks:
        raise ValueError(
          f"config.size_bytes={size} must be a positive multiple of the "
          f"{chunks} chunks of {name} on {net.topology.name}"
        )
    for router in config["routers"]:
      step_loads = _link_loads(config, net, router, steps)
      rows += [
        {
          "topology": net.topology.name,
          "algorithm": name,
          "size_bytes": size,
          "router": router,
          "num_steps": sum(steps.values()),
          "us": 1e6 * sum(
            count * link_loads.step_seconds(net, loads, size // chunks)
            for loads, count in step_loads
          ),
        }
        for size in config["size_bytes"]
      ]
  return rows


def _steps(
  net: Fabric, algorithm: str
) -> tuple[int, Mapping[tuple[Flow, ...], int]]:
  """Returns the flows that an algorithm sends in its steps.

  Returns:
    Number of chunks, and a mapping: flows of a step, with one byte per chunk ->
    number of steps with these flows.
  """
  n = len(net.leaf_of)
  if algorithm == "all_to_all":
    # n bytes per rank: one byte for each destination.
    sent, count = patterns.ring_demands("all_to_all", [range(n)], n)
    return n, {sent: count}
  try:
    schedule = build_schedule(algorithm, net.topology)
    check(schedule, net.topology)
  except ValueError as error:
    raise ValueError(f"config.algorithms: {error}") from error
  # With num_chunks bytes in total, a chunk has one byte. Counts equal rounds.
  rounds = patterns.demands(schedule, schedule.num_chunks)
  return schedule.num_chunks, collections.Counter(rounds)


def _link_loads(
  config: Mapping[str, Any],
  net: Fabric,
  router: str,
  steps: Mapping[tuple[Flow, ...], int],
) -> list[tuple[dict[tuple[int, int], Fraction], int]]:
  """Returns the link loads of each different step, and its number.

  Equal steps take equal paths, so each different step is routed once.
  """
  return [
    (link_loads.loads(net, sent, _route(config, net, router, sent)), count)
    for sent, count in steps.items()
  ]


def _program_times(config: Mapping[str, Any], net: Fabric) -> list[
  dict[str, Any]
]:
  """Computes times of the collectives that `launch.compile --json` printed.

  The collectives use the ring algorithm. Device d of the program's mesh, in
  row-major order, is rank d of the network.
  """
  path = pathlib.Path(config["program"])
  key = f"config.program={path}"
  rows = []
  try:
    programs = read_json(path)
  except ValueError as error:
    raise ValueError(f"{key}: {error}") from error
  try:
    if not isinstance(programs, dict):
      raise ValueError("the content must be a JSON object")
    compiled = {
      label: schema.check(_Compiled, found) for label, found in programs.items()
    }
  except ValueError as error:
    raise ValueError(
      f"{key}: not the output of `launch.compile --json`: {error}"
    ) from error
  for label, program in compiled.items():
    size = math.prod(program.mesh.values())
    if size > len(net.leaf_of):
      raise ValueError(
        f"{key} needs {size} devices, but {net.topology.name} has only "
        f"{len(net.leaf_of)} hosts"
      )
    for entry in program.collectives:
      rows.append({
        "program": label, **_time_collective(config, net, program.mesh, entry)
      })
  return rows


def _time_collective(
  config: Mapping[str, Any],
  net: Fabric,
  mesh: Mapping[str, int],
  entry: _Collective,
) -> dict[str, Any]:
  """Computes the microseconds of a collective, all its executions together."""
  if not entry.axes or entry.count is None:
    raise ValueError(
      f"config.program: a {entry.kind} at {entry.where!r} has no axes or no "
      "known count"
    )
  for name in entry.axes:
    known(f"config.program: axes={entry.axes}: ", name, mesh)
  sizes = tuple(mesh.values())
  # Dims of the mesh over which the collective runs.
  dims = [d for d, name in enumerate(mesh) if name in entry.axes]
  groups = groups_along_dims(np.arange(math.prod(sizes)), sizes, dims)
  sent, count = patterns.ring_demands(entry.kind, groups, entry.bytes)
  steps = {sent: count * entry.count}
  return {
    **entry.model_dump(exclude={"where"}),
    "us": {
      router: 1e6 * sum(
        count * link_loads.step_seconds(net, loads)
        for loads, count in _link_loads(config, net, router, steps)
      )
      for router in config["routers"]
    },
  }
