"""Registration of the keys of studies and benchmarks.

The keys are declared in files named ``keys.py``, in the directories of the
studies and benchmarks. A config file imports the ``keys.py`` of its study, and
the registries of studies and benchmarks import all of these files.
"""

from collections.abc import Callable
import typing

from caatnet.schema.fields import default_of, field, keys, section

# Classes of studies by "STUDY", or "STUDY.SUBJECT" for studies with a key
# ``subject``.
STUDIES: dict[str, type] = {}
# Classes of the section config.benchmark by config.benchmark.name.
BENCHMARKS: dict[str, type] = {}


@typing.dataclass_transform(
  frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def study(cls: type) -> type:
  """Makes a class a `section` and registers it as the config of a study.

  Its name in `STUDIES` consists of the defaults of its keys ``study`` and
  ``subject``.
  """
  made = section(cls)
  names = [default_of(made, k) for k in ("study", "subject") if k in keys(made)]
  return _add(STUDIES, ".".join(names), made)


@typing.dataclass_transform(
  frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def benchmark(name: str) -> Callable[[type], type]:
  """Returns a decorator that registers a class as a benchmark's section.

  Args:
    name: The benchmark, ``config.benchmark.name``.
  """
  return lambda cls: _add(BENCHMARKS, name, section(cls))


def _add(table: dict[str, type], name: str, cls: type) -> type:
  """Adds a class to a table and sorts the table by name."""
  table[name] = cls
  for other in sorted(table):
    table[other] = table.pop(other)
  return cls
