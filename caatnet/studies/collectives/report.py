"""Report of the comparison of collective algorithms."""

from collections.abc import Mapping, Sequence
from typing import Any

from caatnet.studies.collectives.study import PUBLISHED
from parallel.base import plot
from parallel.base.labels import size_text
from parallel.base.report import Report, Table, pivot

Rows = Sequence[Mapping[str, Any]]


def report(result: Mapping[str, Any]) -> Report:
  """Returns a table per topology, MultiTree's speed-ups, and curves."""
  nets: dict[str, list[Mapping[str, Any]]] = {}
  for row in sorted(result["rows"], key=lambda r: r["size_bytes"]):
    nets.setdefault(row["topology"], []).append(row)
  barrier = " with barriers" if result["barrier"] else ""
  parts: list[Table | str] = [
    _topology_table(name, rows, barrier) for name, rows in nets.items()
  ]
  parts.append(Table(
    f"recommended: fastest by events{barrier}; --export=FILE.xml writes that "
    "of one topology and size",
    "topology | size | events_us:,.1f=us | built=config.algorithm",
    [
      row | {"size": size_text(row["size_bytes"])}
      for row in result["recommended"]
    ],
  ))
  parts.append(Table(
    "MultiTree's speed-up: geometric mean and range over the sizes and "
    "topologies above, and\nshare of cases that are not slower (its paper, "
    "in a simulator of its own, over its own "
    f"sizes: {PUBLISHED['over ring']}x over ring, "
    f"{PUBLISHED['over prior art']}x over prior art)",
    "model | {mean:.2f}x=mean | {least:.2f}x to {most:.2f}x=range | "
    "{wins} of {cells}=not slower",
    [
      gain | {"model": f"{model.removesuffix('_us')}, {name}"}
      for model, found in result["speedups"].items()
      for name, gain in found.items()
    ],
  ))
  parts += [
    f"{row['algorithm']} does not run on {row['topology']}"
    for row in result["skipped"]
  ]
  return Report(
    "All-reduce algorithms on topologies", parts, lambda: _figure(nets),
  )


def _topology_table(name: str, rows: Rows, barrier: str) -> Table:
  """Returns times and speed-ups on topology `name`.

  `rows` are its rows of the result, by ascending size; `barrier` is added to
  the title.
  """
  ring_us = {
    r["size_bytes"]: r["events_us"] for r in rows if r["algorithm"] == "ring"
  }
  largest = rows[-1]
  lockstep_us = {
    r["algorithm"]: r["lockstep_us"] for r in rows
    if r["size_bytes"] == largest["size_bytes"]
  }
  texts = [
    r | {
      "size": size_text(r["size_bytes"]), "text": f"{r['events_us']:,.1f}" + (
        f" {ring_us[r['size_bytes']] / r['events_us']:.2f}x" if ring_us else ""
      ),
      "lockstep": lockstep_us[r["algorithm"]],
      "bound": largest["bound_us"] / lockstep_us[r["algorithm"]],
    } for r in rows
  ]
  return Table(
    f"all-reduce on {name}, {largest['num_ranks']} ranks: us by events"
    f"{barrier}, speed-up over ring; "
    f"lockstep us of {size_text(largest['size_bytes'])}\nand its bound's share "
    f"({largest['bound_us']:,.1f} us: the ranks' own links)",
    "algorithm | num_rounds | of.* | lockstep:,.1f | bound:.0%",
    pivot(texts, ["algorithm"], "size", "text"),
  )


def _figure(nets: Mapping[str, Rows]) -> plot.Figure:
  """Returns bytes per second against size, a panel for each topology."""
  rows = [row for of_net in nets.values() for row in of_net]
  points = [r | {"rate": r["size_bytes"] / r["events_us"]} for r in rows] + [
    r | {"algorithm": "bound of the ranks' links",
         "rate": r["size_bytes"] / r["bound_us"]} for r in rows
  ]
  return plot.figure(plot.lines(
    points, "size_bytes/1024=KiB", "rate/1e3=GB all-reduced per s",
    by="algorithm", each="topology", log="xy", legend="",
  ), columns=4, legend="outside right upper")
