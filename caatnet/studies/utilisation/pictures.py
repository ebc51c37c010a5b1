"""Draws the study of compute utilisation; needs the ``plot`` extra."""

from collections.abc import Mapping
import pathlib
from typing import Any

from caatnet.show import pictures


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws utilisation against bandwidth, with the paper's cells as points.

  Args:
    result: What `caatnet.studies.utilisation.study.run` returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  curves, cells = result["curves"], result["table"]["cells"]
  models = curves["utilisation"]
  figure, axes = plt.subplots(
    2, -(-len(models) // 2), figsize=(13, 7.6), sharex=True, sharey=True,
    layout="constrained",
  )
  for panel, (model, lines) in zip(axes.flat, models.items(), strict=True):
    for name, values in lines.items():
      (line,) = panel.plot(curves["gbit_s"], values, label=name)
      own = [c for c in cells if (c["model"], c["method"]) == (model, name)]
      panel.plot(
        [c["published"] for c in own], [c["target"] for c in own],
        linestyle="", marker="o", markersize=4, color=line.get_color(),
      )
    if own:
      panel.plot(
        [], [], "o", color="gray", markersize=4, label="paper, table 4"
      )
    panel.set(xscale="log", title=model)
    panel.grid(alpha=0.3)
  for panel in axes[-1]:
    panel.set(xlabel="bandwidth [Gbit/s]")
  for panel in axes[:, 0]:
    panel.set(ylabel="compute utilisation")
  axes[0, -1].legend(fontsize=8, loc="lower right")
  fitted = result["fitted_on_this_table"]
  figure.suptitle(
    f"1B to 100B: volume factor {result['volume_factor']:.4f}"
    + (", fitted on the points shown" if fitted else ", nothing fitted")
  )
  pictures.save(figure, path)
