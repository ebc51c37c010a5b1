"""Overrides of single config keys, and sweeps over them."""

import ast
from collections.abc import Mapping
import dataclasses
import difflib
from typing import Any

import ml_collections

from caatnet.train.records import flatten

# Sections of which there is one per choice, and the key that chooses.
_SELECTORS = {
  "outer": "algorithm", "optimizer": "name", "model": "name", "data": "name",
}

# Section -> choice -> the whole section.
Sections = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """``config.sweep``: what varies.

  Attributes:
    points: Override strings such as ``"sync.p=0.5"``.
    seeds: Each point runs with each of them.
    sections: Sections that points may put in place of the config's, as in
      ``"outer.algorithm=diloco"``.
  """

  points: tuple[str, ...]
  seeds: tuple[int, ...]
  sections: Sections


def take_sweep(config: ml_collections.ConfigDict) -> Sweep:
  """Removes ``config.sweep`` and returns it; one run where there is none."""
  if "sweep" not in config:
    return Sweep(("",), (config.get("seed", 0),), {})
  sweep = config.sweep
  with config.unlocked():
    del config.sweep
  return Sweep(
    tuple(sweep.points), tuple(sweep.seeds), sweep.get("sections", {})
  )


def override(
  config: ml_collections.ConfigDict,
  overrides: str,
  sections: Sections | None = None,
) -> ml_collections.ConfigDict:
  """A copy with ``key=value key=value ...`` applied.

  Args:
    config: Stays as it is.
    overrides: Keys and values, separated by spaces. ``outer.algorithm`` and
      the like put another section in place, before all other keys.
    sections: The sections that there are for that.

  Raises:
    ValueError: An unknown key, with the nearest one, a value of another type
      than the config's, or a choice whose section is not there.
  """
  config = config.copy_and_resolve_references()
  parts = overrides.split()
  for part in parts:
    _choose_section(config, part, sections or {})
  flat = {
    ".".join(path): value
    for path, value in flatten(config.to_dict()).items()
  }
  for part in parts:
    key, _, text = part.partition("=")
    if key not in flat:
      near = difflib.get_close_matches(key, flat, 1)
      hint = f"; did you mean {near[0]}?" if near else ""
      raise ValueError(f"no config key {key!r}{hint}")
    kind = type(flat[key])
    try:
      value = text if kind is str else ast.literal_eval(text)
      value = float(value) if kind is float else value
    except (SyntaxError, TypeError, ValueError):
      value = None
    if type(value) is not kind:
      raise ValueError(f"{part!r}: the value must be a {kind.__name__}")
    config.update_from_flattened_dict({key: value})
  return config


def _choose_section(
  config: ml_collections.ConfigDict, part: str, sections: Sections
) -> None:
  """Replaces a section where ``part`` chooses another one."""
  key, _, choice = part.partition("=")
  section, _, selector = key.partition(".")
  if _SELECTORS.get(section) != selector or section not in config:
    return
  if config[section].get(selector) == choice:
    return
  offered = sections.get(section, {})
  if choice not in offered:
    raise ValueError(
      f"{part!r}: each {section}.{selector} has a section of its own; here "
      f"there are {', '.join((config[section].get(selector), *offered))}"
    )
  with config.unlocked():
    config[section] = ml_collections.ConfigDict(offered[choice])
