"""Terminal tables of evaluations and sweeps."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

import numpy as np

from caatnet.data.protocol import Data, Dataset
from caatnet.show import render
from caatnet.show.render import print_table
from caatnet.train.evaluate import Evaluation
from parallel.base.report import Column, Table


def measure_rows(
  measures: Mapping[str, Mapping[str, float]], labels: Mapping[str, str]
) -> list[list[str]]:
  """Returns a row per model: its name, and measures in the labels' order."""
  return [
    [name, *(_number(values.get(key, math.nan)) for key in labels)]
    for name, values in measures.items()
  ]


def _number(value: float) -> str:
  """Formats a number; "-" for NaN."""
  return "-" if math.isnan(value) else f"{value:.4f}"


def evaluation_dict(
  evaluation: Evaluation, data: Data, dataset: Dataset, step: int
) -> dict[str, Any]:
  """Returns an evaluation as plain data.

  Args:
    evaluation: The evaluation.
    data: Data section of the config.
    dataset: Dataset of the evaluation.
    step: Step of the checkpoint.
  """
  measures = dataset.measures(evaluation.means)
  return {
    "step": step,
    **{f"validation_{key}": value for key, value in measures.items()},
    "num_examples": evaluation.num_examples,
    f"num_{data.unit}": evaluation.num_examples * data.units_per_example,
    "data_sha256": dataset.sha256,
    "loss_per_place": evaluation.per_place["loss"].tolist(),
  }


def print_evaluation(
  evaluation: Evaluation,
  data: Data,
  dataset: Dataset,
  step: int,
) -> None:
  """Prints the measures of a checkpoint and of simple baseline models.

  Args:
    evaluation: The evaluation of the checkpoint.
    data: Data section of the config.
    dataset: Dataset of the evaluation.
    step: Step of the checkpoint.
  """
  measures = {
    f"checkpoint of step {step}": dataset.measures(evaluation.means)
  } | dict(dataset.baselines())
  count = evaluation.num_examples * data.units_per_example
  print_table(
    f"validation, {count:,} {data.unit}",
    ["model", *data.labels.values()],
    measure_rows(measures, data.labels),
  )
  positions = evaluation.per_place["loss"]
  counts = evaluation.counts["loss"]
  if not positions.ndim:  # one loss per example, as for images
    return
  # Ranges of positions: 1 to 8, 9 to 16, 17 to 32, and so on.
  rows, start = [], 0
  while start < len(positions):
    stop = min(max(2 * start, 8), len(positions))
    here, number = slice(start, stop), counts[start:stop].sum()
    total = np.nansum(positions[here] * counts[here])
    mean = f"{total / number:.4f}" if number else "-"
    rows.append([f"{start + 1} to {stop}", mean])
    start = stop
  print_table(
    "loss by position", [f"{data.unit} of context", data.labels["loss"]], rows
  )


def communication_text(rows: Sequence[Mapping[str, Any]], phase: str) -> str:
  """Formats the bytes of a phase over the tensor axis: "4.46 MB float32".

  Args:
    rows: Rows as in `caatnet.train.traffic`.
    phase: "forward", "backward" or "update".

  Example:
    >>> communication_text([{"axis": "tensor", "phase": "forward",
    ...   "bytes": 4_460_000, "dtype": "float32"}], "forward")
    '4.46 MB float32'
  """
  chosen = [r for r in rows if r["axis"] == "tensor" and r["phase"] == phase]
  parts = [f"{r['bytes'] / 1e6:.2f} MB {r['dtype']}" for r in chosen]
  return ", ".join(parts) or "0"


def sweep_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Returns each point's loss, and its difference from the first point's loss.

  A point is a set of config overrides. Loss and difference are means and ranges
  over seeds. Runs with the same seed have the same initial parameters and data
  order, so differences are computed per seed, which cancels this randomness.

  Args:
    rows: Rows of the sweep's CSV.
  """
  points: dict[str, dict[int, Mapping[str, Any]]] = {}
  for row in rows:
    points.setdefault(row["point"], {})[row["seed"]] = row
  first = next(iter(points.values()))

  def mean_and_range(
    prefix: str, values: Sequence[float], sign: str
  ) -> dict[str, str]:
    if not values:
      return {}
    mean, least, most = sum(values) / len(values), min(values), max(values)
    return {
      f"{prefix}mean": f"{mean:{sign}.4f}",
      f"{prefix}range": f"{least:{sign}.3f} to {most:{sign}.3f}",
    }

  lines = []
  for point, runs in points.items():
    losses = {seed: run["validation_loss"] for seed, run in runs.items()}
    # Uses only seeds with which the first point was run, too.
    differences = [
      loss - first[seed]["validation_loss"]
      for seed, loss in losses.items() if seed in first
    ]
    lines.append(
      next(iter(runs.values()))
      | {"point": point or "base", "seeds": len(losses)}
      | mean_and_range("", list(losses.values()), "")
      | mean_and_range("diff_", differences, "+")
    )
  return Table(
    "validation loss in nats, and its difference from the first point "
    "seed by seed; operand bytes per device and step: MB of the tensor axis, "
    "kB of the worker axis",
    [
      "point", "seeds", "mean", "range",
      Column("diff_mean", "diff", default=""),
      Column("diff_range", "range of diff", default=""),
      Column("forward_bytes", "forward MB", ".2f", unit=1e6),
      Column("backward_bytes", "backward MB", ".2f", unit=1e6),
      Column("worker_bytes", "worker kB", ",.1f", unit=1e3, default="0.0"),
    ],
    lines,
  )


def print_tasks(found: Mapping[str, Any]) -> None:
  """Prints the results of an evaluation on tasks.

  Args:
    found: Result of `caatnet.interop.harness.evaluate`, and the checkpoint's
      "step".
  """

  def number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)

  render.show(Table(
    f"lm-evaluation-harness, checkpoint of step {found['step']}, context of "
    f"{found['context']:,} tokens",
    [
      "task", "version", Column("num_documents", "documents", ","),
      Column("num_shots", "shots"), "filter", "metric",
      Column("value", "value", number),
      Column("stderr", "stderr", number, default="-"),
    ],
    found["metrics"],
  ))
  if found["num_cut"]:
    print(
      "requests whose context was truncated at its beginning: "
      f"{found['num_cut']:,}"
    )
