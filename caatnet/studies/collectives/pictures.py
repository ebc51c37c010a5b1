"""Draws the comparison of collective algorithms; needs the ``plot`` extra."""

from collections.abc import Mapping
import pathlib
from typing import Any

from caatnet.show import pictures


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws all-reduced bytes per second against size, a panel per topology.

  Args:
    result: What `caatnet.studies.collectives.study.run` returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  rows = result["rows"]
  nets = list(dict.fromkeys(r["topology"] for r in rows))
  columns = min(len(nets), 4)
  lines = -(-len(nets) // columns)
  figure, axes = plt.subplots(
    lines, columns, figsize=(3.6 * columns, 3 * lines + 0.6), squeeze=False,
    layout="constrained", sharex=True,
  )
  names = list(dict.fromkeys(r["algorithm"] for r in rows))
  for panel, net in zip(axes.flat, nets, strict=False):
    own = [r for r in rows if r["topology"] == net]
    for index, name in enumerate(names):
      mine = sorted(
        (r for r in own if r["algorithm"] == name),
        key=lambda r: r["size_bytes"],
      )
      panel.plot(
        [r["size_bytes"] / 2**10 for r in mine],
        [r["size_bytes"] / r["events_us"] / 1e3 for r in mine],
        # There are ten colours and eleven algorithms.
        marker="osD^v<>pPX*"[index % 11], markersize=4, color=f"C{index}",
        linestyle="-" if index < 10 else ":", label=name,
      )
    bound = sorted({(r["size_bytes"] / 2**10, r["size_bytes"] / r["bound_us"])
                    for r in own})
    panel.plot(
      [x for x, _ in bound], [y / 1e3 for _, y in bound], "k--", lw=1,
      label="bound of the ranks' links",
    )
    panel.set(title=net, xscale="log", yscale="log")
    panel.grid(alpha=0.3)
  for panel in axes.flat[len(nets):]:
    panel.set_visible(False)
  for panel in axes[-1]:
    panel.set(xlabel="KiB")
  for panel in axes[:, 0]:
    panel.set(ylabel="GB all-reduced per s")
  handles, labels = axes[0, 0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside right upper", fontsize="small")
  pictures.save(figure, path)
