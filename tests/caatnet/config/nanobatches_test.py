"""Values of ``config.inference.nanobatches``."""

import pytest

from caatnet.config import inference, nanobatches
from caatnet.config.override import override
from configs.caatnet import tiny
from configs.recurrent import tiny as recurrent
from parallel.network.inference import machine
from tests.caatnet.models.nanobatches_test import make_batch

ON_TWO = "parallel.tensor=2 inference.batch=8 inference.nanobatches="


def build(value, make=tiny.get_config):
  config = override(make(), ON_TWO + value)
  return inference.build(config, {"tensor": 2})


def test_step_with_fewer_tokens_than_pieces_is_one_batch():
  cuts = build("3").nanobatches
  assert cuts.ordered  # on CPUs
  assert cuts.sizes(make_batch(8, 0, 0)) == (3, 3, 2)
  assert cuts.sizes(make_batch(2, 0, 0)) == (2,)


def test_nothing_is_cut_by_default_and_planned_for_cpus():
  assert build("1").nanobatches is None
  assert build("plan").nanobatches is None


@pytest.mark.parametrize("name", ["gpu:h200:1x8", "tpu:v5p:2x2x2"])
def test_plan_cuts_all_tokens_of_a_step(name):
  """Sizes of a small model, whose plan is one batch."""
  program = build("2").program
  batch = make_batch(8, 2, 30)
  sizes = nanobatches._planned(machine(name), program, 16, batch)
  assert tuple(sizes) == (68,)


@pytest.mark.parametrize(("value", "message"), [
  ("9", "9 nano-batches are more than the 8 tokens .*inference.batch=8$"),
  ("0", "'0' must be a number from 1 or 'plan'"),
  ("most", "'most' must be a number from 1 or 'plan'"),
])
def test_wrong_value_is_one_line(value, message):
  with pytest.raises(ValueError, match=message) as error:
    build(value)
  assert "\n" not in str(error.value)


def test_model_with_states_is_not_cut():
  with pytest.raises(ValueError, match="not those with a state per sequence"):
    build("2", recurrent.get_config)
