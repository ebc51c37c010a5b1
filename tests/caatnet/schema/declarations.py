"""Defaults and allowed values of all config keys, as text.

    python -m tests.caatnet.schema.declarations

writes ``declarations.txt``. Configs of older runs lack newer keys and receive
their defaults (`caatnet.schema.fields.field`), so a default is a part of
the format of ``config.json``: a change of it changes these runs. A change of
the text in a commit shows that it was intended.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import importlib
import pathlib
from typing import Any

from caatnet.schema import fields, register, tree

for name in ("benchmarks", "studies"):  # which register their keys
  importlib.import_module(f"caatnet.{name}.registry")

FILE = pathlib.Path(__file__).with_suffix(".txt")


def _of_section(prefix: str, section: Any) -> Iterator[str]:
  """Yields one line per key of a section with its default values."""
  for name, key in fields.keys(type(section)).items():
    yield from _of_value(f"{prefix}.{name}", getattr(section, name), key)


def _of_value(name: str, value: Any, key: fields.Key) -> Iterator[str]:
  """Yields the lines of a key: several if its value consists of sections."""
  if dataclasses.is_dataclass(value):
    yield from _of_section(name, value)
  elif isinstance(value, Mapping) and value:
    for inner, part in value.items():
      yield from _of_value(f"{name}.{inner}", part, key)
  else:
    yield f"{name} = {value!r} must {key.must()}"


def lines() -> list[str]:
  """Returns one line per key of every section: name, default and range."""
  sections = {"run": tree.TopLevelKeys} | tree._PLAIN_SECTIONS
  for name, among in tree._CHOICES.items():
    sections |= {f"{name}={c}": cls for c, cls in among.sections.items()}
  sections |= {f"study={name}": cls for name, cls in register.STUDIES.items()}
  return [
    line for name, cls in sections.items() for line in _of_section(name, cls())
  ]


if __name__ == "__main__":
  FILE.write_text("\n".join(lines()) + "\n")
