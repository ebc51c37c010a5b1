"""The study of compute utilisation over slow links: result, tables, picture.

Table 4 of Streaming DiLoCo (arXiv 2501.18512) beside ours, and the setting
that a model needs on a link. The model: `parallel.network.utilisation`.
"""

from collections.abc import Mapping
import dataclasses
import difflib
import pathlib
from typing import Any

from caatnet import plots, report
from parallel.hardware import links
from parallel.network import recommendation, utilisation, utilisation_table

LINKS = {
  name.lower(): link
  for name, link in vars(links).items()
  if isinstance(link, links.Link)
}


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes the study.

  Args:
    config: As configs/diloco/utilisation.py has it, as nested dicts.

  Returns:
    Plain data: "table", "curves" (utilisation on the grid) and
    "recommendation". Bandwidths in Gbit/s.

  Raises:
    ValueError: An unknown link, or a number out of its range.
  """
  recommended = _recommend(config["recommend"])  # may refuse the config
  fitted = config["fitted_factor"]
  factor = utilisation_table.FITTED_VOLUME_FACTOR if fitted else 1.0
  cells = utilisation_table.compare(factor)
  distances = [abs(c.notches) for c in cells if c.notches is not None]
  grid = utilisation.bandwidth_grid()
  return {
    "study": "utilisation",
    "source": utilisation_table.PUBLISHED_SOURCE,
    "volume_factor": factor,
    "fitted_on_this_table": fitted,
    "table": {
      "cells": [dataclasses.asdict(cell) for cell in cells],
      "num_cells": len(cells),
      "exact": distances.count(0),
      "within_one_notch": sum(d <= 1 for d in distances),
    },
    "curves": {
      "gbit_s": (grid / 1e9).tolist(),
      "utilisation": {
        model.name: {
          name: utilisation.simulate(
            model, method, grid, volume_factor=factor
          ).utilisation.tolist()
          for name, method in utilisation.paper_methods(
            model.num_layers
          ).items()
        }
        for model in utilisation_table.PAPER_MODELS
      },
    },
    "recommendation": recommended,
  }


def find_link(name: str) -> links.Link:
  """A link of `parallel.hardware.links`, by its constant in lower case."""
  if name not in LINKS:
    near = difflib.get_close_matches(name, LINKS, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(
      f"config.recommend.link={name!r} must be one of {', '.join(LINKS)}{hint}"
    )
  return LINKS[name]


def _recommend(config: Mapping[str, Any]) -> dict[str, Any]:
  """What `recommendation` finds, beside the paper's methods on that link."""
  link = find_link(config["link"])
  bandwidth = 8 * link.bandwidth  # bytes to bits
  factors = {
    "volume_factor": config["volume_factor"],
    "latency_s": link.latency or 0.0,
  }
  choices = {k: config[k] for k in ("sync_every", "overlap_steps", "bits")}
  target = config["target"]
  try:
    model = utilisation.Model(
      config["parameters"], config["num_layers"], config["step_seconds"]
    )
    found = recommendation.recommend(
      model, bandwidth, target, **choices, **factors
    )
  except ValueError as error:  # its names are the config's keys
    raise ValueError(f"config.recommend.{error}") from error
  rows = {}
  for name, method in utilisation.paper_methods(model.num_layers).items():
    timeline = utilisation.simulate(model, method, bandwidth, **factors)
    rows[name] = _setting(method, timeline.utilisation[0])
  return {
    "model": {
      k: config[k] for k in ("parameters", "num_layers", "step_seconds")
    },
    "link": {
      "name": link.name,
      "gbit_s": bandwidth / 1e9,
      "latency_s": link.latency,
      "source": link.source,
    },
    "volume_factor": factors["volume_factor"],
    "target": target,
    "candidates": {key: list(values) for key, values in choices.items()},
    "paper_methods": rows,
    "setting": found and _setting(found.method, found.utilisation),
    "fewest_steps": {
      str(bits): recommendation.fewest_steps(
        model, bandwidth, target, bits, factors["volume_factor"]
      )
      for bits in choices["bits"]
    },
  }


