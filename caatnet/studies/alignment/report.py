"""Report of the study of alignment."""

from collections.abc import Mapping
from typing import Any

from parallel.base import plot
from parallel.base.report import Column, Report, Table, yes_no


def report(result: Mapping[str, Any]) -> Report:
  """Returns requests per row with and without the shift, and their curve."""
  rows = [
    row | {"spared": 1 - row["lines_shifted"] / row["lines"]}
    for row in result["rows"]
  ]
  counted = Table(
    f"requests per row of float32 features, {result['num_ids']:,} random rows, "
    f"row 0 at byte {result['offset']}: counted, nothing was timed\n"
    f"lines of 128 bytes, sectors of 32; padded: rows that begin with a line\n"
    f"TPU: bytes that its DMA moves for each useful byte",
    [
      "features", Column("row_bytes", "bytes", ","),
      Column("lines", "lines", ".3f"),
      Column("lines_shifted", "lines, shifted", ".3f"),
      Column("spared", "spared", ".1%"), Column("sectors", "sectors", ".2f"),
      Column("sectors_shifted", "sectors, shifted", ".2f"),
      Column("lines_padded", "lines, padded"),
      Column("padding", "padding", ".1%"),
      Column("dgl_shifts", "DGL shifts", yes_no),
      Column("tpu_bytes_per_byte", "TPU", ".2f"),
    ],
    rows,
  )
  published = Table(
    "published: times of whole runs, which no row above corresponds to",
    ["what", Column("row_size", "row size"),
     Column("source", "where")],
    result["published"],
  )
  return Report(
    "Alignment of rows of features", [counted, published],
    lambda: _figure(result["curve"], rows),
  )


def _figure(
  curve: Mapping[str, Any], rows: list[Mapping[str, Any]]
) -> plot.Figure:
  """Returns the fraction of requests that the shift avoids, by row size."""
  lines = [
    plot.Line(
      curve["row_bytes"], [100 * share for share in curve[key]], label,
      width=0.9,
    )
    for key, label in (
      ("lines_spared", "lines of 128 bytes (requests)"),
      ("sectors_spared", "sectors of 32 bytes (what crosses the link)"),
    )
  ]
  shown = [r for r in rows if r["row_bytes"] <= curve["row_bytes"][-1]]
  lines.append(plot.Line(
    [r["row_bytes"] for r in shown], [100 * r["spared"] for r in shown],
    style="", marker="o", colour="black", size=4,
    texts=plot.Texts([str(r["features"]) for r in shown]),
  ))
  return plot.Figure([plot.Panel(
    lines, "Counted over all places where a row can begin; nothing was timed",
    "bytes of a row (points: float32 features)",
    "spared by the circular shift [%]", legend="best", grid=True,
  )], (9, 4.4))
