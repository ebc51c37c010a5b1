"""``config.zero`` -> a partition of the training state."""

import dataclasses
from typing import Any

from parallel.zero import partition
from parallel.zero.partition import Partition

# What config.zero may set beside the scheme; depths are names of levels.
_DEPTHS = ("weights", "gradients", "optimizer", "secondary")
_CODECS = ("weight_codec", "gradient_codec", "secondary_codec")


def build(config: Any, num_ranks: int) -> Partition:
  """Checks ``config.zero`` and builds what it describes.

  Args:
    config: ``config.zero``.
    num_ranks: ``config.parallel.data``.

  Raises:
    ValueError: A value that does not fit, with its key and what would.
  """
  levels = partition.parse_levels(config.levels, num_ranks)
  changes: dict[str, Any] = {"block": config.block}
  names = [level.name for level in levels[::-1]]
  for key in _DEPTHS:
    if config[key]:
      if config[key] not in ("none", *names):
        raise ValueError(
          f"config.zero.{key}={config[key]!r} must be 'none' or a level of "
          f"config.zero.levels: {', '.join(map(repr, names))}"
        )
      depth = 0 if config[key] == "none" else names.index(config[key]) + 1
      changes[key] = None if key == "secondary" and not depth else depth
  changes |= {key: config[key] for key in _CODECS if config[key]}
  found = dataclasses.replace(partition.named(config.scheme, levels), **changes)
  if config.prefetch and not found.weights:
    raise ValueError(
      "config.zero.prefetch=True has no effect: config.zero.scheme="
      f"{config.scheme!r} shards no weights"
    )
  return found
