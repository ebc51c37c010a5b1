"""Calls of builders with checked, frozen sections of a config.

`parallel` and the models do not depend on configs, so their error messages name
arguments. The functions here replace these names by the config keys that a user
can change.
"""

from collections.abc import Callable, Mapping
from typing import Any

from caatnet.schema import fields, tree
from parallel.base.naming import naming


def call(
  name: str, builder: Callable[..., Any], values: Mapping[str, Any], *args: Any
) -> Any:
  """Builds the object of a section.

  Args:
    name: The section's name, such as "sync".
    builder: Function that receives the section's dataclass and ``args``.
    values: The section's keys and values.
    *args: Further arguments of the builder.

  Raises:
    ValueError: If a key is not declared, or a value is not allowed.
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
  """Builds the object of a section with a selector.

  Args:
    name: The section's name, such as "outer".
    builders: Builders by choice; see `call`.
    values: The section's keys and values.
    *args: Further arguments of the builder.

  Raises:
    ValueError: If the choice is unknown, a key is not declared, or a value is
      not allowed.
  """
  return call(
    name, lambda made, *rest: builders[tree.choice(name, values)](made, *rest),
    values, *args,
  )
