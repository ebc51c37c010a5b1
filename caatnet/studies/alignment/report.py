"""Report of the study of alignment."""

from collections.abc import Mapping
from typing import Any

from parallel.base import plot
from parallel.base.report import Report, Table


def report(result: Mapping[str, Any]) -> Report:
  """Returns tables and a figure of requests that a circular shift avoids."""
  rows = [
    row | {"spared": 1 - row["lines_shifted"] / row["lines"]}
    for row in result["rows"]
  ]
  return Report("Alignment of rows of features", [
    Table(
      f"requests per row of float32 features, {result['num_ids']:,} random "
      f"rows, row 0 at byte {result['offset']}: counted, nothing was timed\n"
      "lines of 128 bytes, sectors of 32; padded: rows that begin with a line\n"
      "TPU: bytes that its DMA moves for each useful byte",
      "features | row_bytes:,=bytes | lines:.3f | lines_shifted:.3f | "
      "spared:.1% | sectors:.2f | sectors_shifted:.2f | lines_padded | "
      "padding:.1% | dgl_shifts | tpu_bytes_per_byte:.2f=TPU",
      rows,
    ),
    Table(
      "published: times of whole runs, which no row above corresponds to",
      "what | row_size | source", result["published"],
    ),
  ], lambda: _figure(result["curve"], rows))


def _figure(
  curve: Mapping[str, Any], rows: list[Mapping[str, Any]]
) -> plot.Figure:
  """Plots the fraction of requests that a circular shift avoids.

  `curve` has it by row size, `rows` at the studied numbers of features.
  """
  points = [dict(zip(curve, x, strict=True))
            for x in zip(*curve.values(), strict=True)]
  (panel,) = plot.lines(
    points, "row_bytes=bytes of a row (points: float32 features)",
    "lines_spared/0.01=lines of 128 bytes (requests)",
    "sectors_spared/0.01=sectors of 32 bytes (what crosses the link)",
    label="spared by the circular shift [%]", marker="",
    title="Counted over all places where a row can begin; nothing was timed",
  )
  shown = [r for r in rows if r["row_bytes"] <= curve["row_bytes"][-1]]
  panel.marks.append(plot.Line(
    [r["row_bytes"] for r in shown], [100 * r["spared"] for r in shown],
    style="", marker="o", colour="black", size=4,
    texts=plot.Texts([str(r["features"]) for r in shown]),
  ))
  return plot.Figure([panel], (9, 4.4))
