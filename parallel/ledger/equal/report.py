"""Report of a comparison of layouts: verdicts, growth, bytes, locations."""

from collections.abc import Sequence
from typing import Any

from parallel.base.report import Report, Table
from parallel.ledger.equal.check import LayoutReport, as_data, describe
from parallel.ledger.equal.programs import format_layout


def report(program: str, found: Sequence[LayoutReport]) -> Report:
  """Returns the report of a program's layouts."""
  rows = [{
    "layout": format_layout(x.layout), "verdict": x.verdict,
    "relative": max((y.relative for y in x.results), default=None),
    "own": max((y.own for y in x.results), default=None),
    "wide": max((y.wide for y in x.results), default=None),
    "sent": ", ".join(f"{k} {n:,}" for k, n in x.sent_bytes.items()) or "-",
    "memory_bytes": x.bytes_needed,
    "growth": ", ".join(f"{y:.1e}" for y in x.growth) or "-",
  } for x in found]
  return Report(f"{program} on one device and on {len(found)} layouts", [
    "\n".join(map(describe, found)),
    Table(
      "first step; differences from one device, relative to the result, and\n"
      "in multiples of what rounding changes, in the program's dtypes and in "
      "float64",
      "layout | verdict | relative:.1e=largest difference | "
      "own:.1e=of rounding | wide:.1e=of float64 rounding | "
      "memory_bytes=memory of all devices",
      rows,
    ),
    Table(
      "operand bytes per device and step, and largest relative difference "
      "after each step",
      "layout | sent=bytes by axes | growth=difference after steps 1, 2, ...",
      rows,
    ),
  ])


def data(program: str, found: Sequence[LayoutReport]) -> dict[str, Any]:
  """Returns the reports as plain data."""
  return {"program": program, "layouts": [as_data(x) for x in found]}


def failed(found: Sequence[LayoutReport]) -> bool:
  """Returns whether a layout has a bug."""
  return any(x.verdict == "bug" for x in found)
