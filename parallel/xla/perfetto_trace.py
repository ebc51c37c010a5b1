"""Timelines as files for https://ui.perfetto.dev, of any length.

`parallel.network.trace` writes JSON, which the viewer reads up to a million
events.
"""

from collections.abc import Iterable
import pathlib
from typing import Any

from parallel.xla.timeline import COMPUTE, Bar


def write(bars: Iterable[Bar], path: pathlib.Path, name: str) -> float:
  """Writes a trace with one track per row of a timeline.

  Args:
    bars: Result of `parallel.xla.timeline.timeline`. They are written as they
      come, so that a long timeline needs no memory.
    path: File to write.
    name: Name of the program, which the tracks are grouped under.

  Returns:
    Seconds of the program.

  Raises:
    ValueError: The package perfetto is not installed.
    OSError: The file cannot be written.
  """
  try:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
  except ImportError as error:
    raise ValueError(
      "traces need perfetto: pip install 'caatnet[trace]'"
    ) from error
  end_s = 0.0
  with path.open("wb") as file:
    builder = StreamingTraceProtoBuilder(file)
    tracks: dict[str, int] = {}

    def track(row: str, parent: int | None) -> int:
      if row not in tracks:
        tracks[row] = len(tracks) + 1
        packet = builder.create_packet()
        packet.track_descriptor.uuid = tracks[row]
        packet.track_descriptor.name = row or name
        if parent is not None:
          packet.track_descriptor.parent_uuid = parent
        builder.write_packet(packet)
      return tracks[row]

    program = track("", None)
    track(COMPUTE, program)  # the first row
    for bar in bars:
      row = track(bar.row, program)
      for kind, seconds in (
        (TrackEvent.TYPE_SLICE_BEGIN, bar.start_s),
        (TrackEvent.TYPE_SLICE_END, bar.end_s),
      ):
        packet = builder.create_packet()
        packet.timestamp = round(seconds * 1e9)
        packet.trusted_packet_sequence_id = 1
        event = packet.track_event
        event.type, event.track_uuid = kind, row
        if kind == TrackEvent.TYPE_SLICE_BEGIN:
          _describe(event, bar)
        builder.write_packet(packet)
      end_s = max(end_s, bar.end_s)
  return end_s


def _describe(event: Any, bar: Bar) -> None:
  """Writes a bar's name and numbers to its event."""
  event.name = bar.name
  for key in ("where", "bytes", "flops"):
    note = event.debug_annotations.add()
    note.name = key
    if key == "where":
      note.string_value = bar.where
    else:
      note.double_value = getattr(bar, key)
