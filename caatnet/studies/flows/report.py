"""Report of the study of flows over leaf-spine networks."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from parallel.base import plot
from parallel.base.report import Column, Report, Table, keyed, size_text

Rows = Sequence[Mapping[str, Any]]


def report(result: Mapping[str, Any]) -> Report:
  """Returns loads of patterns, loads after failures, times, and bars."""
  parts = [_loads("fullest uplink, in flows", result["patterns"])]
  if result["failed_uplinks"]:
    failed = ", ".join(f"{a}-{b}" for a, b in result["failed_uplinks"])
    parts.append(_loads(
      f"the same after uplinks failed (leaf-spine {failed})",
      result["failures"],
    ))
  times: dict[tuple[str, int], dict[str, Any]] = {}
  for r in result["collectives"]:
    line = times.setdefault((r["algorithm"], r["size_bytes"]), dict(r))
    line[r["router"]] = r["us"]
  names = {r["topology"] for r in result["collectives"]}
  routers = keyed(
    dict.fromkeys(r["router"] for r in result["collectives"]), ",.1f"
  )
  parts.append(Table(
    f"completion in us on {', '.join(names)}, fluid: the fullest link of each "
    "step, and its latency\n(predicted, not measured; packets, queues and "
    "reordering left out)",
    [Column("name", "collective, size"), Column("num_steps", "steps"),
     *routers],
    [
      line | {"name": f"{algorithm}, {size_text(size)}"}
      for (algorithm, size), line in times.items()
    ],
  ))
  if result["program"]:
    parts.append(Table(
      "collectives of the program as rings, us per step of training",
      [Column("", "collective", "{program}: {kind} {phase}"),
       Column("axes", "axes", ",".join), Column("bytes", "bytes", ","),
       "count", *routers],
      [r | r["us"] for r in result["program"]],
    ))
  return Report(
    "Flows over leaf-spine networks", parts,
    functools.partial(_figure, [*result["patterns"], *(
      result["failures"] if result["failed_uplinks"] else ()
    )]),
  )


def _loads(title: str, rows: Rows) -> Table:
  return Table(
    f"{title}; bound: what leaves, enters or joins leaves, spread evenly",
    [
      Column("", "network, pattern",
             "{topology}, {pattern} ({num_flows:,} flows)"),
      "router", Column("num_sent", "sent", ","),
      Column("fullest_uplink", "fullest"), "bound",
      Column("over_bound", "over it", ".3f"),
    ],
    rows,
  )


def _figure(rows: Rows) -> plot.Figure:
  """Returns the fullest uplinks, and the number of pieces per flow."""
  groups = list(dict.fromkeys((r["topology"], r["pattern"]) for r in rows))
  routers = list(dict.fromkeys(r["router"] for r in rows))
  width = 0.8 / len(routers)
  loads, pieces = [], []
  for index, router in enumerate(routers):
    own = [r for r in rows if r["router"] == router]
    places = [
      groups.index((r["topology"], r["pattern"])) + (index + 0.5) * width - 0.4
      for r in own
    ]
    for marks, heights in (
      (loads, [r["over_bound"] for r in own]),
      (pieces, [r["num_sent"] / r["num_flows"] for r in own]),
    ):
      marks.append(plot.Bars(
        places, heights, label=router, thickness=width, horizontal=False
      ))
  ticks = [
    (place, f"{net.replace(' without', chr(10) + 'without')}\n{pattern}")
    for place, (net, pattern) in enumerate(groups)
  ]
  return plot.Figure(
    [
      plot.Panel([*loads, plot.Rule(1)], y="fullest uplink / bound"),
      plot.Panel(
        pieces, x=plot.Axis(ticks=ticks), y=plot.Axis("pieces per flow", "log")
      ),
    ],
    (2.2 + 1.5 * len(groups), 6.4), share_x="all",
    legend="outside upper center", legend_columns=3,
  )
