"""Saved activations of layers in host memory.

A layer's backward reads activations that its forward has saved. With
`offloading` they are copied to pinned host memory when they are saved, and back
before the layer's backward. Only named activations are saved: a layer's input,
which `with_named_input` names, and those that the layer itself names with
`jax.ad_checkpoint.checkpoint_name` and a policy selects. The backward
recomputes all others. XLA schedules the copies; XLA:CPU elides them.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

# Name of a layer's input for checkpoint policies.
LAYER_INPUT = "layer_input"

# Checkpoint policy of `jax.checkpoint`.
Policy = Callable[..., Any]


def offloading(policy: Policy) -> Policy:
  """Returns a policy that saves named activations, in pinned host memory.

  Args:
    policy: Policy that selects the named activations to save, in addition to
      layer inputs.

  Example:
    The backward reads x from host memory and recomputes its product with w.

    >>> def layer(w, x):
    ...   return jnp.sin(w * x)
    >>> f = jax.checkpoint(
    ...   with_named_input(layer), prevent_cse=False,
    ...   policy=offloading(jax.checkpoint_policies.nothing_saveable),
    ... )
    >>> step = jax.jit(jax.grad(lambda w, x: jnp.sum(f(w, x))))
    >>> x = jnp.ones(3)
    >>> text = step.trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    >>> text.count('_xla_buffer_placement = "pinned_host"')
    1
  """

  def offloads(primitive: Any, *avals: Any, **params: Any) -> Any:
    if primitive.name != "name":
      return False
    name = params["name"]
    if name != LAYER_INPUT and not policy(primitive, *avals, **params):
      return False
    return jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[], names_which_can_be_offloaded=[name],
      offload_src="device", offload_dst="pinned_host",
    )(primitive, *avals, **params)

  return offloads


def with_named_input(layer: Callable[[Any, Any], Any]) -> Callable[..., Any]:
  """Returns ``layer(params, x)`` with the arrays of x named ``LAYER_INPUT``.

  Empty arrays and integers, such as the number of the layer, are not named.
  """

  def named(x: jax.Array) -> jax.Array:
    if not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    return checkpoint_name(x, LAYER_INPUT)

  return lambda params, x: layer(params, jax.tree.map(named, x))
