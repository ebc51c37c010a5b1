"""Calls builders with a config's sections as keyword arguments.

A section's keys are the keyword arguments of its builder, neither more nor
fewer, so that a key which would do nothing is an error. `parallel` and the
models know no configs: their errors name their own arguments, which become here
the keys that a user can change.
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
    section: The section's name, such as "outer".
    selector: The key that makes the choice, such as "algorithm".
    choices: For each choice a builder, as `call` takes it.
    config: The section.
    *args: Positional arguments of the builder.

  Returns:
    What the builder returns.

  Raises:
    ValueError: The choice is unknown, the section has a key that the chosen
      builder does not have or lacks one that it has, or the builder refuses a
      value.
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
    builder: A function whose keyword-only arguments are the section's keys; or
      a dataclass with these fields, others having defaults, which may have a
      method ``build``.
    values: The values of the keys.
    *args: Positional arguments of the function, or of ``build``.
    because: What decided which keys there are, for messages.

  Returns:
    What the function or ``build`` returns; else the dataclass.

  Raises:
    ValueError: There is a key that the builder does not have, one is missing,
      or the builder refuses a value.
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
  """Returns a section's keys: a dataclass' fields or keyword arguments.

  A field with a default is no key: others set it.
  """
  if dataclasses.is_dataclass(builder):
    return tuple(
      field.name for field in dataclasses.fields(builder)
      if field.default is dataclasses.MISSING
    )
  parameters = inspect.signature(builder).parameters.values()
  return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def _plain(value: Any) -> Any:
  """Turns a list, which JSON makes of a tuple, into a tuple again."""
  return tuple(value) if isinstance(value, list) else value
