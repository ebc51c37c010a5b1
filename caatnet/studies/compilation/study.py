"""Compiles a training step for a target and tells what XLA made of it.

`analyse` returns plain data, which ``--json`` prints. The tables and pictures
beside this file show it.
"""

from collections.abc import Collection, Mapping
import time
from typing import Any

import jax

from caatnet.studies.compilation import partition
from caatnet.train.experiment import Experiment
from parallel.outer.base import OuterLoop
from parallel.xla import compiled as compiled_ledger
from parallel.xla import fingerprint as fingerprints
from parallel.xla import hlo, ledger, memory, overlap
from parallel.xla.targets import Target


def analyse(
  experiment: Experiment,
  target: Target,
  compiler_options: Mapping[str, bool | str] | None = None,
  step: int = 0,
) -> dict[str, Any]:
  """Compiles a step that `launch.train` would run.

  Args:
    experiment: The run, built on the target's devices.
    target: The machine to compile for.
    compiler_options: Options in place of the target's own.
    step: The number of the step, since an outer loop has several programs.

  Returns:
    Plain data: fingerprint of the lowered program, memory, collectives,
    partition, overlap, roofline. All bytes and FLOPs are per device and step.
  """
  program = experiment.program
  options = target.compiler_options
  options = dict(options if compiler_options is None else compiler_options)
  start = time.perf_counter()
  lowered = lower(experiment, step)
  compiled = lowered.compile(compiler_options=options)
  seconds = time.perf_counter() - start
  module = hlo.parse(compiled.as_text())
  asked = ledger.collectives(lowered, program.layout.mesh)
  made = compiled_ledger.collectives(module, program.layout.mesh)
  result = {
    "target": target.name,
    "device": target.devices[0].device_kind,
    "mesh": dict(program.layout.mesh.shape),
    "compiler_options": options,
    "compile_seconds": seconds,
    "fingerprint": fingerprints.fingerprint(lowered),
    "versions": fingerprints.versions(target.devices[0].platform),
    "memory": _memory(experiment, compiled, target),
    "ledger": [
      {
        "axes": list(d.axes),
        "phase": d.phase,
        "lowered": _rows(d.lowered),
        "compiled": _rows(d.compiled),
        "differs": d.differs,
      }
      for d in compiled_ledger.compare(asked, made)
    ],
    "collectives": [
      {
        "axes": list(c.axes),
        "kind": c.kind,
        "dtype": c.dtype,
        "shape": list(c.shape),
        "phase": c.phase,
        "rematted": c.rematted,
        "where": c.where,
        "count": c.count,
        "bytes": c.bytes,
        "wire_bytes_ring": c.wire_bytes_ring,
      }
      for c in ledger.merge(made)
      if c.bytes
    ],
  }
  if program.layout.shards is not None:
    result["partition"] = partition.analyse(
      program, experiment.train.accumulation, asked, made
    )
  if target.hardware is not None:
    result |= _schedule(experiment, module, target)
  return result


def lower(experiment: Experiment, step: int = 0) -> jax.stages.Lowered:
  """Lowers the program of a step, so that its fingerprint can be taken."""
  plan = experiment.outer.plan(step)
  return fingerprints.lowered_without_locations(
    lambda: experiment.lower_step(plan)
  )


def steps_of_programs(outer: OuterLoop) -> list[int]:
  """Returns the first step of each program of a period in the steady state."""
  first: dict[Any, int] = {}
  for step in outer.steady_round:
    first.setdefault(outer.plan(step).variant, step)
  return sorted(first.values())


