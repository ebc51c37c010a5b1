"""Registration of the keys of studies and benchmarks.

Their declarations are in the directories of the experiments, in files named
``keys.py``. A config imports those that it uses, and the registries of studies
and benchmarks import all.
"""

from collections.abc import Callable
from typing import TypeVar

from caatnet.config.schema.fields import default_of, keys

_Section = TypeVar("_Section", bound=type)

# Configs of studies by config.study and, for serving, config.subject.
STUDIES: dict[str, type] = {}
# Sections config.benchmark by config.benchmark.name.
BENCHMARKS: dict[str, type] = {}


def study(cls: _Section) -> _Section:
  """Registers a section as the whole config of a study.

  The defaults of its keys ``study`` and ``subject`` are its name.
  """
  names = [default_of(cls, k) for k in ("study", "subject") if k in keys(cls)]
  return _add(STUDIES, ".".join(names), cls)


def benchmark(name: str) -> Callable[[_Section], _Section]:
  """Registers a section as ``config.benchmark`` of a benchmark.

  Args:
    name: The benchmark, ``config.benchmark.name``.
  """
  return lambda cls: _add(BENCHMARKS, name, cls)


def _add(table: dict[str, type], name: str, cls: _Section) -> _Section:
  """Adds a row to a table, whose order does not depend on imports."""
  table[name] = cls
  for other in sorted(table):
    table[other] = table.pop(other)
  return cls
