"""Draws how long the choices of configurators take.

Needs the ``plot`` extra.
"""

from collections.abc import Mapping
import pathlib
from typing import Any

import numpy as np

from caatnet.show import pictures


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws bars of a step's seconds, by cause, a panel for each case.

  Args:
    result: What `caatnet.studies.published.study.run` returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  cases: dict[str, list[Mapping[str, Any]]] = {}
  for row in result["rows"]:
    case = f"{row['model']}, {row['cluster']}, {row['links']}"
    cases.setdefault(case, []).append(row)
  columns = min(4, len(cases))
  figure, panels = plt.subplots(
    -(-len(cases) // columns), columns, squeeze=False, layout="constrained",
    figsize=(3.6 * columns, 2.6 * -(-len(cases) // columns)),
  )
  for panel in panels.flat[len(cases) :]:
    panel.set_axis_off()
  for panel, (case, rows) in zip(panels.flat, cases.items(), strict=False):
    left = np.zeros(len(rows))
    for cause in rows[0]["latency"]:
      width = np.array([row["latency"][cause] for row in rows])
      panel.barh(range(len(rows)), width, left=left, label=cause)
      left = left + width
    panel.set(yticks=range(len(rows)), xlabel="seconds of a step")
    panel.set_yticklabels([row["chooser"] for row in rows])
    panel.set_title(case, fontsize="small")
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
  figure.legend(
    *panels.flat[0].get_legend_handles_labels(), ncols=8, frameon=False,
    fontsize="x-small", loc="outside lower center",
  )
  figure.suptitle("predicted, not measured")
  pictures.save(figure, path)
