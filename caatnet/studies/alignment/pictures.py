"""Draws the study of alignment; needs the ``plot`` extra."""

from collections.abc import Mapping
import pathlib
from typing import Any

from caatnet.show import pictures


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws the share of requests that the shift spares, by row size.

  Args:
    result: What `caatnet.studies.alignment.study.run` returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
  curve = result["curve"]
  for key, label in (
    ("lines_spared", "lines of 128 bytes (requests)"),
    ("sectors_spared", "sectors of 32 bytes (what crosses the link)"),
  ):
    axes.plot(
      curve["row_bytes"], [100 * share for share in curve[key]], label=label,
      linewidth=0.9,
    )
  for row in result["rows"]:
    if row["row_bytes"] <= curve["row_bytes"][-1]:
      axes.plot(
        row["row_bytes"], 100 * (1 - row["lines_shifted"] / row["lines"]),
        "o", color="black", markersize=4,
      )
      axes.annotate(
        f"{row['features']}",
        (row["row_bytes"], 100 * (1 - row["lines_shifted"] / row["lines"])),
        xytext=(3, 3), textcoords="offset points", fontsize=8,
      )
  axes.set(
    xlabel="bytes of a row (points: float32 features)",
    ylabel="spared by the circular shift [%]",
    title="Counted over all places where a row can begin; nothing was timed",
  )
  axes.legend()
  axes.grid(alpha=0.3)
  pictures.save(figure, path)
