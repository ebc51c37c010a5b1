"""Draws runs and sweeps; needs the ``plot`` extra (matplotlib)."""

from collections.abc import Callable, Mapping, Sequence
import pathlib
import re
from typing import Any

import numpy as np

from caatnet.train import files
from caatnet.train.records import read_metrics

_NATS = "nats per byte"


def pyplot() -> Any:
  """Imports matplotlib.pyplot for use without a display.

  Raises:
    ValueError: matplotlib is missing; the message says how to install it.
  """
  try:
    import matplotlib
  except ImportError as error:
    raise ValueError(
      'plots need matplotlib: pip install "caatnet[plot]"'
    ) from error
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  return plt


def plot_losses(
  runs: Mapping[str, pathlib.Path],
  path: pathlib.Path,
  reference: Mapping[str, float] | None = None,
  label: str = _NATS,
) -> None:
  """Draws training and validation loss of several runs in one picture.

  Args:
    runs: The folder of each run, by its label.
    path: The PNG to write.
    reference: Losses by their labels, drawn as horizontal lines.
    label: What losses are called, as in `caatnet.data.protocol.Data.labels`.
  """
  plt = pyplot()
  figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
  for name, workdir in runs.items():
    records = read_metrics(workdir)
    training = [(r["step"], r["loss"]) for r in records if "loss" in r]
    validation = [
      (r["step"], r["validation_loss"])
      for r in records
      if "validation_loss" in r
    ]
    steps, losses = zip(*training, strict=True)
    (line,) = axes.plot(steps, losses, alpha=0.35, linewidth=1)
    axes.plot(
      *zip(*validation, strict=True),
      marker="o",
      color=line.get_color(),
      label=f"{name} (validation)",
    )
  for name, loss in (reference or {}).items():
    axes.axhline(loss, color="gray", linestyle="--", linewidth=1)
    axes.annotate(
      name,
      (1, loss),
      xycoords=("axes fraction", "data"),
      xytext=(-4, 3),
      textcoords="offset points",
      ha="right",
      color="gray",
    )
  axes.set(xlabel="step", ylabel=f"loss [{label}]")
  axes.legend()
  save(figure, path)


def plot_positions(
  losses: np.ndarray, path: pathlib.Path, label: str = _NATS
) -> None:
  """Draws the loss at each position of the context.

  Args:
    losses: Losses, float ``[T]``.
    path: The PNG to write.
    label: What losses are called, as in `caatnet.data.protocol.Data.labels`.
  """
  plt = pyplot()
  figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
  axes.plot(np.arange(1, len(losses) + 1), losses, linewidth=1)
  axes.set(
    xlabel="tokens of context", ylabel=f"loss [{label}]", xscale="log"
  )
  save(figure, path)


def plot_sweep(
  rows: Sequence[Mapping[str, Any]], x: str, xlabel: str, path: pathlib.Path
) -> None:
  """Draws the validation loss against a column of a sweep.

  A mark is the mean over seeds, its bar their range.

  Args:
    rows: The rows of the sweep's CSV.
    x: The column on the horizontal axis.
    xlabel: The label of that axis, with its unit.
    path: The PNG to write.
  """
  plt = pyplot()
  figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
  for line in sorted({_line(row) for row in rows}):
    groups: dict[tuple[float, float], list[float]] = {}
    for row in rows:
      # p = 1 has no private channels, so it belongs to the line of each scale.
      same = _line(row) == line
      if same or (row["p"] == 1.0 and row["tensor"] == line[0]):
        key = (row["p"], row[x])
        groups.setdefault(key, []).append(row["validation_loss"])
    points = sorted((key[1], values) for key, values in groups.items())
    means = np.array([np.mean(values) for _, values in points])
    low = means - [min(values) for _, values in points]
    high = np.array([max(values) for _, values in points]) - means
    axes.errorbar(
      [position for position, _ in points],
      means,
      yerr=[low, high],
      marker="o",
      capsize=3,
      label=f"r={line[0]}, private scale: {line[1]}",
    )
  axes.set(xlabel=xlabel, ylabel=_loss_label(rows))
  axes.legend()
  save(figure, path)


def plot_study(
  rows: Sequence[Mapping[str, Any]], workdir: pathlib.Path
) -> None:
  """Draws the validation loss of a sweep against each quantity that varied.

  Args:
    rows: The rows of the sweep's CSV.
    workdir: The folder of the PNGs.
  """
  if any(row["worker"] > 1 for row in rows):
    plot_points(
      rows,
      lambda row: row["worker_bytes"] * row["tensor"] * row["worker"]
      / row["units_per_step"],
      f"operand bytes per worker and {rows[0]['unit'][:-1]} of its own "
      "(worker axis)",
      workdir / "loss_against_worker_bytes.png",
    )
  elif any(row["data_bytes"] for row in rows):
    plot_points(
      rows, lambda row: row["data_bytes"],
      "operand bytes per device and step (data axes)",
      workdir / "loss_against_data_bytes.png",
    )
  for x, label in (("p", "p"), ("backward_bytes", "backward bytes per step")):
    if len({row[x] for row in rows}) > 1:
      plot_sweep(rows, x, label, workdir / f"loss_against_{x}.png")


def plot_points(
  rows: Sequence[Mapping[str, Any]],
  sent: Callable[[Mapping[str, Any]], float],
  xlabel: str,
  path: pathlib.Path,
) -> None:
  """Draws the validation loss against what is sent, a mark per point.

  Args:
    rows: The rows of the sweep's CSV; bars are the range over seeds.
    sent: Returns how much the run of a row sends.
    xlabel: The label of that axis, with its unit.
    path: The PNG to write.
  """
  plt = pyplot()
  points: dict[str, list[Mapping[str, Any]]] = {}
  for row in rows:
    points.setdefault(row["point"], []).append(row)
  height = 4.6 + 0.17 * len(points)
  figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
  marks = "osD^v<>pPX*hd8"
  for index, (point, runs) in enumerate(points.items()):
    losses = [run["validation_loss"] for run in runs]
    some, mean = runs[0], float(np.mean(losses))
    axes.errorbar(
      sent(some),
      mean,
      yerr=[[mean - min(losses)], [max(losses) - mean]],
      marker=marks[index % len(marks)],
      linestyle="none",
      capsize=3,
      label=re.sub(r"(outer|parallel|zero)\.(algorithm=|scheme=)?", "", point),
    )
  axes.set(xlabel=xlabel, ylabel=_loss_label(rows))
  amounts = list(map(sent, rows))
  if max(amounts) > 10 * min(amounts):
    axes.set_xscale("symlog", linthresh=1.0)
  figure.legend(loc="outside lower left", fontsize="x-small")
  save(figure, path)


def _line(row: Mapping[str, Any]) -> tuple[int, str]:
  """Returns the line that a row belongs to: tensor ranks and private scale."""
  return (row["tensor"], row["private_scale"])


def _loss_label(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the label of an axis of losses; old sweeps have only bytes."""
  return f"validation loss [{rows[0].get('loss_label', _NATS)}]"


def save(figure: Any, path: pathlib.Path) -> None:
  """Writes a figure in place of the old one, and closes it."""
  with files.whole(path) as temporary:
    figure.savefig(temporary, dpi=150)
  pyplot().close(figure)
