"""Overrides single config keys, and reads what a sweep varies."""

import ast
from collections.abc import Mapping
import dataclasses
import difflib
from typing import Any

import ml_collections

from caatnet.train.records import flatten

# Sections that differ by choice, and the key that makes the choice.
_SELECTORS = {
  "outer": "algorithm", "optimizer": "name", "model": "name", "data": "name",
}

# What a message calls a value of a type.
_KINDS = {bool: "True or False", int: "an integer", float: "a number"}

# Name of a section -> choice -> the whole section.
Sections = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """What a sweep varies: ``config.sweep``.

  Attributes:
    points: Override strings such as ``"sync.p=0.5"``.
    seeds: The seeds with each of which each point runs.
    sections: Sections that points may put in place of the config's, as in
      ``"outer.algorithm=diloco"``.
  """

  points: tuple[str, ...]
  seeds: tuple[int, ...]
  sections: Sections


def take_sweep(config: ml_collections.ConfigDict) -> Sweep:
  """Removes ``config.sweep`` and returns it; without one, a sweep of one."""
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
  """Returns a copy of a config with ``key=value key=value ...`` applied.

  A key that chooses, such as ``outer.algorithm``, puts another section in
  place. That comes first, whatever the order, since the other keys are those of
  the new section.

  Args:
    config: The config, which is not changed.
    overrides: Keys and values, separated by spaces.
    sections: The sections that may be put in place.

  Raises:
    ValueError: A key is unknown (the message names the nearest one), a value
      has another type than the config's, or there is no section for a choice.
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
    # A value is text if the key's is text, else a Python literal of its type.
    kind = type(flat[key])
    try:
      value = text if kind is str else ast.literal_eval(text)
      value = float(value) if kind is float else value
    except (SyntaxError, TypeError, ValueError):
      value = None
    if type(value) is not kind:
      what = _KINDS.get(kind, f"a {kind.__name__}")
      raise ValueError(f"{part!r}: the value must be {what}")
    config.update_from_flattened_dict({key: value})
  return config


def _choose_section(
  config: ml_collections.ConfigDict, part: str, sections: Sections
) -> None:
  """Replaces a section of ``config`` if ``part`` chooses another one."""
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
