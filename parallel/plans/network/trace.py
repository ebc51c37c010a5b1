"""Timelines of schedules as rows and bars of a trace.

`parallel.plans.network.perfetto_trace` writes them.
"""

from collections.abc import Iterator

import numpy as np

from parallel.plans.network.perfetto_trace import Bar
from parallel.plans.network.simulate import Timeline
from parallel.plans.pipeline import cost
from parallel.plans.pipeline import simulate as pipeline
from parallel.plans.pipeline.pipeline_schedule import ActionKind


def message_bars(timeline: Timeline) -> tuple[list[str], Iterator[Bar]]:
  """Returns one row per link and one bar per message on a link.

  Args:
    timeline: Result of `parallel.plans.network.simulate.events`.

  Returns:
    Names of the rows, and the bars in the order of time.
  """
  routed = timeline.routed
  rows = [f"{link.source} -> {link.destination}" for link in routed.links]
  sizes = routed.hop_bytes(timeline.size_bytes)
  # Messages without a duration come before those that start when they end.
  order = np.lexsort((timeline.end_ns, timeline.start_ns))
  columns = (
    routed.hop_links, timeline.start_ns, timeline.end_ns, timeline.arrival_ns,
    timeline.requested_ns, sizes, routed.hop_transfers,
  )
  return rows, (
    Bar(
      rows[link], f"chunk {routed.chunks[t]}", start / 1e9, end / 1e9,
      {
        "round": int(routed.rounds[t]), "source": int(routed.sources[t]),
        "destination": int(routed.destinations[t]), "bytes": size,
        "waited_ns": start - requested, "arrival_ns": arrival,
      },
    )
    for link, start, end, arrival, requested, size, t in zip(
      *(column[order].tolist() for column in columns), strict=True
    )
  )


def action_bars(timeline: pipeline.Timeline) -> tuple[list[str], Iterator[Bar]]:
  """Returns three rows per stage (compute, two outgoing links) and their bars.

  Args:
    timeline: Result of `parallel.plans.pipeline.simulate.events`.

  Returns:
    Names of the rows, and the bars; a row has its bars in the order of time.
  """
  table = timeline.schedule
  ahead = cost.sends_by_direction(table)[0]  # [T, S]
  rows = [
    name for stage in range(table.num_stages) for name in (
      f"stage {stage}", f"{stage} to the next", f"{stage} to the one before"
    )
  ]

  def bars() -> Iterator[Bar]:
    for tick, stage in np.argwhere(table.kinds).tolist():
      here = tick, stage
      kind, microbatch = ActionKind(table.kinds[here]), int(
        table.microbatches[here]
      )
      details = {
        "microbatch": microbatch, "chunk": int(table.chunks[here]), "tick": tick
      }
      start, end, leave, sent, arrival = (
        float(seconds[here]) for seconds in (
          timeline.start_s, timeline.end_s, timeline.leave_s, timeline.sent_s,
          timeline.arrival_s,
        )
      )
      text = f"{kind.name.lower()} {microbatch}"
      yield Bar(rows[3 * stage], text, start, end, details)
      if leave == leave:  # NaN if the action sends nothing
        row = rows[3 * stage + (1 if ahead[here] else 2)]
        yield Bar(row, text, leave, sent, details | {"arrival_s": arrival})

  return rows, bars()