def _setting(method: utilisation.Method, value: float) -> dict[str, Any]:
  return {**dataclasses.asdict(method), "utilisation": float(value)}


def show(result: Mapping[str, Any]) -> None:
  """Prints the paper's table beside ours, and the recommendation."""
  table = result["table"]
  factor = (
    f"factor {result['volume_factor']:.4f} FITTED on this table"
    if result["fitted_on_this_table"]
    else "nothing fitted"
  )
  rows: dict[tuple[str, str], list[str]] = {}
  for cell in table["cells"]:
    ours = "> 1000" if cell["ours"] is None else f"{cell['ours']:.1f}"
    row = rows.setdefault((cell["model"], cell["method"]), [])
    row.append(f"{cell['published']:.1f} / {ours}")
  report.table(
    "Gbit/s that reach a compute utilisation, the paper's / ours; "
    f"{factor}\n{table['exact']} of {table['num_cells']} cells are equal, "
    f"{table['within_one_notch']} within one of the 50 grid points\n"
    f"({result['source']})",
    ["model, method", *(f"{t:.0%}" for t in utilisation_table.TARGETS)],
    [[", ".join(key), *row] for key, row in rows.items()],
  )
  _show_recommendation(result["recommendation"])


def _show_recommendation(result: Mapping[str, Any]) -> None:
  model, link, setting = (result[k] for k in ("model", "link", "setting"))
  rows = dict(result["paper_methods"])
  if setting:
    rows["recommended"] = setting
  latency = (
    "latency not published, taken as 0"
    if link["latency_s"] is None
    else f"latency {link['latency_s'] * 1e3:.1f} ms"
  )
  report.table(
    f"{model['parameters'] / 1e9:g}e9 parameters, {model['num_layers']} "
    f"layers, {model['step_seconds']:g} s a step\nover {link['name']}: "
    f"{link['gbit_s']:g} Gbit/s, {latency}\nrecommended: least staleness "
    f"with a utilisation of {result['target']:.1%}\n"
    "(predicted, not measured)",
    ["method", "H", "fragments", "overlap", "bits", "utilisation"],
    [
      [
        name,
        *(f"{row[k]:g}" for k in ("sync_every", "num_fragments",
                                  "overlap_steps", "bits")),
        f"{row['utilisation']:.1%}",
      ]
      for name, row in rows.items()
    ],
  )
  if not setting:
    tried = "; ".join(f"{k}: {v}" for k, v in result["candidates"].items())
    fewest = ", ".join(
      f"{steps} at {bits} bits" for bits, steps in
      result["fewest_steps"].items()
    )
    print(
      f"No setting reaches {result['target']:.1%} ({tried}). For its link "
      f"alone H must be at least {fewest}."
    )


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws utilisation against bandwidth, the paper's cells as points."""
  plt = plots.pyplot()
  curves, cells = result["curves"], result["table"]["cells"]
  figure, axes = plt.subplots(
    1, len(curves["utilisation"]), figsize=(13, 4.2), sharey=True,
    layout="constrained",
  )
  for panel, (model, lines) in zip(
    axes, curves["utilisation"].items(), strict=True
  ):
    for name, values in lines.items():
      (line,) = panel.plot(curves["gbit_s"], values, label=name)
      own = [c for c in cells if (c["model"], c["method"]) == (model, name)]
      panel.plot(
        [c["published"] for c in own], [c["target"] for c in own],
        linestyle="", marker="o", markersize=4, color=line.get_color(),
      )
    panel.plot([], [], "o", color="gray", markersize=4, label="paper, table 4")
    panel.set(xscale="log", xlabel="bandwidth [Gbit/s]", title=model)
    panel.grid(alpha=0.3)
  axes[0].set(ylabel="compute utilisation")
  axes[-1].legend(fontsize=8, loc="lower right")
  fitted = result["fitted_on_this_table"]
  figure.suptitle(
    f"volume factor {result['volume_factor']:.4f}"
    + (", fitted on the points shown" if fitted else ", nothing fitted")
  )
  plots.save(figure, path)
