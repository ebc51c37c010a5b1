"""Properties of declarations: every key of every config and its section."""

import ast
import dataclasses
import importlib
import inspect
import math
import pathlib
import re
import subprocess
import sys
import typing

import ml_collections
import pytest

from caatnet.config import experiments
from caatnet.schema import fields, tree
from caatnet.schema.fields import FRACTION, Range, field, section
from caatnet.studies import registry
from configs.caatnet import tiny
from configs.collectives import multitree
from configs.graphs import source
from tests.caatnet.schema import declarations

ROOT = pathlib.Path(__file__).parents[3]


def every_config():
  """Returns all configs by module, and one per choice of each section."""
  found = {}
  for path in sorted((ROOT / "configs").glob("*/*.py")):
    if path.stem != "__init__":
      name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
      found[name] = importlib.import_module(name).get_config()
  for name in ("model", "outer", "data", "optimizer"):
    for choice in tree.choices(name):
      found[f"{name}={choice}"] = ml_collections.ConfigDict(
        {name: tree.defaults(name, choice)}
      )
  for name in tree.choices("graph"):
    found[f"graph={name}"] = source.get_config(name)
  found["serving"] = ml_collections.ConfigDict(
    {"serving": tree.defaults("serving")}
  )
  return found


CONFIGS = every_config()


def every_size():
  """Yields configs of all sizes that configs mention, and their names."""
  for name in sorted(CONFIGS):
    if name.startswith("configs."):
      module = importlib.import_module(name)
      for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
          try:
            yield f"{name}:{node.value}", module.get_config(node.value)
          except (TypeError, ValueError):  # another text than a size
            continue


