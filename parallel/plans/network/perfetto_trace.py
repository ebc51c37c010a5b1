"""Timelines as files for https://ui.perfetto.dev, of any length."""

from collections.abc import Iterable, Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

SUFFIX = ".perfetto-trace"  # the viewer detects the format by it


class Bar(NamedTuple):
  """Bar of a trace: an interval on a row.

  Attributes:
    row: Name of the row.
    name: Label of the bar.
    start_s: Start in seconds.
    end_s: End in seconds.
    details: Texts and numbers that the viewer displays, by name.
  """

  row: str
  name: str
  start_s: float
  end_s: float
  details: Mapping[str, str | int | float]


def write(
  bars: Iterable[Bar], path: pathlib.Path, name: str, rows: Sequence[str] = ()
) -> float:
  """Writes a trace with one track per row.

  Args:
    bars: Bars; those of one row are in the order of time and do not overlap.
      Each is written at once, so that a long timeline needs little memory.
    path: File to write.
    name: Name of the program or schedule, which the tracks are grouped under.
    rows: Names of the first rows; others follow when a bar needs them.

  Returns:
    Largest ``end_s`` of the bars.

  Raises:
    ValueError: The package perfetto is not installed.
    OSError: The file cannot be written.
  """
  try:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
      TrackDescriptor,
      TrackEvent,
    )
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
  except ImportError as error:
    raise ValueError(
      "traces need perfetto: pip install 'caatnet[trace]'"
    ) from error
  end_s = 0.0
  with path.open("wb") as file:
    builder = StreamingTraceProtoBuilder(file)
    group = builder.create_packet()
    group.track_descriptor.uuid = 1
    group.track_descriptor.name = name
    # Rows have the order of their ranks instead of that of their names.
    group.track_descriptor.child_ordering = TrackDescriptor.EXPLICIT
    builder.write_packet(group)
    tracks: dict[str, int] = {}

    def track(row: str) -> int:
      if row not in tracks:
        packet = builder.create_packet()
        descriptor = packet.track_descriptor
        descriptor.sibling_order_rank = len(tracks)
        descriptor.uuid = tracks[row] = 2 + len(tracks)
        descriptor.name, descriptor.parent_uuid = row, 1
        builder.write_packet(packet)
      return tracks[row]

    for row in rows:
      track(row)
    for bar in bars:
      on = track(bar.row)
      for kind, seconds in (
        (TrackEvent.TYPE_SLICE_BEGIN, bar.start_s),
        (TrackEvent.TYPE_SLICE_END, bar.end_s),
      ):
        packet = builder.create_packet()
        packet.timestamp = round(seconds * 1e9)
        packet.trusted_packet_sequence_id = 1
        packet.track_event.type, packet.track_event.track_uuid = kind, on
        if kind == TrackEvent.TYPE_SLICE_BEGIN:
          _describe(packet.track_event, bar)
        builder.write_packet(packet)
      end_s = max(end_s, bar.end_s)
  return end_s


def _describe(event: Any, bar: Bar) -> None:
  """Writes a bar's name and details to its event."""
  event.name = bar.name
  for key, value in bar.details.items():
    note = event.debug_annotations.add()
    note.name = key
    if isinstance(value, str):
      note.string_value = value
    elif isinstance(value, int):
      note.int_value = value
    else:
      note.double_value = value
