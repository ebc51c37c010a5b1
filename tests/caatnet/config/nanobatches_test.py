"""Values of ``config.inference.nanobatches``."""

import types

import pytest

from caatnet.config import inference, nanobatches
from caatnet.config.override import override
from configs.caatnet import tiny
from configs.recurrent import tiny as recurrent
from parallel.plans.nanobatches import nanobatch, nanobatch_costs
from parallel.plans.nanobatches.nanobatch import Reduction
from parallel.plans.nanobatches.nanobatch_costs import LLAMA_2_70B
from parallel.plans.network.inference import machine
from parallel.tensor.partial_sync import PartialSync
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
  sizes = nanobatches._planned_sizes(machine(name), program, 16, batch)
  assert tuple(sizes) == (68,)


def test_plan_is_that_of_the_sums_and_the_context_of_a_step():
  """Compares Llama 2 70B on PCI Express with plans of given costs."""
  pcie, batch = machine("gpu:a100-pcie:1x8"), make_batch(256, 1, 1792)
  plans = []
  for p, dtype, bits, context in (
    (1.0, None, 16, 1024), (0.5, None, 16, 1024), (0.5, "float32", 32, 1024),
    (0.5, None, 16, 8192),
  ):
    sync = PartialSync(p=p, forward_dtype=dtype)
    program = types.SimpleNamespace(model=types.SimpleNamespace(
      config=types.SimpleNamespace(
        syncs=((sync, sync),), dtype="bfloat16", workload=LLAMA_2_70B
      )
    ))
    found = nanobatches._planned_sizes(pcie, program, context, batch)
    costs = nanobatch_costs.layer_costs(
      "m", LLAMA_2_70B, nanobatch_costs.profiles()["a100", 8], pcie,
      nanobatch_costs.TokenMix(256, context, 1792, context / 2),
      [Reduction(p=p, bits=bits)],
    )
    assert found == nanobatch.plan(costs, 2048).sizes
    plans.append(found)
  assert len(set(plans)) == 3  # half of the channels in twice the bits


def planned(name, devices, lanes=1):
  """Cuts of a plan on accelerators."""
  tensor = types.SimpleNamespace(
    devices=devices, lanes=lanes, size=devices * lanes
  )
  program = types.SimpleNamespace(
    layout=types.SimpleNamespace(on_cpu=False, tensor=tensor)
  )
  shape = types.SimpleNamespace(states=(), page_size=16)
  return nanobatches.build("plan", name, program, shape, 8)


def test_plan_needs_the_machine_of_the_mesh():
  assert planned("", 1) is None  # no reductions
  assert not planned("gpu:h200:1x4", 4).ordered
  for name, devices, lanes, message in (
    ("", 4, 1, "needs config.inference.machine"),
    ("gpu:h900:1x4", 4, 1, "config.inference.machine: .*h900"),
    ("gpu:h200:1x8", 4, 1, "has 8 devices, but 4 tensor ranks are on 4"),
    ("gpu:h200:1x4", 4, 2, "has 4 devices, but 8 tensor ranks are on 4"),
  ):
    with pytest.raises(ValueError, match=message) as error:
      planned(name, devices, lanes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("value", "message"), [
  ("9", "9 nano-batches are more than the 8 tokens .*inference.batch=8$"),
  ("0", "'0' must be a number from 1 or 'plan'"),
  ("most", "'most' must be a number from 1 or 'plan'"),
])
def test_wrong_value_is_one_line(value, message):
  with pytest.raises(ValueError, match=message) as error:
    build(value)
  assert "\n" not in str(error.value)


def test_step_longer_than_the_profile_names_its_keys():
  program = types.SimpleNamespace(model=types.SimpleNamespace(
    config=types.SimpleNamespace(
      syncs=((PartialSync(), PartialSync()),), dtype="bfloat16",
      workload=LLAMA_2_70B,
    )
  ))
  with pytest.raises(
    ValueError, match=r"5000 tokens in a step \(config\.inference\.batch and "
  ):
    nanobatches._planned_sizes(
      machine("gpu:h100:1x8"), program, 1, make_batch(0, 1, 5000)
    )


def test_model_with_states_is_not_cut():
  with pytest.raises(ValueError, match="only models with cached keys and"):
    build("2", recurrent.get_config)
