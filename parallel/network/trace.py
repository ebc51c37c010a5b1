"""Export of timelines as Chrome traces, for https://ui.perfetto.dev.

Format: "Trace Event Format", Google, complete events ("ph": "X").
"""

from collections.abc import Iterable, Sequence
import json
from typing import Any, NamedTuple

import numpy as np

from parallel.network.simulate import Timeline
from parallel.pipeline import cost
from parallel.pipeline import simulate as pipeline
from parallel.pipeline.pipeline_schedule import Kind

MAX_EVENTS = 1_000_000  # about 150 MB, the limit of viewers


class Bar(NamedTuple):
  """Bar of a trace: an interval on one row.

  Attributes:
    row: Index of the row.
    start_us: Start time in microseconds, the format's unit.
    length_us: Duration in microseconds.
    name: Label of the bar.
    category: Category, by which viewers can filter.
    args: Details that viewers display, by name.
  """

  row: int
  start_us: float
  length_us: float
  name: str
  category: str
  args: dict[str, Any]


def to_json(timeline: Timeline, name: str = "") -> str:
  """Returns a trace with one row per link and one bar per message.

  Args:
    timeline: Result of `parallel.network.simulate.events`.
    name: Title of the trace.

  Returns:
    JSON text.

  Raises:
    ValueError: There are more than ``MAX_EVENTS`` messages.
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
  """Returns a trace with three rows per stage: compute and two links.

  Args:
    timeline: Result of `parallel.pipeline.simulate.events`.
    name: Title of the trace.

  Returns:
    JSON text.

  Raises:
    ValueError: There are more than ``MAX_EVENTS`` actions.
  """
  table = timeline.schedule
  places = np.argwhere(table.kinds).tolist()
  ahead = cost.sends(table)[0]  # [T, S]
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
      if leave == leave:  # NaN if the action sends nothing
        row = 3 * stage + (1 if ahead[here] else 2)
        args = args | {"arrival_us": arrival}
        yield Bar(row, leave, sent - leave, text, "hop", args)

  rows = (
    (f"stage {stage}", f"{stage} to the next", f"{stage} to the one before")
    for stage in range(table.num_stages)
  )
  return _document(name, [text for three in rows for text in three], bars())


def _check(count: int, what: str, fewer: str) -> None:
  """Raises ValueError if a trace would have too many bars."""
  if count > MAX_EVENTS:
    raise ValueError(
      f"{count} {what} are more than a trace may have ({MAX_EVENTS}): take "
      f"fewer {fewer}"
    )


def _document(name: str, rows: Sequence[str], bars: Iterable[Bar]) -> str:
  """Returns a trace as JSON text."""
  # Metadata events ("M") name the process and one thread per row.
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
  return json.dumps(
    {"displayTimeUnit": "ns", "traceEvents": events}, allow_nan=False
  )
