"""Report of pipeline schedules: cost, times, and stages over time."""

from collections.abc import Mapping
import itertools
from typing import Any

import numpy as np

from caatnet.studies.pipeline.study import build_schedule, simulate_schedule
from parallel.base import plot
from parallel.base.labels import size_text
from parallel.base.report import Report, Table
from parallel.plans.pipeline.pipeline_schedule import ActionKind
from parallel.plans.pipeline.simulate import Timeline
from parallel.plans.topology.text import parse_quantity

# Kind of action -> its colour and its name in the legend.
COLOURS = {
  ActionKind.FORWARD: ("#7ba7d7", "forward"),
  ActionKind.BACKWARD: ("#72b77a", "backward"),
  ActionKind.INPUT: ("#7fc7c4", "backward of inputs"),
  ActionKind.WEIGHT: ("#b79ad1", "backward of weights"),
}
# Actions are labelled in panels with at most this many; more are illegible.
MAX_ACTION_LABELS = 1500


def report(result: Mapping[str, Any]) -> Report:
  """Returns tables of costs and times, and a figure of stages over time."""
  config = result["config"]
  size, link = config["pipeline"], config["link"]
  rows = [
    row | {
      "schedule": _name(row), "stored": _stored(row),
      "inputs": max(row["inputs"]), "cotangents": max(row["cotangents"]),
    }
    for row in result["rows"]
  ]
  rate = parse_quantity("bandwidth", link["bandwidth"])
  return Report("Schedules of a pipeline", [
    Table(
      f"{size['stages']} stages, {size['microbatches']} microbatches: counted "
      "in schedules, all ticks equally long\nstored: of how many microbatches "
      "the fullest stage stores activations, and the emptiest; held: inputs "
      "and cotangents of its parts",
      "schedule | chunks | ticks | bubble:.1% | own_bubble:.1%=of a stage | "
      "stored | stored_bytes=at most | {inputs}, {cotangents}=held | "
      "sent_bytes",
      rows,
    ),
    Table(
      f"step; {size_text(config['boundary_bytes'])} over links of "
      f"{rate / 1e9:g} GB/s, {link['latency_s']} s, "
      f"{'sent under compute' if link['overlap'] else 'stages wait'} "
      "(predicted, not measured)\nlockstep: all stages wait for each tick, as "
      "one program does",
      "schedule | closed_s=closed form, no hops | "
      "without_hops_s=events, no hops | events_s | events_bubble:.1%=idle | "
      "lockstep_s",
      rows,
    ),
    *(f"left out: {row['why']}" for row in result["skipped"]),
  ], lambda: _figure(result))


def _name(row: Mapping[str, Any]) -> str:
  """Formats a schedule's name; adds the built schedule's name if different."""
  if row["built"] == row["schedule"]:
    return row["schedule"]
  return f"{row['schedule']} (is {row['built']})"


def _stored(row: Mapping[str, Any]) -> str:
  """Formats stored activations of the fullest and the emptiest stage."""
  most, least = (f(row["stored"]) / row["chunks"] for f in (max, min))
  return f"{most:g}" if most == least else f"{most:g} to {least:g}"


def _figure(result: Mapping[str, Any]) -> plot.Figure:
  """Plots the actions of each stage over time, one panel per schedule."""
  config, rows = result["config"], result["rows"]
  stages = config["pipeline"]["stages"]
  ends = (0, 1010 * max(row["events_s"] for row in rows))
  panels = []
  for row in rows:
    timeline = simulate_schedule(
      config, build_schedule(config, row["schedule"])
    )
    table = timeline.schedule
    chunks = f", {table.num_chunks} chunks" if table.num_chunks > 1 else ""
    panels.append(plot.Panel(
      _actions(timeline),
      f"{table.name}{chunks}: {1e3 * timeline.finish_s:,.1f} ms, "
      f"{timeline.bubble:.1%} idle",
      plot.Axis("ms", limits=ends),
      plot.Axis(
        "stage", limits=(stages - 0.5, -0.5),
        ticks=[(s, str(s)) for s in range(0, stages, 1 + stages // 20)],
      ),
      frame="open",
    ))
  return plot.Figure(
    panels, (13, len(rows) * (0.75 + min(0.22 * stages, 4)) + 0.6),
    title="numbers are microbatches; a stage's later chunks are lighter",
    share_x="all", legend="outside lower center", legend_columns=len(COLOURS),
  )


def _actions(timeline: Timeline) -> list[plot.Bars]:
  """Returns a bar for each action, in the row of its stage."""
  table = timeline.schedule
  here = np.nonzero(table.kinds)
  stages, few = here[1], len(here[1]) <= MAX_ACTION_LABELS
  start, end = 1e3 * timeline.start_s[here], 1e3 * timeline.end_s[here]
  kinds, chunks = table.kinds[here], table.chunks[here]
  found = []
  for kind, chunk in itertools.product(COLOURS, range(table.num_chunks)):
    some = (kinds == kind) & (chunks == chunk)
    if some.any():
      colour, label = COLOURS[kind]
      found.append(plot.Bars(
        stages[some].tolist(), (end - start)[some].tolist(),
        start[some].tolist(), "" if chunk else label,
        _lighter(colour, chunk / table.num_chunks), 0.9,
        edge=0.4 if few else 0.0,
        texts=list(map(str, table.microbatches[here][some])) if few else (),
      ))
  return found


def _lighter(colour: str, share: float) -> str:
  """Returns the hex colour mixed with a fraction 0.65 `share` of white."""
  channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
  mixed = (round(c + 0.65 * share * (255 - c)) for c in channels)
  return "#" + "".join(f"{c:02x}" for c in mixed)
