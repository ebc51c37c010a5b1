"""Sweeps: one run per combination of overrides and seed, and one CSV file.

Each run has a separate folder. A finished run is not repeated, and a killed one
resumes from its checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
import csv
import hashlib
import io
import json
import sys
from typing import Any

from etils import epath

from caatnet.train import loop, records
from caatnet.train.experiment import Experiment
from parallel.base import files


def expand(grid: str) -> list[str]:
  """Returns all combinations of a grid's values.

  Args:
    grid: ``key=value,value`` parts, separated by spaces.

  Raises:
    ValueError: If a part has no "=" or no value.

  Example:
    >>> expand("a=1,2 b=3,4")
    ['a=1 b=3', 'a=1 b=4', 'a=2 b=3', 'a=2 b=4']
  """
  points = [""]
  for part in grid.split():
    key, _, values = part.partition("=")
    if not values:
      raise ValueError(
        f"--grid: {part!r} is not key=value,value; "
        'example: --grid="sync.p=1.0,0.5 parallel.tensor=2,4"'
      )
    points = [
      f"{point} {key}={value}".strip()
      for point in points
      for value in values.split(",")
    ]
  return points


def run_point(
  experiment: Experiment,
  point: str,
  workdir: epath.Path,
  count_bytes: Callable[[], Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
  """Trains one run of a sweep, or reads its result if it is finished.

  Args:
    experiment: The run.
    point: The overrides of the run, which name its folder and its CSV row.
    workdir: The sweep's folder.
    count_bytes: Returns rows like `TrainResult.communication` for a mesh where
      every worker and rank has its own device. The run itself may use fewer
      devices; ranks on the same device do not communicate.

  Returns:
    A CSV row: config, results and communication of the run by column name.

  Raises:
    SystemExit: A signal has stopped the run, which has been saved.
  """
  seed = experiment.seed
  # Names are cut to 80 characters, so a digest makes them unique.
  digest = hashlib.sha256(point.encode()).hexdigest()[:6]
  name = point.replace(" ", "_").replace("/", "-") or "base"
  folder = workdir / "runs" / f"{name[:80]}_{digest}_seed{seed}"
  stored = folder / "result.json"
  if stored.exists():
    records.write_config(folder, experiment.config)  # raises for another config
    return files.read_json(stored)
  result = loop.train(experiment, folder, label=f"{point} seed={seed}")
  if not result.finished:
    sys.exit(result.exit_code)
  config, data = experiment.config, experiment.data
  rows = count_bytes()

  def sent(axis: str, phase: str) -> float:
    return sum(
      r["bytes"] for r in rows if (r["axis"], r["phase"]) == (axis, phase)
    )

  levels = {axis.name for axis in experiment.program.layout.data}
  over_levels = sum(
    r["bytes"] for r in rows if set(r["axis"].split("+")) <= levels
  )
  facts = records.read_environment(folder)
  sync = config.get("sync", {})  # absent for models without sync policies
  row = {
    "point": point,
    "seed": seed,
    "p": sync.get("p", 1.0),
    "tensor": config["parallel"]["tensor"],
    "private_scale": sync.get("private_scale", "none"),
    "algorithm": config["outer"]["algorithm"],
    "worker": config["parallel"]["worker"],
    **{f"validation_{key}": value for key, value in result.measures.items()},
    "loss_label": data.labels["loss"],
    "forward_bytes": sent("tensor", "forward"),
    "backward_bytes": sent("tensor", "backward"),
    "worker_bytes": sent("worker", "update"),
    "data_bytes": over_levels,
    "unit": data.unit,
    "units_per_step": experiment.units_per_step,
    "units_per_second": result.units_per_second,
    "num_steps": result.step,
    "parameters": facts["parameters"],
    "data_sha256": facts["data"]["sha256"],
    "workdir": str(folder),
  }
  records.write_json(stored, row)
  return row


def write_csv(rows: Sequence[Mapping[str, Any]], path: epath.Path) -> None:
  """Replaces the CSV file by all rows so far, which have equal keys."""
  text = io.StringIO(newline="")
  writer = csv.DictWriter(text, list(rows[0]))
  writer.writeheader()
  writer.writerows(rows)
  files.replace(path, text.getvalue())


def read_csv(path: epath.Path) -> list[dict[str, Any]]:
  """Returns the rows of a sweep's CSV; numbers are parsed.

  Raises:
    ValueError: The file is damaged; the message names it.
  """
  try:
    with open(path, newline="") as file:
      rows: list[dict[str, Any]] = list(csv.DictReader(file, strict=True))
  except (csv.Error, UnicodeDecodeError) as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  for number, row in enumerate(rows, 1):
    if None in row or None in row.values():
      raise ValueError(
        f"{path}: row {number} must have {len(rows[0])} fields, as the header "
        "has"
      )
    for key, value in row.items():
      try:
        row[key] = json.loads(value)
      except (ValueError, RecursionError):
        continue  # text
  return rows
