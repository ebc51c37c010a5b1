"""Report of the study of compute utilisation over slow links."""

from collections.abc import Iterable, Mapping
from typing import Any

from caatnet.studies.utilisation import published
from parallel.base import plot
from parallel.base.report import Column, Report, Table, keyed


def report(result: Mapping[str, Any]) -> Report:
  """Returns the paper's table, other models, the recommendation, and curves."""
  table = result["table"]
  factor = (
    f"factor {result['volume_factor']:.4f} FITTED on this table"
    if result["fitted_on_this_table"]
    else "nothing fitted"
  )
  compared = _bandwidths(
    "Gbit/s that reach a compute utilisation, the paper's / ours; "
    f"{factor}\n{table['exact']} of {table['num_cells']} cells are equal, "
    f"{table['within_one_notch']} within one of the 50 grid points\n"
    f"({result['source']})",
    (
      (c["model"], c["method"],
       f"{c['published']:.1f} / {_least(c['ours'])}")
      for c in table["cells"]
    ),
  )
  sizes = "\n".join(
    f"{m['name']}: {m['parameters'] / 1e9:g}e9 parameters, {m['num_layers']} "
    f"layers, {m['step_seconds']:g} s a step, volume factor "
    f"{m['volume_factor']:g}"
    for m in result["models"]
  )
  models = _bandwidths(
    "Gbit/s that reach a compute utilisation (predicted, not measured)\n"
    f"{sizes}\n({result['models_source']})",
    (
      (m["name"], c["method"], _least(c["gbit_s"]))
      for m in result["models"] for c in m["cells"]
    ),
  )
  return Report(
    "Compute utilisation over slow links",
    [compared, models, *_recommendation(result["recommendation"])],
    lambda: _figure(result),
  )


def _least(gbit_s: float | None) -> str:
  """Formats the lowest sufficient bandwidth."""
  return "> 1000" if gbit_s is None else f"{gbit_s:.1f}"


def _bandwidths(title: str, cells: Iterable[tuple[str, str, str]]) -> Table:
  """Returns a table of models and methods by target.

  Args:
    title: Title of the table.
    cells: Model, method and text of each cell, in the order of the targets.
  """
  rows: dict[tuple[str, str], list[str]] = {}
  for model, method, text in cells:
    rows.setdefault((model, method), []).append(text)
  targets = [f"{t:.0%}" for t in published.TARGETS]
  return Table(
    title, keyed(["model, method", *targets]),
    [
      {"model, method": ", ".join(key)} | dict(zip(targets, row, strict=True))
      for key, row in rows.items()
    ],
  )


def _recommendation(result: Mapping[str, Any]) -> list[Table | str]:
  model, link, setting = (result[k] for k in ("model", "link", "setting"))
  rows = dict(result["paper_methods"])
  if setting:
    rows["recommended"] = setting
  latency = (
    "latency not published, taken as 0"
    if link["latency_s"] is None
    else f"latency {link['latency_s'] * 1e3:.1f} ms"
  )
  found: list[Table | str] = [Table(
    f"{model['parameters'] / 1e9:g}e9 parameters, {model['num_layers']} "
    f"layers, {model['step_seconds']:g} s a step\nover {link['name']}: "
    f"{link['gbit_s']:g} Gbit/s, {latency}\nrecommended: least staleness "
    f"with a utilisation of {result['target']:.1%}\n"
    "(predicted, not measured)",
    [
      Column("name", "method"), Column("sync_every", "H", "g"),
      Column("num_fragments", "fragments", "g"),
      Column("overlap_steps", "overlap", "g"), Column("bits", "bits", "g"),
      Column("utilisation", "utilisation", ".1%"),
    ],
    [row | {"name": name} for name, row in rows.items()],
  )]
  if not setting:
    tried = "; ".join(f"{k}: {v}" for k, v in result["candidates"].items())
    fewest = ", ".join(
      f"{steps} at {bits} bits" for bits, steps in
      result["fewest_steps"].items()
    )
    found.append(
      f"No setting reaches {result['target']:.1%} ({tried}). For its link "
      f"alone H must be at least {fewest}."
    )
  return found


def _figure(result: Mapping[str, Any]) -> plot.Figure:
  """Returns utilisation against bandwidth, with the paper's cells as points."""
  curves, cells = result["curves"], result["table"]["cells"]
  models = curves["utilisation"]
  panels = []
  for model, lines in models.items():
    marks = []
    for number, (name, values) in enumerate(lines.items()):
      own = [c for c in cells if (c["model"], c["method"]) == (model, name)]
      colour = f"C{number}"
      marks += [
        plot.Line(curves["gbit_s"], values, name, colour=colour),
        plot.Line([c["published"] for c in own], [c["target"] for c in own],
                  style="", marker="o", size=4, colour=colour),
      ]
    if any(c["model"] == model for c in cells):
      marks.append(plot.Line(
        (), (), "paper, table 4", "", "o", colour="gray", size=4
      ))
    panels.append(plot.Panel(
      marks, model, plot.Axis("bandwidth [Gbit/s]", "log"),
      "compute utilisation", grid=True,
    ))
  fitted = result["fitted_on_this_table"]
  return plot.Figure(
    panels, (13, 7.6), -(-len(models) // 2),
    f"1B to 100B: volume factor {result['volume_factor']:.4f}"
    + (", fitted on the points shown" if fitted else ", nothing fitted"),
    "outside right upper", share_x="all", share_y="all",
  )
