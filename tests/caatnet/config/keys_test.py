"""Properties of config keys: each has an effect, or is an error."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import pytest

from caatnet.config import experiments, sections
from caatnet.config.data import DATA
from caatnet.config.graph import SOURCES
from caatnet.config.model import MODELS
from caatnet.config.optimizer import OPTIMIZERS
from caatnet.config.outer import OUTER
from caatnet.config.override import override
from caatnet.schema import tree
from configs.caatnet import tiny
from parallel.outer.optimizers import Optax


def build(overrides="", **changes):
  config = override(tiny.get_config("test"), overrides)
  with config.unlocked():
    for section, keys in changes.items():
      config[section].update(keys)
  return experiments.build(config)


@pytest.mark.quick
@pytest.mark.parametrize(
  ("name", "builders"),
  [("outer", OUTER), ("optimizer", OPTIMIZERS), ("model", MODELS),
   ("data", DATA), ("graph", SOURCES)],
)
def test_every_declared_choice_has_a_builder(name, builders):
  assert tree.choices(name) == tuple(builders)


@pytest.mark.quick
@pytest.mark.parametrize(
  ("overrides", "changes", "message"),
  [
    ("", {"outer": {"sync_every": 3}},
     "config.outer.sync_every=3 has no effect with config.outer.algorithm="),
    ("outer.algorithm=diloco", {"outer": {"keep": 0.5}},
     "config.outer.keep=0.5 has no effect with config.outer.algorithm='diloco"),
    ("outer.algorithm=noloco", {"outer": {"codec": "int8"}},
     "config.outer.codec='int8' has no effect"),
    ("optimizer.name=sgd optimizer.warmup_steps=2",
     {"optimizer": {"beta_2": 0.9}},
     "config.optimizer.beta_2=0.9 has no effect with config.optimizer.name='s"),
    ("", {"data": {"num_classes": 10}},
     "config.data.num_classes=10 has no effect with config.data.name='text'"),
    ("", {"model": {"p": 0.5}}, "config.model.p=0.5 has no effect"),
    ("", {"sync": {"q": 0.5}}, "config.sync.q=0.5 has no effect"),
    ("", {"train": {"epochs": 2}}, "config.train.epochs=2 has no effect"),
    ("outer.algorithm=diloco outer.block=64", {},
     "config.outer.block=64 has no effect with config.outer.codec='float32'"),
    ("outer.algorithm=diloco outer.error_feedback=True", {},
     "config.outer.error_feedback=True has no effect with config.outer.codec"),
    ("outer.algorithm=diloco outer.optimizer=sgd", {},
     "config.outer.momentum=0.9 has no effect with config.outer.optimizer"),
    ("zero.block=64", {}, "config.zero.block=64 has no effect"),
    ("sync.topology=ring", {}, "config.sync.topology='ring' has no effect"),
    ("sync.carry=on", {}, "config.sync.carry='on' has no effect"),
    ("sync.p=0.5 sync.p_mlp=(1.0,) sync.p_attention=(1.0,)", {},
     "config.sync.p=0.5 has no effect"),
  ],
)
def test_key_without_effect_is_an_error(overrides, changes, message):
  with pytest.raises(ValueError, match=message):
    build(overrides, **changes)


@pytest.mark.quick
@pytest.mark.parametrize("algorithm", OUTER)
def test_key_of_another_outer_loop_is_an_error(algorithm):
  own = dict(tree.defaults("outer", algorithm))
  every = {}
  for name in OUTER:
    every |= tree.defaults("outer", name).to_dict()
  assert set(every) > set(own)
  for key in set(every) - set(own):
    section = own | {key: every[key]}
    with pytest.raises(ValueError, match=f"config.outer.{key}=.* has no effec"):
      sections.build_selected("outer", OUTER, section, None, 0)


# Values with which all keys of outer loops have an effect; others for each key.
BASE = {"codec": "int8", "overlap": (4,), "sync_every": 10}
CHANGED = {
  "optimizer": "adam", "codec": "int4", "block": 64, "route": "all_to_all",
  "weights": (1.0, 3.0), "clients": 1, "pattern": "sequential",
  "overlap": (3,), "top_k": 32,
}


@functools.cache
def two_workers():
  return build("parallel.worker=2 parallel.tensor=4").program


def described(value):
  """Returns all attributes of an outer loop as text without addresses."""
  if isinstance(value, Optax):  # closures: described by two of its steps
    optimizer, steps = value.optimizer, []
    state = optimizer.init(jnp.zeros(()))
    for gradient in (1.0, -0.25):
      step, state = optimizer.update(jnp.float32(gradient), state)
      steps.append(float(step))
    return str(steps)
  if dataclasses.is_dataclass(value):
    return type(value).__name__ + str({
      field.name: described(getattr(value, field.name))
      for field in dataclasses.fields(value)
    })
  return re.sub(" at 0x[0-9a-f]+", "", repr(value))


@pytest.mark.parametrize(
  ("algorithm", "changes"),
  [*((name, {}) for name in OUTER), ("diloco", {"optimizer": "adam"})],
)
def test_every_key_of_an_outer_loop_changes_it(algorithm, changes):
  section = dict(tree.defaults("outer", algorithm))
  section |= {k: v for k, v in (BASE | changes).items() if k in section}

  def outer(**changes):
    return described(sections.build_selected(
      "outer", OUTER, section | changes, two_workers(), 0
    ))

  before = outer()
  assert outer() == before
  for key in set(section) - {"algorithm"} - set(changes):
    value = section[key]
    other = not value if isinstance(value, bool) else CHANGED.get(key)
    if other is None:
      other = value * 2 if isinstance(value, int) else (value + 2) / 4
    assert outer(**{key: other}) != before, key


def test_section_without_effect_is_an_error():
  config = tiny.get_config("test")
  config.recommend = {"link": "wifi_6"}
  with pytest.raises(ValueError, match=r"config\.recommend has no effect"):
    experiments.build(config)
  config = tiny.get_config("test")
  del config.zero
  with pytest.raises(ValueError, match=r"config\.zero is missing"):
    experiments.build(config)


@pytest.mark.parametrize("overrides", [
  "outer.sync_every=7 outer.algorithm=eager",
  "outer.algorithm=eager outer.sync_every=7",
])
def test_selector_replaces_its_section_before_other_overrides(overrides):
  config = override(tiny.get_config("test"), overrides)
  assert config.outer.sync_every == 7
  config.outer.sync_every = tree.defaults("outer", "eager").sync_every
  assert config.outer == tree.defaults("outer", "eager")
  assert tiny.get_config("test").outer.algorithm == "data_parallel"


def test_selector_with_the_current_value_changes_nothing():
  config = override(tiny.get_config("test"), "outer.algorithm=diloco")
  config.outer.sync_every = 3
  assert override(config, "outer.algorithm=diloco").outer.sync_every == 3


def test_selector_resets_keys_that_both_sections_have():
  config = override(
    tiny.get_config("test"), "outer.algorithm=diloco outer.learning_rate=0.1"
  )
  assert override(config, "outer.algorithm=noloco").outer.learning_rate == 0.7


def test_sweep_may_declare_sections_per_choice():
  own = {"outer": {"diloco": tree.defaults("outer", "diloco")}}
  own["outer"]["diloco"].momentum = 0.3
  config = override(tiny.get_config("test"), "outer.algorithm=diloco", own)
  assert config.outer.momentum == 0.3


@pytest.mark.parametrize(("overrides", "unit"), [
  ("data.batch_size=6 train.accumulation=4", 4),
  ("data.batch_size=4 parallel.worker=3", 3),
  ("data.batch_size=6 parallel.worker=2 train.accumulation=2", 4),
])
def test_ranks_and_microbatches_divide_the_batch(overrides, unit):
  with pytest.raises(ValueError, match=rf"must be a multiple of .* = {unit}$"):
    build(overrides)
