"""Figures of runs and sweeps; `caatnet.show.drawing` writes them."""

from collections.abc import Callable, Mapping, Sequence
import itertools
import math
import pathlib
import re
from typing import Any

import numpy as np

from caatnet.show import drawing
from caatnet.train.records import read_metrics
from parallel.base import plot

_NATS = "nats per byte"


def plot_losses(
  runs: Mapping[str, pathlib.Path],
  path: pathlib.Path,
  reference: Mapping[str, float] | None = None,
  label: str = _NATS,
) -> plot.Figure:
  """Plots training and validation losses of several runs in one figure.

  If a run has no training loss or no validation loss, that line is omitted.

  Args:
    runs: Directory of each run, by its label.
    path: PNG to write.
    reference: Losses by their labels, drawn as horizontal lines.
    label: Unit of losses, as in `caatnet.data.protocol.Data.labels`.

  Returns:
    The figure.
  """
  marks: list[plot.Mark] = []
  # Both losses of a run have the same colour.
  for index, (name, workdir) in enumerate(runs.items()):
    records, colour = read_metrics(workdir), f"C{index}"
    training, validation = (
      [(r["step"], r[key]) for r in records if key in r]
      for key in ("loss", "validation_loss")
    )
    if training:
      marks.append(plot.Line(
        *zip(*training, strict=True), "" if validation else name, alpha=0.35,
        width=1, colour=colour,
      ))
    if validation:
      marks.append(plot.Line(
        *zip(*validation, strict=True), f"{name} (validation)", marker="o",
        colour=colour,
      ))
  marks += [
    plot.Rule(loss, colour="gray", text=name)
    for name, loss in (reference or {}).items()
  ]
  return _write_panel((7, 4.2), path, plot.Panel(
    marks, "", plot.Axis("step"), plot.Axis(f"loss [{label}]"),
    legend="best" if marks else "",
  ))


def plot_positions(
  losses: np.ndarray, path: pathlib.Path, label: str = _NATS
) -> plot.Figure:
  """Plots the loss at each position of the context.

  Args:
    losses: Loss at each of T positions, float ``[T]``.
    path: PNG to write.
    label: Unit of losses, as in `caatnet.data.protocol.Data.labels`.

  Returns:
    The figure.
  """
  return _write_panel((7, 4), path, plot.Panel(
    [plot.Line(range(1, len(losses) + 1), losses.tolist(), width=1)], "",
    plot.Axis("tokens of context", "log"), plot.Axis(f"loss [{label}]"),
  ))


def plot_sweep(
  rows: Sequence[Mapping[str, Any]], x: str, xlabel: str
) -> plot.Figure:
  """Plots the validation loss against a column of a sweep.

  A mark is the mean over seeds, an error bar the range over seeds.

  Args:
    rows: Rows of the sweep's CSV.
    x: Column on the horizontal axis.
    xlabel: Label of that axis, with its unit.
  """
  marks = []
  for line in sorted({_line_key(row) for row in rows}):
    groups: dict[tuple[float, float], list[float]] = {}
    for row in rows:
      # p is the synchronised fraction of channels. With p = 1 no channels are
      # private, so the row is a point of the lines of all private scales.
      same = _line_key(row) == line
      if same or (row["p"] == 1.0 and row["tensor"] == line[0]):
        key = (row["p"], row[x])
        groups.setdefault(key, []).append(row["validation_loss"])
    # (x, losses of all seeds), in ascending order of x.
    points = sorted((key[1], values) for key, values in groups.items())
    marks.append(_mean_line(
      points, label=f"r={line[0]}, private scale: {line[1]}", marker="o"
    ))
  return plot.Figure([plot.Panel(
    marks, "", plot.Axis(xlabel), plot.Axis(_loss_label(rows)), legend="best"
  )], (7, 4.4))


