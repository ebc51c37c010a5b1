"""Laws of configs: a key does something, or it is an error that names it."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import pytest

from caatnet.config import experiments
from caatnet.config import sections as builders
from caatnet.config.data import DATA
from caatnet.config.model import MODELS
from caatnet.config.optimizer import OPTIMIZERS
from caatnet.config.outer import OUTER
from caatnet.config.override import override
from caatnet.config.sync import build_sync
from caatnet.config.zero import build_zero
from caatnet.train.experiment import TrainOptions
from configs import sections
from configs.caatnet import tiny
from parallel.outer.optimizers import Optax

# Every section that configs offer, its selector, and what reads it.
SECTIONS = [
  *((sections.outer(name), "algorithm", OUTER[name]) for name in OUTER),
  (sections.adamw(), "name", OPTIMIZERS["adamw"]),
  (sections.sgd(), "name", OPTIMIZERS["sgd"]),
  (sections.transformer(), "name", MODELS["transformer"]),
  (sections.convolutional(), "name", MODELS["convolutional"]),
  (sections.text(), "name", DATA["text"]),
  (sections.images(), "name", DATA["images"]),
  (sections.sync(), None, build_sync),
  (sections.zero(), None, build_zero),
  (sections.train(), None, TrainOptions),
]


def build(overrides="", **changes):
  config = override(tiny.get_config("test"), overrides, sections.choices())
  with config.unlocked():
    for section, keys in changes.items():
      config[section].update(keys)
  return experiments.build(config)


@pytest.mark.quick
@pytest.mark.parametrize(("section", "selector", "builder"), SECTIONS)
def test_a_section_has_the_keys_of_its_builder(section, selector, builder):
  keys = set(section.keys()) - {selector}
  assert keys == set(builders.keys_of(builder))
  if selector:
    assert section[selector]


@pytest.mark.quick
def test_every_choice_has_a_section():
  choices = sections.choices()
  assert set(choices.outer) == set(OUTER) == set(sections.OUTER)
  assert set(choices.optimizer) == set(OPTIMIZERS)


@pytest.mark.quick
@pytest.mark.parametrize(
  ("overrides", "changes", "message"),
  [
    ("", {"outer": {"every": 3}},
     "config.outer.every=3 has no effect with config.outer.algorithm='data_p"),
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
    ("", {"outer": {"algorithm": "diloco"}},
     "config.outer lacks .*every with config.outer.algorithm='diloco'"),
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
def test_a_key_that_does_nothing_is_an_error(overrides, changes, message):
  with pytest.raises(ValueError, match=message):
    build(overrides, **changes)


@pytest.mark.quick
@pytest.mark.parametrize("algorithm", OUTER)
def test_a_key_of_another_outer_loop_is_an_error(algorithm):
  own = dict(sections.outer(algorithm))
  every = {k: v for name in OUTER for k, v in sections.outer(name).items()}
  assert set(every) > set(own)
  for key in set(every) - set(own):
    section = own | {key: every[key]}
    with pytest.raises(ValueError, match=f"config.outer.{key}=.* has no effec"):
      builders.choose("outer", "algorithm", OUTER, section, None, 0)


# With these values all keys of outer loops have an effect; and others for each.
BASE = {"codec": "int8", "overlap": (4,), "every": 10}
CHANGED = {
  "optimizer": "adam", "codec": "int4", "block": 64, "route": "all_to_all",
  "weights": (1.0, 3.0), "clients": 1, "pattern": "sequential",
  "overlap": (3,), "top_k": 32,
}


@functools.cache
def two_workers():
  return build("parallel.worker=2 parallel.tensor=4").program


def described(value):
  """All that an outer loop is made of, as text without addresses."""
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
  section = dict(sections.outer(algorithm))
  section |= {k: v for k, v in (BASE | changes).items() if k in section}

  def outer(**changes):
    return described(builders.choose(
      "outer", "algorithm", OUTER, section | changes, two_workers(), 0
    ))

  before = outer()
  assert outer() == before
  for key in set(section) - {"algorithm"} - set(changes):
    value = section[key]
    other = not value if isinstance(value, bool) else CHANGED.get(key)
    if other is None:
      other = value * 2 if isinstance(value, int) else (value + 2) / 4
    assert outer(**{key: other}) != before, key


def test_a_section_that_does_nothing_is_an_error():
  config = tiny.get_config("test")
  config.recommend = {"link": "wifi_6"}
  with pytest.raises(ValueError, match=r"config\.recommend has no effect"):
    experiments.build(config)
  config = tiny.get_config("test")
  del config.zero
  with pytest.raises(ValueError, match=r"config\.zero is missing"):
    experiments.build(config)


def test_a_choice_brings_its_section_along():
  """Before all other keys, wherever it stands."""
  config = override(
    tiny.get_config("test"), "outer.every=7 outer.algorithm=eager",
    sections.choices(),
  )
  assert config.outer.algorithm == "eager"
  assert config.outer.every == 7
  assert tiny.get_config("test").outer.algorithm == "data_parallel"
  with pytest.raises(ValueError, match="has a section of its own; here there"):
    override(tiny.get_config("test"), "outer.algorithm=eager")