def bounds(
  compute_seconds: float, rows: Collection[Mapping[str, float]]
) -> dict[str, float]:
  """Bounds the time of a step from that of its compute and its transfers.

  Args:
    compute_seconds: Time of compute.
    rows: Transfers over each set of axes, as `overlap.by_axis` sums them up.

  Returns:
    The time if everything overlaps, as scheduled, and if nothing does; what
    these are made of; and the number of transfers that are in none of it, since
    nobody knows how often they run.
  """
  wire = sum(row["seconds"] for row in rows)
  exposed = sum(row["exposed_seconds"] for row in rows)
  # Different axes may have links of their own, so only the busiest ones bound
  # the time in which all is sent.
  busiest = max((row["seconds"] for row in rows), default=0.0)
  return {
    "compute_seconds": compute_seconds,
    "wire_seconds": wire,
    "busiest_axes_seconds": busiest,
    "exposed_seconds": exposed,
    "unknown_transfers": sum(row["unknown"] for row in rows),
    "step_if_all_overlaps": max(compute_seconds, busiest),
    "step_as_scheduled": compute_seconds + exposed,
    "step_if_none_overlaps": compute_seconds + wire,
  }


def _rows(side: dict) -> list[dict[str, Any]]:
  """Turns one side of a comparison of ledgers into plain data."""
  return [
    {"kind": kind, "dtype": dtype, **sent._asdict()}
    for (kind, dtype), sent in sorted(side.items())
  ]


def _memory(
  experiment: Experiment, compiled: jax.stages.Compiled, target: Target
) -> dict[str, Any]:
  """Returns the bytes of a device by what they hold."""
  state = experiment.abstract_state()
  sizes = memory.memory(
    compiled,
    {
      "parameters": state.params,
      "optimizer state": (state.opt_state, state.step),
      **({"outer loop's state": state.outer} if state.outer else {}),
      "batch": experiment.abstract_batch(),
    },
  )
  return {
    **sizes.arguments,
    **({"of these on the host": sizes.host} if sizes.host else {}),
    "padding by layout": sizes.padding,
    "outputs": sizes.outputs,
    "temporaries": sizes.temporaries,
    "program": sizes.program,
    "total": sizes.total,
    "capacity": target.hardware.memory_bytes if target.hardware else None,
  }


def _schedule(
  experiment: Experiment, module: hlo.Module, target: Target
) -> dict[str, Any]:
  """Reads the schedule: what runs beside each collective, and time bounds."""
  program, hardware = experiment.program, target.hardware
  schedule = overlap.ScheduledProgram(
    module,
    program.layout.mesh,
    hardware,
    overlap.wire_seconds(target, program.layout.mesh),
  )
  cost, transfers = schedule.total(), schedule.collectives()
  axes = overlap.by_axis(transfers)
  model_flops = experiment.flops_per_step / program.layout.mesh.size
  peak = hardware.peak(program.model.dtype)
  # XLA's text does not show the FLOPs of custom calls, such as flash attention.
  # So compute takes at least the model's own FLOPs at the peak rate.
  compute = max(cost.seconds, model_flops / peak)
  return {
    "transfers": [
      {
        "axes": list(t.entries[0].axes),
        "kind": t.entries[0].kind,
        "dtype": t.entries[0].dtype,
        "phase": t.entries[0].phase,
        "where": t.entries[0].where,
        "count": t.count,
        "bytes": t.bytes,
        "asynchronous": t.asynchronous,
        "wire_seconds": t.wire_seconds,
        "beside_seconds": t.beside.seconds,
        "hidden": t.hidden if t.asynchronous else 0.0,
        "beside": list(t.between),
      }
      for t in transfers
      if t.bytes
    ],
    "overlap": [
      {"axes": list(names), **row} for names, row in axes.items()
    ],
    "roofline": {
      "model_flops": model_flops,
      "product_flops": cost.flops,
      "memory_bytes": cost.bytes,
      "model_flops_seconds": model_flops / peak,
      "memory_seconds": cost.bytes / hardware.memory_bandwidth,
      **bounds(compute, axes.values()),
    },
    "constants": {
      f"{program.model.dtype} peak": [f"{peak / 1e12:g} TFLOP/s",
                                       hardware.source],
      "memory": [
        f"{hardware.memory_bytes / 1e9:.4g} GB, "
        f"{hardware.memory_bandwidth / 1e9:g} GB/s",
        hardware.source,
      ],
      **{
        level.link.name: [
          f"{level.link.bandwidth / 1e9:g} GB/s each way", level.link.source
        ]
        for level in target.levels
      },
    },
  }
