"""Compiles a training step for a target and says what XLA made of it.

`analyse` returns plain data (what ``--json`` prints); `print_analysis` and
`caatnet.plots.plot_compilation` show it.
"""

from collections.abc import Mapping
import time
from typing import Any

import jax

from caatnet import zero_compiled
from caatnet.build import Experiment
from caatnet.report import table
from parallel.outer.base import OuterLoop
from parallel.xla import compiled as compiled_ledger
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
    experiment: Built on the target's devices.
    target: What to compile for.
    compiler_options: In place of the target's own.
    step: Which step's program; the outer loop has several.

  Returns:
    Plain data: memory, collectives, partition, overlap, roofline. All bytes
    and FLOPs per device and step.
  """
  program = experiment.program
  options = target.compiler_options
  options = dict(options if compiler_options is None else compiler_options)
  start = time.perf_counter()
  lowered = experiment.lower_step(experiment.outer.plan(step))
  compiled = lowered.compile(compiler_options=options)
  seconds = time.perf_counter() - start
  module = hlo.parse(compiled.as_text())
  asked = ledger.collectives(lowered, program.mesh)
  made = compiled_ledger.collectives(module, program.mesh)
  result = {
    "target": target.name,
    "mesh": dict(program.mesh.shape),
    "compiler_options": options,
    "compile_seconds": seconds,
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
  if program.shards is not None:
    result["partition"] = zero_compiled.analyse(
      program, experiment.train.accumulation, asked, made
    )
  if target.hardware is not None:
    result |= _schedule(experiment, module, target)
  return result


def steps_of_programs(outer: OuterLoop) -> list[int]:
  """The first step of each program of a round, once all has begun."""
  first: dict[Any, int] = {}
  for step in outer.steady_round:
    first.setdefault(outer.plan(step).program, step)
  return sorted(first.values())


def _rows(side: dict) -> list[dict[str, Any]]:
  return [
    {"kind": kind, "dtype": dtype, "count": count, "bytes": total}
    for (kind, dtype), (count, total) in sorted(side.items())
  ]


def _memory(
  experiment: Experiment, compiled: jax.stages.Compiled, target: Target
) -> dict[str, Any]:
  state = experiment.abstract_state()
  sizes = memory.memory(
    compiled,
    {
      "parameters": state.params,
      "optimizer state": (state.opt_state, state.step),
      **({"outer loop's state": state.outer} if state.outer else {}),
      "batch": experiment.abstract_tokens(),
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
  program, hardware = experiment.program, target.hardware
  schedule = overlap.Schedule(
    module,
    program.mesh,
    hardware,
    overlap.wire_seconds(target, program.mesh),
  )
  cost, transfers = schedule.total(), schedule.transfers()
  axes = overlap.by_axis(transfers)
  wire = sum(row["seconds"] for row in axes.values())
  exposed = sum(row["exposed_seconds"] for row in axes.values())
  tokens = experiment.data.batch_size * experiment.data.seq_len
  model_flops = tokens * program.config.flops_per_token(
    experiment.data.seq_len
  ) / program.mesh.size
  peak = hardware.peak(program.config.dtype)
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
      "compute_seconds": max(cost.seconds, model_flops / peak),
      "wire_seconds": wire,
      "exposed_seconds": exposed,
      "step_if_all_overlaps": max(
        cost.seconds, model_flops / peak, wire
      ),
      "step_as_scheduled": max(cost.seconds, model_flops / peak) + exposed,
      "step_if_none_overlaps": max(cost.seconds, model_flops / peak) + wire,
    },
    "constants": {
      f"{program.config.dtype} peak": [f"{peak / 1e12:g} TFLOP/s",
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


def print_analysis(results: Mapping[str, Mapping[str, Any]]) -> None:
  """Tables of one program, or of two with the ratio of the second.

  Args:
    results: Label -> what `analyse` returned.
  """
  first, *others = results.values()
  _print_memory(results)
  for label, result in results.items():
    _print_ledger(label, result)
    if "partition" in result:
      zero_compiled.print_analysis(label, result["partition"])
  if others:
    _print_bytes_ratio(results)
  if "roofline" not in first:
    return
  for label, result in results.items():
    _print_transfers(label, result)
  _print_overlap(results)
  _print_roofline(results)
  table(
    "constants",
    ["", "value", "source"],
    [[name, *values] for name, values in first["constants"].items()],
  )


def _gb(size: float) -> str:
  return f"{size / 1e9:.3f}" if size >= 1e8 else f"{size / 1e9:.6f}"


def _ratio(values: list[float]) -> list[str]:
  if len(values) != 2:
    return []
  return [f"{values[1] / values[0]:.3f}" if values[0] else "-"]


def _ratio_column(results: Mapping[str, Any]) -> list[str]:
  return ["ratio"] if len(results) == 2 else []


def _print_memory(results: Mapping[str, Mapping[str, Any]]) -> None:
  sides = [r["memory"] for r in results.values()]
  rows = []
  for name in sides[0]:
    if name == "capacity":
      continue
    values = [side[name] for side in sides]
    rows.append([name, *map(_gb, values), *_ratio(values)])
  capacity = sides[0]["capacity"]
  if capacity:
    rows.append(["capacity", *(_gb(capacity) for _ in sides)])
    verdicts = []
    for side in sides:
      free = capacity - side["total"]
      verdicts.append(
        f"fits, {_gb(free)} free" if free >= 0 else f"{_gb(-free)} too much"
      )
    rows.append(["", *verdicts])
  target = next(iter(results.values()))["target"]
  table(
    f"memory per device, GB ({target})",
    ["", *results, *_ratio_column(results)],
    [row + [""] * (1 + len(sides) - len(row)) for row in rows],
  )


def _print_ledger(label: str, result: Mapping[str, Any]) -> None:
  def cell(side):
    return "\n".join(
      f"{r['count'] if r['count'] is not None else '?'} x {r['kind']} "
      f"{r['dtype']}  "
      + (f"{r['bytes'] / 1e6:,.3f} MB" if r["bytes"] is not None else "?")
      for r in side
    )

  table(
    f"collectives of {label}: operand MB per device and step, as asked for and "
    "as compiled",
    ["axes", "phase", "lowered", "compiled", ""],
    [
      [
        ",".join(row["axes"]) or "(no axes)",
        row["phase"],
        cell(row["lowered"]),
        cell(row["compiled"]),
        "differs" if row["differs"] else "",
      ]
      for row in result["ledger"]
    ],
  )
  table(
    f"collectives of {label}, compiled, by place",
    ["where", "phase", "axes", "kind", "dtype", "count", "MB each",
     "wire MB per step (ring)"],
    [
      [
        c["where"] or "-",
        c["phase"] + (", again" if c["rematted"] else ""),
        ",".join(c["axes"]),
        c["kind"],
        c["dtype"],
        "?" if c["count"] is None else str(c["count"]),
        f"{c['bytes'] / 1e6:,.3f}",
        "?"
        if c["count"] is None
        else f"{c['wire_bytes_ring'] * c['count'] / 1e6:,.3f}",
      ]
      for c in result["collectives"]
    ],
  )


def _print_bytes_ratio(results: Mapping[str, Mapping[str, Any]]) -> None:
  totals: dict[tuple, list[float]] = {}
  for index, result in enumerate(results.values()):
    for row in result["ledger"]:
      for side in ("lowered", "compiled"):
        key = (",".join(row["axes"]), row["phase"], side)
        cells = totals.setdefault(key, [0.0] * len(results))
        cells[index] += sum(r["bytes"] or 0 for r in row[side])
  table(
    "operand MB per device and step",
    ["axes", "phase", "", *results, *_ratio_column(results)],
    [
      [*key, *(f"{v / 1e6:,.3f}" for v in values), *_ratio(values)]
      for key, values in totals.items()
    ],
  )


def _print_transfers(label: str, result: Mapping[str, Any]) -> None:
  table(
    f"schedule of {label}: what runs between start and done",
    ["where", "phase", "axes", "count", "MB", "", "wire us",
     "compute beside, us", "hidden", "the costliest beside"],
    [
      [
        t["where"] or "-",
        t["phase"],
        ",".join(t["axes"]),
        "?" if t["count"] is None else str(t["count"]),
        f"{t['bytes'] / 1e6:,.2f}",
        "async" if t["asynchronous"] else "sync",
        f"{t['wire_seconds'] * 1e6:,.0f}",
        f"{t['beside_seconds'] * 1e6:,.0f}",
        f"{t['hidden']:.0%}",
        t["beside"][0] if t["beside"] else "",
      ]
      for t in result["transfers"]
    ],
  )


def _print_overlap(results: Mapping[str, Mapping[str, Any]]) -> None:
  rows = []
  for label, result in results.items():
    for row in result["overlap"]:
      size = row["bytes"]
      rows.append(
        [
          label,
          ",".join(row["axes"]) or "(no axes)",
          f"{size / 1e6:,.2f}",
          f"{row['asynchronous'] / size:.1%}",
          f"{row['hidden'] / size:.1%}",
          f"{(size - row['hidden']) / 1e6:,.2f}",
        ]
      )
  table(
    "overlap: operand bytes per device and step",
    ["", "axes", "MB", "asynchronous", "hidden by the roofline", "exposed MB"],
    rows,
  )


def _print_roofline(results: Mapping[str, Mapping[str, Any]]) -> None:
  names = {
    "model_flops": ("model FLOPs, 10^12", 1e-12),
    "product_flops": ("FLOPs of XLA's products, 10^12", 1e-12),
    "memory_bytes": ("main-memory GB moved", 1e-9),
    "model_flops_seconds": ("ms of model FLOPs at peak", 1e3),
    "memory_seconds": ("ms of main memory at full rate", 1e3),
    "compute_seconds": ("ms of compute, roofline by instruction", 1e3),
    "wire_seconds": ("ms on the links", 1e3),
    "exposed_seconds": ("ms on the links, not hidden", 1e3),
    "step_if_all_overlaps": ("step, ms: all overlapped", 1e3),
    "step_as_scheduled": ("step, ms: overlapped as scheduled", 1e3),
    "step_if_none_overlaps": ("step, ms: nothing overlapped", 1e3),
  }
  rows = []
  for key, (name, unit) in names.items():
    values = [r["roofline"][key] * unit for r in results.values()]
    rows.append([name, *(f"{v:,.3f}" for v in values), *_ratio(values)])
  table(
    "bounds per device and step, not a measurement: peak rates, ring "
    "algorithms, no latency",
    ["", *results, *_ratio_column(results)],
    rows,
  )
