"""Studies that compute a prediction and train nothing: one entry point each.

A study turns its config into plain data (what ``--json`` prints), tables and a
picture. `launch.simulate` runs the one that ``config.study`` names.
"""

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
from typing import Any

from caatnet import (
  collective_plots,
  collective_studies,
  flow_studies,
  utilisation,
  zero_plot,
  zero_study,
  zero_tables,
)


@dataclasses.dataclass(frozen=True)
class Study:
  """What a kind of simulation can do.

  Attributes:
    run: Config as nested dicts -> result as plain data.
    show: Prints tables of a result.
    plot: Draws a result into a PNG.
    export: Writes what the config describes for other programs; None: the
      study has nothing of that kind.
  """

  run: Callable[[Mapping[str, Any]], dict[str, Any]]
  show: Callable[[Mapping[str, Any]], None]
  plot: Callable[[Mapping[str, Any], pathlib.Path], None]
  export: Callable[[Mapping[str, Any], pathlib.Path], None] | None = None


STUDIES = {
  "utilisation": Study(utilisation.run, utilisation.show, utilisation.plot),
  "collectives": Study(
    collective_studies.compare,
    collective_studies.show_comparison,
    collective_plots.plot_comparison,
  ),
  "schedule": Study(
    collective_studies.run_one,
    collective_studies.show_one,
    collective_studies.plot_one,
    collective_studies.export_one,
  ),
  "flows": Study(flow_studies.run, flow_studies.show, flow_studies.plot),
  "zero": Study(zero_study.run, zero_tables.show, zero_plot.plot),
}


def find(config: Mapping[str, Any]) -> Study:
  """The study that a config names.

  Raises:
    ValueError: ``config.study`` is missing or unknown.
  """
  name = config.get("study")
  if name not in STUDIES:
    raise ValueError(
      f"config.study={name!r} must be one of {', '.join(STUDIES)}; a config "
      "with a study: configs/diloco/utilisation.py"
    )
  return STUDIES[name]