def leaves(config, prefix=""):
  for key, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from leaves(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value


def numbers(kind):
  return fields._number_types(kind)


@pytest.mark.quick
def test_every_key_of_every_config_is_declared():
  count = 0
  for name, config in CONFIGS.items():
    tree.check(config)
    declared = tree.keys_with_values(config)
    # Sections of a sweep are declared under their own names.
    assert set(declared) == set(dict(leaves(config))), name
    for key, _ in declared.values():
      assert key.doc.strip(), name
      assert key.must(), name
      count += bool(numbers(key.kind))
  assert count > 500


def test_unknown_sizes_of_configs_are_refused():
  count = 0
  for name in sorted(CONFIGS):
    if name.startswith("configs."):
      build = importlib.import_module(name).get_config
      if inspect.signature(build).parameters:
        count += 1
        with pytest.raises(ValueError, match="foo") as error:
          build("foo")
        assert "\n" not in str(error.value)
  assert count > 50


def test_sizes_of_configs_have_allowed_values():
  names = set()
  for name, config in every_size():
    tree.check(config)
    names.add(name)
  assert {"configs.serving.composition:figures", "configs.benchmark.ring:links",
          "configs.benchmark.peers:135m"} <= names


@pytest.mark.quick
def test_defaults_and_ranges_are_those_of_earlier_runs():
  """`declarations` writes the file anew; keys that it lacks are new."""
  listed = declarations.FILE.read_text().splitlines()
  assert set(listed) - set(declarations.lines()) == set()


def right(kind, allowed):
  """Returns values that a declaration allows, bounds among them."""
  parts = typing.get_args(kind)
  if kind is bool:
    return [True, False]
  if kind is type(None):
    return [None]
  if kind is str:
    return list(allowed) if isinstance(allowed, tuple) else ["any text"]
  if kind in (int, float):
    high = allowed.high if math.isfinite(allowed.high) else 1e30
    if kind is int:
      return [allowed.low, high]
    bounds = [] if allowed.above else [allowed.low]
    return [*bounds, *([] if allowed.below else [high]),
            (max(allowed.low, -1e30) + high) / 2]
  if typing.get_origin(kind) is dict:
    return [{}, *({"a": part} for part in right(parts[1], allowed))]
  if typing.get_origin(kind) is not tuple:
    return [value for part in parts for value in right(part, allowed)]
  if parts[-1] is Ellipsis:
    found = right(parts[0], allowed)
    return [*((value,) for value in found), [*found]]
  return [tuple(right(part, allowed)[0] for part in parts)]


def wrong(kind, allowed):
  """Returns values of other types, and those just outside of the range."""
  parts = typing.get_args(kind)
  if kind is bool:
    return [0, 1, "True", None]
  if kind is type(None):
    return []
  if kind is str:
    names = [""] if isinstance(allowed, tuple) and "" not in allowed else []
    unknown = ["no such name"] if isinstance(allowed, tuple) else []
    return [*names, *unknown, None, 1, True, ("a",)]
  if kind in (int, float):
    found = [math.nan, math.inf, -math.inf, 1e39, 10**400, True, None, b"1",
             "1", [None]]
    if kind is int:
      return [*found, allowed.low - 1, allowed.high + 1, allowed.low + 0.5]
    # Values that float32 rounds to a bound, and subnormal ones, are that bound.
    low, high = allowed.low, allowed.high
    found += [low, low + 1e-38] if allowed.above else [
      low - abs(low) * 1e-6 - 1e-37
    ]
    if math.isfinite(high):
      found += [high, high * (1 - 1e-9)] if allowed.below else [
        high + abs(high) * 1e-6
      ]
    return found
  if typing.get_origin(kind) is dict:
    return [["a"], *({"a": part} for part in wrong(parts[1], allowed))]
  if typing.get_origin(kind) is not tuple:
    others = {int: (int, float), float: (int, float)}
    known = [t for part in parts for t in others.get(part, (part,))]
    return [
      value for part in parts for value in wrong(part, allowed)
      if type(value) not in {*known} - {*others.get(part, (part,))}
    ]
  if parts[-1] is Ellipsis:
    first = right(parts[0], allowed)[0]
    return [3, "a", None] + [
      value for part in wrong(parts[0], allowed)
      for value in ((part,), (first, part))
    ]
  good = right(kind, allowed)[0]
  return [(), (1,), (*good, 1), None] + [
    (*good[:i], value, *good[i + 1:])
    for i, part in enumerate(parts) for value in wrong(part, allowed)
  ]


def check_refusals(place, key):
  """By one line with the key, the value or its part, and what is allowed."""
  for value in right(key.kind, key.allowed):
    key.check(place, value)
  for value in wrong(key.kind, key.allowed) + ([] if key.empty else [(), []]):
    with pytest.raises(ValueError) as error:
      key.check(place, value)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"config.{place}="), message
    given, must = message.removeprefix(f"config.{place}=").split(" must ", 1)
    assert given in repr(value)
    assert must in key.must()


# Key and declaration -> the first config that has it.
FIRST = {
  (place, key): name for name, config in sorted(CONFIGS.items(), reverse=True)
  for place, (key, _) in tree.keys_with_values(config).items()
}


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted({*FIRST.values()}))
def test_values_outside_of_declarations_are_refused(name):
  config = CONFIGS[name].to_dict()
  for place, (key, value) in tree.keys_with_values(config).items():
    if FIRST[place, key] != name:
      continue
    check_refusals(place, key)
    *path, last = place.split(".")
    part = config
    for section_name in path:
      part = part[section_name]
    part[last] = wrong(key.kind, key.allowed)[0]
    with pytest.raises(ValueError, match=rf"config\..*{re.escape(last)}="):
      tree.check(config)
    part[last] = value


@section
class Toy:
  """Section with a key of each type."""

  rate: float = field(0.5, "A rate.", FRACTION)
  sizes: tuple[int, ...] = field((1,), "Sizes.", Range(1, 9, whole=True))
  others: tuple[int, ...] = field(
    (1,), "Sizes; () for none.", Range(1, 9, whole=True), empty=True
  )
  pair: tuple[int, int] = field((1, 2), "A pair.", Range(0, 9, whole=True))
  kind: str = field("a", "A kind.", ("a", "b"))
  text: str = field("", "A text.")
  flag: bool = field(False, "A flag.")
  mixed: tuple[str | float, ...] = field((), "Texts and numbers.", FRACTION)
  table: tuple[dict[str, int], ...] = field(
    (), "Records.", Range(0, 9, whole=True)
  )
  unset: float | None = field(None, "A number, or none.", FRACTION)


