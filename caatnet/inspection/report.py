"""Report of one or several compiled steps, side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import itertools
from typing import Any

from caatnet.inspection import partition
from parallel.base import plot
from parallel.base.report import (
  Column,
  Report,
  Table,
  columns_of_keys,
  format_range,
)
from parallel.ledger import conformal

Result = Mapping[str, Any]
Results = Mapping[str, Result]

# Suffix of table titles when transfers of unknown count are excluded.
_EXCLUSION_SUFFIX = ", without transfers of unknown count"
# Key of the bounds -> its heading, and the unit of the heading.
_BOUNDS = {
  "model_flops": ("model FLOPs, 10^12", 1e12),
  "product_flops": ("FLOPs of XLA's products, 10^12", 1e12),
  "memory_bytes": ("main-memory GB moved", 1e9),
  "model_flops_seconds": ("ms of model FLOPs at peak", 1e-3),
  "memory_seconds": ("ms of main memory at full rate", 1e-3),
  "formula_seconds": ("ms of compute, roofline by closed formula", 1e-3),
  "waiting_seconds": ("ms of waiting for longer actions of stages", 1e-3),
  "compute_seconds": ("ms of compute, roofline by instruction", 1e-3),
  "wire_seconds": ("ms on the links, one axis after another", 1e-3),
  "busiest_axes_seconds": ("ms on the links of the busiest axes", 1e-3),
  "exposed_seconds": ("ms on the links, not hidden", 1e-3),
  "step_if_all_overlaps": ("step, ms: all overlapped, axes too", 1e-3),
  "step_as_scheduled": ("step, ms: overlapped as scheduled", 1e-3),
  "step_if_none_overlaps": ("step, ms: nothing overlapped", 1e-3),
}
_LATENCY_BOUNDS = {
  "wire_seconds": "ms of collectives, with latency",
  "step_as_scheduled": "step, ms: as scheduled, with latency",
  "step_if_none_overlaps": "step, ms: nothing overlapped, with latency",
}


def report(results: Results) -> Report:
  """Returns tables and a figure of programs; with two, also their ratio.

  Args:
    results: Label -> result of `caatnet.inspection.study.analyse` or
      `caatnet.inspection.decoding.analyse`.
  """
  return Report(
    "Compiled steps", list(_parts(results)), lambda: _figure(results),
  )


def _parts(results: Results) -> Iterator[Table | str]:
  first, *others = results.values()
  yield _memory(results)
  for label, result in results.items():
    yield from ledger_tables(label, result)
    for unknown in result.get("unknown", ()):  # older results lack it
      yield (
        f"{label}: {unknown['name']}, {unknown['what']}, may communicate and "
        "is not counted."
      )
    if "partition" in result:
      yield from partition_tables(label, result["partition"])
    if "inference" in result:
      yield _inference(label, result["inference"])
      if result["inference"].get("widened"):
        yield _widening_notice(label, result["inference"]["widened"])
  if others:
    yield _bytes_ratio(results)
  if "transfers" not in first:
    return
  for label, result in results.items():
    yield _transfers(label, result)
    if "host_copies" in result:
      yield host_copies_table(label, result["host_copies"])
  yield overlap_table(results)
  for label, result in results.items():
    if "nanobatches" in result:
      yield _nanobatches(label, result["nanobatches"])
  if all("roofline" in result for result in results.values()):
    yield _roofline(results)
    for label, result in results.items():
      if result.get("outside"):
        yield (
          f"{label}: the interval is widened, outside: "
          f"{', '.join(result['outside'])}."
        )
  else:
    yield (
      "No bounds: the program gathers pages of the cache into a dense copy, "
      "which a kernel for attention over pages does not."
    )
  yield Table(
    "constants", columns_of_keys(["", "value", "source"]),
    [
      dict(zip(("", "value", "source"), (name, *values), strict=True))
      for name, values in first["constants"].items()
    ],
  )


def _program_columns(results: Results) -> list[Column]:
  """Returns a column for each program and, with two, the ratio."""
  ratio = [Column("ratio", "ratio", default="")] if len(results) == 2 else []
  return [*columns_of_keys(results, default=""), *ratio]


def _program_cells(
  results: Results, values: Sequence[Any], form: Callable[[Any], str]
) -> dict[str, str]:
  """Returns the cells of `_program_columns` from the value of each program."""
  cells = dict(zip(results, map(form, values), strict=True))
  if len(values) == 2:
    before, after = values
    cells["ratio"] = f"{after / before:.3f}" if before else "-"
  return cells


def _gb(size: float) -> str:
  return f"{size / 1e9:.3f}" if size >= 1e8 else f"{size / 1e9:.6f}"


def _axes(axes: Sequence[str]) -> str:
  return ",".join(axes) or "(no axes)"


def _memory(results: Results) -> Table:
  sides = [r["memory"] for r in results.values()]
  rows = [
    {"": name}
    | _program_cells(results, [side.get(name, 0) for side in sides], _gb)
    for name in dict.fromkeys(itertools.chain(*sides)) if name != "capacity"
  ]
  capacity = sides[0]["capacity"]
  if capacity:
    rows.append({"": "capacity"} | dict.fromkeys(results, _gb(capacity)))
    verdicts = {"": ""}
    for label, side in zip(results, sides, strict=True):
      free = capacity - side.get("peak", side["total"])  # CPUs have no peak
      verdicts[label] = (
        f"fits, {_gb(free)} free" if free >= 0 else f"{_gb(-free)} too much"
      )
    rows.append(verdicts)
  return Table(
    f"memory per device, GB ({next(iter(results.values()))['target']})",
    ["", *_program_columns(results)], rows,
  )


def ledger_tables(label: str, result: Result) -> list[Table]:
  """Returns a program's collectives: by axes and phase, and by named scope."""

  def cell(side: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for r in side:
      name = f"{r['kind']} {r['dtype']}"
      if r["count"]:
        lines.append(f"{r['count']} x {name}  {r['bytes'] / 1e6:,.3f} MB")
      if r["unknown_bytes"]:
        lines.append(f"? x {name}  {r['unknown_bytes'] / 1e6:,.3f} MB each")
    return "\n".join(lines)

  return [
    Table(
      f"collectives of {label}: operand MB per device and step, as asked for "
      "and as compiled",
      [
        Column("axes", "axes", _axes), "phase",
        Column("lowered", "lowered", cell),
        Column("compiled", "compiled", cell), "differs",
      ],
      result["ledger"],
    ),
    Table(
      f"collectives of {label}, compiled, by place; -: unknown",
      "where | {phase}{again}=phase | axes | kind | dtype | count | "
      "bytes/1e6:,.3f=MB each | wire/1e6:,.3f=wire MB per step (ring)",
      [
        c | {
          "again": ", again" if c["rematted"] else "",
          "kind": c["kind"] + ", at most" * c["kind"].startswith("ragged"),
          "wire": None if c["count"] is None
          else c["wire_bytes_ring"] * c["count"],
        }
        for c in result["collectives"]
      ],
    ),
  ]


def _bytes_ratio(results: Results) -> Table:
  totals: dict[tuple[str, str, str], list[float]] = {}
  unknown = False
  for index, result in enumerate(results.values()):
    for row in result["ledger"]:
      for side in ("lowered", "compiled"):
        key = (",".join(row["axes"]), row["phase"], side)
        cells = totals.setdefault(key, [0.0] * len(results))
        cells[index] += sum(r["bytes"] for r in row[side])
        unknown |= any(r["unknown_bytes"] for r in row[side])
  return Table(
    "operand MB per device and step" + _EXCLUSION_SUFFIX * unknown,
    ["axes", "phase", "", *_program_columns(results)],
    [
      dict(zip(("axes", "phase", ""), key, strict=True))
      | _program_cells(results, values, lambda v: f"{v / 1e6:,.3f}")
      for key, values in totals.items()
    ],
  )


def _transfers(label: str, result: Result) -> Table:
  return Table(
    f"schedule of {label}: what runs between start and done; -: unknown",
    "where | phase | axes | count | bytes/1e6:,.2f=MB | asynchronous | "
    "wire_seconds/1e-6:,.0f=wire us | "
    "beside_seconds/1e-6:,.0f=overlapped compute, us | hidden:.0% | "
    "costliest=costliest overlapped",
    [
      row | {"costliest": next(iter(row["beside"]), "")}
      for row in result["transfers"]
    ],
  )


def host_copies_table(
  label: str, rows: Sequence[Mapping[str, Any]]
) -> Table:
  """Returns the copies between device and host, and what overlaps them."""
  return Table(
    f"copies of {label} between device and host: compute between start and "
    "done (-: none, synchronous), and the rate of a host link that hides the "
    "copy under it",
    "where | to_host | count | bytes/1e6:,.3f=MB each | "
    "overlapped_seconds/1e-6:,.1f=overlapped compute, us | "
    "hiding_rate/1e9:,.1f=GB/s that hides it",
    rows,
  )


def overlap_table(results: Results) -> Table:
  """Returns the bytes of each axis that are sent during compute."""
  rows = []
  for label, result in results.items():
    for row in result["overlap"]:
      size, each = row["bytes"], row["unknown_bytes"]
      rows.append(row | {
        "label": label, "exposed": size - row["hidden"],
        "unknown_text":
          f"{row['unknown']}, {each / 1e6:,.2f} MB each time" if each else "",
      } | {
        f"{key}_share": row[key] / size if size else None
        for key in ("asynchronous", "hidden")
      })
  return Table(
    "overlap: operand bytes per device and step",
    [
      "label=program", Column("axes", "axes", _axes), "bytes/1e6:,.2f=MB",
      "asynchronous_share:.1%=asynchronous",
      "hidden_share:.1%=hidden by the roofline",
      "exposed/1e6:,.2f=exposed MB",
      *["unknown_text=of unknown count, besides"]
      * any(row["unknown_text"] for row in rows),
    ],
    rows,
  )


def _roofline(results: Results) -> Table:
  bounds = [r["roofline"] for r in results.values()]
  rows = [
    {"": name} | _program_cells(
      results, [b[key] / unit for b in bounds], lambda v: f"{v:,.3f}"
    )
    for key, (name, unit) in _BOUNDS.items()
    if all(key in b for b in bounds)  # there is a formula of inference only
  ]
  unknown = any(b["unknown_transfers"] for b in bounds)
  rates = (
    "bounds per device and step, not a measurement: peak rates, ring "
    "algorithms, no latency unless said"
  )
  if any("links" in r["constants"] for r in results.values()):
    rates = "step of a device, predicted with the rates of the cluster"
  return Table(
    rates + _EXCLUSION_SUFFIX * unknown,
    ["", *_program_columns(results)],
    rows + _latency_rows(results) + _interval_rows(results),
  )


def _interval_rows(results: Results) -> list[dict[str, str]]:
  """Returns the intervals of step times; [] if a program has no interval."""
  if not all("interval" in r for r in results.values()):
    return []
  return [{"": f"step, ms: median and {conformal.COVERAGE:.0%} interval"} | {
    label: "{:,.3f} ({:,.3f} to {:,.3f})".format(*(
      1e3 * r["interval"][key] for key in ("median", "low", "high")
    ))
    for label, r in results.items()
  }]


def _latency_rows(results: Results) -> list[dict[str, str]]:
  """Returns rows of bounds with the latency of collectives, if known."""
  if not all("with_latency" in r for r in results.values()):
    why = {r["without_latency"] for r in results.values()
           if "without_latency" in r}
    return [
      {"": f"with latency: {w}"} | dict.fromkeys(results, "-") for w in why
    ]
  rows = []
  for key, name in _LATENCY_BOUNDS.items():
    ends = [
      [bounds[key] * 1e3 for bounds in r["with_latency"]]
      for r in results.values()
    ]
    row = {"": name} | {
      label: format_range(end, "{:,.3f}".format)
      for label, end in zip(results, ends, strict=True)
    }
    if len(ends) == 2:
      ratios = [b / a for a, b in zip(*ends, strict=True)]
      row["ratio"] = format_range(ratios, "{:.3f}".format)
    rows.append(row)
  return rows


def _inference(label: str, result: Result) -> Table:
  """Returns the sizes of a step of inference, and its bytes by formula."""
  attention = (
    "pages are gathered into a dense copy" if result["gathers_pages"]
    else f"pages are read by {', '.join(result['kernels'])}"
  )
  return Table(
    f"{result['phase']} of {label}: {result['sequences']} x {result['tokens']} "
    f"tokens of each replica, in contexts of {result['context']}; {attention}\n"
    "operand MB over the tensor axis, per device and step",
    [
      "kind", "dtype",
      *columns_of_keys(partition.BYTE_SOURCES, ",.6f", unit=1e6)
    ],
    result["formula"],
  )


def _nanobatches(label: str, rows: Sequence[Mapping[str, Any]]) -> Table:
  """Returns the bytes that nano-batches reduce, and the overlapped fraction."""
  return Table(
    f"nano-batches of {label}: operand bytes of reductions, and the share of "
    "them\nwith a product of another nano-batch between start and done, and "
    "hidden under\nthe roofline time of other nano-batches' instructions",
    "kind | count | bytes/1e6:,.2f=MB | asynchronous_share:.1%=asynchronous | "
    "overlapped_share:.1%=with a product | hidden_share:.1%=hidden",
    [
      row | {
        f"{key}_share": row[key] / row["bytes"]
        for key in ("asynchronous", "overlapped", "hidden")
      } for row in rows
    ],
  )


def _widening_notice(label: str, names: Sequence[str]) -> str:
  """Returns a notice on conversions of a 16-bit cache and how to avoid them."""
  more = f"; and {len(names) - 3} more" if names[3:] else ""
  return (
    f"{label}: XLA:CPU updates a 16-bit cache in float32. {len(names)} "
    "instructions convert all of it, which config.model.dtype=float32 (or "
    "config.inference.dtype, if set) avoids; other targets update it in "
    f"place: {'; '.join(names[:3])}{more}"
  )


def partition_tables(label: str, result: Result) -> list[Table]:
  """Returns a partition's memory and bytes, by formula and by programs."""
  return [
    Table(
      f"training state of {label} by formula, GB per device",
      columns_of_keys(result["memory"], ".3f", unit=1e9), [result["memory"]],
    ),
    Table(
      f"levels of {label} ({result['partition']}): operand MB per device and "
      "step",
      ["axes", "kind", "dtype",
       *columns_of_keys(partition.BYTE_SOURCES, ",.3f", unit=1e6, default="?")],
      result["bytes"],
    ),
  ]


def _figure(results: Results) -> plot.Figure:
  """Plots memory, bytes by axis and phase, and bytes hidden under compute."""
  rows = []
  for label, result in results.items():
    overlap = result.get("overlap", ())
    hidden, total = (
      sum(row[key] for row in overlap) for key in ("hidden", "bytes")
    )
    rows.append({
      "program": label, "hidden": hidden, "exposed": total - hidden,
      "memory": {
        part: size for part, size in result["memory"].items()
        if part not in ("total", "peak", "capacity") and "host" not in part
      },
      "sent": {
        f"{','.join(row['axes'])} {row['phase']}":
        sum(r["bytes"] for r in row["compiled"]) for row in result["ledger"]
      },
    })
  for key in "memory", "sent":  # all programs have all parts
    parts = dict.fromkeys(part for row in rows for part in row[key])
    for row in rows:
      row[key] = dict.fromkeys(parts, 0) | row[key]
  sent = "operand GB per device and step"
  panels = [
    *plot.stacked_bar_panels(
      rows, "program", "memory/1e9", label="GB per device", title="memory"
    ),
    *plot.stacked_bar_panels(
      rows, "program", "sent/1e9", label=sent, title="collectives, compiled"
    ),
  ]
  if all("overlap" in r for r in results.values()):
    panels += plot.stacked_bar_panels(
      rows, "program", {"hidden": "hidden/1e9", "exposed": "exposed/1e9"},
      label=sent, title="under compute, by the roofline",
    )
  capacity = next(iter(results.values()))["memory"]["capacity"]
  if capacity:
    panels[0].marks.append(
      plot.Rule(capacity / 1e9, vertical=True, label="capacity")
    )
  return plot.figure(panels)
