"""Prints tables of the study of flows over leaf-spine networks."""

from collections.abc import Mapping, Sequence
from typing import Any

from caatnet.show import tables
from caatnet.show.tables import size_text


def show(result: Mapping[str, Any]) -> None:
  """Prints loads of patterns, loads after failures, and times.

  Args:
    result: What `caatnet.studies.flows.study.run` returned.
  """
  _show_loads("fullest uplink, in flows", result["patterns"])
  if result["failed_uplinks"]:
    failed = ", ".join(f"{a}-{b}" for a, b in result["failed_uplinks"])
    _show_loads(
      f"the same after uplinks failed (leaf-spine {failed})",
      result["failures"],
    )
  rows = result["collectives"]
  routers = list(dict.fromkeys(r["router"] for r in rows))
  cells = {(r["algorithm"], r["size_bytes"], r["router"]): r["us"]
           for r in rows}
  names = {r["topology"] for r in rows}
  tables.table(
    f"completion in us on {', '.join(names)}, fluid: the fullest link of each "
    "step, and its latency\n(predicted, not measured; packets, queues and "
    "reordering left out)",
    ["collective, size", "steps", *routers],
    [
      [
        f"{r['algorithm']}, {size_text(r['size_bytes'])}",
        str(r["num_steps"]),
        *(f"{cells[r['algorithm'], r['size_bytes'], x]:,.1f}"
          for x in routers),
      ]
      for r in rows if r["router"] == routers[0]
    ],
  )
  if result["program"]:
    tables.table(
      "collectives of the program as rings, us per step of training",
      ["collective", "axes", "bytes", "count", *routers],
      [
        [
          f"{r['program']}: {r['kind']} {r['phase']}", ",".join(r["axes"]),
          f"{r['bytes']:,}", str(r["count"]),
          *(f"{r['us'][x]:,.1f}" for x in routers),
        ]
        for r in result["program"]
      ],
    )


def _show_loads(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
  tables.table(
    f"{title}; bound: what leaves, enters or joins leaves, spread evenly",
    ["network, pattern", "router", "sent", "fullest", "bound", "over it"],
    [
      [
        f"{r['topology']}, {r['pattern']} ({r['num_flows']:,} flows)",
        r["router"], f"{r['num_sent']:,}", r["fullest_uplink"], r["bound"],
        f"{r['over_bound']:.3f}",
      ]
      for r in rows
    ],
  )
