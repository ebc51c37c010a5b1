"""Programs that were compiled for the planner's memory model, and its fit.

Files of results hold the programs; `log/2026-11-28-planner-memory-v5p.md` names
the commit that compiled them. A test fits them again, as a change of the
formulas has to.
"""

from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

import numpy as np

from caatnet.show import results
from parallel.plans.planner import memory
from parallel.plans.planner.space import Configuration
from parallel.plans.workload import TrainingStep, Transformer

_CHIPS = 8
# Half of the programs are this near to the capacity, by the formulas.
_NEAR = 0.15
# Programs of more than this multiple of a device's memory are neither fitted
# nor judged: no plan takes them, and their errors would widen the bound.
_MOST = 2.0
# Candidates for the sizes of a model, see
# `parallel.plans.workload.Transformer`.
_SIZES = (
  "num_layers", "width", "num_heads", "num_kv_heads", "head_width", "ffn_width",
  "vocab_size",
)


def draw(
  rng: np.random.Generator, near: bool, capacity: float
) -> tuple[TrainingStep, Configuration]:
  """Draws a training step and a configuration.

  Args:
    rng: Random generator.
    near: Whether the formulas are within 15% of the capacity.
    capacity: Bytes of a device.
  """
  while True:
    stages = int(rng.choice([1, 1, 2, 4]))
    tensor = int(rng.choice([n for n in (1, 2, 4, 8) if n * stages <= _CHIPS]))
    data = _CHIPS // stages // tensor
    width = int(rng.choice([1024, 2048, 3072, 4096, 6144, 8192]))
    heads = width // 128  # heads of width 128
    model = Transformer(
      int(rng.choice([32000, 65536, 128256])), width,
      stages * int(rng.integers(2, 21)), heads, int(rng.choice([heads, 8])),
      256 * round(width * float(rng.choice([8 / 3, 3.5, 4])) / 256),
    )
    seq_len = int(rng.choice([1024, 2048, 4096, 8192]))
    microbatches = stages * int(rng.choice([1, 2, 4]))
    configuration = Configuration(
      stages, data, tensor, microbatches,
      scheme=str(rng.choice(["ddp", "zero1", "zero2", "zero3"]))
      if data > 1 else "ddp",
      remat=str(rng.choice(["none", "full", "reduced"])),
    )
    batch = data * microbatches * int(rng.choice([1, 2, 4, 8]))
    step = TrainingStep(model, batch, seq_len)
    found = memory.terms(configuration, step)
    share = memory.UNFITTED.estimate(found) / capacity  # by the formulas
    if abs(share - 1) < _NEAR if near else 0.05 < share < 1.3:
      return step, configuration


def overrides(step: TrainingStep, configuration: Configuration) -> str:
  """Returns the overrides of `configs/caatnet/7b.py` for this program."""
  keys = {
    f"model.{key}": getattr(step.model, key)
    for key in _SIZES
  } | {"data.seq_len": step.seq_len, "data.batch_size": step.batch_size}
  text = " ".join(f"{key}={value}" for key, value in keys.items())
  return f"{text} {configuration.overrides()}"


def kept(path: pathlib.Path) -> dict[int, dict[str, Any]]:
  """Returns a file's programs by number, without failed ones (retried)."""
  rows = [row for row in results.rows(path) if "error" not in row]
  try:
    return {row["number"]: row for row in rows}
  except (KeyError, TypeError) as error:
    raise ValueError(f"{path} has a row without a number") from error


def kept_keys(
  step: TrainingStep, configuration: Configuration
) -> dict[str, Any]:
  """Returns the part of a program that a row stores for `formulas`."""
  model = {
    key: getattr(step.model, key) for key in (*_SIZES, "dtype")
  } | {"seq_len": step.seq_len, "backward_bytes": step.backward_bytes}
  return {
    "model": model, "configuration": dataclasses.asdict(configuration),
    "batch": step.batch_size,
  }


def formulas(row: dict[str, Any]) -> dict[str, float]:
  """Returns the values of the formulas for a row."""
  sizes = dict(row["model"])
  example = {key: sizes.pop(key) for key in ("seq_len", "backward_bytes")}
  step = TrainingStep(Transformer(**sizes), row["batch"], **example)
  return memory.terms(Configuration(**row["configuration"]), step)


def fits(
  rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]] = ()
) -> memory.PlatformFits:
  """Fits programs.

  Steps without stages are fitted together with pipelines that save only inputs,
  of which there are more.

  Args:
    rows: Programs.
    others: Programs whose pipelines join the fit of pipelines.
  """
  def of(programs, test):
    return memory.fit_factors([
      (formulas(row), row["total"]) for row in programs
      if test(row["configuration"])
    ])

  return memory.PlatformFits(
    of(rows, lambda c: c.get("keep") != "residuals"),
    of([*rows, *others], lambda c: c["stages"] > 1),
  )


def judge(
  rows: list[dict[str, Any]], capacity: float,
  others: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
  """Fits one half of the programs, and returns the errors of both halves.

  Programs of more than twice the capacity are left out.

  Args:
    rows: Compiled programs.
    capacity: Bytes of a device.
    others: Programs whose pipelines join the fit of pipelines, without being
      judged.

  Returns:
    The fits, and errors; empty if there are too few programs.
  """
  rows, others = (
    [row for row in part if row["total"] <= _MOST * capacity]
    for part in (rows, others or [])
  )
  # Both halves contain equally many programs near the capacity.
  halves = [[row for row in rows if row["number"] % 2 == i] for i in (0, 1)]
  if min(map(len, halves)) < 2:
    return {}
  fitted = fits(halves[0], others)
  found = {"fit": dataclasses.asdict(fitted)}
  for name, half in zip(("fitted", "held out"), halves, strict=True):
    totals = np.array([r["total"] for r in half])
    estimates, bounds = np.array([
      (fit.estimate(terms), fit.bound(terms)) for fit, terms in (
        (fitted.of(Configuration(**r["configuration"])), formulas(r))
        for r in half
      )
    ]).T
    errors, taken = abs(estimates / totals - 1), bounds <= capacity
    fit = [r["fits"] for r in half]
    pairs = list(zip(taken.tolist(), fit, strict=True))
    found[name] = {
      "programs": len(half), "fit": sum(fit), "taken": int(taken.sum()),
      "median": float(np.median(errors)),
      "p95": float(np.percentile(errors, 95)), "worst": float(errors.max()),
      # wrong: accepted by the bound, but too large; lost: rejected, but fits.
      "wrong": pairs.count((True, False)), "lost": pairs.count((False, True)),
      # The upper bound as a multiple of the compiled size.
      "bound_median": float(np.median(bounds / totals)),
      "bound_most": float((bounds / totals).max()),
      "exceeded": int((bounds < totals).sum()),
    }
  return found
