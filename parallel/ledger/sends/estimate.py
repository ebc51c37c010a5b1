"""Times of a program's collectives on a named device, and possible savings.

The time of a collective is the bytes that a device sends in the ring algorithm,
divided by the bandwidth of one of its links, without latency. Compute takes the
time of the roofline with peak rates. Nothing overlaps. If XLA:CPU has widened
sums from bfloat16 to float32, the program is timed as if its sums and products
were in bfloat16.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from parallel.base import labels
from parallel.ledger.overlap import ScheduledProgram
from parallel.ledger.reading import Executed, Reading
from parallel.plans.hardware.devices import DEVICES, Device

DEFAULT_DEVICE = "h100"
_ROUND_STEPS = 30  # steps of a DiLoCo round, as in arXiv 2501.18512
_REDUCTION_KINDS = "all_reduce", "reduce_scatter"


def wire_s(found: Executed, device: str) -> float | None:
  """Returns the seconds of a collective's operand on a link of ``device``.

  None if its bytes are unknown.
  """
  size = found.entry.wire_bytes_ring
  if size is None:
    return None
  if found.promoted and found.requested:
    size *= _itemsize(found.requested) / _itemsize(found.entry.dtype)
  return size / DEVICES[device].link.bandwidth


def compute_s(reading: Reading, device: str) -> float | None:
  """Returns the seconds of a program's compute; None if it is not compiled."""
  if reading.module is None or not reading.module.scheduled:
    return None
  rates = DEVICES[device]
  if any(found.promoted for found in reading.executed):
    rates = _with_bfloat16_rates(rates)
  program = ScheduledProgram(
    reading.module, reading.mesh, rates, lambda entry: 0.0
  )
  return program.total().seconds


def _with_bfloat16_rates(device: Device) -> Device:
  """Returns a device as fast in float32 as the given one in bfloat16."""
  rate = device.peak("bfloat16")
  return dataclasses.replace(
    device, flops={**device.flops, "float32": rate},
    memory_bandwidth=2 * device.memory_bandwidth,
  )


def _itemsize(dtype: str) -> int:
  return np.dtype(dtype).itemsize


def savings(
  shown: Mapping[str, Any], commands: Mapping[str, str]
) -> list[str]:
  """Returns sentences on how many bytes published methods save at most.

  An axis with sums in the forward phase sums activations, of which partially
  synchronised tensor parallelism sends less. An axis with sums only after the
  forward phase sums gradients, which an outer loop exchanges once per round.

  Args:
    shown: A program of `parallel.ledger.sends.report.readings_as_data`.
    commands: "partial_sync" and "outer" -> command that analyses the method.
  """
  rows = [r for r in shown["collectives"] if r["kind"] in _REDUCTION_KINDS]
  forward = {r["over"] for r in rows if r["phase"] == "forward"}
  trained = any(r["phase"] != "forward" for r in shown["collectives"])
  partly = [r for r in rows if r["over"] in forward]
  late = [r for r in rows if r["over"] not in forward]
  lines = []
  if partly:
    lines.append(_format_saving(
      shown, partly, 0.5, "partially synchronised tensor parallelism (p = 0.5)",
      commands.get("partial_sync"),
    ))
  if late and trained:
    lines.append(_format_saving(
      shown, late, 1 - 1 / _ROUND_STEPS,
      f"DiLoCo with rounds of {_ROUND_STEPS} steps", commands.get("outer"),
    ))
  return lines


def _format_saving(
  shown: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], share: float,
  method: str, command: str | None,
) -> str:
  axes = ", ".join(sorted({row["over"] for row in rows}))
  removed = share * sum(row["bytes"] for row in rows)
  whole = sum(row["bytes"] for row in shown["collectives"])
  text = (
    f"{method} could remove at most {labels.text(removed, 'bytes')} of "
    f"{labels.text(whole, 'bytes')} (operand bytes), in the sums over {axes}"
  )
  seconds = [row["seconds"] for row in rows]
  if shown["step_s"] and None not in seconds:
    text += f", and {share * sum(seconds) / shown['step_s']:.0%} of the step"
  return text + f". More: python -m {command}" * bool(command)
