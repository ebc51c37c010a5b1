"""Checkpoint policies that place saved activations on the host."""

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest

from parallel.memory.offload import (
  ON_DEVICE,
  ON_HOST,
  ActivationPlacement,
  SaveMode,
  group_into_periods,
  offload_policy,
  split_period,
  stack_trees,
  with_named_input,
)

POLICIES = jax.checkpoint_policies


def layer(w, x):
  x, number = x
  y = checkpoint_name(jnp.sin(w * x), "sine")
  return checkpoint_name(w * jnp.cos(y), "cosine") * x, number + 1


def placed(policy):
  """Returns the number of placements on the host in a gradient."""
  f = jax.checkpoint(
    with_named_input(layer), policy=offload_policy(policy), prevent_cse=False
  )

  def loss(w, x):
    return jnp.sum(f(w, (x, 0))[0])

  x = jnp.ones(3)
  traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(x, x)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  return text.count('_xla_buffer_placement = "pinned_host"')


@pytest.mark.parametrize(("policy", "count"), [
  (POLICIES.nothing_saveable, 1),
  (POLICIES.save_only_these_names("sine"), 2),
  (POLICIES.save_only_these_names("cosine", "sine"), 3),
  # Activations without a name are recomputed, whatever the policy.
  (POLICIES.everything_saveable, 3),
])
def test_selected_names_and_the_input_are_on_the_host(policy, count):
  assert placed(policy) == count


def test_gradient_equals_the_one_without_checkpoint():
  f = jax.checkpoint(
    with_named_input(layer), policy=offload_policy(POLICIES.everything_saveable)
  )
  w, x = jnp.linspace(0.1, 1, 3), jnp.ones(3)
  ours, theirs = (
    jax.grad(lambda w, f=f: jnp.sum(f(w, (x, 0))[0]))(w) for f in (f, layer)
  )
  assert jnp.allclose(ours, theirs)


DEVICE, INPUTS, HOST, REST = (
  SaveMode(saves, offloads)
  for saves, offloads in ((True, False), (False, False), (True, True),
                          (False, True))
)


@pytest.mark.parametrize(("activations", "num_layers", "expected"), [
  (ON_DEVICE, 7, [DEVICE]),
  (ON_HOST, 12, [HOST]),
  (ActivationPlacement(), 8, [REST]),
  (ActivationPlacement(saved=0.5), 16, [REST] * 2 + [DEVICE] * 2),
  (ActivationPlacement(saved=0.5), 8, [REST] * 2 + [DEVICE] * 2),
  # a loop has two iterations or more
  (ActivationPlacement(saved=0.5), 2, [REST]),
  # 11 layers have no period but themselves, which would compile each of them.
  (ActivationPlacement(saved=0.5), 11, [REST]),
  # A third of four layers is one, rounded down for the device's memory.
  (ActivationPlacement(1 / 3, 0, 2 / 3), 8, [HOST] * 3 + [DEVICE]),
  (ActivationPlacement(0.3, 0.3, 0.4), 10, [HOST, INPUTS]),
  (ActivationPlacement(0.3, 0.3, 0.4), 12, [HOST] * 2 + [INPUTS, DEVICE]),
])
def test_layers_of_a_period(activations, num_layers, expected):
  assert list(activations.ways(num_layers)) == expected


def test_device_never_has_more_than_its_share():
  for saved in range(9):
    for inputs in range(9 - saved):
      shares = ActivationPlacement(saved / 8, inputs / 8)
      for num_layers in range(1, 33):
        ways = shares.ways(num_layers)
        assert num_layers % len(ways) == 0
        assert len(ways) == 1 or len(ways) < num_layers
        kept = ways.count(DEVICE) / len(ways)
        assert kept <= saved / 8
        assert kept + ways.count(INPUTS) / len(ways) <= (saved + inputs) / 8


def test_members_of_groups_are_the_layers():
  x = {"w": jnp.arange(24.0).reshape(6, 4)}
  for length in (1, 3):
    rows = group_into_periods(x, length)["w"]
    found = [
      stack_trees(split_period({"w": row}, length))["w"] for row in rows
    ]
    assert jnp.array_equal(jnp.stack(found), rows)
    assert jnp.array_equal(rows.reshape(6, 4), x["w"])
