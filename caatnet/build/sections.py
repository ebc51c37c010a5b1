"""Sections of a config as keyword arguments of what they describe.

A section's keys are the keyword arguments of its builder, neither more nor
fewer, so that a key which would do nothing is an error. `parallel` and the
models know no configs: their errors name their own arguments, and here these
become the keys that a user can change.
"""

from collections.abc import Callable, Mapping
import dataclasses
import inspect
from typing import Any

from caatnet.checks import naming, one_of


def choose(
  section: str,
  selector: str,
  choices: Mapping[str, Callable[..., Any]],
  config: Mapping[str, Any],
  *args: Any,
) -> Any:
  """Builds what a section with a choice in it describes.

  Args:
    section: The section's name, e.g. "outer".
    selector: The key that chooses, e.g. "algorithm".
    choices: What it may choose -> a builder, as `call` takes it.
    config: The section.
    *args: Positional arguments of the builder.

  Returns:
    What the builder returns.

  Raises:
    ValueError: An unknown choice, a key that the chosen one does not have, a
      key that is missing, or what the builder refuses.
  """
  values = dict(config)
  name = values.pop(selector, None)
  chosen = f"config.{section}.{selector}"
  one_of(chosen, name, tuple(choices))
  return call(
    section, choices[name], values, *args, because=f"{chosen}={name!r}"
  )


def call(
  section: str,
  builder: Callable[..., Any],
  values: Mapping[str, Any],
  *args: Any,
  because: str = "",
) -> Any:
  """Calls a builder with a section's keys as keyword arguments.

  Args:
    section: The section's name.
    builder: A function whose keyword-only arguments are the section's keys, or
      a dataclass with these fields and, perhaps, a method ``build``.
    values: The keys and their values.
    *args: Positional arguments of the function, or of ``build``.
    because: What decided which keys there are, for messages.

  Raises:
    ValueError: See `choose`.
  """
  keys = keys_of(builder)
  where = f" with {because}" if because else ""
  for key in values:
    if key not in keys:
      raise ValueError(
        f"config.{section}.{key}={values[key]!r} has no effect{where}; the "
        f"keys are {', '.join(keys) or 'none'}"
      )
  missing = [key for key in keys if key not in values]
  if missing:
    raise ValueError(
      f"config.{section} lacks {', '.join(missing)}{where}: this choice has a "
      "section of its own (configs/sections.py); use a config that has it"
    )
  with naming(f"config.{section}", keys):
    keywords = {key: _plain(values[key]) for key in keys}
    if not dataclasses.is_dataclass(builder):
      return builder(*args, **keywords)
    options = builder(**keywords)
    return options.build(*args) if hasattr(options, "build") else options


def keys_of(builder: Callable[..., Any]) -> tuple[str, ...]:
  """A section's keys: a dataclass' fields, a function's keyword arguments."""
  if dataclasses.is_dataclass(builder):
    return tuple(field.name for field in dataclasses.fields(builder))
  parameters = inspect.signature(builder).parameters.values()
  return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def _plain(value: Any) -> Any:
  """Lists, which JSON makes of tuples, as tuples again."""
  return tuple(value) if isinstance(value, list) else value
