"""Comparison of all-reduce algorithms on topologies: times, bounds, speed-ups.

Sizes and topologies are like those in the figures of MultiTree (Huang et al.,
ISCA 2021). Deviation: the paper's simulator sends flits,
`parallel.plans.network.simulate` sends whole messages.
"""

from collections.abc import Mapping, Sequence
import math
import pathlib
from typing import Any

from rich.console import Console
from rich.progress import track

from caatnet.studies.collectives import exports
from caatnet.studies.inputs import (
  build_schedule,
  check_lists,
  parse_topology,
)
from parallel.base.naming import prefix_error_keys
from parallel.plans.network.routed import on_links
from parallel.plans.schedules.bounds import injection_bound
from parallel.plans.schedules.msccl import exporter
from parallel.plans.topology.graph import Topology

# MultiTree's speed-ups, from the abstract of Huang et al., ISCA 2021.
PUBLISHED = {"over ring": 2.3, "over prior art": 1.56}


# Names of arguments in error messages, which get the prefix "config.".
_ARGUMENT_KEYS = ("size_bytes", "bandwidth", "latency_s", "pieces")


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Times every algorithm on every topology.

  Args:
    config: Config like configs/collectives/multitree.py, as nested dicts.

  Returns:
    Plain data. "rows" has times in us for each topology, algorithm and size.
    "skipped" has algorithms that do not run on a topology, and the reasons.
    "recommended" has the fastest row of each topology and size. "speedups" has
    MultiTree's speed-ups, as geometric means over sizes and topologies: over
    the ring, over the best other algorithm in the config, and over "optimal".

  Raises:
    ValueError: A topology or algorithm is unknown or missing, or a size is not
      a whole number of bytes for each chunk.
  """
  sizes, barrier = config["size_bytes"], config["barrier"]
  check_lists(config)
  nets = [
    parse_topology(config, "topologies", text) for text in config["topologies"]
  ]
  cases = [(net, name) for net in nets for name in config["algorithms"]]
  rows, skipped = [], []
  for net, name in track(
    cases, "simulating", transient=True, console=Console(stderr=True)
  ):
    try:
      on_links(build_schedule(name, net), net)  # verifies the schedule
    except ValueError as error:
      skipped.append(
        {"topology": net.name, "algorithm": name, "why": str(error)}
      )
      continue
    for size in sizes:
      with prefix_error_keys("config", _ARGUMENT_KEYS):
        rows.append(_time_algorithm(
          net, name, size, barrier, config["pieces"],
          config["random_numberings"],
        ))
  return {
    "study": "collectives",
    "bandwidth": config["bandwidth"],
    "latency_s": config["latency_s"],
    "barrier": barrier,
    "pieces": config["pieces"],
    "rows": rows,
    "skipped": skipped,
    "recommended": _recommended(rows),
    "speedups": _speedups(rows),
  }


def export(config: Mapping[str, Any], path: pathlib.Path) -> None:
  """Writes the recommended schedule of one topology and size.

  Args:
    config: Config as nested dicts.
    path: File to write, as in `exports.export`.

  Raises:
    ValueError: There are several topologies or sizes, or `exports.export`
      raises it.
  """
  check_lists(config)
  for key in ("topologies", "size_bytes"):
    if len(config[key]) != 1:
      raise ValueError(
        f"config.{key}={tuple(config[key])} must have one item for --export"
      )
  with prefix_error_keys("config.export", config["export"]):
    exporter.check_options(**config["export"])
  (text,), (size,) = config["topologies"], config["size_bytes"]
  net = parse_topology(config, "topologies", text)
  with prefix_error_keys("config", _ARGUMENT_KEYS):
    exports.export(
      path, config, "algorithms", (), net, "all_reduce", size,
      config["pieces"], config["random_numberings"],
      "barrier" if config["barrier"] else "events",
    )


def _recommended(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
  """Returns the fastest algorithm's row of results by topology and size."""
  best: dict[tuple[str, int], Mapping[str, Any]] = {}
  for row in rows:
    cell = row["topology"], row["size_bytes"]
    if cell not in best or row["events_us"] < best[cell]["events_us"]:
      best[cell] = row
  return list(best.values())


def _time_algorithm(
  net: Topology, name: str, size_bytes: int, barrier: bool, pieces: int,
  random_numberings: int,
) -> dict[str, Any]:
  """Returns a row with an algorithm's times by events and in lockstep.

  Args:
    net: Network.
    name: Algorithm, as in `builders.parse_builder`.
    size_bytes: Bytes of the buffer.
    barrier: Whether switches wait for whole messages.
    pieces: Number of pieces of each chunk; 0 for the fastest number.
    random_numberings: Number of random numberings of ranks to try.
  """
  by_events, in_lockstep = (
    exports.tune_algorithm(
      net, name, "all_reduce", size_bytes, pieces, random_numberings, model
    ) for model in ("barrier" if barrier else "events", "lockstep")
  )
  return {
    "topology": net.name,
    "num_ranks": net.num_ranks,
    "algorithm": name,
    "num_rounds": len(in_lockstep.schedule.rounds),
    "size_bytes": size_bytes,
    # Simulated times are whole nanoseconds.
    "events_us": round(by_events.seconds * 1e9) / 1e3,
    "built": str(by_events),
    "events_chunks": by_events.schedule.num_chunks,
    "lockstep_us": in_lockstep.seconds * 1e6,
    "lockstep_chunks": in_lockstep.schedule.num_chunks,
    "bound_us": injection_bound(net, size_bytes) * 1e6,
  }


def _speedups(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns MultiTree's speed-ups over other algorithms, see `run`.

  Returns:
    For each time model and baseline: geometric mean and range over all pairs of
    topology and size ("cells"), and the number of pairs in which MultiTree is
    not slower ("wins").
  """
  cells: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
  for row in rows:
    cell = cells.setdefault((row["topology"], row["size_bytes"]), {})
    cell[row["algorithm"]] = row
  found: dict[str, Any] = {}
  for model in ("events_us", "lockstep_us"):
    over: dict[str, list[float]] = {
      "over ring": [], "over the best other": [], "over optimal": []
    }
    for cell in cells.values():
      ours = cell.get("multitree")
      # "optimal" selects among other algorithms' trees, including MultiTree's.
      others = [
        r[model] for name, r in cell.items()
        if name not in ("multitree", "optimal")
      ]
      if ours and "ring" in cell:
        over["over ring"].append(cell["ring"][model] / ours[model])
      if ours and others:
        over["over the best other"].append(min(others) / ours[model])
      if ours and "optimal" in cell:
        over["over optimal"].append(cell["optimal"][model] / ours[model])
    found[model] = {
      name: {
        "mean": math.exp(sum(map(math.log, values)) / len(values)),  # geometric
        "least": min(values),
        "most": max(values),
        "wins": sum(value >= 1 for value in values),
        "cells": len(values),
      }
      for name, values in over.items()
      if values
    }
  return found
