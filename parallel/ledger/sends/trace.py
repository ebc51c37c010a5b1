"""Timeline and execution traces of a program, with the rates of a device.

The time of a collective is the bytes that a device sends in the ring algorithm,
divided by the bandwidth of one of its links, without latency.
"""

from collections.abc import Mapping
import pathlib

from parallel.base import files
from parallel.base.checks import known
from parallel.ledger.overlap import ScheduledProgram
from parallel.ledger.reading import Reading
from parallel.ledger.sends import estimate, execution
from parallel.ledger.targets import Target
from parallel.ledger.timeline import COMPUTE, Bar, timeline
from parallel.plans.hardware.devices import DEVICES
from parallel.plans.network import chakra, perfetto_trace, replay


def rates_device(name: str, target: Target | None) -> str:
  """Returns the name of the device whose rates give the times.

  Args:
    name: Value of ``--rates``; "" for the device of the target, or an H100.
    target: The target to compile for; None for this machine.

  Raises:
    ValueError: No device has this name.
  """
  if not name and target and target.hardware:
    return target.hardware.name
  known("--rates=", name or estimate.DEFAULT_DEVICE, DEVICES)
  return name or estimate.DEFAULT_DEVICE


def write(
  readings: Mapping[str, Reading], path: pathlib.Path, rates: str
) -> str:
  """Writes the timeline of a program as a file for https://ui.perfetto.dev.

  Args:
    readings: One program.
    path: File to write.
    rates: A key of `parallel.plans.hardware.devices.DEVICES`.

  Returns:
    A sentence about the timeline.

  Raises:
    ValueError: There are several programs, the program was not compiled or is
      not scheduled, the rates are unknown, or perfetto is not installed.
  """
  name, program = _only_program("--trace", readings, rates)
  with files.atomic_file(path) as temporary:
    seconds = perfetto_trace.write(
      map(_to_perfetto_bar, timeline(program)), temporary, name, [COMPUTE]
    )
  return (
    f"{path}: {seconds * 1e3:,.3f} ms with the peak rates of {rates} and one "
    f"of its links{_format_missing(readings)}; open it at https://ui.perfetto.dev"
  )


def _format_missing(readings: Mapping[str, Reading]) -> str:
  """Returns a text about untimed instructions that may communicate."""
  missing = sum(len(reading.unknown) for reading in readings.values())
  return f", without {missing} instructions that may communicate" * (
    missing > 0
  )


def _to_perfetto_bar(bar: Bar) -> perfetto_trace.Bar:
  return perfetto_trace.Bar(
    bar.row, bar.name, bar.start_s, bar.end_s,
    {"where": bar.where, "bytes": bar.bytes, "flops": bar.flops},
  )


def write_chakra(
  readings: Mapping[str, Reading], folder: pathlib.Path, rates: str
) -> str:
  """Writes execution traces of all devices, reads them back and replays them.

  The returned sentence compares two times of communication: that of the replay,
  which sends whole bytes over rings, and that of the timeline, whose bytes are
  computed by a formula and may be fractions.

  Args:
    readings: One program.
    folder: Folder to write.
    rates: A key of `parallel.plans.hardware.devices.DEVICES`.

  Returns:
    A sentence about the traces.

  Raises:
    ValueError: As for `write`, with mlc-chakra instead of perfetto.
  """
  _, program = _only_program("--chakra", readings, rates)
  chakra.write(execution.traces(program), folder)
  traces = chakra.read(folder)
  found = replay.replay(
    traces, replay.make_ring_timer(DEVICES[rates].link.bandwidth)
  )
  communicating = max(found.communicating_s)
  expected = replay.covered_s(
    (bar.start_s, bar.end_s) for bar in timeline(program) if bar.row != COMPUTE
  )
  difference = abs(communicating - expected) / expected if expected else 0.0
  return (
    f"{folder}: {len(traces)} traces of {len(traces[0]):,} nodes; replayed on "
    f"rings of links of {rates}: {found.finish_s * 1e3:,.6f} ms, communication "
    f"during {communicating * 1e3:,.6f} ms (timeline: relative difference "
    f"{difference:.1e}){_format_missing(readings)}"
  )


def _only_program(
  flag: str, readings: Mapping[str, Reading], rates: str
) -> tuple[str, ScheduledProgram]:
  """Returns the name of the only program, and the program with its times.

  ``rates`` is the device whose rates give them; ``flag`` begins error messages.
  """
  if len(readings) != 1:
    raise ValueError(
      f"{flag} needs exactly one program, got {', '.join(readings)}"
    )
  ((name, reading),) = readings.items()
  reading.check_timed(f"{name}: {flag}")
  device = DEVICES[rates]
  return name, ScheduledProgram(
    reading.module, reading.mesh, device,
    lambda entry: entry.wire_bytes_ring / device.link.bandwidth,
  )
