"""Analysis shared by all compiled programs: memory, ledger, schedule."""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import math
import time
from types import MappingProxyType
from typing import Any

import jax

from parallel.ledger import compiled as compiled_ledger
from parallel.ledger import fingerprint as fingerprints
from parallel.ledger import hlo, ledger, memory, overlap
from parallel.ledger.ledger import Collective
from parallel.ledger.targets import Target


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
  """Program compiled for a target.

  Attributes:
    target: Machine that it is compiled for.
    mesh: Mesh of the target's devices.
    module: Optimised HLO module.
    asked: Collectives of the lowered program, before XLA's optimizations.
    made: Collectives of the compiled program.
    facts: Target, fingerprint and ledger as plain data.
    compiled: jax's handle of the executable.
  """

  target: Target
  mesh: jax.sharding.Mesh
  module: hlo.Module
  asked: list[Collective]
  made: list[Collective]
  facts: dict[str, Any]
  compiled: jax.stages.Compiled

  def memory(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bytes of a device by content.

    Args:
      arguments: Name -> pytree of abstract arrays with shardings; together all
        arguments of the program.
    """
    sizes = memory.memory(self.compiled, dict(arguments))
    hardware = self.target.hardware
    return {
      **sizes.arguments,
      **({"of these on the host": sizes.host} if sizes.host else {}),
      "padding by layout": sizes.padding,
      "outputs": sizes.outputs,
      "temporaries": sizes.temporaries,
      **(
        {"temporaries on the host": sizes.host_temporaries}
        if sizes.host_temporaries else {}
      ),
      "program": sizes.program,
      "total": sizes.total,
      **({"peak": sizes.peak} if sizes.peak is not None else {}),
      "capacity": hardware.memory_bytes if hardware else None,
    }

  def schedule(
    self,
    wire_seconds: Callable[[Collective], float] | None = None,
    reads: Mapping[tuple[int, ...], float] = MappingProxyType({}),
    hides: Callable[[Collective, hlo.Instruction], bool] = lambda *_: True,
  ) -> overlap.ScheduledProgram:
    """Returns the program timed by the target's roofline.

    Args:
      wire_seconds: Function from a collective to its seconds; None uses its
        bytes over the links' bandwidth.
      reads: Dims of an array -> bytes that a kernel reads of it.
      hides: Predicate: whether an instruction counts as compute that hides a
        collective.
    """
    return overlap.ScheduledProgram(
      self.module, self.mesh, self.target.hardware,
      wire_seconds or overlap.build_wire_time_model(self.target, self.mesh),
      reads, hides,
    )

  def constants(self, dtype: str) -> dict[str, list[str]]:
    """Returns the hardware rates used for times, and their sources."""
    hardware = self.target.hardware
    peak = hardware.peak(dtype)
    return {
      f"{dtype} peak": [f"{peak / 1e12:g} TFLOP/s", hardware.source],
      "memory": [
        f"{hardware.memory_bytes / 1e9:.4g} GB, "
        f"{hardware.memory_bandwidth / 1e9:g} GB/s",
        hardware.source,
      ],
      **{
        level.link.name: [
          f"{level.link.bandwidth / 1e9:g} GB/s each way", level.link.source
        ]
        for level in self.target.levels if self.target.links is None
      },
      **(
        {"links": [self.target.links.name, self.target.links.source]}
        if self.target.links else {}
      ),
    }


def compile_for(
  target: Target,
  mesh: jax.sharding.Mesh,
  lower: Callable[[], jax.stages.Lowered],
  compiler_options: Mapping[str, bool | str],
) -> CompiledProgram:
  """Lowers and compiles a program for a target.

  Args:
    target: Machine to compile for.
    mesh: Mesh of the target's devices.
    lower: Function that lowers the program.
    compiler_options: XLA options.

  Raises:
    ValueError: The target has several TPU slices.
  """
  if target.num_slices > 1:
    raise ValueError(
      f"--target={target.name} must have one slice, since times between slices "
      "are not modelled; use launch.sends for bytes"
    )
  start = time.perf_counter()
  # Source locations would change the fingerprint with every edit of a file.
  lowered = fingerprints.lowered_without_locations(lower)
  compiled = lowered.compile(dict(compiler_options))
  seconds = time.perf_counter() - start
  module = hlo.parse(compiled.as_text())
  asked, _ = ledger.read(lowered, mesh)
  made, unknown = compiled_ledger.read(module, mesh)
  facts = {
    "target": target.name,
    "device": target.devices[0].device_kind,
    "mesh": dict(mesh.shape),
    "compiler_options": dict(compiler_options),
    "compile_seconds": seconds,
    "fingerprint": fingerprints.fingerprint(lowered),
    "versions": fingerprints.versions(target.devices[0].platform),
    "ledger": [
      {
        "axes": list(d.axes),
        "phase": d.phase,
        "lowered": ledger_rows(d.lowered),
        "compiled": ledger_rows(d.compiled),
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
    "unknown": [dataclasses.asdict(u) for u in unknown],
  }
  return CompiledProgram(target, mesh, module, asked, made, facts, compiled)


def ledger_rows(side: dict) -> list[dict[str, Any]]:
  """Converts a dict (kind, dtype) -> bytes that a program sends to rows."""
  return [
    {"kind": kind, "dtype": dtype, **sent._asdict()}
    for (kind, dtype), sent in sorted(side.items())
  ]


def timeline(
  transfers: Collection[overlap.ScheduledCollective],
) -> dict[str, list[dict[str, Any]]]:
  """Converts scheduled transfers to plain data: each one, and sums by axes."""
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
        "beside_seconds": t.overlapped.seconds,
        # A synchronous collective blocks, whatever is scheduled around it.
        "hidden": t.hidden if t.asynchronous else 0.0,
        "beside": list(t.between[:3]),
      }
      for t in transfers
      if t.bytes
    ],
    "overlap": [
      {"axes": list(names), **row}
      for names, row in overlap.sum_by_axes(list(transfers)).items()
    ],
  }


def host_copies(program: overlap.ScheduledProgram) -> list[dict[str, Any]]:
  """Converts copies between device and host to plain data, equal ones once.

  Returns:
    A row for each direction, name scope, size and kind (asynchronous or not).
    "overlapped_seconds" is the shortest compute that overlaps a copy of the
    row, "hiding_rate" the host link's bytes/s at which the copy takes as long;
    both are None for synchronous copies.
  """
  rows: dict[tuple[Any, ...], dict[str, Any]] = {}
  for copy in program.host_copies():
    key = copy.to_host, copy.where, copy.bytes, copy.asynchronous
    seconds = copy.overlapped.seconds if copy.asynchronous else None
    row = rows.setdefault(key, {
      "to_host": copy.to_host, "where": copy.where, "bytes": copy.bytes,
      "count": 0, "overlapped_seconds": seconds,
      "hiding_rate": copy.hiding_rate if copy.asynchronous else None,
    })
    unknown = None in (row["count"], copy.count)
    row["count"] = None if unknown else row["count"] + copy.count
    if seconds is not None and seconds < row["overlapped_seconds"]:
      row |= {"overlapped_seconds": seconds, "hiding_rate": copy.hiding_rate}
  for row in rows.values():
    if row["hiding_rate"] == math.inf:  # not in JSON
      row["hiding_rate"] = None
  return list(rows.values())


def step_time_bounds(
  compute_seconds: float, rows: Collection[Mapping[str, float]]
) -> dict[str, float]:
  """Returns bounds on a step's time from its compute and its transfers.

  Args:
    compute_seconds: Time of compute.
    rows: Transfers over each set of axes, summed by `overlap.sum_by_axes`.

  Returns:
    In seconds, the step time with full overlap, as scheduled, and without
    overlap, and the terms of these sums; and the number of transfers that are
    excluded because their number of executions is unknown.
  """
  wire = sum(row["seconds"] for row in rows)
  exposed = sum(row["exposed_seconds"] for row in rows)  # not hidden
  # Different axes may use different links, so the total transfer time is only
  # bounded by the axes with the longest transfers.
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
