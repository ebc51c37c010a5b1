"""Tables for the terminal."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from caatnet.data.baselines import Baselines
from caatnet.evaluate import Evaluation


def table(
  title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
  """Prints a table; the first column left, the others right."""
  grid = Table(title=title, title_justify="left")
  for index, column in enumerate(columns):
    grid.add_column(column, justify="right" if index else "left")
  for row in rows:
    grid.add_row(*row)
  console = Console()
  if not console.is_terminal:  # a log file has no width to respect
    console = Console(width=130)
  console.print(grid)


def loss_rows(
  losses: Mapping[str, float], num_columns: int
) -> list[list[str]]:
  """Name, nats and bits per byte, padded to ``num_columns``."""
  rows = []
  for name, loss in losses.items():
    row = [name, f"{loss:.4f}", f"{loss / math.log(2):.4f}"]
    rows.append(row + [""] * (num_columns - len(row)))
  return rows


def baseline_losses(baselines: Baselines) -> dict[str, float]:
  """Names for tables -> nats per byte."""
  return {
    "unigram": baselines.unigram,
    "bigram": baselines.bigram,
    "xz (this text alone)": baselines.xz,
  }


def evaluation_dict(
  evaluation: Evaluation, step: int, sha256: str
) -> dict[str, Any]:
  """An evaluation as plain data."""
  return {
    "step": step,
    "validation_loss": evaluation.loss,
    "bits_per_byte": evaluation.bits_per_byte,
    "num_tokens": evaluation.num_tokens,
    "text_sha256": sha256,
    "loss_per_position": evaluation.loss_per_position.tolist(),
  }


def print_evaluation(
  evaluation: Evaluation, step: int, baselines: Baselines
) -> None:
  """The validation loss beside what simple models reach."""
  losses = {f"checkpoint of step {step}": evaluation.loss}
  losses |= baseline_losses(baselines)
  table(
    f"validation, {evaluation.num_tokens:,} bytes",
    ["model", "nats per byte", "bits per byte"],
    loss_rows(losses, 3),
  )
  positions = evaluation.loss_per_position
  rows, start = [], 0
  while start < len(positions):
    stop = min(max(2 * start, 8), len(positions))
    mean = float(positions[start:stop].mean())
    rows.append([f"{start + 1} to {stop}", f"{mean:.4f}"])
    start = stop
  table("loss by position", ["bytes of context", "nats per byte"], rows)


def communication_text(rows: Sequence[Mapping[str, Any]], phase: str) -> str:
  """Tensor-axis bytes of one phase, e.g. "4.46 MB float32"."""
  chosen = [r for r in rows if r["axis"] == "tensor" and r["phase"] == phase]
  parts = [f"{r['bytes'] / 1e6:.2f} MB {r['dtype']}" for r in chosen]
  return ", ".join(parts) or "0"


def print_sweep(rows: Sequence[Mapping[str, Any]]) -> None:
  """Mean and range over seeds, per point, and against the first point.

  A seed decides parameters and order of the data, so the difference is taken
  seed by seed: what all points share cancels.
  """
  points: dict[str, dict[int, Mapping[str, Any]]] = {}
  for row in rows:
    points.setdefault(row["point"], {})[row["seed"]] = row
  first = next(iter(points.values()))
  lines = []
  for point, runs in points.items():
    losses = [run["validation_loss"] for run in runs.values()]
    differences = [
      run["validation_loss"] - first[seed]["validation_loss"]
      for seed, run in runs.items()
      if seed in first
    ]
    some = next(iter(runs.values()))
    lines.append(
      [
        point or "base",
        str(len(losses)),
        f"{sum(losses) / len(losses):.4f}",
        f"{min(losses):.3f} to {max(losses):.3f}",
        f"{sum(differences) / len(differences):+.4f}" if differences else "",
        f"{min(differences):+.3f} to {max(differences):+.3f}"
        if differences
        else "",
        f"{some['forward_bytes'] / 1e6:.2f}",
        f"{some['backward_bytes'] / 1e6:.2f}",
        f"{some.get('worker_bytes', 0.0) / 1e3:,.1f}",
      ]
    )
  table(
    "validation loss, nats per byte, and its difference from the first point "
    "seed by seed; operand bytes per device and step: MB of the tensor axis, "
    "kB of the worker axis",
    ["point", "seeds", "mean", "range", "diff", "range", "forward MB",
     "backward MB", "worker kB"],
    lines,
  )