@pytest.mark.quick
def test_types_and_ranges_are_described():
  count = "must be an integer from"
  musts = {
    "rate": "lie in [0, 1]",
    "sizes": f"be a non-empty tuple, each part of which {count} 1 to 9",
    "others": f"be a tuple, each part of which {count} 1 to 9",
    "pair": f"be a tuple of 2, each part of which {count} 0 to 9",
    "kind": "be one of 'a', 'b'", "text": "be text",
    "flag": "be True or False",
    "mixed": "be a tuple, each part of which must be text or lie in [0, 1]",
    "table": "be a tuple, each part of which must be a dict, each value of "
    f"which {count} 0 to 9",
    "unset": "lie in [0, 1] or be None",
  }
  found = fields.keys(Toy)
  assert {name: key.must() for name, key in found.items()} == musts
  for name, key in found.items():
    check_refusals(f"toy.{name}", key)


def test_declaration_needs_documentation_and_a_range_of_its_type():
  class Undocumented:
    width: int = field(1, "", Range(1, 9, whole=True))

  class Boundless:
    width: int = field(1, "Width.")

  class OfFloats:
    width: int = field(1, "Width.", FRACTION)

  for cls in (Undocumented, Boundless, OfFloats):
    with pytest.raises(TypeError, match=f"{cls.__name__}.width has no "):
      section(cls)


@pytest.mark.quick
def test_equal_names_in_two_sections_have_their_own_ranges(monkeypatch):
  """The pull of a new loop does not inherit NoLoCo's range."""

  @section
  class Elastic:
    """Loop with a pull of any strength."""

    pull: float = field(3.0, "Pull.", Range(0, 5))

  loops = dict(tree._CHOICES["outer"].sections) | {"easgd": Elastic}
  monkeypatch.setitem(
    tree._CHOICES, "outer",
    dataclasses.replace(tree._CHOICES["outer"], sections=loops),
  )
  monkeypatch.setitem(tree._RUN_SECTIONS, "outer", tree._CHOICES["outer"])
  for name, pull, ok in (
    ("easgd", 3.0, True), ("easgd", 5.1, False), ("noloco", 3.0, False),
    ("noloco", 1.9, True),
  ):
    config = {"outer": tree.defaults("outer", name).to_dict() | {"pull": pull}}
    if ok:
      tree.check(config)
      continue
    high = {"easgd": "5]", "noloco": "2)"}[name]
    with pytest.raises(ValueError) as error:
      tree.check(config)
    message = f"config.outer.pull={pull} must lie in [0, {high}"
    assert str(error.value) == message


@pytest.mark.quick
@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"sync": None}, "config.sync=None must be a section"),
    ({"model": None}, "config.model=None must be a section"),
    ({"sync": {"pp": 1.0}}, "did you mean config.sync.p"),
    ({"snc": {"p": 1.0}}, "did you mean config.sync"),
    ({"outer": {"algorithm": "diloco", "sync_evry": 3}},
     "with config.outer.algorithm='diloco'; did you mean config.outer.sync_"),
    ({"outer": {"algorithm": "x"}},
     "config.outer.algorithm='x' must be one of"),
    ({"study": "x"}, "config.study='x' must be one of alignment, coll"),
    ({"study": "serving", "subject": "x"},
     "config.subject='x' must be one of 'composition', 'fairness', 'fast"),
  ],
)
def test_undeclared_key_or_section_is_an_error(changes, message):
  config = tiny.get_config("test").to_dict() | changes
  with pytest.raises(ValueError) as error:
    tree.check(config)
  assert message in str(error.value)


def test_missing_keys_have_their_defaults():
  """Loads the config of an older run."""
  values = {"algorithm": "diloco", "sync_every": 7}
  made = tree.parse_section("outer", values)
  assert (made.sync_every, made.learning_rate) == (7, 0.7)
  nested = tree.parse_section("memory", {"tiers": [["0", 0.5], ["1", 0.5]]})
  assert nested.tiers == (("0", 0.5), ("1", 0.5))
  old = {"outer": values, "name": "old"}
  assert tree.upgrade_config(old) == {
    "outer": tree.defaults("outer", "diloco").to_dict() | values, "name": "old"
  }


