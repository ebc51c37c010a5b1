"""Communication per training step, counted in the lowered programs."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from caatnet.program import Program
from caatnet.train.experiment import Experiment
from parallel.ledger import ledger
from parallel.outer.base import float32_sum_bytes


def lower_steps(experiment: Experiment) -> dict[Any, jax.stages.Lowered]:
  """Returns the lowered programs of a run's steps, by `Plan.variant`."""
  return {
    variant: experiment.lower_step(plan)
    for variant, (plan, _) in experiment.plans.items()
  }


def communication_per_step(
  experiment: Experiment, lowered: Mapping[Any, jax.stages.Lowered],
  strict: bool = True,
) -> list[dict[str, Any]]:
  """Returns communicated bytes per step, averaged over all steps of the run.

  Args:
    experiment: The run.
    lowered: Programs of the run, from `lower_steps`.
    strict: Whether an operation that `uncounted_operations` lists is an error;
      otherwise it is left out.

  Returns:
    Rows like those of `sum_bytes_by_axis`, with bytes as means per step.

  Raises:
    NotImplementedError: If ``strict`` is set and there is such an operation.
  """
  mesh = experiment.program.layout.mesh
  counts = {key: count for key, (_, count) in experiment.plans.items()}
  totals: dict[tuple[str, str, str], np.ndarray] = {}
  for program, count in counts.items():
    read = ledger.collectives if strict else lambda *x: ledger.read(*x)[0]
    for row in sum_bytes_by_axis(read(lowered[program], mesh), mesh):
      key = (row["axis"], row["phase"], row["dtype"])
      sizes = np.array([row["bytes"], row["wire_bytes"]]) * count
      totals[key] = totals.get(key, 0.0) + sizes / sum(counts.values())
  return [
    {"axis": axis, "phase": phase, "dtype": dtype, "bytes": float(sizes[0]),
     "wire_bytes": float(sizes[1])}
    for (axis, phase, dtype), sizes in totals.items()
  ]


def uncounted_operations(
  experiment: Experiment, lowered: Mapping[Any, jax.stages.Lowered]
) -> list[str]:
  """Returns names of operations that may communicate but are not counted."""
  mesh = experiment.program.layout.mesh
  found = [u.what for x in lowered.values() for u in ledger.read(x, mesh)[1]]
  return sorted(set(found))


def sum_bytes_by_axis(
  entries: list[ledger.Collective], mesh: jax.sharding.Mesh
) -> list[dict[str, Any]]:
  """Sums the bytes that a device sends, by axis, phase and dtype.

  Args:
    entries: The collectives of a program.
    mesh: The mesh of the program.

  Returns:
    Rows of "axis", "phase", "dtype", "bytes" (of operands) and "wire_bytes" (on
    the links, for ring algorithms). A collective over several axes has a row of
    their joined names, such as ``node+gpu``.
  """
  phases = ("forward", "backward", "update")
  order = list(mesh.axis_names)
  sizes: dict[tuple[Any, ...], np.ndarray] = {}
  for c in entries:
    key = (
      tuple(order.index(axis) for axis in c.axes),
      phases.index(c.phase),
      c.dtype,
      "+".join(c.axes),
    )
    size = np.array([c.bytes, c.wire_bytes_ring]) * c.count
    sizes[key] = sizes.get(key, 0) + size
  return [
    {"axis": axes, "phase": phases[phase], "dtype": dtype,
     "bytes": size[0].item(), "wire_bytes": size[1].item()}
    for (_, phase, dtype, axes), size in sorted(sizes.items())
    if axes and size[0]  # a collective over no axis stays on the device
  ]


def format_saving(program: Program, rows: Sequence[Mapping[str, Any]]) -> str:
  """Formats how many bytes an outer loop saves, relative to data parallelism.

  Args:
    program: The model on a mesh.
    rows: Result of `communication_per_step`.

  Returns:
    One line of text; empty without communication over the worker axis.
  """
  worker = program.layout.worker
  rows = [r for r in rows if r["axis"] == worker.name]
  sent = sum(row["bytes"] for row in rows)
  wire = sum(row["wire_bytes"] for row in rows)
  if not sent:
    return ""
  shapes = program.split(program.local_shapes).trained
  dense = sum(float32_sum_bytes(shapes, worker).values())
  devices = worker.devices
  ring = 2 * (devices - 1) / devices * dense  # of all-reduced gradients
  return (
    f"saves     worker axis: {dense / sent:,.1f}x fewer operand bytes than "
    f"all-reduced float32 gradients, {dense / sent / 2:,.1f}x than bfloat16; "
    f"{ring / wire:,.1f}x and {ring / wire / 2:,.1f}x on the links of a ring"
  )
