"""Draws timetables, stages over time; needs the ``plot`` extra."""

from collections.abc import Mapping
import pathlib
from typing import Any

import numpy as np

from caatnet.show import pictures
from caatnet.studies.pipeline.study import built, timed
from parallel.pipeline.simulate import Timeline
from parallel.pipeline.timetable import Kind

# Colours of kinds, and what the legend says.
COLOURS = {
  Kind.FORWARD: ("#7ba7d7", "forward"),
  Kind.BACKWARD: ("#72b77a", "backward"),
  Kind.INPUT: ("#7fc7c4", "backward of inputs"),
  Kind.WEIGHT: ("#b79ad1", "backward of weights"),
}
MAX_NUMBERS = 1500  # of microbatches in a panel; more would be a blur


def plot(result: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws when each stage does what, a panel for each timetable.

  Args:
    result: What `caatnet.studies.pipeline.study.run` returned.
    path: The PNG to write.
  """
  plt = pictures.pyplot()
  config, rows = result["config"], result["rows"]
  stages = config["pipeline"]["stages"]
  figure, panels = plt.subplots(
    len(rows), figsize=(13, len(rows) * (0.75 + 0.22 * stages) + 0.6),
    layout="constrained", sharex=True, squeeze=False,
  )
  for row, panel in zip(rows, panels[:, 0], strict=True):
    timeline = timed(config, built(config, row["timetable"]))
    draw_timeline(timeline, panel)
  panels[-1, 0].set_xlabel("ms")
  kinds = {
    kind for panel in panels[:, 0] for kind in COLOURS
    if any(c.get_label() == kind.name for c in panel.containers)
  }
  figure.legend(
    handles=[
      plt.Rectangle((0, 0), 1, 1, color=colour, label=text)
      for kind, (colour, text) in COLOURS.items() if kind in kinds
    ],
    loc="outside upper center", ncols=len(COLOURS), fontsize="small",
    frameon=False,
    title="numbers are microbatches; a stage's later chunks are lighter",
    title_fontsize="small",
  )
  pictures.save(figure, path)


def draw_timeline(timeline: Timeline, panel: Any) -> None:
  """Draws a row for each stage, with a box for each action.

  Args:
    timeline: When everything happens.
    panel: The matplotlib axes to draw on.
  """
  table = timeline.timetable
  ticks, stages = np.nonzero(table.kinds)
  here = ticks, stages
  start, end = 1e3 * timeline.start_s[here], 1e3 * timeline.end_s[here]
  kinds, chunks = table.kinds[here], table.chunks[here]
  for kind, (colour, _) in COLOURS.items():
    for chunk in range(table.num_chunks):
      some = (kinds == kind) & (chunks == chunk)
      if some.any():
        panel.barh(
          stages[some], (end - start)[some], left=start[some], height=0.9,
          color=_lighter(colour, chunk / table.num_chunks), edgecolor="white",
          linewidth=0.4, label=kind.name,
        )
  if len(ticks) <= MAX_NUMBERS:
    # A box of three points has room for a digit of five.
    points = 13 * 72 * (end - start) / (1e3 * timeline.finish_s)
    for x, stage, m, room in zip(
      (start + end) / 2, stages, table.microbatches[here], points, strict=True
    ):
      panel.text(
        x, stage, str(m), ha="center", va="center_baseline", clip_on=True,
        fontsize=min(8.0, 0.9 * room / max(1, 0.6 * len(str(m)))),
      )
  chunks_text = f", {table.num_chunks} chunks" if table.num_chunks > 1 else ""
  panel.set(
    ylabel="stage", yticks=range(table.num_stages),
    ylim=(table.num_stages - 0.5, -0.5), xlim=(0, None),
  )
  panel.set_title(
    f"{table.name}{chunks_text}: {1e3 * timeline.finish_s:,.1f} ms, "
    f"{timeline.bubble:.1%} idle",
    fontsize="medium", loc="left",
  )
  panel.spines[["top", "right"]].set_visible(False)


def _lighter(colour: str, share: float) -> tuple[float, ...]:
  """Returns a colour mixed with a share of white, 0.65 of it at most."""
  pictures.pyplot()
  from matplotlib.colors import to_rgb

  return tuple(x + 0.65 * share * (1 - x) for x in to_rgb(colour))
