"""Measured times of collectives, from a trace of `jax.profiler`.

The profiler names each event by its instruction, so that events join with the
ledger of the same compiled program (`parallel.ledger.reading`). A collective
ends at about the same time on all devices of a group. The device that began
last has waited for no other: its time is the *transfer*; the others have
*waited* in addition. A collective is *hidden* while its own device executes
other instructions.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
import pathlib
import re
from typing import Any, NamedTuple

import jax

from parallel.ledger.reading import Reading


class Interval(NamedTuple):
  """Execution of an instruction on a device, in nanoseconds."""

  start: float
  end: float


# Instructions whose events contain those of others.
_CONTAINERS = {"while", "conditional", "call"}
# Device -> instruction -> executions in order.
Events = dict[str, dict[str, list[Interval]]]


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
  """Measured executions of a collective instruction.

  Attributes:
    instruction: Name of the instruction, or of its start.
    executions: Number of executions on a device in the trace.
    transfer_s: Mean seconds on the device that waited least.
    waiting_s: Mean seconds beyond ``transfer_s``, over all devices.
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
    return self.bytes / self.transfer_s if self.transfer_s else math.inf


def read_events(folder: pathlib.Path) -> dict[str, list[Events]]:
  """Reads the newest trace in a folder of `jax.profiler`.

  Args:
    folder: Folder that was passed to ``jax.profiler.start_trace``.

  Returns:
    Name of a program, such as "jit_step" -> events of each program that has
    this name.

  Raises:
    ValueError: There is no trace, or it is damaged.
  """
  files = sorted(folder.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
  if not files:
    raise ValueError(
      f"{folder} has no file *.xplane.pb; pass a folder that jax.profiler wrote"
    )
  try:
    trace = jax.profiler.ProfileData.from_file(str(files[-1]))
  except RuntimeError as error:
    raise ValueError(f"{files[-1]} is damaged: {error}") from error
  found: dict[str, dict[Any, Events]] = {}
  for plane in trace.planes:
    for line in plane.lines:
      for event in line.events:
        stats = dict(event.stats)
        if "hlo_op" not in stats:
          continue
        module = re.sub(r"\(\d+\)$", "", str(stats.get("hlo_module", "")))
        program = found.setdefault(module, {}).setdefault(
          stats.get("program_id"), {}
        )
        # Virtual CPU devices share a plane.
        device = f"{plane.name} {stats.get('device_ordinal', '')}"
        program.setdefault(device, {}).setdefault(
          str(stats["hlo_op"]), []
        ).append(Interval(event.start_ns, event.start_ns + event.duration_ns))
  return {module: list(each.values()) for module, each in found.items()}


def select_program_events(
  reading: Reading, candidates: Sequence[Events]
) -> Events | None:
  """Selects a compiled program's events from those of programs with its name.

  Args:
    reading: The compiled program.
    candidates: Events of the programs with its name, each of which ran.

  Returns:
    The events with the fewest instructions that the program does not have; None
    without candidates.

  Raises:
    ValueError: Several programs fit equally well.
  """
  names = {
    instruction.name
    for computation in reading.module.computations.values()
    for instruction in computation.instructions
  }
  others = [
    len({name for of_device in found.values() for name in of_device} - names)
    for found in candidates
  ]
  if others.count(min(others, default=0)) > 1:
    raise ValueError(
      f"the profile has {len(candidates)} programs named "
      f"{reading.module.name}, whose events cannot be told apart; profile one "
      "of them"
    )
  return candidates[others.index(min(others))] if others else None


def measure_collectives(reading: Reading, found: Events) -> list[
  MeasuredCollective
]:
  """Joins the collectives of a program with its events.

  Args:
    reading: The compiled program.
    found: Events of the same program.

  Returns:
    One entry per instruction that has events on all devices, in the order of
    the program. Executions that the trace has cut off on some devices are left
    out.
  """
  # An instruction of a computation with two callers is listed twice.
  operands = {(e.instruction, e.operand): e for e in reading.executed}
  wire: dict[str, float] = {}
  for e in operands.values():
    size = wire.get(e.instruction, 0.0)
    wire[e.instruction] = size + e.entry.wire_bytes_ring
  dones = {e.instruction: e.done for e in reading.executed}
  computing = {
    instruction.name
    for computation in reading.module.computations.values()
    for instruction in computation.instructions
    if instruction.opcode not in _CONTAINERS
  } - {*wire, *dones.values()}
  result = []
  for start, size in wire.items():
    devices = [
      _join_start_and_done(
        of_device, start, dones[start]
      ) for of_device in found.values()
    ]
    count = min(map(len, devices), default=0)
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
    result.append(MeasuredCollective(
      start, count, transfer / count / 1e9, waiting / count / 1e9,
      hidden / total if total else 0.0, size,
    ))
  return result


def _join_start_and_done(
  of_device: Mapping[str, list[Interval]], start: str, done: str
) -> list[Interval]:
  """Returns the executions of which the trace has both start and done.

  ``of_device`` has a device's executions by the names of instructions.
  """
  starts, ends = (sorted(of_device.get(name, ())) for name in (start, done))
  # The trace may begin between a start and its done.
  ends = [end for end in ends if starts and end.end >= starts[0].end]
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
  """Returns how much of an interval the disjoint intervals ``busy`` cover."""
  return sum(
    max(0.0, min(interval.end, x.end) - max(interval.start, x.start))
    for x in busy
  )
