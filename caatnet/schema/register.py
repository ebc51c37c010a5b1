"""Registration of the keys of studies and benchmarks.

Their declarations are in the directories of the experiments, in files named
``keys.py``. A config imports those that it uses, and the registries of studies
and benchmarks import all.
"""

from collections.abc import Callable
import typing

from caatnet.schema.fields import default_of, field, keys, section

# Configs of studies by config.study and, for serving, config.subject.
STUDIES: dict[str, type] = {}
# Sections config.benchmark by config.benchmark.name.
BENCHMARKS: dict[str, type] = {}


@typing.dataclass_transform(
  frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def study(cls: type) -> type:
  """Returns a class as a section, registered as the config of a study.

  The defaults of its keys ``study`` and ``subject`` are its name.
  """
  made = section(cls)
  names = [default_of(made, k) for k in ("study", "subject") if k in keys(made)]
  return _add(STUDIES, ".".join(names), made)


@typing.dataclass_transform(
  frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def benchmark(name: str) -> Callable[[type], type]:
  """Returns a decorator: `section`, registered as ``config.benchmark``.

  Args:
    name: The benchmark, ``config.benchmark.name``.
  """
  return lambda cls: _add(BENCHMARKS, name, section(cls))


def _add(table: dict[str, type], name: str, cls: type) -> type:
  """Adds a row to a table, whose order does not depend on imports."""
  table[name] = cls
  for other in sorted(table):
    table[other] = table.pop(other)
  return cls
