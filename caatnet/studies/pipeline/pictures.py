"""Draws timetables, stages over time; needs the ``plot`` extra."""

from collections.abc import Mapping
import itertools
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
    len(rows), figsize=(13, len(rows) * (0.75 + min(0.22 * stages, 4)) + 0.6),
    layout="constrained", sharex=True, squeeze=False,
  )
  kinds: set[int] = set()
  longest_s = max(row["events_s"] for row in rows)
  for row, panel in zip(rows, panels[:, 0], strict=True):
    timeline = timed(config, built(config, row["timetable"]))
    draw_timeline(timeline, panel, longest_s)
    kinds |= set(timeline.timetable.kinds.flat)
  panels[-1, 0].set(xlabel="ms", xlim=(0, 1010 * longest_s))
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


def draw_timeline(timeline: Timeline, panel: Any, longest_s: float) -> None:
  """Draws a row for each stage, with a box for each action.

  Args:
    timeline: When everything happens.
    panel: The matplotlib axes to draw on.
    longest_s: Seconds that the panel shows.
  """
  table = timeline.timetable
  ticks, stages = np.nonzero(table.kinds)
  here = ticks, stages
  start, end = 1e3 * timeline.start_s[here], 1e3 * timeline.end_s[here]
  kinds, chunks = table.kinds[here], table.chunks[here]
  few = len(ticks) <= MAX_NUMBERS
  # One collection of boxes for all that look alike: many are drawn fast so.
  for kind, chunk, stage in itertools.product(
    COLOURS, range(table.num_chunks), range(table.num_stages)
  ):
    some = (kinds == kind) & (chunks == chunk) & (stages == stage)
    panel.broken_barh(
      np.stack([start[some], (end - start)[some]], 1), (stage - 0.45, 0.9),
      facecolor=_lighter(COLOURS[kind][0], chunk / table.num_chunks),
      edgecolor="white", linewidth=0.4 if few else 0,
    )
  if few:
    points = 12 * 72 * (end - start) / (1e3 * longest_s)  # the boxes' width
    for x, stage, m, room in zip(
      (start + end) / 2, stages, table.microbatches[here], points, strict=True
    ):
      panel.text(
        x, stage, str(m), ha="center", va="center_baseline", clip_on=True,
        fontsize=min(8.0, 0.9 * room / max(1, 0.6 * len(str(m)))),
      )
  chunks_text = f", {table.num_chunks} chunks" if table.num_chunks > 1 else ""
  panel.set(
    ylabel="stage",
    yticks=range(0, table.num_stages, 1 + table.num_stages // 20),
    ylim=(table.num_stages - 0.5, -0.5),
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
