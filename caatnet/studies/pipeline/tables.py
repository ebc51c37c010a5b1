"""Prints a table of timetables."""

from collections.abc import Mapping
from typing import Any

from caatnet.show import tables
from caatnet.show.tables import size_text
from parallel.topology.text import quantity


def show(result: Mapping[str, Any]) -> None:
  """Prints what timetables cost, how long they take, and which do not fit.

  Args:
    result: What `caatnet.studies.pipeline.study.run` returned.
  """
  config = result["config"]
  size, link = config["pipeline"], config["link"]
  rows = result["rows"]
  tables.table(
    f"{size['stages']} stages, {size['microbatches']} microbatches: counted in "
    "timetables, all ticks equally long\nstored: of how many microbatches the "
    "fullest stage stores activations, and the emptiest; held: inputs and "
    "cotangents of its parts",
    ["timetable", "chunks", "ticks", "bubble", "of a stage", "stored",
     "at most", "held", "sent"],
    [
      [
        _name(row), str(row["chunks"]), str(row["ticks"]),
        f"{row['bubble']:.1%}", f"{row['own_bubble']:.1%}", _stored(row),
        size_text(row["stored_bytes"]),
        f"{max(row['inputs'])}, {max(row['cotangents'])}",
        size_text(row["sent_bytes"]),
      ]
      for row in rows
    ],
  )
  bandwidth = quantity("bandwidth", link["bandwidth"])
  tables.table(
    f"ms of a step; {size_text(config['boundary_bytes'])} over links of "
    f"{bandwidth / 1e9:g} GB/s, {link['latency_s']} s, "
    f"{'sent under compute' if link['overlap'] else 'stages wait'} "
    "(predicted, not measured)\nlockstep: all stages wait for each tick, as "
    "one program does",
    ["timetable", "closed form, no hops", "events, no hops", "events", "idle",
     "lockstep"],
    [
      [
        _name(row),
        "-" if row["closed_s"] is None else f"{row['closed_s'] * 1e3:,.1f}",
        f"{row['without_hops_s'] * 1e3:,.1f}",
        f"{row['events_s'] * 1e3:,.1f}", f"{row['events_bubble']:.1%}",
        f"{row['lockstep_s'] * 1e3:,.1f}",
      ]
      for row in rows
    ],
  )
  for row in result["skipped"]:
    print(f"left out: {row['why']}")


def _name(row: Mapping[str, Any]) -> str:
  """Names a row; says so where another timetable was built."""
  if row["built"] == row["timetable"]:
    return row["timetable"]
  return f"{row['timetable']} (is {row['built']})"


def _stored(row: Mapping[str, Any]) -> str:
  """Formats stored activations of the fullest and the emptiest stage."""
  most, least = (f(row["stored"]) / row["chunks"] for f in (max, min))
  return f"{most:g}" if most == least else f"{most:g} to {least:g}"
