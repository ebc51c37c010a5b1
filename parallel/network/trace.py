"""Timelines as Chrome traces, which https://ui.perfetto.dev shows.

Format: "Trace Event Format", Google, complete events ("ph": "X").
"""

import json

from parallel.network.simulate import Timeline

MAX_EVENTS = 1_000_000  # about 150 MB; viewers do not take more


def to_json(timeline: Timeline, name: str = "") -> str:
  """Returns a trace with a row per link and a bar per message on it.

  Args:
    timeline: What `parallel.network.simulate.events` returned.
    name: Title of the trace.

  Raises:
    ValueError: There are more messages than a viewer takes.
  """
  routed = timeline.routed
  if len(routed.hop_links) > MAX_EVENTS:
    raise ValueError(
      f"{len(routed.hop_links)} messages on links are more than a trace may "
      f"have ({MAX_EVENTS}): take fewer ranks"
    )
  # Metadata events ("M") name the process and its threads: one per link.
  rows = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}]
  rows += [
    {
      "ph": "M", "pid": 0, "tid": place, "name": "thread_name",
      "args": {"name": f"{link.source} -> {link.destination}"},
    }
    for place, link in enumerate(routed.links)
  ]
  sizes = routed.hop_bytes(timeline.size_bytes)
  columns = (
    routed.hop_links, timeline.start_ns, timeline.end_ns, timeline.arrival_ns,
    timeline.requested_ns, sizes, routed.hop_transfers,
  )
  for link, start, end, arrival, requested, size, t in zip(
    *(column.tolist() for column in columns), strict=True
  ):
    # The format counts microseconds.
    rows.append({
      "ph": "X", "pid": 0, "tid": link, "ts": start / 1e3,
      "dur": (end - start) / 1e3, "name": f"chunk {routed.chunks[t]}",
      "cat": f"round {routed.rounds[t]}",
      "args": {
        "source": int(routed.sources[t]),
        "destination": int(routed.destinations[t]), "bytes": size,
        "waited_ns": start - requested, "arrival_ns": arrival,
      },
    })
  return json.dumps({"displayTimeUnit": "ns", "traceEvents": rows})
