"""Prints tables of compiled steps, one or several side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from caatnet.show.tables import table
from caatnet.studies.compilation import partition


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
  """Prints tables of programs; of two, with the ratio of the second.

  Args:
    results: For each label what `caatnet.studies.compilation.study.analyse` or
      `caatnet.studies.compilation.decoding.analyse` returned.
  """
  first, *others = results.values()
  _print_memory(results)
  for label, result in results.items():
    _print_ledger(label, result)
    if "partition" in result:
      _print_partition(label, result["partition"])
    if "inference" in result:
      _print_inference(label, result["inference"])
  if others:
    _print_bytes_ratio(results)
  if "transfers" not in first:
    return
  for label, result in results.items():
    _print_transfers(label, result)
  _print_overlap(results)
  if all("roofline" in result for result in results.values()):
    _print_roofline(results)
  else:
    print(
      "No bounds: the program gathers pages of the cache into a dense copy, "
      "which a kernel for attention over pages does not."
    )
  table(
    "constants",
    ["", "value", "source"],
    [[name, *values] for name, values in first["constants"].items()],
  )


# Of titles of tables in which transfers are missing.
_LEFT_OUT = ", without transfers of unknown count"


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
    lines = []
    for r in side:
      name = f"{r['kind']} {r['dtype']}"
      if r["count"]:
        lines.append(f"{r['count']} x {name}  {r['bytes'] / 1e6:,.3f} MB")
      if r["unknown_bytes"]:
        lines.append(f"? x {name}  {r['unknown_bytes'] / 1e6:,.3f} MB each")
    return "\n".join(lines)

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
  unknown = False
  for index, result in enumerate(results.values()):
    for row in result["ledger"]:
      for side in ("lowered", "compiled"):
        key = (",".join(row["axes"]), row["phase"], side)
        cells = totals.setdefault(key, [0.0] * len(results))
        cells[index] += sum(r["bytes"] for r in row[side])
        unknown |= any(r["unknown_bytes"] for r in row[side])
  table(
    "operand MB per device and step" + _LEFT_OUT * unknown,
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
      mb = row["unknown_bytes"] / 1e6
      rows.append(
        [
          label,
          ",".join(row["axes"]) or "(no axes)",
          f"{size / 1e6:,.2f}",
          *(f"{row[k] / size:.1%}" if size else "-"
            for k in ("asynchronous", "hidden")),
          f"{(size - row['hidden']) / 1e6:,.2f}",
          f"{row['unknown']}, {mb:,.2f} MB each time" if mb else "",
        ]
      )
  unknown = any(row[-1] for row in rows)
  columns = ["", "axes", "MB", "asynchronous", "hidden by the roofline",
             "exposed MB", "of unknown count, besides"]
  table(
    "overlap: operand bytes per device and step",
    columns if unknown else columns[:-1],
    rows if unknown else [row[:-1] for row in rows],
  )


def _print_roofline(results: Mapping[str, Mapping[str, Any]]) -> None:
  names = {
    "model_flops": ("model FLOPs, 10^12", 1e-12),
    "product_flops": ("FLOPs of XLA's products, 10^12", 1e-12),
    "memory_bytes": ("main-memory GB moved", 1e-9),
    "model_flops_seconds": ("ms of model FLOPs at peak", 1e3),
    "memory_seconds": ("ms of main memory at full rate", 1e3),
    "formula_seconds": ("ms of compute, roofline by closed formula", 1e3),
    "waiting_seconds": ("ms of waiting for longer actions of stages", 1e3),
    "compute_seconds": ("ms of compute, roofline by instruction", 1e3),
    "wire_seconds": ("ms on the links, one axis after another", 1e3),
    "busiest_axes_seconds": ("ms on the links of the busiest axes", 1e3),
    "exposed_seconds": ("ms on the links, not hidden", 1e3),
    "step_if_all_overlaps": ("step, ms: all overlapped, axes too", 1e3),
    "step_as_scheduled": ("step, ms: overlapped as scheduled", 1e3),
    "step_if_none_overlaps": ("step, ms: nothing overlapped", 1e3),
  }
  rows = []
  for key, (name, unit) in names.items():
    if not all(key in r["roofline"] for r in results.values()):
      continue  # there is a formula of inference only
    values = [r["roofline"][key] * unit for r in results.values()]
    rows.append([name, *(f"{v:,.3f}" for v in values), *_ratio(values)])
  rows += _latency_rows(results)
  unknown = any(r["roofline"]["unknown_transfers"] for r in results.values())
  table(
    "bounds per device and step, not a measurement: peak rates, ring "
    "algorithms, no latency unless said" + _LEFT_OUT * unknown,
    ["", *results, *_ratio_column(results)],
    rows,
  )


def _latency_rows(
  results: Mapping[str, Mapping[str, Any]],
) -> list[list[str]]:
  """Returns rows of bounds in which collectives have latency, if there are."""
  if not all("with_latency" in r for r in results.values()):
    why = {r["without_latency"] for r in results.values()
           if "without_latency" in r}
    return [[f"with latency: {w}"] + ["-"] * len(results) for w in why]
  names = {
    "wire_seconds": "ms of collectives, with latency",
    "step_as_scheduled": "step, ms: as scheduled, with latency",
    "step_if_none_overlaps": "step, ms: nothing overlapped, with latency",
  }
  rows = []
  for key, name in names.items():
    ends = [
      [bounds[key] * 1e3 for bounds in r["with_latency"]]
      for r in results.values()
    ]
    ratios = []
    if len(ends) == 2:
      ratios = [_span([b / a for a, b in zip(*ends, strict=True)], ".3f")]
    rows.append([name, *(_span(end, ",.3f") for end in ends), *ratios])
  return rows


def _span(ends: Sequence[float], form: str) -> str:
  """Formats the least and the greatest value, once if they look the same."""
  return " to ".join(dict.fromkeys(f"{end:{form}}" for end in ends))


def _print_inference(label: str, result: Mapping[str, Any]) -> None:
  """Prints what a step of inference reads, and its bytes by formula."""
  attention = (
    "pages are gathered into a dense copy" if result["gathers_pages"]
    else f"pages are read by {', '.join(result['kernels'])}"
  )
  table(
    f"{result['phase']} of {label}: {result['sequences']} x {result['tokens']} "
    f"tokens of each replica, in contexts of {result['context']}; {attention}\n"
    "operand MB over the tensor axis, per device and step",
    ["kind", "dtype", *partition.SIDES],
    [
      [r["kind"], r["dtype"],
       *(f"{r[side] / 1e6:,.6f}" for side in partition.SIDES)]
      for r in result["formula"]
    ],
  )


def _print_partition(label: str, result: Mapping[str, Any]) -> None:
  """Prints a partition's memory and bytes, by formula and by programs."""
  table(
    f"training state of {label} by formula, GB per device",
    list(result["memory"]),
    [[f"{size / 1e9:.3f}" for size in result["memory"].values()]],
  )
  table(
    f"levels of {label} ({result['partition']}): operand MB per device and "
    "step",
    ["axes", "kind", "dtype", *partition.SIDES],
    [
      [r["axes"], r["kind"], r["dtype"],
       *("?" if r[side] is None else f"{r[side] / 1e6:,.3f}"
         for side in partition.SIDES)]
      for r in result["bytes"]
    ],
  )
