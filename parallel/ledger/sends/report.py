"""Report of a program's collectives by axis, phase and source line."""

from collections.abc import Mapping, Sequence
import dataclasses
import os
from types import MappingProxyType
from typing import Any

from parallel.base import labels
from parallel.base.report import Column, Report, Table, columns_of_keys
from parallel.ledger.compiled import SentTotals, compare
from parallel.ledger.profiles import MeasuredCollective
from parallel.ledger.reading import Executed, Reading
from parallel.ledger.sends import estimate

_SUMMED = "bytes", "wire_bytes", "seconds"


def readings_as_data(
  readings: Mapping[str, Reading],
  measured: Mapping[str, Sequence[MeasuredCollective]] = MappingProxyType({}),
  rates: str = estimate.DEFAULT_DEVICE,
) -> dict[str, Any]:
  """Returns the readings of programs as dicts, lists, texts and numbers.

  Args:
    readings: Name -> reading.
    measured: Name -> measured times.
    rates: A key of `parallel.plans.hardware.devices.DEVICES`.

  Returns:
    Name -> dict with the axes, the memory, the notes, and ``collectives``:
    one row per kind, axes, phase, dtype and source line, with

    - ``bytes``: operand bytes of one execution of the program per device,
    - ``wire_bytes``: bytes that a device sends with the ring algorithm; None if
      the number of devices is unknown,
    - ``seconds``: time on the device ``rates`` (`parallel.ledger.sends.
      estimate`); None if unknown,
    - ``at_most``: whether bytes are an upper bound,
    - ``inserted``: whether XLA marks the collective as the partitioner's,
    - ``executions``: number of executions, times operands, per execution of the
      program; None if unknown, and bytes are then those of a single one.

    ``unknown``: instructions that may communicate and are in no row;
    ``totals``: sums of the rows, see `_totals`; ``by_axes``: such sums for each
    set of axes and phase; ``host``: a row per copy between device and host;
    ``step_s``: seconds of all compute and collectives of the program, None if
  unknown.
    With measured times: ``measured``, and ``not_measured``, the instructions of
    collectives that have no event on some device.
  """
  return {
    name: {
      "axes": dict(reading.axes), "memory": dict(reading.memory),
      "notes": list(reading.notes),
      "collectives": (rows := _rows(reading, rates)),
      "device": rates, "step_s": _step_s(reading, rows, rates),
      "unknown": [dataclasses.asdict(u) for u in reading.unknown],
      "totals": _totals(rows, len(reading.unknown)),
      "by_axes": _totals_by_axes(rows),
      "host": [dataclasses.asdict(copy) for copy in reading.host],
    } | ({"measured": _measured_rows(reading, measured[name]),
          "not_measured": _not_measured(reading, measured[name])}
         if name in measured else {})
    for name, reading in readings.items()
  }


def _step_s(
  reading: Reading, rows: Sequence[Mapping[str, Any]], rates: str
) -> float | None:
  if _totals(rows, len(reading.unknown))["unknown"]["number"]:
    return None
  compute_s = estimate.compute_s(reading, rates)
  return compute_s and compute_s + sum(row["seconds"] for row in rows)


def _rows(reading: Reading, rates: str) -> list[dict[str, Any]]:
  rows: dict[tuple, dict[str, Any]] = {}
  for found in reading.executed:
    entry = found.entry
    unknown = entry.count is None
    key = (
      entry.kind, entry.axes, entry.group_size, entry.dtype, found.requested,
      found.promoted, entry.phase, entry.rematted, found.source, entry.where,
      entry.smallest_group, unknown, found.inserted,
    )
    row = rows.setdefault(key, _row(found) | {
      "executions": None if unknown else 0, "bytes": 0, "wire_bytes": 0.0,
      "seconds": 0.0, "instructions": [],
    })
    times = 1 if unknown else entry.count
    if not unknown:
      row["executions"] += times
    row["bytes"] += times * entry.bytes
    if entry.wire_bytes_ring is None:
      row["wire_bytes"] = row["seconds"] = None
    else:
      row["wire_bytes"] += times * entry.wire_bytes_ring
      row["seconds"] += times * estimate.wire_s(found, rates)
    row["instructions"].append(found.instruction)
  return sorted(rows.values(), key=lambda r: (r["axes"], -r["bytes"]))


