r"""Draws the pictures of documents, and results/outer_loops.png.

  python -m docs.draw                # into this repository
  python -m docs.draw some/folder    # into docs/ and results/ of that folder

Numbers come from results/*.csv. The entry of the log that names a file has its
command and commit. The metadata of a picture ("Description") hold its numbers
or texts, so that a test can compare the committed picture with a new one. Needs
the extra `plot`.
"""

from collections.abc import Callable, Sequence
import json
import pathlib
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import patches
from matplotlib import pyplot as plt
import numpy as np

from docs.points import (
  BLACK,
  BLUE,
  GREEN,
  LOOP_STYLES,
  ORANGE,
  ROOT,
  loop_name,
  loss_differences,
  read,
)

# Outlines instead of text and a seed for identifiers make an SVG equal on every
# machine. The background is white even on dark pages.
STYLE = {
  "font.family": "DejaVu Sans",
  "svg.fonttype": "path",
  "svg.hashsalt": "caatnet",
  "figure.facecolor": "white",
  "savefig.facecolor": "white",
}
GREY, LIGHT = "#6b6b6b", "#e9e9e9"


def mean_and_range(values: Sequence[float]) -> tuple[float, list[list[float]]]:
  """Returns the mean over seeds, and an error bar's length below and above."""
  mean = float(np.mean(values))
  return mean, [[mean - min(values)], [max(values) - mean]]


def set_ticks(axes: Any, places: Sequence[float]) -> None:
  """Sets ticks at the values ``places`` of a logarithmic x axis.

  They are labelled with plain numbers.
  """
  axes.set_xticks(places, [f"{place:,}" for place in places])
  axes.set_xticks([], minor=True)


