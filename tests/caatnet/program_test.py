"""A model on a mesh: sizes and placement of its parameters per device."""

import jax
import numpy as np
import pytest

from tests.caatnet.models.transformer_test import make_config, make_program


def count(tree):
  return sum(x.size for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(("ranks", "devices"), [(1, 1), (4, 1), (4, 2), (8, 8)])
def test_local_and_cost_parameters_are_those_of_one_device(ranks, devices):
  """Slices of ranks are divided among devices; gains are on all of them."""
  program = make_program(make_config(width=48, vocab_size=61), ranks, devices)
  whole = jax.eval_shape(program.init_params, jax.random.key(0))
  gains = sum(
    x.size for x, spec in zip(
      jax.tree.leaves(whole),
      jax.tree.leaves(program.specs, is_leaf=lambda x: not isinstance(x, dict)),
      strict=True,
    ) if "tensor" not in spec
  )
  expected = (count(whole) - gains) // devices + gains
  assert count(program.local_params) == expected
  assert sum(p.size * p.count for p in program.cost_parameters) == expected
  assert {p.wire_bytes for p in program.cost_parameters} == {4}


def test_optimizer_states_have_the_specs_of_their_parameters():
  program = make_program(make_config(), 4, 2)
  leaf = jax.ShapeDtypeStruct((3,), np.float32)
  specs = program.specs_like_params({
    "mu": {"blocks": {"w_out": leaf}, "norm": leaf}, "count": leaf,
    "w_out": leaf,
  })
  assert specs["mu"]["blocks"]["w_out"] == program.specs["blocks"]["w_out"]
  assert specs["mu"]["norm"] == program.specs["norm"]
  # "w_out" and "count" are no parameter paths: replicated on every device.
  assert tuple(specs["count"]) == tuple(specs["w_out"]) == ()
