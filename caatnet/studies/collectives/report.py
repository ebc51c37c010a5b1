"""Report of the comparison of collective algorithms."""

from collections.abc import Mapping, Sequence
from typing import Any

from caatnet.studies.collectives.study import PUBLISHED
from parallel.base import plot
from parallel.base.report import Column, Report, Table, keyed, size_text

Rows = Sequence[Mapping[str, Any]]


def report(result: Mapping[str, Any]) -> Report:
  """Returns a table per topology, MultiTree's speed-ups, and curves."""
  nets: dict[str, list[Mapping[str, Any]]] = {}
  for row in result["rows"]:
    nets.setdefault(row["topology"], []).append(row)
  barrier = " with barriers" if result["barrier"] else ""
  parts: list[Table | str] = [
    _topology(name, rows, barrier) for name, rows in nets.items()
  ]
  gains = [
    gain | {"model": f"{model.removesuffix('_us')}, {name}"}
    for model, found in result["speedups"].items()
    for name, gain in found.items()
  ]
  if gains:
    parts.append(Table(
      "MultiTree's speed-up: geometric mean and range over the sizes and "
      "topologies above, and\nshare of cases that are not slower (its paper, "
      "in a simulator of its own, over its own "
      f"sizes: {PUBLISHED['over ring']}x over ring, "
      f"{PUBLISHED['over prior art']}x over prior art)",
      ["model", Column("", "mean", "{mean:.2f}x"),
       Column("", "range", "{least:.2f}x to {most:.2f}x"),
       Column("", "fastest", "{wins} of {cells}")],
      gains,
    ))
  skipped: dict[str, list[str]] = {}
  for row in result["skipped"]:
    skipped.setdefault(row["algorithm"], []).append(row["topology"])
  parts += [
    f"{name} does not run on {', '.join(without)}"
    for name, without in skipped.items()
  ]
  return Report(
    "All-reduce algorithms on topologies", parts,
    lambda: _figure(nets),
  )


def _topology(name: str, rows: Rows, barrier: str) -> Table:
  """Returns times and speed-ups on one topology."""
  sizes = sorted({r["size_bytes"] for r in rows})
  ring_us = {
    r["size_bytes"]: r["events_us"] for r in rows if r["algorithm"] == "ring"
  }
  lines: dict[str, dict[str, Any]] = {}
  for row in sorted(rows, key=lambda r: r["size_bytes"]):
    line = lines.setdefault(row["algorithm"], {"rounds": row["num_rounds"]})
    size, us = row["size_bytes"], row["events_us"]
    gain = f" {ring_us[size] / us:.2f}x" if size in ring_us else ""
    line |= {size_text(size): f"{us:,.1f}{gain}"} | row | {
      "of_bound": row["bound_us"] / row["lockstep_us"]
    }
  order = dict.fromkeys(r["algorithm"] for r in rows)
  return Table(
    f"all-reduce on {name}, {rows[0]['num_ranks']} ranks: us by events"
    f"{barrier}, speed-up over ring; "
    f"lockstep us of {size_text(sizes[-1])}\nand its bound's share "
    f"({lines[rows[0]['algorithm']]['bound_us']:,.1f} us: the ranks' own "
    "links)",
    ["algorithm", "rounds",
     *keyed(map(size_text, sizes)), Column("lockstep_us", "lockstep", ",.1f"),
     Column("of_bound", "bound", ".0%")],
    [lines[algorithm] for algorithm in order],
  )


def _figure(nets: Mapping[str, Rows]) -> plot.Figure:
  """Returns bytes per second against size, a panel for each topology."""
  columns = min(len(nets), 4)
  lines = -(-len(nets) // columns)
  names = list(dict.fromkeys(
    r["algorithm"] for rows in nets.values() for r in rows
  ))
  return plot.Figure(
    [
      plot.Panel(
        _curves(rows, names), name, plot.Axis("KiB", "log"),
        plot.Axis("GB all-reduced per s", "log"), grid=True,
      )
      for name, rows in nets.items()
    ],
    (3.6 * columns, 3 * lines + 0.6), columns, share_x="all",
    legend="outside right upper",
  )


def _curves(rows: Rows, names: Sequence[str]) -> list[plot.Line]:
  """Returns the lines of one topology."""
  rows = sorted(rows, key=lambda r: r["size_bytes"])
  found = []
  for index, name in enumerate(names):
    own = [r for r in rows if r["algorithm"] == name]
    found.append(plot.Line(
      [r["size_bytes"] / 2**10 for r in own],
      [r["size_bytes"] / r["events_us"] / 1e3 for r in own], name,
      # Ten colours for eleven algorithms: the last one is dotted.
      "-" if index < 10 else ":", "osD^v<>pPX*"[index % 11], f"C{index}",
      size=4,
    ))
  bound = sorted(
    {(r["size_bytes"] / 2**10, r["size_bytes"] / r["bound_us"]) for r in rows}
  )
  found.append(plot.Line(
    [x for x, _ in bound], [y / 1e3 for _, y in bound],
    "bound of the ranks' links", "--", colour="black", width=1,
  ))
  return found