def draw_loss_against_bytes(path: pathlib.Path) -> None:
  """Draws loss against bytes sent: a panel per mesh axis, tensor and worker."""
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(10, 4.6), sharey=True, layout="constrained",
    width_ratios=(1, 1.75),
  )
  data: dict[str, Any] = {"tensor axis": {}, "worker axis": {}}

  def mark(axes: Any, panel: str, x: float, losses: tuple[float, ...],
           label: str, colour: str, at: tuple[float, float, str],
           shape: str = "o") -> None:
    mean, bar = mean_and_range(losses)
    axes.errorbar(
      x, mean, yerr=bar, marker=shape, markersize=7, color=colour, capsize=3
    )
    axes.annotate(
      label, (x, mean), xytext=at[:2], textcoords="offset points", ha=at[2],
      va="center", fontsize=9, color=colour,
    )
    data[panel][label.replace("\n", " ")] = [
      round(x, 3), *(round(loss, 4) for loss in losses)
    ]

  points = read("partial_sync_480_steps")
  baseline = points[0]
  for point in points:
    p = float(point.get("sync.p"))
    mark(
      left, "tensor axis", point.kilobytes, loss_differences(point, baseline),
      f"p = {p:g}", BLUE, (0, 22, "center"),
    )
  points = {loop_name(point): point for point in read("outer_loops")}
  baseline = points["data parallelism"]
  for name, label, at in LABELS:
    point = points[name]
    # Local SGD has DiLoCo's bytes and about its loss; it is moved to the left.
    x = point.kilobytes * (0.82 if point.algorithm == "local_sgd" else 1)
    mark(
      right, "worker axis", x, loss_differences(point, baseline), label,
      LOOP_STYLES[point.algorithm][1], at,
    )
  long = read("outer_loops_long")
  mark(
    right, "worker axis", long[1].kilobytes, loss_differences(long[1], long[0]),
    "Streaming, 4 bit, 1 step late, 3,000 steps", ORANGE, (10, 0, "left"), "*",
  )
  left.set(
    title="tensor axis: partial synchronisation",
    ylabel="validation loss above that of full\nsynchronisation, nats per byte",
    xlim=(1.4e3, 3e4),
  )
  right.set(title="worker axis: outer loops", xlim=(0.6, 1.2e4))
  for axes, ticks in (
    (left, (2000, 5000, 10_000, 20_000)), (right, (1, 10, 100, 1000, 10_000))
  ):
    axes.set(xscale="log", xlabel="operand kB sent per device and step")
    set_ticks(axes, ticks)
    axes.axhline(0, color=GREY, linewidth=0.8, linestyle="--", zorder=0)
    axes.grid(color=LIGHT, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
  save(figure, path, data)


# Points of results/outer_loops.csv in README's picture: name, label, and the
# label's offset from the point (points to the right, upwards, alignment).
LABELS = (
  ("data parallelism", "data parallelism", (0, -16, "center")),
  ("local SGD, H = 30", "local SGD", (-2, -20, "right")),
  ("DiLoCo, H = 30", "DiLoCo", (0, 23, "center")),
  ("DiLoCo, H = 100", "DiLoCo, H = 100", (-2, 20, "center")),
  ("Streaming DiLoCo, H = 30", "Streaming DiLoCo", (6, -20, "left")),
  (
    "Streaming DiLoCo, H = 30, 1 step late, 4 bit",
    "Streaming, 4 bit,\n1 step late", (-10, 0, "right"),
  ),
  (
    "Streaming DiLoCo, H = 100, 1 step late, 4 bit",
    "Streaming, 4 bit, 1 step late,\nH = 100", (-2, 26, "center"),
  ),
  ("eager DiLoCo, H = 30", "eager DiLoCo", (10, 0, "left")),
  ("SparseLoCo, H = 30", "SparseLoCo", (10, 0, "left")),
  ("NoLoCo, H = 30", "NoLoCo", (10, 0, "left")),
)


def draw_outer_loops(path: pathlib.Path) -> None:
  """Draws all points of results/outer_loops.csv, with a legend."""
  figure, axes = plt.subplots(figsize=(11.5, 6), layout="constrained")
  order = list(LOOP_STYLES)
  points = sorted(
    read("outer_loops"), key=lambda point: order.index(point.algorithm)
  )
  num_at: dict[float, int] = {}
  of_algorithm: dict[str, int] = {}
  data = {}
  for point in points:
    # Points with equal bytes are moved apart, to the side.
    place = num_at.setdefault(point.kilobytes, 0)
    num_at[point.kilobytes] += 1
    number = of_algorithm.setdefault(point.algorithm, 0)
    of_algorithm[point.algorithm] += 1
    many = sum(p.kilobytes == point.kilobytes for p in points)
    mean, bar = mean_and_range(point.losses)
    axes.errorbar(
      point.kilobytes * 1.12 ** (place - (many - 1) / 2), mean, yerr=bar,
      marker="osD^v*"[number], markersize=7, capsize=3, linestyle="none",
      color=LOOP_STYLES[point.algorithm][1], label=loop_name(point),
    )
    data[loop_name(point)] = [
      round(point.kilobytes, 3), *(round(loss, 4) for loss in point.losses)
    ]
  axes.set(
    title="Outer loops after 600 steps of 1,024 bytes: mean of 3 seeds and "
    "their range",
    xlabel="operand kB sent per device and step over the worker axis (points "
    "that send as much are moved apart)",
    ylabel="validation loss, nats per byte",
    xscale="log",
  )
  set_ticks(axes, (1, 10, 100, 1000))
  axes.grid(color=LIGHT)
  axes.set_axisbelow(True)
  axes.spines[["top", "right"]].set_visible(False)
  figure.legend(
    loc="outside right upper", fontsize=9, frameon=False,
    title="2 workers and inner AdamW, unless said", title_fontsize=9,
    alignment="left",
  )
  save(figure, path, data)


def canvas(width: float, height: float) -> tuple[Any, Any]:
  """Returns a figure for boxes; a unit is a hundredth of its width."""
  figure, axes = plt.subplots(figsize=(width, height))
  axes.set(xlim=(0, 100), ylim=(0, 100 * height / width), aspect="equal")
  axes.axis("off")
  figure.subplots_adjust(0, 0, 1, 1)
  return figure, axes


def box(axes: Any, x: float, y: float, width: float, height: float, text: str,
        fill: str = "white", edge: str = BLACK, size: float = 10,
        **style: Any) -> None:
  """Draws a rectangle from its lower left corner, with text in the middle."""
  axes.add_patch(
    patches.FancyBboxPatch(
      (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.6",
      facecolor=fill, edgecolor=edge, linewidth=1.2,
    )
  )
  axes.text(
    x + width / 2, y + height / 2, text, ha="center", va="center",
    fontsize=size, color=BLACK, **style,
  )


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float],
          colour: str = BLACK) -> None:
  """Draws an arrow from one point to another."""
  axes.annotate(
    "", end, start,
    arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6,
                "shrinkA": 0, "shrinkB": 0},
  )


