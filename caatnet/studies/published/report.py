"""Report of published configurators: their choices and step times."""

from collections.abc import Mapping
from typing import Any

from parallel.base import labels, plot
from parallel.base.report import Report, Table


def report(result: Mapping[str, Any]) -> Report:
  """Returns choices, speed-ups, assumptions, and bars of a step's seconds."""
  return Report("Choices of published configurators", [
    Table(
      "predicted, not measured; in vain: preferred configurations that "
      "do not fit; says: time by its own model",
      "cluster | links | model | chooser | configuration | "
      "seconds:.4g=s / step | said_s:.4g=says | in_vain",
      result["rows"],
    ),
    Table(
      "how many times as long as Pipette's choice others' take, over all "
      "clusters, links and models; published: recalled from the paper, not "
      "verified, of its own clusters and models; its model says: median of "
      "the predicted over the simulated time",
      "over=chooser | cases | least:.3g | median:.3g | most:.3g | "
      "recalled=published | said:.0%=its model says",
      result["speed_ups"],
    ),
    labels.format_items(result["assumptions"]),
  ], lambda: plot.figure(
    plot.stacked_bar_panels(
      result["rows"], "chooser", "latency", label="seconds of a step",
      each="model cluster links",
    ),
    "predicted, not measured", columns=4,
  ))
