"""Draws the study of partitions: memory, step time, model size."""

from collections.abc import Mapping
import pathlib
from typing import Any

from caatnet.show import pictures

_MARKS = "osD^v<>pPX"


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws step time against memory, and against the size of the model.

  There is a column of panels with reuse in the node and one without. Each panel
  has the named schemes and the fronts.

  Args:
    result: What `caatnet.studies.partitions.study.run` returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  ways = ("reuse", "no reuse")
  figure, axes = plt.subplots(
    2, len(ways), figsize=(13, 9), sharex="row", sharey="row",
    layout="constrained",
  )
  for column, way in enumerate(ways):
    _memory(axes[0][column], result, way)
    _size(axes[1][column], result, way)
  axes[0][0].set(ylabel="predicted seconds of a step")
  axes[1][0].set(ylabel="predicted time of a step / its compute alone")
  for panel in axes[:, 0]:
    low, high = panel.get_ylim()
    panel.set_ylim(0.8 * low, 1.4 * high)  # room for labels
    for axis in (panel.yaxis, panel.xaxis):
      axis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}")
  handles, labels = axes[0][0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside right upper", fontsize=9)
  a = result["assumptions"]
  figure.suptitle(
    f"{a['devices']} devices of {a['cluster']}, {a['accumulation']} "
    f"microbatches, compute at {a['utilisation']:.0%} of peak"
  )
  pictures.save(figure, path)


def _memory(panel: Any, result: Mapping[str, Any], way: str) -> None:
  """Draws seconds of a step against the memory of a device."""
  a = result["assumptions"]
  panel.scatter(
    [row["memory"]["total"] / 1e9 for row in result["candidates"]],
    [row["seconds"][way] for row in result["candidates"]],
    s=6, color="lightgray", label="all partitions",
  )
  for codecs, style in (("coded or not", "-"), ("not coded", "--")):
    front = result["fronts"][f"{way}, {codecs}"]
    panel.plot(
      [row["memory"]["total"] / 1e9 for row in front],
      [row["seconds"][way] for row in front],
      style, color="black", lw=1, drawstyle="steps-pre", marker=".",
      label=f"front, {codecs}",
    )
  for mark, (name, row) in zip(
    _MARKS, result["schemes"].items(), strict=False
  ):
    panel.plot(
      row["memory"]["total"] / 1e9, row["seconds"][way], mark, label=name,
      alpha=0.8,
    )
  panel.axvline(
    a["memory_bytes"] / 1e9, color="gray", ls=":", label="memory of a device"
  )
  panel.set(
    xscale="log", yscale="log", xlabel="GB of training state on a device",
    title=f"{a['parameters'] / 1e9:g}e9 parameters, {way} in the node",
  )
  panel.grid(alpha=0.3)


def _size(panel: Any, result: Mapping[str, Any], way: str) -> None:
  """Draws the slowdown of a step against the largest model that fits.

  All times are proportional to the size of the model, so a partition is a
  horizontal line up to its largest model.
  """
  a = result["assumptions"]

  def slowdown(row: Mapping[str, Any]) -> float:
    return row["seconds"][way] / a["compute_seconds"]

  for mark, (name, row) in zip(
    _MARKS, result["schemes"].items(), strict=False
  ):
    panel.plot(
      row["largest_model"] / 1e9, slowdown(row), mark, label=name, alpha=0.8
    )
  for codecs, style in (("coded or not", "-"), ("not coded", "--")):
    front = result["fronts"][f"{way}, {codecs}"]
    ends = [row["largest_model"] / 1e9 for row in front]
    panel.hlines(
      list(map(slowdown, front)), [1.0, *ends[:-1]], ends, color="black",
      linestyle=style,
    )
    above = codecs == "not coded"
    for end, row in zip(ends, front, strict=True):
      panel.annotate(
        "/".join(map(str, row["degrees"])), (end, slowdown(row)),
        xytext=(-8, 3) if above else (0, -3), textcoords="offset points",
        rotation=60, fontsize=7, ha="left" if above else "right",
        va="bottom" if above else "top",
      )
  panel.set(
    xscale="log", yscale="log", xlabel="1e9 parameters of the largest model in "
    f"{a['memory_bytes'] / 1e9:g} GB; labels: shards of w / g / o",
    title=f"fastest for each model size, {way} in the node",
  )
  panel.grid(alpha=0.3)
