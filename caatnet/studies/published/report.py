"""Report of published configurators: their choices and step times."""

from collections.abc import Mapping, Sequence
from typing import Any

from parallel.base import plot
from parallel.base.report import Column, Report, Table

Rows = Sequence[Mapping[str, Any]]


def report(result: Mapping[str, Any]) -> Report:
  """Returns choices, speed-ups, assumptions, and bars of a step's seconds."""
  parts: list[Table | str] = [Table(
    "predicted, not measured; in vain: preferred configurations that "
    "do not fit; says: time by its own model",
    [
      "cluster", "links",
      "model", "chooser",
      "configuration",
      Column("seconds", "s / step", ".4g"),
      Column("said_s", "says", ".4g", default=""), Column("in_vain", "in vain"),
    ],
    result["rows"],
  )]
  if result["speed_ups"]:
    parts.append(Table(
      "how many times as long as Pipette's choice others' take, over all "
      "clusters, links and models; published: recalled from the paper, not "
      "verified, of its own clusters and models",
      [
        Column("over", "chooser"), "cases",
        Column("least", "least", ".3g"), Column("median", "median", ".3g"),
        Column("most", "most", ".3g"), Column("recalled", "published"),
        Column("said", "its model says, median", "{:.0%} of it".format,
               default=""),
      ],
      result["speed_ups"],
    ))
  parts += [f"{name}: {text}" for name, text in result["assumptions"].items()]
  return Report(
    "Choices of published configurators", parts,
    lambda: _figure(result["rows"]),
  )


def _figure(rows: Rows) -> plot.Figure:
  """Returns bars of a step's seconds by cause, one panel per case."""
  cases: dict[str, list[Mapping[str, Any]]] = {}
  for row in rows:
    case = f"{row['model']}, {row['cluster']}, {row['links']}"
    cases.setdefault(case, []).append(row)
  columns = min(4, len(cases))
  panels = [
    plot.Panel(
      plot.stacked({
        cause: [row["latency"][cause] for row in of_case]
        for cause in of_case[0]["latency"]
      }),
      case, "seconds of a step",
      plot.Axis(ticks=list(enumerate(row["chooser"] for row in of_case)),
           reverse=True),
      frame="open",
    )
    for case, of_case in cases.items()
  ]
  return plot.Figure(
    panels, (3.6 * columns, 2.6 * -(-len(cases) // columns)), columns,
    "predicted, not measured", "outside lower center",
    legend_columns=2 * columns,
  )
