"""Comparison of a partition's closed form with a lowered and compiled step."""

from collections.abc import Iterable
from typing import Any

from caatnet.program import Program
from parallel.ledger.ledger import Collective
from parallel.plans.zero import cost

BYTE_SOURCES = ("formula", "lowered", "compiled")


def analyse(
  program: Program,
  accumulation: int,
  lowered: Iterable[Collective],
  compiled: Iterable[Collective],
) -> dict[str, Any]:
  """Returns memory by formula, and bytes by formula and in both programs.

  Args:
    program: Model on a mesh, with a partition.
    accumulation: Microbatches per step.
    lowered: Collectives of the lowered step.
    compiled: Collectives of the program compiled by XLA.

  Returns:
    Plain data. "memory" has the bytes of a device by formula
    (`parallel.plans.zero.cost`). "bytes" has a row for each set of levels of
    data-parallel ranks, kind of collective and dtype, with operand bytes per
    device and step; None if a count is unknown. The counts of the programs
    include norms and losses.
  """
  layout = program.layout
  lanes = {axis.name: axis.lanes for axis in layout.data}
  arguments = layout.partition, program.cost_parameters
  memory = cost.memory(*arguments, lanes)
  rows: dict[tuple[str, ...], dict[str, int | None]] = {}

  def add(side, axes, kind, dtype, size):
    key = ",".join(axes), kind, dtype
    row = rows.setdefault(key, dict.fromkeys(BYTE_SOURCES, 0))
    # One unknown count makes the sum unknown.
    row[side] = None if None in (row[side], size) else row[side] + size

  for e in cost.level_collectives(
    *arguments, accumulation=accumulation, lanes=lanes
  ):
    # A level of one device needs no communication.
    axes = [name for name in e.levels if layout.mesh.shape[name] > 1]
    add("formula", axes, e.kind, e.dtype, e.operand_bytes)
  levels = {axis.name for axis in layout.data}
  for side, entries in (("lowered", lowered), ("compiled", compiled)):
    for e in entries:
      # Collectives over the tensor axis alone are not the partition's.
      if set(e.axes) & levels and e.bytes:
        size = None if e.count is None else e.count * e.bytes
        add(side, e.axes, e.kind, e.dtype, size)
  return {
    "partition": str(layout.partition),
    "memory": {
      "state (arguments)": memory.stored,
      "weights of a step": memory.weights,
      "gradients": memory.gradients,
      "second copy": memory.secondary,
    },
    "bytes": [
      {"axes": axes, "kind": kind, "dtype": dtype, **row}
      for (axes, kind, dtype), row in sorted(rows.items())
    ],
  }
