"""Checkpoint policies that place saved activations on the host."""

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import pytest

from parallel.memory.offload import offloading, with_named_input

POLICIES = jax.checkpoint_policies


def layer(w, x):
  x, number = x
  y = checkpoint_name(jnp.sin(w * x), "sine")
  return checkpoint_name(w * jnp.cos(y), "cosine") * x, number + 1


def placed(policy):
  """Returns the number of placements on the host in a gradient."""
  f = jax.checkpoint(
    with_named_input(layer), policy=offloading(policy), prevent_cse=False
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
    with_named_input(layer), policy=offloading(POLICIES.everything_saveable)
  )
  w, x = jnp.linspace(0.1, 1, 3), jnp.ones(3)
  ours, theirs = (
    jax.grad(lambda w, f=f: jnp.sum(f(w, (x, 0))[0]))(w) for f in (f, layer)
  )
  assert jnp.allclose(ours, theirs)
