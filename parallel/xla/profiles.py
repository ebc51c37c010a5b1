"""Measured times of collectives, from a trace of `jax.profiler`.

The profiler names each event by its instruction, so that events join with the
ledger of the same compiled program (`parallel.xla.reading`). A collective ends
at about the same time on all devices of a group. The device that began last has
waited for no other: its time is the *transfer*; the others have *waited* in
addition. A collective is *hidden* while its own device executes other
instructions.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import pathlib
import re
from typing import NamedTuple

import jax

from parallel.xla.reading import Reading


class Interval(NamedTuple):
  """Execution of an instruction on a device, in nanoseconds."""

  start: float
  end: float


# Instructions whose events contain those of others.
_CONTAINERS = {"while", "conditional", "call"}
# Device -> instruction -> executions in order.
Events = dict[str, dict[str, list[Interval]]]


@dataclasses.dataclass(frozen=True)
class Measured:
  """Measured executions of a collective instruction.

  Attributes:
    instruction: Name of the instruction, or of its start.
    executions: Number of executions on a device in the trace.
    transfer_s: Mean seconds on the device that waited least.
    waiting_s: Mean seconds that the others took longer, over devices.
    hidden: Fraction of the time during which its device executed other
      instructions.
    bytes: Bytes that a device sends per execution with the ring algorithm.
  """

  instruction: str
  executions: int
  transfer_s: float
  waiting_s: float
  hidden: float
  bytes: float

  @property
  def bandwidth(self) -> float:
    """Bytes per second that a device sent during the transfer."""
    return self.bytes / self.transfer_s


def events(folder: pathlib.Path, module: str) -> Events:
  """Reads the events of a program from a folder of `jax.profiler` traces.

  Args:
    folder: Folder that was passed to ``jax.profiler.start_trace``. Of several
      traces, the newest is read.
    module: Name of the program, such as "jit_step".

  Raises:
    ValueError: There is no trace, or the program did not run during it.
  """
  files = sorted(folder.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
  if not files:
    raise ValueError(f"{folder}: no file *.xplane.pb of jax.profiler")
  found: Events = {}
  others = set()
  for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
    for line in plane.lines:
      for event in line.events:
        stats = dict(event.stats)
        if "hlo_op" not in stats:
          continue
        name = re.sub(r"\(\d+\)$", "", str(stats.get("hlo_module", "")))
        if name != module:
          others.add(name)
          continue
        # Virtual CPU devices share a plane.
        device = f"{plane.name} {stats.get('device_ordinal', '')}"
        found.setdefault(device, {}).setdefault(
          str(stats["hlo_op"]), []
        ).append(Interval(event.start_ns, event.start_ns + event.duration_ns))
  if not found:
    raise ValueError(
      f"{files[-1]}: {module} has no events; others: "
      f"{', '.join(sorted(others)) or 'none'}"
    )
  for of_device in found.values():
    for intervals in of_device.values():
      intervals.sort()
  return found


def measured(reading: Reading, found: Events) -> list[Measured]:
  """Joins the collectives of a program with its events.

  Args:
    reading: The compiled program.
    found: Result of `events` for the same program.

  Returns:
    One entry per instruction that has events on all devices, in the order of
    the program. Executions that the trace has cut off on some devices are left
    out.
  """
  wire: dict[str, float] = {}
  for e in reading.executed:
    wire[e.instruction] = wire.get(e.instruction, 0.0) + (
      e.entry.wire_bytes_ring
    )
  dones = _dones(reading)
  computing = {
    instruction.name
    for computation in reading.module.computations.values()
    for instruction in computation.instructions
    if instruction.opcode not in _CONTAINERS
  } - {*wire, *dones.values()}
  result = []
  for start, size in wire.items():
    done = dones.get(start)
    devices = [_joined(events, start, done) for events in found.values()]
    count = min(map(len, devices))
    if not count:
      continue
    devices = [intervals[-count:] for intervals in devices]
    transfer = waiting = hidden = total = 0.0
    for each in zip(*devices, strict=True):
      lengths = [x.end - x.start for x in each]
      transfer += min(lengths)
      waiting += sum(lengths) / len(lengths) - min(lengths)
    for intervals, of_device in zip(devices, found.values(), strict=True):
      busy = _union(
        x for name, executions in of_device.items() if name in computing
        for x in executions
      )
      hidden += sum(_overlap(x, busy) for x in intervals)
      total += sum(x.end - x.start for x in intervals)
    result.append(Measured(
      start, count, transfer / count / 1e9, waiting / count / 1e9,
      hidden / total, size,
    ))
  return result


def _dones(reading: Reading) -> dict[str, str]:
  """Returns the names of dones by the names of their starts."""
  return {
    operand: instruction.name
    for computation in reading.module.computations.values()
    for instruction in computation.instructions
    if instruction.opcode.endswith("-done")
    for operand in instruction.operands
  }


def _joined(
  of_device: Mapping[str, list[Interval]], start: str, done: str | None
) -> list[Interval]:
  """Returns the executions of a collective, from its start to its done."""
  starts = of_device.get(start, [])
  ends = of_device.get(done, []) if done else starts
  return [
    Interval(a.start, max(a.end, b.end))
    for a, b in zip(starts, ends, strict=False)
  ]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
  """Joins intervals that overlap."""
  joined: list[Interval] = []
  for x in sorted(intervals):
    if joined and x.start <= joined[-1].end:
      joined[-1] = Interval(joined[-1].start, max(joined[-1].end, x.end))
    else:
      joined.append(x)
  return joined


def _overlap(interval: Interval, busy: Iterable[Interval]) -> float:
  """Returns the length of an interval that disjoint intervals cover."""
  return sum(
    max(0.0, min(interval.end, x.end) - max(interval.start, x.start))
    for x in busy
  )
