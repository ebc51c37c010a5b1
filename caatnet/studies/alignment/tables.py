"""Prints the table of the study of alignment."""

from collections.abc import Mapping
from typing import Any

from caatnet.show import tables


def show(result: Mapping[str, Any]) -> None:
  """Prints requests per row, with the shift and without.

  Args:
    result: What `caatnet.studies.alignment.study.run` returned.
  """
  tables.table(
    f"requests per row of float32 features, {result['num_ids']:,} random rows, "
    f"row 0 at byte {result['offset']}: counted, nothing was timed\n"
    f"lines of 128 bytes, sectors of 32; padded: rows that begin with a line\n"
    f"TPU: bytes that its DMA moves for each useful byte",
    ["features", "bytes", "lines", "shifted", "spared", "sectors", "shifted",
     "lines, padded", "padding", "DGL shifts", "TPU"],
    [
      [
        str(row["features"]), f"{row['row_bytes']:,}",
        f"{row['lines']:.3f}", f"{row['lines_shifted']:.3f}",
        f"{1 - row['lines_shifted'] / row['lines']:.1%}",
        f"{row['sectors']:.2f}", f"{row['sectors_shifted']:.2f}",
        str(row["lines_padded"]), f"{row['padding']:.1%}",
        "yes" if row["dgl_shifts"] else "no",
        f"{row['tpu_bytes_per_byte']:.2f}",
      ]
      for row in result["rows"]
    ],
  )
  tables.table(
    "published: times of whole runs, so they stand beside no row above",
    ["what", "row size", "where"],
    [[row[key] for key in ("what", "row_size", "source")]
     for row in result["published"]],
  )
