"""Config overrides, such as ``"sync.p=0.5 seed=1"``, and sweeps of them."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import ml_collections

from caatnet.schema import tree

# Whole sections, by the section's name and by choice.
Sections = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """Points and seeds of a sweep, from ``config.sweep``.

  Attributes:
    points: Override strings such as ``"sync.p=0.5"``.
    seeds: The seeds; each point runs with each seed.
    sections: Sections that a point with a selector such as
      ``outer.algorithm=diloco`` receives instead of the declared defaults.
  """

  points: tuple[str, ...]
  seeds: tuple[int, ...]
  sections: Sections


def take_sweep(config: ml_collections.ConfigDict) -> Sweep:
  """Removes ``config.sweep`` and returns it; without it, a sweep of one run."""
  if "sweep" not in config:
    return Sweep(("",), (config.get("seed", 0),), {})
  sweep = tree.parse_section("sweep", config.sweep)
  with config.unlocked():
    del config.sweep
  return Sweep(sweep.points, sweep.seeds, sweep.sections)


def override(
  config: ml_collections.ConfigDict,
  overrides: str,
  sections: Sections | None = None,
) -> ml_collections.ConfigDict:
  """Returns a copy of a config with ``key=value key=value ...`` applied.

  A selector, such as ``outer.algorithm``, replaces its section by the defaults
  of the choice. Selectors are applied first, independent of their position,
  since other overrides refer to keys of the new section.

  Args:
    config: The config, which is not changed.
    overrides: Keys and values, separated by spaces.
    sections: Sections that selectors use instead of the declared defaults.

  Raises:
    ValueError: If a key is unknown (the message has the nearest one), a value
      is not allowed, or there is no such choice.

  Example:
    >>> config = ml_collections.ConfigDict({
    ...   "outer": tree.defaults("outer", "data_parallel"),
    ... })
    >>> config = override(config, "outer.sync_every=5 outer.algorithm=diloco")
    >>> config.outer.algorithm, config.outer.sync_every, config.outer.momentum
    ('diloco', 5, 0.9)
  """
  config = config.copy_and_resolve_references()
  parts = overrides.split()
  # Selectors first, since they replace sections and thereby the known keys.
  tree.apply_selectors(config, parts, sections or {})
  declared = tree.keys_with_values(config)
  for part in parts:
    name, _, text = part.partition("=")
    if name not in declared:
      raise ValueError(
        f"no config key {name!r}{tree.format_suggestion(name, list(declared))}"
      )
    value = tree.parse_value(name, declared[name][0], text)
    config.update_from_flattened_dict({name: value})
  return config
