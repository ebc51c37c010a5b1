"""``config.zero``: a partition of the training state."""

import dataclasses
from typing import Any

from parallel.zero import partition
from parallel.zero.partition import Partition

DEFAULT_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Zero:
  """The section as values.

  Attributes:
    partition: Which level of data-parallel ranks has which part of the state.
    offload: Whether the optimizer's state waits in the host's memory.
    prefetch: Whether a layer's weights are gathered beside the layer before.
  """

  partition: Partition
  offload: bool
  prefetch: bool


def build_zero(
  num_ranks: int,
  *,
  levels: str,
  scheme: str,
  weights: str,
  gradients: str,
  optimizer: str,
  secondary: str,
  weight_codec: str,
  gradient_codec: str,
  secondary_codec: str,
  block: int,
  offload: bool,
  prefetch: bool,
) -> Zero:
  """Checks the section and builds what it describes.

  Args:
    num_ranks: ``config.parallel.data``.
    levels: The levels of data-parallel ranks as text; the other arguments are
      the section's keys, see ``configs/sections.py``.

  Raises:
    ValueError: A value that does not fit, with what would.
  """
  found = parse_levels(levels, num_ranks)
  names = [level.name for level in found[::-1]]
  changes: dict[str, Any] = {"block": block or DEFAULT_BLOCK}
  for key, value in (
    ("weights", weights), ("gradients", gradients), ("optimizer", optimizer),
    ("secondary", secondary),
  ):
    if not value:
      continue
    if value not in ("none", *names):
      raise ValueError(
        f"{key}={value!r} must be 'none' or a level of "
        f"config.zero.levels: {', '.join(map(repr, names))}"
      )
    depth = 0 if value == "none" else names.index(value) + 1
    changes[key] = None if key == "secondary" and not depth else depth
  for key, value in (
    ("weight_codec", weight_codec), ("gradient_codec", gradient_codec),
    ("secondary_codec", secondary_codec),
  ):
    if value:
      changes[key] = value
  chosen = dataclasses.replace(partition.named(scheme, found), **changes)
  codecs = (
    chosen.weight_codec, chosen.gradient_codec, chosen.secondary_codec
  )
  if block and set(codecs) == {"none"}:
    raise ValueError(f"block={block} has no effect: nothing is coded")
  if prefetch and not chosen.weights:
    raise ValueError(
      f"prefetch=True has no effect: scheme={scheme!r} shards no weights"
    )
  return Zero(chosen, offload, prefetch)


def parse_levels(text: str, num_ranks: int) -> tuple[partition.Level, ...]:
  """Reads ``config.zero.levels``; see `parallel.zero.partition.parse_levels`.

  Raises:
    ValueError: Not of that form, a name twice, or another product.
  """
  levels = partition.parse_levels(text, num_ranks)
  if {"worker", "tensor"} & {level.name for level in levels}:
    raise ValueError(
      f"levels={text!r}: names must differ from worker and tensor"
    )
  return levels
