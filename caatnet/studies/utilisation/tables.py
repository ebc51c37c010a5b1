"""Prints tables of the study of compute utilisation over slow links."""

from collections.abc import Mapping
from typing import Any

from caatnet.show import tables
from caatnet.studies.utilisation import published


def show(result: Mapping[str, Any]) -> None:
  """Prints the paper's table beside ours, other models, the recommendation.

  Args:
    result: What `caatnet.studies.utilisation.study.run` returned.
  """
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
  tables.table(
    "Gbit/s that reach a compute utilisation, the paper's / ours; "
    f"{factor}\n{table['exact']} of {table['num_cells']} cells are equal, "
    f"{table['within_one_notch']} within one of the 50 grid points\n"
    f"({result['source']})",
    ["model, method", *(f"{t:.0%}" for t in published.TARGETS)],
    [[", ".join(key), *row] for key, row in rows.items()],
  )
  _show_models(result)
  _show_recommendation(result["recommendation"])


def _show_models(result: Mapping[str, Any]) -> None:
  lines = []
  for model in result["models"]:
    rows: dict[str, list[str]] = {}
    for cell in model["cells"]:
      least = cell["gbit_s"]
      rows.setdefault(cell["method"], []).append(
        "> 1000" if least is None else f"{least:.1f}"
      )
    lines += [[f"{model['name']}, {name}", *row] for name, row in rows.items()]
  sizes = "\n".join(
    f"{m['name']}: {m['parameters'] / 1e9:g}e9 parameters, {m['num_layers']} "
    f"layers, {m['step_seconds']:g} s a step, volume factor "
    f"{m['volume_factor']:g}"
    for m in result["models"]
  )
  tables.table(
    "Gbit/s that reach a compute utilisation (predicted, not measured)\n"
    f"{sizes}\n({result['models_source']})",
    ["model, method", *(f"{t:.0%}" for t in published.TARGETS)],
    lines,
  )


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
  tables.table(
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
