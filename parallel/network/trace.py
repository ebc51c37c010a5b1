"""Timelines as Chrome traces, which https://ui.perfetto.dev shows.

Format: "Trace Event Format", Google, complete events ("ph": "X").
"""

import json
import pathlib

from parallel.network.simulate import Timeline

MAX_EVENTS = 1_000_000  # about 150 MB; viewers do not take more


def write(timeline: Timeline, path: pathlib.Path, name: str = "") -> None:
  """Writes a row for every link, a bar for every message on it.

  Args:
    timeline: Of `parallel.network.simulate.events`.
    path: JSON file; its folder is made.
    name: Of the whole.

  Raises:
    ValueError: More messages than a viewer takes.
  """
  layout = timeline.layout
  if len(layout.hop_links) > MAX_EVENTS:
    raise ValueError(
      f"{path}: {len(layout.hop_links)} messages on links are more than a "
      f"trace may have ({MAX_EVENTS}): take fewer ranks"
    )
  rows = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}]
  rows += [
    {
      "ph": "M", "pid": 0, "tid": place, "name": "thread_name",
      "args": {"name": f"{link.source} -> {link.destination}"},
    }
    for place, link in enumerate(layout.links)
  ]
  sizes = layout.hop_bytes(timeline.size_bytes)
  columns = (
    layout.hop_links, timeline.start_ns, timeline.end_ns, timeline.arrival_ns,
    timeline.requested_ns, sizes, layout.hop_transfers,
  )
  for link, start, end, arrival, requested, size, t in zip(
    *(column.tolist() for column in columns), strict=True
  ):
    rows.append({
      "ph": "X", "pid": 0, "tid": link, "ts": start / 1e3,
      "dur": (end - start) / 1e3, "name": f"chunk {layout.chunks[t]}",
      "cat": f"round {layout.rounds[t]}",
      "args": {
        "source": int(layout.sources[t]),
        "destination": int(layout.destinations[t]), "bytes": size,
        "waited_ns": start - requested, "arrival_ns": arrival,
      },
    })
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": rows}))