def draw_stream(path: pathlib.Path) -> None:
  """Draws the residual stream of a rank through one block."""
  figure, axes = canvas(10, 4.8)
  text = axes.text
  text(1, 44.8, "One block on tensor rank m", fontsize=12,
       fontweight="bold", color=BLACK)
  # The stream: private channels over shared ones.
  for y, height, fill, label in (
    (38, 4.6, "#fde3d0", "private channels  x$_m$[…, k:]   a rank's own"),
    (33, 4.6, "#cfe5f3", "shared channels  x[…, :k]   equal on all ranks"),
  ):
    axes.add_patch(
      patches.Rectangle((3, y), 91, height, facecolor=fill, edgecolor="none")
    )
    text(4, y + height / 2, label, fontsize=9.5, va="center", color=BLACK)
  arrow(axes, (94, 37.8), (98.5, 37.8))
  for start, name, inner, w_in, w_out in (
    (6, "attention", "attend", "norm_1, w_qkv", "w_out"),
    (53, "MLP", "swiglu", "norm_2, w_gate_up", "w_down"),
  ):
    box(axes, start, 18.5, 13.5, 7.5,
        f"column_parallel\nRMSNorm, columns\n{w_in}", "#e6f4ee", GREEN, 8.5)
    box(axes, start + 15.5, 18.5, 8.5, 7.5, f"{name}\n{inner}", "white", GREY,
        8.5)
    box(axes, start + 26, 18.5, 13.5, 7.5,
        f"row_parallel\nrows of {w_out},\nthen F", "#fdeee4", ORANGE, 8.5)
    arrow(axes, (start + 6.75, 33), (start + 6.75, 26), GREEN)
    arrow(axes, (start + 13.5, 22.2), (start + 15.5, 22.2))
    arrow(axes, (start + 24, 22.2), (start + 26, 22.2))
    arrow(axes, (start + 32.75, 26), (start + 32.75, 33), ORANGE)
    axes.add_patch(
      patches.Circle((start + 32.75, 37.8), 1.9, facecolor="white",
                     edgecolor=ORANGE, linewidth=1.6)
    )
    text(start + 32.75, 37.7, "+", ha="center", va="center", fontsize=15,
         color=ORANGE)
    axes.plot([start + 32.75, start + 32.75], [33, 35.9], color=ORANGE,
              linewidth=1.6)
    text(start + 19.75, 28.6, "rank-local: no collectives", ha="center",
         fontsize=8, color=GREY, style="italic")
  text(3, 12.6, "column_parallel adds the pending update of the stream, "
       "applies the norm, and multiplies by the rank's columns; it sends "
       "nothing.",
       fontsize=9, color=GREEN)
  text(3, 9.2, "row_parallel multiplies by the rank's rows and reduces by F, "
       "the only communication of a block; the backward reduces by its "
       "transpose.",
       fontsize=9, color=ORANGE)
  text(3, 3.6, r"$F(y)_m = [\;\Sigma_j\; y_j[\dots,:k]\;,\;\; s\; y_m[\dots,"
       r"k:]\;]\qquad k=\mathrm{int}(p\,H)\qquad p=1$: ordinary tensor "
       "parallelism", fontsize=12, color=BLACK)
  save(figure, path, [text.get_text() for text in axes.texts])


def draw_lanes(path: pathlib.Path) -> None:
  """Draws eight logical ranks on eight, four and one devices."""
  figure, axes = canvas(10, 4.3)
  axes.text(1, 40, "tensor = 8 logical ranks: three meshes, the same numbers",
            fontsize=12, fontweight="bold", color=BLACK)
  colours = ("#cfe5f3", "#fde3d0", "#dcefe3", "#f6e3ee")
  for y, devices in ((28, 8), (17, 4), (6, 1)):
    lanes = 8 // devices
    gap = 0.8
    width = (76 - gap * (devices - 1)) / devices
    for device in range(devices):
      x = 22 + device * (width + gap)
      box(axes, x, y - 1.2, width, 7.8, "", "white", GREY)
      for lane in range(lanes):
        rank = device * lanes + lane
        cell = (width - 1.2) / lanes
        box(axes, x + 0.6 + lane * cell + 0.3, y, cell - 0.6, 4.2, f"{rank}",
            colours[rank % 4], BLACK, 10)
      axes.text(x + width / 2, y + 5.3, f"device {device}", ha="center",
                va="center", fontsize=8, color=GREY)
    axes.text(1, y + 3.6, f"{lanes} lane{'s' * (lanes > 1)} x {devices} "
              f"device{'s' * (devices > 1)}", fontsize=10.5, color=BLACK)
    axes.text(1, y + 0.6, f"--mesh=tensor:{devices}", fontsize=9, color=GREY,
              family="DejaVu Sans Mono")
  axes.text(1, 1.2, "rank = device x lanes + lane.  A collective reduces the "
            "lanes (an array dim of a device) first, the mesh axis second.",
            fontsize=9.5, color=BLACK)
  save(figure, path, [text.get_text() for text in axes.texts])


def save(figure: Any, path: pathlib.Path, data: Any) -> None:
  """Writes a figure, with its data as metadata, and closes it."""
  path.parent.mkdir(parents=True, exist_ok=True)
  metadata = {"Description": json.dumps(data)}
  if path.suffix == ".svg":
    metadata |= {"Date": None}
  figure.savefig(path, dpi=150, metadata=metadata)
  plt.close(figure)


# Path of each picture in a folder -> function that draws it.
PICTURES: dict[str, Callable[[pathlib.Path], None]] = {
  "docs/loss_against_bytes.svg": draw_loss_against_bytes,
  "docs/stream.svg": draw_stream,
  "docs/lanes.svg": draw_lanes,
  "results/outer_loops.png": draw_outer_loops,
}


def main(folder: pathlib.Path = ROOT) -> None:
  """Draws all pictures into a folder."""
  with plt.rc_context(STYLE):
    for name, draw in PICTURES.items():
      draw(folder / name)


if __name__ == "__main__":
  main(*map(pathlib.Path, sys.argv[1:]))
