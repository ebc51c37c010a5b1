"""Configs as trees of declared sections: defaults, checks, overrides, help.

A config is a ``ConfigDict`` while it is written and parsed. Builders receive
its sections as frozen dataclasses, from `parse_section`. Model, data, optimizer
and outer loop are choices: each choice has a section with its own keys, and a
*selector* such as ``outer.algorithm`` names the choice. A selector in an
override replaces the section by the declared defaults of the new choice, before
other overrides are applied. Values of keys that both choices have are not kept,
since keys with equal names may have different defaults and ranges.

A tree of mutable dataclasses could replace ``ConfigDict``, but not the parser
of overrides in ``ml_collections`` or the format of ``config.json``. `check`
finds misspelt keys in config files, which ``__slots__`` would reject.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import difflib
import typing
from typing import Any

import ml_collections
from ml_collections import config_dict

from caatnet.schema.data import DATA
from caatnet.schema.experts import Experts
from caatnet.schema.federated import Federated
from caatnet.schema.fields import (
  SEED,
  Key,
  NestedConfig,
  SectionsByChoice,
  default_of,
  field,
  keys,
  section,
)
from caatnet.schema.graph import SOURCES
from caatnet.schema.inference import Inference, Serving
from caatnet.schema.kinds import Kinds
from caatnet.schema.memory import Memory
from caatnet.schema.model import MODELS
from caatnet.schema.optimizer import OPTIMIZERS
from caatnet.schema.outer import OUTER
from caatnet.schema.parallel import Parallel, Pipeline
from caatnet.schema.register import BENCHMARKS, STUDIES
from caatnet.schema.sync import Sync
from caatnet.schema.train import Elastic, Sweep, Train
from caatnet.schema.zero import Zero

# Former names of keys -> present names. `upgrade_config` renames them in
# configs of older runs; in overrides and config files, former names are errors.
RENAMED = {
  "certified": "certified_clusters",
  "every": "sync_every",
  "exact": "exact_clusters",
  "lanes": "num_connections",
  "least_bytes": "min_bytes",
  "least_devices": "min_devices",
  "least_gain": "min_gain",
  "memory": "memory_bandwidth",
  "most_examples": "max_examples",
  "most_experts": "max_experts",
  "most_microbatches": "max_microbatches",
  "most_pieces": "max_pieces",
  "premise": "premise_clusters",
  "python": "python_path",
  "regret": "regret_clusters",
  "solved": "solved_clusters",
  "timetable": "schedule",
  "timetables": "schedules",
}
# Former place of a key -> present place, for error messages.
MOVED = {"zero.offload": "memory.moments"}


@section
class TopLevelKeys:
  """Top-level keys of a config with a model, or of a benchmark."""

  name: str = field("base", "Name of the run and of its folder in runs/.")
  seed: int = field(0, "Seed of the parameters and the order of data.", SEED)
  kernels: str = field(
    "auto", 'Implementation of norms and codecs: "pallas" (kernels on TPUs and '
    'GPUs, for supported sizes), "auto" ("pallas" except for kernels that make '
    'a model slower: parallel/kernels/evidence.py), "reference" (jnp), or '
    '"interpret" (TPU kernels, interpreted on any machine; slow).',
    ("auto", "pallas", "reference", "interpret"),
  )


@dataclasses.dataclass(frozen=True)
class Choice:
  """Alternative sections, one of which a selector chooses.

  Attributes:
    selector: The key that names the choice.
    sections: Class of the section for each choice.
    doc: Documentation of the selector.
  """

  selector: str
  sections: Mapping[str, type]
  doc: str

  @property
  def key(self) -> Key:
    """Declaration of the selector as a key."""
    return Key(str, tuple(self.sections), self.doc)


_CHOICES = {
  "model": Choice("name", MODELS, "Kind of model."),
  "outer": Choice(
    "algorithm", OUTER, "Outer loop: communication between workers."
  ),
  "data": Choice("name", DATA, "Kind of data."),
  "optimizer": Choice("name", OPTIMIZERS, "Inner optimizer."),
  "graph": Choice("source", SOURCES, "Source of the graph."),
  "benchmark": Choice("name", BENCHMARKS, "Benchmark that runs."),
}
_PLAIN_SECTIONS = {
  "sync": Sync, "parallel": Parallel, "pipeline": Pipeline, "zero": Zero,
  "memory": Memory, "train": Train, "inference": Inference, "elastic": Elastic,
  "sweep": Sweep, "kinds": Kinds, "serving": Serving, "experts": Experts,
  "federated": Federated,
}
# Sections of a config with a model.
_RUN_SECTIONS = {**_CHOICES, **_PLAIN_SECTIONS}


def choices(name: str) -> tuple[str, ...]:
  """Returns the choices of a section, such as all outer loops for "outer"."""
  return tuple(_CHOICES[name].sections)


def defaults(
  name: str | type, chosen: str = ""
) -> ml_collections.ConfigDict:
  """Returns a section with the defaults of its keys.

  Args:
    name: The section's name, or "run" for the top-level keys of a training
      config; or the class of a study for the study's whole config, or of a
      benchmark for ``config.benchmark``.
    chosen: The choice, if the named section has a selector.

  Raises:
    ValueError: If there is no such choice.

  Example:
    >>> defaults("outer", "diloco").sync_every
    30
  """
  if isinstance(name, type):
    for benchmark, cls in BENCHMARKS.items():
      if cls is name:
        return defaults("benchmark", benchmark)
    return ml_collections.ConfigDict(_defaults(name))
  if name not in _CHOICES:
    return ml_collections.ConfigDict(
      _defaults({"run": TopLevelKeys, **_PLAIN_SECTIONS}[name])
    )
  among = _CHOICES[name]
  among.key.check(f"{name}.{among.selector}", chosen)
  return ml_collections.ConfigDict(
    {among.selector: chosen, **_defaults(among.sections[chosen])}
  )


def parse_section(name: str, values: Mapping[str, Any]) -> Any:
  """Checks a section and returns it as a frozen dataclass.

  Missing keys get their defaults, since configs of older runs lack newer keys.

  Args:
    name: The section's name.
    values: The section's keys and values.

  Raises:
    ValueError: If a key is not declared, or a value is not allowed.

  Example:
    >>> section = {"algorithm": "diloco", "sync_every": 10}
    >>> parse_section("outer", section).momentum
    0.9
    >>> parse_section("sync", {"p": 1.5})
    Traceback (most recent call last):
    ValueError: config.sync.p=1.5 must lie in [0, 1]
  """
  kind = _RUN_SECTIONS[name]
  for inner, key, value in _walk(kind, values, name):
    key.check(inner, value)
  values = dict(values)
  if isinstance(kind, Choice):
    # The selector determines the class; it is not one of its fields.
    kind = kind.sections[values.pop(kind.selector)]
  return kind(**{key: _lists_to_tuples(value) for key, value in values.items()})


def upgrade_config(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a stored training config with all keys of the present version.

  Every reader of ``config.json`` calls this (`caatnet.train.records`). Keys
  that were renamed or moved since the run get their new names; missing keys
  get their defaults, which reproduce the behaviour before their introduction.

  Args:
    config: The config of a run as plain data, possibly of an older version.

  Example:
    >>> old = {"outer": {"algorithm": "local_sgd", "every": 7}}
    >>> upgrade_config(old)["outer"]["sync_every"]
    7
  """
  made = dict(config)
  if "zero" in made and "memory" not in made:
    zero = dict(made["zero"])
    moments = "pinned_host" if zero.pop("offload", False) else "device"
    made |= {"zero": zero, "memory": {"moments": moments}}
  for name, values in made.items():
    kind = _RUN_SECTIONS.get(name)
    if isinstance(kind, Choice) and isinstance(values, Mapping):
      kind = kind.sections.get(values.get(kind.selector))
    if kind is not None and isinstance(values, Mapping):
      known = _defaults(kind)
      made[name] = known | {
        _name_now(key, known, values): value for key, value in values.items()
      }
  return made


