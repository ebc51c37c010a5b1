"""Timeline of a compiled program, with the rates of a device."""

from collections.abc import Mapping
import pathlib

from caatnet.train import files
from parallel.hardware.devices import DEVICES
from parallel.xla import perfetto_trace
from parallel.xla.overlap import ScheduledProgram
from parallel.xla.reading import Reading
from parallel.xla.timeline import timeline


def write(
  readings: Mapping[str, Reading], path: pathlib.Path, rates: str
) -> str:
  """Writes the timeline of a program as a file for https://ui.perfetto.dev.

  The time of a collective is that of the bytes that a device sends with the
  ring algorithm on one link of the device, without latency.

  Args:
    readings: One program.
    path: File to write.
    rates: A key of `parallel.hardware.devices.DEVICES`.

  Returns:
    A sentence about the timeline.

  Raises:
    ValueError: There are several programs, the program was not compiled or is
      not scheduled, the rates are unknown, or perfetto is not installed.
  """
  if len(readings) != 1:
    raise ValueError(f"--trace shows one program, not {', '.join(readings)}")
  ((name, reading),) = readings.items()
  if reading.module is None:
    raise ValueError(f"--trace needs a compiled program; {name} is none")
  device = DEVICES[rates]
  program = ScheduledProgram(
    reading.module, reading.mesh, device,
    lambda entry: entry.wire_bytes_ring / device.link.bandwidth,
  )
  with files.whole(path) as temporary:
    seconds = perfetto_trace.write(timeline(program), temporary, name)
  return (
    f"{path}: {seconds * 1e3:,.3f} ms with the peak rates of {rates} and one "
    "of its links; open it at https://ui.perfetto.dev"
  )
