"""Builder of ``config.zero``: a partition of the training state."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from caatnet.schema import zero as schema
from parallel.plans import axis_kinds
from parallel.plans.zero import partition
from parallel.plans.zero.partition import Partition

DEFAULT_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Zero:
  """Partition of a worker's training state, and prefetching of weights.

  Attributes:
    partition: Levels of data-parallel ranks over which each part of a worker's
      state is sharded.
    prefetch: Whether a layer's weights are gathered while the previous layer
      runs.
  """

  partition: Partition
  prefetch: bool


def build_zero(section: schema.Zero, sizes: Mapping[str, int]) -> Zero:
  """Builds the partition of ``config.zero``.

  Args:
    section: The section.
    sizes: ``config.parallel``, with the number of ranks of each kind of axis.

  Raises:
    ValueError: If a value is not allowed; the message has the allowed values.
  """
  found = axis_kinds.data_levels(
    sizes, parse_levels(section.levels, sizes["data"])
  )
  # Names from the innermost level; depth d stands for the d innermost levels.
  names = [level.name for level in found[::-1]]
  changes: dict[str, Any] = {
    "block": section.block or DEFAULT_BLOCK,
    "coded_blocks": section.coded_blocks,
  }
  for key in ("weights", "gradients", "optimizer", "secondary"):
    value = getattr(section, key)
    if not value:  # the scheme sets the depth
      continue
    if value not in ("none", *names):
      raise ValueError(
        f"{key}={value!r} must be 'none' or a level of "
        f"config.zero.levels: {', '.join(map(repr, names))}"
      )
    depth = 0 if value == "none" else names.index(value) + 1
    changes[key] = None if key == "secondary" and not depth else depth
  for key in (
    "weight_codec", "gradient_codec", "secondary_codec", "gradient_hops"
  ):
    if getattr(section, key):
      changes[key] = getattr(section, key)
  scheme = partition.named(section.scheme, found)
  chosen = dataclasses.replace(scheme, **changes)
  codecs = (
    chosen.weight_codec, chosen.gradient_codec, chosen.secondary_codec
  )
  if section.block and set(codecs) == {"none"}:
    raise ValueError(
      f"block={section.block} has no effect, since no codec is set"
    )
  if section.gradient_hops and chosen.gradient_codec == "none":
    raise ValueError(
      f"gradient_hops={section.gradient_hops!r} has no effect, since gradients "
      "have no codec"
    )
  if section.prefetch and not chosen.weights:
    raise ValueError(
      f"prefetch=True has no effect, since scheme={section.scheme!r} shards no "
      "weights"
    )
  return Zero(chosen, section.prefetch)


def parse_levels(text: str, num_ranks: int) -> tuple[partition.Level, ...]:
  """Parses names and sizes of levels of ranks from ``config.zero.levels``.

  Args:
    text: The levels, outermost first, as in ``"node:2,gpu:4"``; "" for one
      level named data.
    num_ranks: The number of data-parallel ranks.

  Raises:
    ValueError: If the text has another form, a name occurs twice or is the name
      of another axis, or the product is not the number of ranks.

  Example:
    >>> [(x.name, x.size) for x in parse_levels("node:2,gpu:4", num_ranks=8)]
    [('node', 2), ('gpu', 4)]
  """
  levels = partition.parse_levels(text, num_ranks)
  others = [each.name for each in axis_kinds.AXES if each.name != "data"]
  if {*others} & {level.name for level in levels}:
    raise ValueError(
      f"levels={text!r}: names must differ from {', '.join(others[:-1])} and "
      f"{others[-1]}"
    )
  return levels