def _name_now(
  key: str, known: Mapping[str, Any], values: Mapping[str, Any]
) -> str:
  """Returns the present name of a key that may have been renamed.

  Args:
    key: The key of a stored section.
    known: The keys that the section has in the present version.
    values: The stored keys and values of the section.
  """
  new = RENAMED.get(key)
  is_old = key not in known and new in known and new not in values
  return new if is_old else key


def keys_with_values(config: Mapping[str, Any]) -> dict[str, tuple[Key, Any]]:
  """Returns the declaration and the value of every key of a config.

  Args:
    config: The config, or its sections as nested dicts.

  Raises:
    ValueError: If a key is not declared, a section is None, or a selector has
      an unknown value.
  """
  return {
    name: (key, value)
    for name, key, value in _walk(_top_level_kinds(config), config)
  }


def check(config: Mapping[str, Any]) -> None:
  """Checks all keys and values of a config.

  Args:
    config: The config, or its sections as nested dicts.

  Raises:
    ValueError: If a key is not declared or a value is not allowed; the message
      has key, value and the allowed values.
  """
  for name, key, value in _walk(_top_level_kinds(config), config):
    key.check(name, value)


def choice(name: str, values: Mapping[str, Any]) -> str:
  """Returns the value of a section's selector."""
  return values[_CHOICES[name].selector]


