"""Studies that compute a prediction and train nothing, found by name.

A study is a folder here: ``study.py`` has ``run`` (config as nested dicts ->
plain data, which ``--json`` prints) and may have ``export``; ``tables.py`` has
``show`` (prints a result) and ``pictures.py`` has ``plot`` (draws it into a
file). A new study is a folder and a name in ``SUBJECTS``.
"""

from collections.abc import Callable, Mapping
import dataclasses
import importlib
import pathlib
from typing import Any

# What config.study may be: folders beside this file.
SUBJECTS = ("collectives", "flows", "partitions", "schedule", "utilisation")


@dataclasses.dataclass(frozen=True)
class Study:
  """What a study can do.

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


def find(config: Mapping[str, Any]) -> Study:
  """The study that a config names; the other studies are not imported.

  Raises:
    ValueError: ``config.study`` is missing or unknown.
  """
  name = config.get("study")
  if name not in SUBJECTS:
    raise ValueError(
      f"config.study={name!r} must be one of {', '.join(SUBJECTS)}; a config "
      "with a study: configs/diloco/utilisation.py"
    )
  study, tables, pictures = (
    importlib.import_module(f"caatnet.studies.{name}.{part}")
    for part in ("study", "tables", "pictures")
  )
  return Study(
    study.run, tables.show, pictures.plot, getattr(study, "export", None)
  )