def plot_study(
  rows: Sequence[Mapping[str, Any]], workdir: pathlib.Path
) -> list[pathlib.Path]:
  """Plots the validation loss of a sweep against each quantity that varied.

  Args:
    rows: Rows of the sweep's CSV (`caatnet.train.sweep.read_csv`).
    workdir: Directory of the figures, each as PNG, SVG and PDF.

  Returns:
    The PNGs.
  """
  figures = {}
  if any(row["worker"] > 1 for row in rows):
    figures["worker_bytes"] = plot_points(
      rows,
      lambda row: row["worker_bytes"] * row["tensor"] * row["worker"]
      / row["units_per_step"],
      f"operand bytes per worker and {rows[0]['unit'][:-1]} of its own "
      "(worker axis)",
    )
  elif any(row["data_bytes"] for row in rows):
    figures["data_bytes"] = plot_points(
      rows, lambda row: row["data_bytes"],
      "operand bytes per device and step (data axes)",
    )
  for x, label in (
    ("p", "p, the synchronised share of the stream"),
    ("backward_bytes", "operand bytes of the backward pass, per device and "
     "step (tensor axis)"),
  ):
    if len({row[x] for row in rows}) > 1:
      figures[x] = plot_sweep(rows, x, label)
  paths = []
  for name, figure in figures.items():
    for suffix in (".svg", ".pdf", ".png"):
      path = workdir / f"loss_against_{name}{suffix}"
      drawing.write(figure, path)
    paths.append(path)
  return paths


def plot_points(
  rows: Sequence[Mapping[str, Any]],
  sent: Callable[[Mapping[str, Any]], float],
  xlabel: str,
) -> plot.Figure:
  """Plots the validation loss against sent bytes, one mark per point.

  A point is a set of config overrides. With several points, losses are relative
  to the first point's loss with the same seed (equal initial parameters, data).

  Args:
    rows: Rows of the sweep's CSV. A mark is the mean over seeds, an error bar
      the range over seeds. Seeds that the first point lacks are left out.
    sent: Returns the bytes that the run of a row sends.
    xlabel: Label of the horizontal axis, with its unit.
  """
  points: dict[str, dict[int, Mapping[str, Any]]] = {}
  for row in rows:
    points.setdefault(row["point"], {})[row["seed"]] = row
  first, *others = points
  base = {
    seed: row["validation_loss"] if others else 0.0
    for seed, row in points[first].items()
  }
  marks = [
    _mean_line(
      [(sent(next(iter(runs.values()))), [
        run["validation_loss"] - base[seed]
        for seed, run in runs.items() if seed in base
      ])],
      label=_shorten_overrides(point), marker=marker, style="",
    )
    for (point, runs), marker in zip(
      points.items(), itertools.cycle("osD^v<>pPX*hd8"), strict=False
    ) if base.keys() & runs.keys()
  ]
  label = _loss_label(rows)
  if others:
    label = label.replace(
      "loss [", f"loss above that of {_shorten_overrides(first)}\n["
    )
    marks.append(plot.Rule(0.0, colour="gray", style="--"))
  axis = _bytes_axis(xlabel, list(map(sent, rows)))
  panel = plot.Panel(marks, "", axis, plot.Axis(label))
  size = (8, 4.6 + 0.17 * len(points))
  return plot.Figure([panel], size, legend="outside lower left")


def _bytes_axis(label: str, amounts: Sequence[float]) -> plot.Axis:
  """Returns an axis of bytes, logarithmic if they differ by more than 10x."""
  low, high = min(amounts), max(amounts)
  if high <= 10 * low:
    return plot.Axis(label)
  if low == 0:
    return plot.Axis(label, "symlog")  # which also shows 0 bytes
  low, high = low / 1.5, high * 1.5
  powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
  places = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
  return plot.Axis(label, "log", (low, high), [
    (place, f"{place:,.10g}") for place in places if low <= place <= high
  ])


def _shorten_overrides(point: str) -> str:
  """Returns the config overrides of a point without the names of sections."""
  return re.sub(
    r"(outer|parallel|zero)\.(algorithm=|scheme=)?", "", point
  ) or "base"


def _mean_line(
  points: Sequence[tuple[float, Sequence[float]]], **options: Any
) -> plot.Line:
  """Returns a line through the mean values, with their ranges as error bars."""
  return plot.Line(
    [place for place, _ in points],
    [float(np.mean(values)) for _, values in points],
    errors=tuple([f(values) for _, values in points] for f in (min, max)),
    **options,
  )


def _line_key(row: Mapping[str, Any]) -> tuple[int, str]:
  """Returns (tensor ranks, private scale), equal for all rows of a line."""
  return (row["tensor"], row["private_scale"])


def _loss_label(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the label of an axis of losses, by default in nats per byte."""
  return f"validation loss [{rows[0].get('loss_label', _NATS)}]"


def _write_panel(
  size: tuple[float, float], path: pathlib.Path, panel: plot.Panel
) -> plot.Figure:
  """Writes a figure with one panel, and returns it."""
  figure = plot.Figure([panel], size)
  drawing.write(figure, path)
  return figure
