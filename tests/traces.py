"""Trace files, parsed in the way the viewer does."""

from typing import NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
  Trace,
  TrackDescriptor,
  TrackEvent,
)


class Slice(NamedTuple):
  """Slice on a track, with times in nanoseconds."""

  name: str
  start: int
  end: int
  details: dict


def read(path):
  """Returns the title, the rows in the viewer's order, and slices by row.

  A viewer sorts events by time, those of one time in the order of the file, and
  an end closes the slice of its track that began last.
  """
  trace = Trace()
  trace.ParseFromString(path.read_bytes())
  tracks = [
    p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")
  ]
  (group,) = (t for t in tracks if not t.HasField("parent_uuid"))
  assert group.child_ordering == TrackDescriptor.EXPLICIT
  rows = sorted(
    (t for t in tracks if t.HasField("parent_uuid")),
    key=lambda t: t.sibling_order_rank,
  )
  assert {t.parent_uuid for t in rows} <= {group.uuid}
  names = {t.uuid: t.name for t in rows}
  assert len({*names, group.uuid}) == len(tracks)
  slices, begun = {t.name: [] for t in rows}, {}
  events = [p for p in trace.packet if p.HasField("track_event")]
  for packet in sorted(events, key=lambda p: p.timestamp):
    event = packet.track_event
    stack = begun.setdefault(event.track_uuid, [])
    if event.type == TrackEvent.TYPE_SLICE_BEGIN:
      notes = {
        a.name: getattr(a, a.WhichOneof("value"))
        for a in event.debug_annotations
      }
      stack.append((event.name, packet.timestamp, notes))
    else:
      name, start, notes = stack.pop()
      assert not stack  # slices of a row do not overlap
      slices[names[event.track_uuid]].append(
        Slice(name, start, packet.timestamp, notes)
      )
  assert not any(begun.values())
  return group.name, [t.name for t in rows], slices
