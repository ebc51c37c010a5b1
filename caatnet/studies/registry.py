"""Finds studies by name; a study computes a prediction and trains nothing.

A study is a folder here. Its ``study.py`` has ``run``, which takes a config as
nested dicts and returns plain data, and may have ``export`` and ``write_page``.
Its ``tables.py`` has ``show``, which prints a result, and its ``pictures.py``
has ``plot``, which draws a result into a file. A new study is a folder and a
name in ``SUBJECTS``.
"""

from collections.abc import Callable, Mapping
import dataclasses
import importlib
import json
import pathlib
from typing import Any

from caatnet.config.schema import tree
from caatnet.show import results

# The values of config.study: folders beside this file.
SUBJECTS = (
  "alignment", "collectives", "datacentre", "flows", "inference", "partitions",
  "pipeline", "planner", "published", "schedule", "serving", "utilisation",
)


@dataclasses.dataclass(frozen=True)
class Study:
  """What a study can do.

  Attributes:
    run: Computes a result, plain data, from a config as nested dicts.
    show: Prints tables of a result.
    plot: Draws a result into a PNG.
    export: Writes what the config describes for other programs; None if the
      study has nothing to export.
    write_page: Writes a result as a page of HTML; None if there is none.
  """

  run: Callable[[Mapping[str, Any]], dict[str, Any]]
  show: Callable[[Mapping[str, Any]], None]
  plot: Callable[[Mapping[str, Any], pathlib.Path], None]
  export: Callable[[Mapping[str, Any], pathlib.Path], None] | None = None
  write_page: Callable[[Mapping[str, Any], pathlib.Path], None] | None = None

  def present(
    self, result: Mapping[str, Any], as_json: bool, output: str, picture: str
  ) -> None:
    """Prints a result, and writes what a command line asks for.

    Args:
      result: What `run` returned.
      as_json: Whether JSON is printed in place of tables.
      output: The JSON file to write; "" for none.
      picture: The PNG to write; "" for none.
    """
    if as_json:
      print(json.dumps(result))
    else:
      self.show(result)
    if output:
      results.write(pathlib.Path(output), result)
    if picture:
      self.plot(result, pathlib.Path(picture))


def find(config: Mapping[str, Any]) -> Study:
  """Returns the study that a config names, and imports no other.

  Args:
    config: The config as nested dicts.

  Raises:
    ValueError: ``config.study`` is missing or unknown, or a number is out of
      its range.
  """
  name = config.get("study")
  if name not in SUBJECTS:
    raise ValueError(
      f"config.study={name!r} must be one of {', '.join(SUBJECTS)}; a config "
      "with a study: configs/diloco/utilisation.py"
    )
  tree.check(config)
  study, tables, pictures = (
    importlib.import_module(f"caatnet.studies.{name}.{part}")
    for part in ("study", "tables", "pictures")
  )
  return Study(
    study.run, tables.show, pictures.plot, getattr(study, "export", None),
    getattr(study, "write_page", None),
  )
