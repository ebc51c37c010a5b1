"""Functions that call builders with checked, frozen sections of a config.

`parallel` and the models do not depend on configs, so their error messages name
arguments. The functions here replace these names by the config keys that a user
can change.
"""

from collections.abc import Callable, Mapping
from typing import Any

from caatnet.schema import fields, tree
from parallel.base.naming import prefix_error_keys


def build_section(
  name: str, builder: Callable[..., Any], values: Mapping[str, Any], *args: Any
) -> Any:
  """Checks a section of a config and returns the object that it describes.

  Args:
    name: The section's name, such as "sync".
    builder: Function that receives the section's dataclass and ``args``.
    values: The section's keys and values.
    *args: Further arguments of the builder.

  Raises:
    ValueError: If a key is not declared, or a value is not allowed.
  """
  made = tree.parse_section(name, values)
  with prefix_error_keys(f"config.{name}", fields.keys(type(made))):
    return builder(made, *args)


def build_selected(
  name: str,
  builders: Mapping[str, Callable[..., Any]],
  values: Mapping[str, Any],
  *args: Any,
) -> Any:
  """Like `build_section`, for a section whose selector names the builder.

  Args:
    name: The section's name, such as "outer".
    builders: Builders by choice; see `build_section`.
    values: The section's keys and values.
    *args: Further arguments of the builder.

  Raises:
    ValueError: If the choice is unknown, a key is not declared, or a value is
      not allowed.
  """
  return build_section(
    name, lambda made, *rest: builders[tree.choice(name, values)](made, *rest),
    values, *args,
  )
