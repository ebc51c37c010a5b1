"""Draws compiled training steps; needs the ``plot`` extra."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import numpy as np

from caatnet.show import pictures


def plot(
  results: Mapping[str, Mapping[str, Any]], path: pathlib.Path
) -> None:
  """Draws memory, bytes by axis and phase, and what hides under compute.

  Args:
    results: For each label what `caatnet.studies.compilation.study.analyse`
      returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  scheduled = all("overlap" in r for r in results.values())
  panels = 3 if scheduled else 2
  figure, axes = plt.subplots(
    1, panels, figsize=(4.4 * panels, 4), layout="constrained"
  )
  labels = list(results)
  places = range(len(labels))

  first = next(iter(results.values()))["memory"]
  parts = [k for k in first if k not in ("total", "capacity")]
  _stack(
    axes[0],
    places,
    {p: [r["memory"][p] / 1e9 for r in results.values()] for p in parts},
  )
  if first["capacity"]:
    axes[0].axhline(
      first["capacity"] / 1e9, color="black", ls="--", lw=1, label="capacity"
    )
  axes[0].set(ylabel="GB per device", title="memory")

  totals: dict[str, list[float]] = {}
  for index, result in enumerate(results.values()):
    for row in result["ledger"]:
      name = f"{','.join(row['axes'])} {row['phase']}"
      cells = totals.setdefault(name, [0.0] * len(labels))
      cells[index] += sum(r["bytes"] for r in row["compiled"]) / 1e9
  _stack(axes[1], places, totals)
  axes[1].set(
    ylabel="operand GB per device and step", title="collectives, compiled"
  )

  if scheduled:
    sums = {"hidden": [], "exposed": []}
    for result in results.values():
      hidden = sum(row["hidden"] for row in result["overlap"]) / 1e9
      total = sum(row["bytes"] for row in result["overlap"]) / 1e9
      sums["hidden"].append(hidden)
      sums["exposed"].append(total - hidden)
    _stack(axes[2], places, sums)
    axes[2].set(
      ylabel="operand GB per device and step",
      title="under compute, by the roofline",
    )
  for panel in axes:
    panel.set_xticks(places, labels)
    panel.legend(fontsize=8)
  pictures.save(figure, path)


def _stack(
  panel: Any, places: Sequence[int], parts: Mapping[str, Sequence[float]]
) -> None:
  """Draws stacked bars."""
  base = np.zeros(len(places))
  for name, heights in parts.items():
    panel.bar(places, heights, 0.6, bottom=base, label=name)
    base += np.array(heights)
