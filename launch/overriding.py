"""Config overrides on the command line, checked before absl parses them."""

from collections.abc import Sequence
import re
from typing import Any

from absl import flags

from caatnet.schema import tree


class LoadedConfigParser(flags.ArgumentParser):
  """Parser of ``--config`` that returns an already loaded config.

  Attributes:
    config: The config of the command line; None before its file is executed.
  """

  config: Any = None

  def parse(self, argument: str) -> Any:
    """Returns the loaded config, locked against new keys."""
    self.config.lock()
    return self.config


def find_overrides(argv: Sequence[str]) -> list[tuple[str, str]]:
  """Returns key and value of each ``--config.KEY=VALUE`` of a command line."""
  overrides = []
  for index, argument in enumerate(argv):
    match = re.match(r"--?(?:no)?config\.([^=]+)(?:=(.*))?", argument)
    if match:  # "--config.KEY VALUE" is allowed as well
      following = argv[index + 1] if index + 1 < len(argv) else ""
      overrides.append((match[1], following if match[2] is None else match[2]))
  return overrides


def prepare(argv: Sequence[str], path: str, config: Any) -> None:
  """Applies selectors of the command line to a config; checks overridden keys.

  Selectors such as ``--config.outer.algorithm=diloco`` are applied first. For
  an unknown key, absl would print a traceback of 53 lines.

  Args:
    argv: The command line.
    path: The config's file.
    config: The config, which is changed in place.

  Raises:
    ValueError: A key is unknown, or a tuple is given twice (absl joins both).
  """
  overrides = find_overrides(argv)
  tree.apply_selectors(config, [f"{key}={value}" for key, value in overrides],
              config.get("sweep", {}).get("sections", {}))
  declared = tree.keys_with_values(config)
  for key, _ in overrides:
    if key not in declared:
      near = tree.format_suggestion(key, list(declared), "--config.")
      raise ValueError(f"{path} has no key config.{key}{near}")
    values = [value for other, value in overrides if other == key]
    if len(values) > 1 and isinstance(declared[key][1], tuple):
      raise ValueError(f"config.{key} is given twice: {' and '.join(values)}")


def rewrite_absl_message(message: str, config: Any) -> str:
  """Returns absl's message, or for a wrong override the key's allowed values.

  Args:
    message: absl's error message.
    config: The config, or None if there is none.
  """
  match = re.match(r"flag --(?:no)?config\.([^=]+)=(.*?): ", message)
  if match and config is not None:
    declared = tree.keys_with_values(config)
    if match[1] in declared:
      key = declared[match[1]][0]
      return f"config.{match[1]}={match[2]!r} must {key.must()}"
  return message
