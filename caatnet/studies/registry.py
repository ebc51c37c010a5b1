"""Registry of studies; a study computes a prediction and trains nothing.

A study is a directory. Its ``study.py`` has ``run``, which takes a config as
nested dicts and returns plain data, and may have ``export`` and ``write_page``.
Its ``report.py`` has ``report``, which returns a result's tables and figure
(`parallel.base.report`). Its ``keys.py`` declares the config. A new study is a
directory and a name in ``STUDY_NAMES``. An import of this module registers the
configs of all studies.
"""

from collections.abc import Callable, Mapping
import dataclasses
import importlib
import pathlib
from typing import Any

from caatnet.schema import tree
from parallel.base.report import Report

# Valid values of config.study: names of the subdirectories.
STUDY_NAMES = (
  "alignment", "collectives", "datacentre", "federated", "flows", "inference",
  "partitions", "pipeline", "placement", "planner", "published", "schedule",
  "serving", "utilisation",
)
# Files that register the configs; each subject of serving has one.
KEY_MODULES = (
  *(f"{name}.keys" for name in STUDY_NAMES),
  *(f"serving.{subject}_keys" for subject in (
    "composition", "fairness", "fastswitch", "nanobatches", "vllm_log",
  )),
)
for _name in KEY_MODULES:
  importlib.import_module(f"caatnet.studies.{_name}")


@dataclasses.dataclass(frozen=True)
class Study:
  """Entry points of a study.

  Attributes:
    run: Computes a result, plain data, from a config as nested dicts.
    report: Returns the report of a result.
    export: Writes the objects that the config describes to a file for other
      programs; None if the study has no export.
    write_page: Writes a result as an interactive HTML page; None if the study
      has none.
  """

  run: Callable[[Mapping[str, Any]], dict[str, Any]]
  report: Callable[[Mapping[str, Any]], Report]
  export: Callable[[Mapping[str, Any], pathlib.Path], None] | None = None
  write_page: Callable[[Mapping[str, Any], pathlib.Path], None] | None = None

  def show(self, result: Mapping[str, Any]) -> None:
    """Prints the report of a result."""
    from caatnet.show import render

    render.show(self.report(result))

  def plot(self, result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes the figure of a result as PNG."""
    from caatnet.show import drawing

    drawing.write(self.report(result).figure(), path)


def find(
  config: Mapping[str, Any], only: str = "", example: str = ""
) -> Study:
  """Returns the study that a config names. Imports only that study.

  Example:
    >>> study = find({"study": "utilisation"})
    >>> study.run.__module__, study.export
    ('caatnet.studies.utilisation.study', None)

  Args:
    config: Config as nested dicts.
    only: The only study that a command accepts; "" for all.
    example: Path of a config of that study.

  Raises:
    ValueError: ``config.study`` is missing or unknown, or a number is out of
      its range.
  """
  name = config.get("study")
  if only and name != only:
    raise ValueError(f"config.study={name!r} must be {only!r}; use {example}")
  tree.check({"study": name, **config})
  study, report = (
    importlib.import_module(f"caatnet.studies.{name}.{part}")
    for part in ("study", "report")
  )
  return Study(
    study.run, report.report, getattr(study, "export", None),
    getattr(study, "write_page", None),
  )
