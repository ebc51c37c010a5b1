"""Timelines as Chrome traces, which https://ui.perfetto.dev shows.

Format: "Trace Event Format", Google, complete events ("ph": "X").
"""

from collections.abc import Iterable, Sequence
import json
from typing import Any, NamedTuple

import numpy as np

from parallel.network.simulate import Timeline
from parallel.pipeline import simulate as pipeline
from parallel.pipeline.timetable import Kind

MAX_EVENTS = 1_000_000  # about 150 MB; viewers do not take more


class Bar(NamedTuple):
  """What a row shows for a while.

  Attributes:
    row: The number of the row.
    start_us: When it begins, in microseconds, as the format counts.
    length_us: How long it takes.
    name: What stands on it.
    category: By what viewers may filter.
    args: What viewers show of it, by name.
  """

  row: int
  start_us: float
  length_us: float
  name: str
  category: str
  args: dict[str, Any]


def to_json(timeline: Timeline, name: str = "") -> str:
  """Returns a trace with a row per link and a bar per message on it.

  Args:
    timeline: What `parallel.network.simulate.events` returned.
    name: Title of the trace.

  Raises:
    ValueError: There are more messages than a viewer takes.
  """
  routed = timeline.routed
  _check(len(routed.hop_links), "messages on links", "ranks")
  sizes = routed.hop_bytes(timeline.size_bytes)
  columns = (
    routed.hop_links, timeline.start_ns, timeline.end_ns, timeline.arrival_ns,
    timeline.requested_ns, sizes, routed.hop_transfers,
  )
  return _document(
    name,
    [f"{link.source} -> {link.destination}" for link in routed.links],
    (
      Bar(
        link, start / 1e3, (end - start) / 1e3, f"chunk {routed.chunks[t]}",
        f"round {routed.rounds[t]}",
        {
          "source": int(routed.sources[t]),
          "destination": int(routed.destinations[t]), "bytes": size,
          "waited_ns": start - requested, "arrival_ns": arrival,
        },
      )
      for link, start, end, arrival, requested, size, t in zip(
        *(column.tolist() for column in columns), strict=True
      )
    ),
  )


def pipeline_to_json(timeline: pipeline.Timeline, name: str = "") -> str:
  """Returns a trace with a row per stage, and one for each of its two links.

  Args:
    timeline: What `parallel.pipeline.simulate.events` returned.
    name: Title of the trace.

  Raises:
    ValueError: There are more actions than a viewer takes.
  """
  table = timeline.timetable
  places = np.argwhere(table.kinds).tolist()
  _check(len(places), "actions", "microbatches")

  def bars() -> Iterable[Bar]:
    for tick, stage in places:
      here = tick, stage
      kind, microbatch = Kind(table.kinds[here]), int(table.microbatches[here])
      args = {
        "microbatch": microbatch, "chunk": int(table.chunks[here]), "tick": tick
      }
      start, end, leave, sent, arrival = (
        1e6 * float(seconds[here]) for seconds in (
          timeline.start_s, timeline.end_s, timeline.leave_s, timeline.sent_s,
          timeline.arrival_s,
        )
      )
      text = f"{kind.name.lower()} {microbatch}"
      yield Bar(3 * stage, start, end - start, text, kind.name, args)
      if leave == leave:  # not nan: something is sent
        row = 3 * stage + (1 if kind is Kind.FORWARD else 2)
        args = args | {"arrival_us": arrival}
        yield Bar(row, leave, sent - leave, text, "hop", args)

  rows = (
    (f"stage {stage}", f"{stage} to the next", f"{stage} to the one before")
    for stage in range(table.num_stages)
  )
  return _document(name, [text for three in rows for text in three], bars())


def _check(count: int, what: str, fewer: str) -> None:
  """Refuses more bars than a viewer takes."""
  if count > MAX_EVENTS:
    raise ValueError(
      f"{count} {what} are more than a trace may have ({MAX_EVENTS}): take "
      f"fewer {fewer}"
    )


def _document(name: str, rows: Sequence[str], bars: Iterable[Bar]) -> str:
  """Returns the text of a trace."""
  # Metadata events ("M") name the process and its threads: one per row.
  events = [
    {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}
  ]
  events += [
    {
      "ph": "M", "pid": 0, "tid": place, "name": "thread_name",
      "args": {"name": text},
    }
    for place, text in enumerate(rows)
  ]
  events += [
    {
      "ph": "X", "pid": 0, "tid": bar.row, "ts": bar.start_us,
      "dur": bar.length_us, "name": bar.name, "cat": bar.category,
      "args": bar.args,
    }
    for bar in bars
  ]
  return json.dumps({"displayTimeUnit": "ns", "traceEvents": events})
