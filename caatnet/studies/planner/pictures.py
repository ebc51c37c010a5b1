"""Draws a plan: the matrix of links in its order, and where time and memory go.

Needs the ``plot`` extra.
"""

from collections.abc import Mapping
import pathlib
from typing import Any

import numpy as np

from caatnet.show import pictures


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws links before and after, and bars of the best few.

  Args:
    result: What `caatnet.studies.planner.study.run` returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  best, cluster = result["best"], result["cluster"]
  figure, axes = plt.subplots(2, 2, figsize=(12, 9), layout="constrained")
  _matrices(cluster, best[0], axes[0])
  for key, unit, text, panel in (
    ("latency", 1.0, "seconds of a step", axes[1, 0]),
    ("memory", 1e9, "GB of a device", axes[1, 1]),
  ):
    left = np.zeros(len(best))
    for cause in best[0][key]:
      width = np.array([row[key][cause] for row in best]) / unit
      if width.any():
        panel.barh(range(len(best)), width, left=left, label=cause)
        left = left + width
    panel.set(yticks=range(len(best)), xlabel=text)
    panel.set_yticklabels(
      [row["configuration"].replace(", ", "\n", 1) for row in best]
      if key == "latency" else [""] * len(best), fontsize="x-small",
    )
    panel.invert_yaxis()
    panel.legend(
      fontsize="x-small", ncols=4, frameon=False, loc="upper center",
      bbox_to_anchor=(0.5, -0.12),
    )
    panel.spines[["top", "right"]].set_visible(False)
  axes[1, 1].axvline(cluster["memory_bytes"] / 1e9, color="k", linestyle="--")
  figure.suptitle(f"{cluster['name']}: predicted, not measured")
  pictures.save(figure, path)


def _matrices(
  cluster: Mapping[str, Any], best: Mapping[str, Any], panels: Any
) -> None:
  """Draws rates between devices in their own order, and in the plan's."""
  if cluster["bandwidth"] is None:
    for panel in panels:
      panel.text(0.5, 0.5, f"{cluster['devices']} devices: too many to draw",
                 ha="center")
      panel.set_axis_off()
    return
  rates = np.array(cluster["bandwidth"], float) / 1e9
  orders = ("own order", np.arange(len(rates))), (
    f"in order of\n{best['configuration'].split(',')[0]}",
    np.array(best["order"]),
  )
  for (text, order), panel in zip(orders, panels, strict=True):
    image = panel.imshow(
      np.log10(rates[np.ix_(order, order)]), cmap="viridis",
      interpolation="nearest",
    )
    panel.set(title=f"log10 GB/s, {text}", xlabel="to", ylabel="from")
    panel.figure.colorbar(image, ax=panel)
