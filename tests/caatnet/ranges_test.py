"""Laws of ranges: no number of any config trains outside of its range."""

import dataclasses
import importlib
import math
import pathlib

import pytest

from caatnet import ranges
from caatnet.config import experiments
from caatnet.serving import options as serving_options
from caatnet.studies import registry
from configs import sections
from configs.caatnet import tiny
from configs.collectives import multitree
from configs.graphs import source

ROOT = pathlib.Path(__file__).parents[2]
# Numbers that have no range, with the reason.
FREE = {
  "model.rope_scaling": "`positions.parse_scaling` checks its numbers",
  "planner.why_not": "texts, of which there are none by default",
}
# Keys whose defaults are integers and other values need not be.
MEANS = {"recommend.bits": "codes may have a fraction of a bit on average"}


def leaves(config, prefix=""):
  """All values of a config by their keys, but for what sweeps put in place."""
  found = {}
  for key, value in config.items():
    if not hasattr(value, "items"):
      found[prefix + key] = value
    elif key != "sections":
      found |= leaves(value, f"{prefix}{key}.")
  return found


def parts(value):
  if isinstance(value, tuple):
    return [p for part in value for p in parts(part)]
  return [value]


def numeric_keys():
  """Every key with a number of every config and every choice, and its value."""
  configs = [
    importlib.import_module(
      ".".join(path.relative_to(ROOT).with_suffix("").parts)
    ).get_config()
    for path in sorted((ROOT / "configs").glob("*/*.py"))
    if path.stem != "__init__"
  ]
  configs += [source.get_config("communities")]
  for section, choices in sections.choices().items():
    configs += [{section: choice} for choice in choices.values()]
  configs += [{"model": sections.transformer()},
              {"model": sections.convolutional()},
              {"serving": dataclasses.asdict(serving_options.DEFAULTS)}]
  found = {}
  for config in configs:
    for key, value in leaves(config).items():
      # Empty tuples are of numbers that are not given.
      if value == () or any(
        isinstance(part, int | float) and not isinstance(part, bool)
        for part in parts(value)
      ):
        found[key] = value
  return found


KEYS = numeric_keys()


def nested(key, value):
  """``{"a": {"b": value}}`` for the key "a.b"."""
  for name in reversed(key.split(".")):
    value = {name: value}
  return value


def test_every_number_has_a_range_and_every_range_a_number():
  assert len(KEYS) > 80
  assert set(ranges.RANGES).isdisjoint(FREE)
  named = {ranges.general(key) for key in KEYS}
  assert named - set(FREE) == set(ranges.RANGES)


@pytest.mark.quick
@pytest.mark.parametrize("key", sorted(set(KEYS) - set(FREE)))
def test_no_number_is_negative_infinite_or_no_number(key):
  value = KEYS[key]
  ranges.check(nested(key, value))
  wrong = [math.nan, math.inf, -math.inf, -1, -1e-9, None, True, "1"]
  if value != () and key not in MEANS and all(
    isinstance(part, int) for part in parts(value)
  ):
    wrong += [0.5, 10**30]
  for number in wrong:
    bad = (number,) if isinstance(value, tuple) else number
    with pytest.raises(ValueError) as error:
      ranges.check(nested(key, bad))
    message = str(error.value)
    assert message.startswith(f"config.{key}={number!r} must "), message
    assert "\n" not in message


# Each with what trained before there were ranges, or is at a bound.
BOUNDS = [
  ("seed", [0, 2**32 - 1], [2**32]),
  ("model.width", [1], [0, 2**31]),
  ("model.rope_base", [1, 1e6], [0, 0.5, 1e39, 10**400]),
  ("model.norm_eps", [1e-12], [0, 1e-50]),
  ("model.init_std", [1e-3], [0]),
  ("sync.p", [0, 1], [1.5]),
  ("sync.p_mlp", [(), (0.0, 1.0)], [(0.5, 1.5)]),
  ("parallel.worker", [1], [0]),
  ("outer.every", [1], [0]),
  ("outer.learning_rate", [1.5], [0]),
  ("outer.momentum", [0, 0.999], [1, 1.5]),
  ("outer.keep", [0, 1], [1.01]),
  ("outer.weights", [(), (0.5, 3)], [(1, 0)]),
  ("outer.compensation", [0, 2], []),
  ("outer.error_decay", [0, 1], [1.1]),
  ("outer.pull", [0, 1.9], [2]),
  ("data.validation_percent", [0.1, 99.9], [0, 100]),
  ("data.shape", [(8, 8, 1)], [(8, 0, 1)]),
  ("optimizer.learning_rate", [10], [0]),
  ("optimizer.warmup_steps", [0], []),
  ("optimizer.final_fraction", [0, 1], [1.5]),
  ("optimizer.beta_1", [0, 0.999], [1, 1.5]),
  ("optimizer.beta_2", [0, 0.999], [1, 1.5, 1 - 1e-9]),
  ("optimizer.eps", [1e-16, 2e-38], [0, 1e-38]),
  ("optimizer.weight_decay", [0, 1], []),
  ("optimizer.clip_norm", [0, 100], []),
  ("optimizer.momentum", [0, 0.999], [1, 1.5]),
  ("train.num_steps", [1], [0]),
  ("failed_uplinks", [(), ((0, 1),)], [((0, -1),)]),
  ("utilisation", [1], [0, 1.1]),
  ("recommend.target", [0.999], [0, 1]),
  ("arms.mine.growth", [1], [0]),
  ("clients.mine.rate", [0, 2.5], []),
]


@pytest.mark.quick
@pytest.mark.parametrize(("key", "inside", "outside"), BOUNDS)
def test_bounds(key, inside, outside):
  for value in inside:
    ranges.check(nested(key, value))
  for value in outside:
    with pytest.raises(ValueError, match=f"config.{key}=.* must "):
      ranges.check(nested(key, value))


@pytest.mark.parametrize(
  ("enter", "config", "key", "message"),
  [
    (experiments.build, tiny.get_config("test"), "optimizer.clip_norm",
     "config.optimizer.clip_norm=-1.0 must be at least 0 and finite (float32)"),
    (registry.find, multitree.get_config("test"), "pieces",
     "config.pieces=-1 must be an integer from 0 to 2147483647"),
  ],
)
def test_nothing_is_built_of_a_number_out_of_its_range(
  enter, config, key, message
):
  *path, last = key.split(".")
  section = config
  for name in path:
    section = section[name]
  section[last] = type(section[last])(-1)
  with pytest.raises(ValueError) as error:
    enter(config)
  assert str(error.value) == message
