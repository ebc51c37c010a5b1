"""Registry of benchmarks.

A benchmark is a file ``FOLDER/NAME.py`` with ``run``, which takes a config and
returns plain data, and a section that ``FOLDER/keys.py`` registers as NAME. An
import of this module registers the keys of all benchmarks.
"""

from collections.abc import Callable
import importlib
from typing import Any

import ml_collections

from caatnet.schema.register import BENCHMARKS

FOLDERS = (
  "elastic", "graphs", "peers", "planner", "programs", "serving", "training",
)
for _folder in FOLDERS:
  importlib.import_module(f"caatnet.benchmarks.{_folder}.keys")


def find(
  config: ml_collections.ConfigDict,
) -> Callable[[ml_collections.ConfigDict], dict[str, Any]]:
  """Returns the function that runs a config's benchmark.

  Args:
    config: Config with a section ``benchmark``.

  Raises:
    ValueError: The config has no benchmark, or an unknown one.
  """
  name = config.benchmark.name if "benchmark" in config else None
  if name not in BENCHMARKS:
    raise ValueError(
      f"config.benchmark.name={name!r} must be one of "
      f"{', '.join(BENCHMARKS)}; the configs are in configs/benchmark/"
    )
  folder = BENCHMARKS[name].__module__.rpartition(".")[0]
  return importlib.import_module(f"{folder}.{name}").run
