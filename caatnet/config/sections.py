"""Calls builders with a config's sections, checked and frozen.

`parallel` and the models know no configs: their errors name their own
arguments, which become here the keys that a user can change.
"""

from collections.abc import Callable, Mapping
from typing import Any

from caatnet.checks import naming
from caatnet.config.schema import fields, tree


def call(
  name: str, builder: Callable[..., Any], values: Mapping[str, Any], *args: Any
) -> Any:
  """Builds what a section describes.

  Args:
    name: The section's name, such as "sync".
    builder: A function of the section as its declared dataclass, and of `args`.
    values: The section's keys and values.
    *args: Further arguments of the builder.

  Raises:
    ValueError: A key is not declared, a value is not allowed, or the builder
      refuses one.
  """
  made = tree.section_of(name, values)
  with naming(f"config.{name}", fields.keys(type(made))):
    return builder(made, *args)


def choose(
  name: str,
  builders: Mapping[str, Callable[..., Any]],
  values: Mapping[str, Any],
  *args: Any,
) -> Any:
  """Builds what a section with a selector describes.

  Args:
    name: The section's name, such as "outer".
    builders: For each choice a builder, as `call` takes it.
    values: The section's keys and values.
    *args: Further arguments of the builder.

  Raises:
    ValueError: As `call`, or the choice is unknown.
  """
  return call(
    name, lambda made, *rest: builders[tree.choice(name, values)](made, *rest),
    values, *args,
  )
