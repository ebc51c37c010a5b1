"""Report of the study of flows over leaf-spine networks."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from parallel.base import plot
from parallel.base.report import Report, Table, pivot

Rows = Sequence[Mapping[str, Any]]


def report(result: Mapping[str, Any]) -> Report:
  """Returns tables of link loads, with and without failures, and of times."""
  failed = ", ".join(f"{a}-{b}" for a, b in result["failed_uplinks"])
  failures = result["failures"] if failed else []
  names = {r["topology"] for r in result["collectives"]}
  return Report("Flows over leaf-spine networks", [
    _loads("fullest uplink, in flows", result["patterns"]),
    _loads(
      f"the same after uplinks failed (leaf-spine {failed}); optimum: the "
      "fullest uplink of the best\nroutes, by a linear program; spray and "
      "ethereal do not always reach it",
      failures, " | optimum:,.4g",
    ),
    Table(
      f"completion in us on {', '.join(names)}, fluid: the fullest link of "
      "each step, and its latency\n(predicted, not measured; packets, queues "
      "and reordering left out)",
      "algorithm=collective | size_bytes | num_steps | of.*:,.1f",
      pivot(
        result["collectives"], ["algorithm", "size_bytes"], "router", "us"
      ),
    ),
    Table(
      "collectives of the program as rings, us per step of training",
      "{program}: {kind} {phase}=collective | axes | bytes:, | count | "
      "us.*:,.1f",
      result["program"],
    ),
  ], functools.partial(_figure, [*result["patterns"], *failures]))


def _loads(title: str, rows: Rows, more: str = "") -> Table:
  return Table(
    f"{title}; bound: what leaves, enters or joins leaves, spread evenly",
    "{topology}, {pattern} ({num_flows:,} flows)=network, pattern | router | "
    "num_sent | fullest_uplink=fullest | bound | over_bound:.3f=over it"
    + more,
    rows,
  )


def _figure(rows: Rows) -> plot.Figure:
  """Plots the load of the fullest uplink, and the number of pieces per flow."""
  rows = [r | {"pieces": r["num_sent"] / r["num_flows"]} for r in rows]
  panels = [
    panel for label, key in (
      ("fullest uplink / bound", "over_bound"), ("pieces per flow", "pieces")
    )
    for panel in plot.stacked_bar_panels(
      rows, "pattern router", {label: key}, label=label, each="topology"
    )
  ]
  return plot.figure(panels, columns=len(panels) // 2)