def apply_selectors(
  config: ml_collections.ConfigDict,
  overrides: Sequence[str],
  sections: Mapping[str, Mapping[str, Any]],
) -> None:
  """Replaces a section of a config if an override changes its selector.

  Args:
    config: The config, which is changed in place.
    overrides: Strings ``SECTION.KEY=VALUE``; only selectors are applied.
    sections: Sections to use instead of the declared defaults, by section name
      and choice.

  Raises:
    ValueError: If there is no such choice.
  """
  for override in overrides:
    key, _, chosen = override.partition("=")
    name, _, selector = key.partition(".")
    if name not in config or name not in _CHOICES:
      continue
    if selector != _CHOICES[name].selector or (
      config[name].get(selector) == chosen
    ):
      continue
    offered = sections.get(name, {})
    with config.unlocked():
      config[name] = (
        ml_collections.ConfigDict(offered[chosen]) if chosen in offered
        else defaults(name, chosen)
      )


def format_suggestion(name: str, names: Sequence[str], prefix: str = "") -> str:
  """Returns a hint at a key's new name or the most similar name; "" for none.

  Example:
    >>> format_suggestion("moment", ["momentum", "sync_every"])
    '; did you mean momentum?'
    >>> format_suggestion("every", ["momentum", "sync_every"])
    '; it is now sync_every'
  """
  config = "config." if prefix else ""
  moved = MOVED.get(f"{prefix.removeprefix(config)}{name}")
  if moved:
    return f"; it is now {config}{moved}"
  section, dot, key = name.rpartition(".")
  renamed = f"{section}{dot}{RENAMED.get(key)}"
  if renamed in names:
    return f"; it is now {prefix}{renamed}"
  near = difflib.get_close_matches(name, names, 1)
  return f"; did you mean {prefix}{near[0]}?" if near else ""


def parse_value(name: str, key: Key, text: str) -> Any:
  """Parses the value of a key in an override.

  Args:
    name: The key, preceded by its sections, for error messages.
    key: The declaration of the key.
    text: The value: text, or a Python literal for a key of another type.

  Raises:
    ValueError: If the value has another type, or is not allowed.
  """
  value: Any = text
  if key.kind is not str:  # text is not quoted on the command line
    try:
      value = ast.literal_eval(text)
    # The errors that the documentation of `literal_eval` lists.
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
      value = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"),
               "true": True, "false": False}.get(text.lower(), text)
  key.check(name, value)
  return float(value) if key.kind is float else value


def help_text(config: Mapping[str, Any]) -> str:
  """Returns the help text: value, documentation and range of every key.

  Args:
    config: The config.
  """
  lines = []
  for name, (key, value) in sorted(keys_with_values(config).items()):
    lines.append(f"--config.{name}={value!r}\n    {key.doc}")
    lines.append(f"    It must {key.must()}.")
  return "\n".join(lines)


def _defaults(cls: type) -> dict[str, Any]:
  """Returns the defaults of a section, for a ConfigDict."""
  return {name: _plain(default_of(cls, name)) for name in keys(cls)}


def _plain(value: Any) -> Any:
  """Converts sections to dicts, and None to the placeholder of a float."""
  if dataclasses.is_dataclass(value):
    return {name: _plain(getattr(value, name)) for name in keys(type(value))}
  if isinstance(value, Mapping):
    return {name: _plain(part) for name, part in value.items()}
  return config_dict.placeholder(float) if value is None else value


