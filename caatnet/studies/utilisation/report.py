"""Report of the study of compute utilisation over slow links."""

from collections.abc import Mapping
from typing import Any

from parallel.base import labels, plot
from parallel.base.report import Report, Table, pivot


def report(result: Mapping[str, Any]) -> Report:
  """Returns table 4, other models, the recommendation, and a figure."""
  table, models = result["table"], result["models"]
  factor = (
    f"factor {result['volume_factor']:.4f} FITTED on this table"
    if result["fitted_on_this_table"]
    else "nothing fitted"
  )
  return Report("Compute utilisation over slow links", [
    _bandwidths(
      "Gbit/s that reach a compute utilisation, the paper's / ours; "
      f"{factor}\n{table['exact']} of {table['num_cells']} cells are equal, "
      f"{table['within_one_notch']} within one of the 50 grid points\n"
      f"({result['source']})",
      [c | {"text": f"{c['published']:.1f} / {_format_bandwidth(c['ours'])}"}
       for c in table["cells"]],
    ),
    _bandwidths(
      "Gbit/s that reach a compute utilisation (predicted, not measured)\n"
      f"({result['models_source']})",
      [c | {"model": m["name"], "text": _format_bandwidth(c["gbit_s"])}
       for m in models for c in m["cells"]],
    ),
    Table(
      "models", "name=model | parameters:.4g | num_layers | step_seconds:g | "
      "volume_factor:g", models,
    ),
    *_recommendation(result["recommendation"]),
  ], lambda: _figure(result))


def _format_bandwidth(gbit_s: float | None) -> str:
  """Formats the lowest sufficient bandwidth; "> 1000" for None."""
  return "> 1000" if gbit_s is None else f"{gbit_s:.1f}"


def _bandwidths(title: str, cells: list[Mapping[str, Any]]) -> Table:
  """Returns a table of cell texts, with a column for each target."""
  cells = [c | {"target": f"{c['target']:.0%}"} for c in cells]
  return Table(
    title, "{model}, {method}=model, method | of.*",
    pivot(cells, ["model", "method"], "target", "text"),
  )


def _recommendation(result: Mapping[str, Any]) -> list[Table | str]:
  model, link, setting = (result[k] for k in ("model", "link", "setting"))
  rows = result["paper_methods"] | ({"recommended": setting} if setting else {})
  latency = (
    "latency not published, taken as 0"
    if link["latency_s"] is None
    else f"latency {labels.text(link['latency_s'], 'latency_s')}"
  )
  found: list[Table | str] = [Table(
    f"{model['parameters'] / 1e9:g}e9 parameters, {model['num_layers']} "
    f"layers, {model['step_seconds']:g} s a step\nover {link['name']}: "
    f"{link['gbit_s']:g} Gbit/s, {latency}\nrecommended: least staleness "
    f"with a utilisation of {result['target']:.1%}\n"
    "(predicted, not measured)",
    "method | sync_every=H | num_fragments | overlap_steps | bits | "
    "utilisation",
    [row | {"method": name} for name, row in rows.items()],
  )]
  if not setting:
    found.append(
      f"No setting reaches {result['target']:.1%} "
      f"({labels.text(result['candidates'])}). Least H for its link alone, by "
      f"bits: {labels.text(result['fewest_steps'])}."
    )
  return found


def _figure(result: Mapping[str, Any]) -> plot.Figure:
  """Plots utilisation against bandwidth, with the paper's cells as points."""
  curves, cells = result["curves"], result["table"]["cells"]
  panels = plot.lines(
    [
      {"model": model, "method": method, "gbit_s": x, "utilisation": y}
      for model, methods in curves["utilisation"].items()
      for method, values in methods.items()
      for x, y in zip(curves["gbit_s"], values, strict=True)
    ],
    "gbit_s=bandwidth [Gbit/s]", "utilisation=compute utilisation",
    by="method", each="model", log="x", marker="",
  )
  for panel in panels:
    for line in list(panel.marks):
      own = [c for c in cells
             if (c["model"], c["method"]) == (panel.title, line.label)]
      panel.marks.append(plot.Line(
        [c["published"] for c in own], [c["target"] for c in own],
        style="", marker="o", size=4, colour=line.colour,
      ))
  fitted = result["fitted_on_this_table"]
  return plot.figure(
    panels, f"1B to 100B: volume factor {result['volume_factor']:.4f}, "
    f"{'fitted on' if fitted else 'not fitted to'} the points (paper, table 4)",
  )