def test_older_names_of_keys_are_translated_in_every_section():
  found = set()
  sections = [(name, {}, cls) for name, cls in tree._PLAIN_SECTIONS.items()]
  for name, among in tree._CHOICES.items():
    sections += [
      (name, {among.selector: choice}, cls)
      for choice, cls in among.sections.items()
    ]
  for name, selected, cls in sections:
    for old, new in tree.RENAMED.items():
      if new in fields.keys(cls):
        made = tree.upgrade_config({name: selected | {old: 12345}})[name]
        assert made[new] == 12345
        assert old not in made
        found.add(f"{name}.{old}")
        both = tree.upgrade_config({name: selected | {old: 1, new: 2}})[name]
        assert both[old] == 1  # which `check` refuses
  assert {"outer.every", "pipeline.timetable", "elastic.lanes"} <= found


@pytest.mark.parametrize(("older", "moments"), [
  ({"zero": {"offload": True}}, "pinned_host"),
  ({"zero": {"offload": False}}, "device"), ({"zero": {}}, "device"),
  ({"zero": {}, "memory": {"moments": "pinned_host"}}, "pinned_host"),
])
def test_offloaded_moments_of_older_runs_are_in_the_section_memory(
  older, moments
):
  made = tree.upgrade_config(older)
  assert made["memory"]["moments"] == moments
  tree.check(made)
  with pytest.raises(ValueError, match=r"it is now config\.memory\.moments;"):
    tree.check({"zero": {"offload": True}})
  assert tree.format_suggestion(
    "zero.offload", []
  ) == "; it is now memory.moments"


@pytest.mark.quick
@pytest.mark.parametrize(("name", "text", "value"), [
  ("flag", "true", True), ("flag", "FALSE", False), ("rate", "1", 1.0),
  ("rate", "1e-2", 0.01), ("text", "1", "1"), ("pair", "[3, 0]", [3, 0]),
])
def test_override_has_the_type_of_its_key(name, text, value):
  found = tree.parse_value(f"toy.{name}", fields.keys(Toy)[name], text)
  assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_help_lists_each_key_once(name):
  text = tree.help_text(CONFIGS[name])
  keys = [
    line.partition("=")[0].removeprefix("--config.")
    for line in text.splitlines() if line.startswith("--config.")
  ]
  assert keys == sorted(dict(leaves(CONFIGS[name])))


def test_help_has_value_documentation_and_range():
  assert tree.help_text({"sync": {"route": "ring", "p": 0.5}}).startswith(
    "--config.sync.p=0.5\n    Fraction of the residual stream's channels "
    "that tensor ranks sum.\n"
    "    It must lie in [0, 1].\n--config.sync.route='ring"
  )


@pytest.mark.parametrize(
  ("enter", "config", "key", "message"),
  [
    (experiments.build, tiny.get_config("test"), "optimizer.clip_norm",
     "config.optimizer.clip_norm=-1.0 must be at least 0 and finite (float32)"),
    (registry.find, multitree.get_config("test"), "pieces",
     "config.pieces=-1 must be an integer from 0 to 2147483647"),
  ],
)
def test_number_out_of_range_is_refused_before_building(
  enter, config, key, message
):
  *path, last = key.split(".")
  part = config
  for name in path:
    part = part[name]
  part[last] = type(part[last])(-1)
  with pytest.raises(ValueError) as error:
    enter(config)
  assert str(error.value) == message


def test_declarations_load_no_jax():
  code = (
    "import sys, caatnet.schema.tree; "
    "assert not {'jax', 'flax', 'optax'} & set(sys.modules)"
  )
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_type_hints_of_all_sections_resolve():
  for name in ("outer", "model", "data", "optimizer", "graph", "benchmark"):
    for choice in tree._CHOICES[name].sections.values():
      assert set(typing.get_type_hints(choice)) == set(fields.keys(choice))