def _top_level_kinds(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a config's fields, sections and choices by top-level key."""
  if "study" not in config:
    return _RUN_SECTIONS | keys(TopLevelKeys)
  study, subject = config["study"], config.get("subject")
  cls = STUDIES.get(f"{study}.{subject}") or STUDIES.get(f"{study}")
  if cls is None:
    names = dict.fromkeys(name.partition(".")[0] for name in STUDIES)
    if study in names:
      subjects = [
        repr(name.partition(".")[2]) for name in STUDIES
        if name.startswith(f"{study}.")
      ]
      raise ValueError(
        f"config.subject={subject!r} must be one of {', '.join(subjects)}"
      )
    raise ValueError(
      f"config.study={study!r} must be one of "
      f"{', '.join(names) or 'the imported ones'}; a config with a study: "
      "configs/diloco/utilisation.py"
    )
  top = keys(cls)
  # A study without a key ``name`` studies the run of the other sections.
  return top if "name" in top else _RUN_SECTIONS | keys(TopLevelKeys) | top


def _walk(
  kind: Any, values: Any, prefix: str = ""
) -> Iterator[tuple[str, Key, Any]]:
  """Yields name, declaration and value of every key in a part of a config.

  Args:
    kind: Class of a section, a `Choice`, or a dict of such kinds by key.
    values: Keys and values of this part of the config.
    prefix: The part's name; "" for the whole config.
  """
  if not isinstance(values, Mapping | ml_collections.ConfigDict):
    raise ValueError(
      f"config.{prefix}={values!r} must be a section, which has keys"
    )
  joint = f"{prefix}." if prefix else ""
  because = ""
  if isinstance(kind, Choice):
    name, choice = f"{prefix}.{kind.selector}", values.get(kind.selector)
    kind.key.check(name, choice)
    yield name, kind.key, choice
    because = f" with config.{name}={choice!r}"
    selector, kind = kind.selector, kind.sections[choice]
    values = {k: values[k] for k in values if k != selector}
  known = kind if isinstance(kind, Mapping) else keys(kind)
  for name in values:
    value = _value(values, name)
    if name not in known:
      raise ValueError(
        f"config.{joint}{name}={value!r} has no effect{because}"
        f"{format_suggestion(name, list(known), f'config.{joint}')}; the keys "
        "are "
        f"{', '.join(known) or 'none'}"
      )
    yield from _walk_key(known[name], value, joint + name)


def _walk_key(
  key: Any, value: Any, name: str
) -> Iterator[tuple[str, Key, Any]]:
  """Yields name, declaration and value of a key, or of all its inner keys."""
  kind = key.kind if isinstance(key, Key) else key
  if isinstance(kind, Choice) or dataclasses.is_dataclass(kind):
    yield from _walk(kind, value, name)
  elif kind is NestedConfig:
    if value:
      for inner, found, part in _walk(_top_level_kinds(value), value):
        yield f"{name}.{inner}", found, part
  elif kind is SectionsByChoice:
    for inner, by_choice in value.items():
      if inner not in _CHOICES:
        raise ValueError(
          f"config.{name}.{inner} must be one of {', '.join(_CHOICES)}"
        )
      for choice, part in by_choice.items():
        yield from _walk(_CHOICES[inner], part, f"{name}.{inner}.{choice}")
  elif typing.get_origin(kind) is dict:
    if not isinstance(value, Mapping | ml_collections.ConfigDict):
      raise ValueError(
        f"config.{name}={value!r} must be a section, which has keys"
      )
    # All values of a dict have one type and one range.
    inner = dataclasses.replace(key, kind=typing.get_args(kind)[1])
    for part in value:
      yield from _walk_key(inner, value[part], f"{name}.{part}")
  else:
    yield name, key, value


def _value(values: Any, name: str) -> Any:
  """Returns the value of a key; None for a placeholder without a value."""
  if isinstance(values, ml_collections.ConfigDict):
    return values.get(name)
  return values[name]


def _lists_to_tuples(value: Any) -> Any:
  """Converts lists to tuples, recursively, since JSON has no tuples."""
  if isinstance(value, list | tuple):
    return tuple(_lists_to_tuples(part) for part in value)
  return value