def _totals(
  rows: Sequence[Mapping[str, Any]], unknown: int
) -> dict[str, dict[str, Any]]:
  """Returns three sums over a program's rows; each row is in one of them.

  Args:
    rows: Collectives of the program.
    unknown: Number of instructions that may communicate and are in no row.

  Returns:
    ``counted``, ``at_most`` and ``unknown``, each with ``number`` (of rows, or
    of instructions), ``bytes``, ``wire_bytes`` and ``seconds``, None if
    unknown. A row whose number of executions or of devices is unknown belongs
    to ``unknown``.
  """
  parts: dict[str, list[Mapping[str, Any]]] = {"counted": [], "at_most": []}
  for row in rows:
    if None in (row["executions"], row["wire_bytes"]):
      unknown += 1
    else:
      parts["at_most" if row["at_most"] else "counted"].append(row)
  return {
    name: {"number": len(part)} | {
      key: sum(row[key] for row in part) for key in _SUMMED
    }
    for name, part in parts.items()
  } | {"unknown": {
    "number": unknown, **dict.fromkeys(_SUMMED, None if unknown else 0)
  }}


def _totals_by_axes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns `_totals` for each set of axes and phase."""
  parts: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
  for row in rows:
    parts.setdefault((row["over"], row["phase"]), []).append(row)
  return [
    {"over": over, "phase": phase, "what": what, **total}
    for (over, phase), part in parts.items()
    for what, total in _totals(part, 0).items() if total["number"]
  ]


def _row(found: Executed) -> dict[str, Any]:
  entry = found.entry
  return {
    "kind": entry.kind, "axes": list(entry.axes), "over": entry.over,
    "group_size": entry.group_size, "smallest_group": entry.smallest_group,
    "at_most": entry.at_most, "dtype": entry.dtype,
    "requested": found.requested, "promoted": found.promoted,
    "phase": entry.phase, "rematted": entry.rematted, "source": found.source,
    "where": entry.where, "asynchronous": found.asynchronous,
    "between": list(found.between), "inserted": found.inserted,
  }


def report(
  readings: Mapping[str, Reading],
  measured: Mapping[str, Sequence[MeasuredCollective]] = MappingProxyType({}),
  rates: str = estimate.DEFAULT_DEVICE,
  commands: Mapping[str, str] = MappingProxyType({}),
) -> Report:
  """Returns a report on each program, and on the difference if there are two.

  Args:
    readings: Name -> reading.
    measured: Name -> measured times.
    rates: A key of `parallel.plans.hardware.devices.DEVICES`.
    commands: Argument of `parallel.ledger.sends.estimate.savings`.
  """
  parts: list[Table | str] = []
  for name, shown in readings_as_data(readings, measured, rates).items():
    axes = ", ".join(f"{a} {n}" for a, n in shown["axes"].items())
    title = f"{name}: what a device sends in one run; mesh: {axes or 'none'}"
    if shown["collectives"]:
      parts.append(_collectives_table(title, shown["collectives"]))
    if shown["unknown"]:
      parts.append(Table(
        f"{name}: may communicate, not counted",
        [_SOURCE, "name=instruction", "what"], shown["unknown"],
      ))
    if shown["collectives"] or shown["unknown"]:
      parts.append(_totals_table(name, shown))
    else:
      parts.append(f"{name} sends nothing.")
    if shown["host"]:
      parts.append(_host_copies_table(name, shown["host"]))
    if shown["memory"]:
      parts.append("memory of a device: " + ", ".join(
        f"{n} {_format_size(size)}" for n, size in shown["memory"].items()
      ))
    parts += [*shown["notes"], *estimate.savings(shown, commands)]
    if shown.get("measured"):
      parts.append(_measured_table(name, shown["measured"]))
    if missing := shown.get("not_measured"):
      parts.append(
        f"{name}: the profile has no complete event of {len(missing)} "
        f"collectives, such as {missing[0]}. The trace may have cut them off, "
        "or a GPU has executed them in a command buffer, which XLA_FLAGS="
        "--xla_gpu_enable_command_buffer= disables."
      )
  if len(readings) == 2:
    parts.append(_difference_table(readings))
  return Report("Collectives of a program", parts)


def _collectives_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
  overlaps = any(row["asynchronous"] for row in rows)
  return Table(title, [
    _SOURCE, "over=axes", "{phase}{again}=phase", "{kind}{made}=kind",
    Column("requested", "requested", default="?"), "{dtype}{widened}=sent",
    Column("executions", "runs", default="?"), "{most}{operand}=operand",
    "{most}{wire}=wire, ring", *["overlapped"] * overlaps,
  ], [
    row | _format_sizes(row) | {
      "again": ", again" if row["rematted"] else "",
      "made": ", inserted" if row["inserted"] else "",
      "widened": ", widened" if row["promoted"] else "",
      "overlapped": f"{len(row['between'])} instructions"
      if row["asynchronous"] else "nothing",
    }
    for row in rows
  ])


def _format_sizes(row: Mapping[str, Any]) -> dict[str, str]:
  """Returns table field -> text, for the byte counts of a row."""
  return {
    "most": "at most " * row["at_most"], "operand": _format_size(row["bytes"]),
    "wire": _format_size(row["wire_bytes"]),
  }


def _format_size(size: float | None) -> str:
  """Returns bytes in the largest unit that they fill; "?" if unknown."""
  return "?" if size is None else labels.text(size, "bytes")


def _totals_table(name: str, shown: Mapping[str, Any]) -> Table:
  """Returns a table of totals by axes and phase, and of the whole program.

  ``shown`` is a program's item of the result of `readings_as_data`.
  """
  step_s = shown["step_s"]
  title = f"{name}: totals of one run"
  if step_s:
    title += (
      f"; times with the peak rates of {shown['device']} and one of its links, "
      f"nothing hidden: {step_s * 1e3:.3g} ms"
    )
  return Table(title, [
    "over=axes", "phase", Column("what", "", lambda x: x.replace("_", " ")),
    "number=rows or instructions", Column("bytes", "operand", _format_size),
    Column("wire_bytes", "wire, ring", _format_size),
    *["seconds/1e-3:.3g=ms", "share:.1%=of the run"] * bool(step_s),
  ], [
    row | {"share": row["seconds"] / step_s if step_s else None}
    for row in (
      *shown["by_axes"],
      *({"over": "all", "phase": "all", "what": what, **total}
        for what, total in shown["totals"].items()
        if total["number"] or what == "counted")
    )
  ])


def _host_copies_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
  return Table(f"{name}: copies between device and host memory", [
    _SOURCE, Column("to_host", "to", lambda x: "host" if x else "device"),
    Column("count", "runs", default="?"), "bytes=size of one",
    "asynchronous",
  ], rows)


def _measured_rows(
  reading: Reading, measured: Sequence[MeasuredCollective]
) -> list[dict[str, Any]]:
  # The first operand represents a merged collective.
  found = {e.instruction: e for e in reversed(reading.executed)}
  return [
    _row(found[m.instruction]) | dataclasses.asdict(m)
    | {"bandwidth": m.bandwidth}
    for m in measured
  ]


def _not_measured(
  reading: Reading, measured: Sequence[MeasuredCollective]
) -> list[str]:
  """Returns the instructions of collectives that have no measured time."""
  found = {m.instruction for m in measured}
  names = dict.fromkeys(e.instruction for e in reading.executed)
  return [name for name in names if name not in found]


def _measured_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
  return Table(f"{name}: measured, means of one execution", [
    _SOURCE, "over=axes", "kind", "executions",
    "transfer_s/1e-3:,.3f=transfer ms", "waiting_s/1e-3:,.3f=waiting ms",
    "hidden:.0%", "{most}{wire}=wire, ring", "{most}{rate}=GB/s",
  ], [
    row | _format_sizes(row | {"wire_bytes": row["bytes"]})
    | {"rate": f"{row['bandwidth'] / 1e9:,.3f}"} for row in rows
  ])


def _shorten_path(source: str) -> str:
  """Shortens a path relative to the working directory."""
  return source.removeprefix(os.getcwd() + os.sep) or "?"


_SOURCE = Column("source", "source line", _shorten_path)


def _difference_table(readings: Mapping[str, Reading]) -> Table:
  names = list(readings)
  rows = [
    {
      "axes": ",".join(d.axes) or "other", "phase": d.phase,
      names[0]: _format_sums(d.lowered), names[1]: _format_sums(d.compiled),
      "differs": "differs" if d.differs else "",
    }
    for d in compare(*(r.entries for r in readings.values()))
  ]
  unknown = ["\n".join(map(str, r.unknown)) for r in readings.values()]
  if any(unknown):  # unknown sizes may differ
    rows.append({
      "axes": "unknown", "phase": "", **dict(zip(names, unknown, strict=True)),
      "differs": "may differ",
    })
  return Table(
    "difference: executions and operand bytes of one run",
    ["axes", "phase", *columns_of_keys(names), Column("differs", "")], rows,
  )


def _format_sums(side: Mapping[tuple[str, str], SentTotals]) -> str:
  return "\n".join(
    f"{sent.count} x {kind} {dtype} {_format_size(sent.bytes)}"
    + f" + ? x {_format_size(sent.unknown_bytes)}" * bool(sent.unknown_bytes)
    for (kind, dtype), sent in side.items()
  )
