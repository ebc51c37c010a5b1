"""Saved activations of layers in host memory.

A layer's backward reads activations that its forward has saved. With
`offload_policy` they are copied to pinned host memory when they are saved, and
back before the layer's backward. Only named activations are saved: a layer's
input, which `with_named_input` names, and those that the layer itself names
with `jax.ad_checkpoint.checkpoint_name` and a policy selects. The backward
recomputes all others. XLA schedules the copies; XLA:CPU elides them.

`ActivationPlacement` has the fractions of layers that save what a policy
selects, or only their input, in device memory or on the host. A scan over
layers then runs one period of layers per iteration, each layer with its own
policy. XLA keeps the weights and gradients of a period in additional memory,
instead of those of one layer. If all layers are equal, a period is one layer.
"""

from collections.abc import Callable
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from parallel.plans.placement import periods

# Name of a layer's input for checkpoint policies.
LAYER_INPUT = "layer_input"

# Checkpoint policy of `jax.checkpoint`.
Policy = Callable[..., Any]


class SaveMode(NamedTuple):
  """Activations that a layer saves for its backward, and their memory.

  Attributes:
    saves: Whether the layer saves what the model's policy selects; if not, it
      saves only its input.
    offloads: Whether saved values are in pinned host memory until the backward.
  """

  saves: bool
  offloads: bool


@dataclasses.dataclass(frozen=True)
class ActivationPlacement:
  """Fractions of layers by what they save, and where.

  All other layers save their input in host memory.

  Attributes:
    saved: Fraction that saves what the policy selects, in device memory.
    inputs: Fraction that saves only its input, in device memory.
    saved_on_host: Fraction that saves what the policy selects, in host memory.

  Example:
    >>> ActivationPlacement(saved=0.5).ways(num_layers=12)[1:3]
    (SaveMode(saves=False, offloads=True), SaveMode(saves=True, offloads=False))
  """

  saved: float = 0.0
  inputs: float = 0.0
  saved_on_host: float = 0.0

  def ways(self, num_layers: int) -> tuple[SaveMode, ...]:
    """Returns what each layer of a period saves.

    A period is the layers of one iteration of the scan (`placement.periods`).
    Cumulative fractions, in the order of the attributes, are rounded down to
    whole layers of a period, so that device memory never holds more layers than
    requested. The result has one entry if all layers save the same.
    """
    length = periods.length(num_layers)
    shares = (self.saved, self.inputs, self.saved_on_host)
    ends = [int(length * x + 1e-6) for x in itertools.accumulate(shares)]
    found = [
      way for way, (start, end) in zip(
        (SaveMode(True, False), SaveMode(False, False), SaveMode(True, True),
         SaveMode(False, True)),
        itertools.pairwise([0, *ends, length]), strict=True,
      ) for _ in range(end - start)
    ]
    if len(set(found)) == 1:
      return (found[0],)
    return tuple(reversed(found))  # first layers have most time to copy

  def layers(
    self, f: Callable[[Any, Any], Any], policy: Policy | None, num_layers: int
  ) -> list[tuple[Callable[[Any, Any], Any], Policy | None]]:
    """Returns the layers of one iteration of a scan, each with its policy.

    A policy is that of `jax.checkpoint`; None saves all activations.

    Args:
      f: A layer, ``f(params, x)``.
      policy: The model's policy; None saves all activations, in device memory.
      num_layers: Number of layers.
    """
    found = []
    for saves, offloads in self.ways(num_layers):
      one = policy if saves else jax.checkpoint_policies.nothing_saveable
      if offloads:
        assert one is not None
        found.append((with_named_input(f), offload_policy(one)))
      else:
        found.append((f, one))
    return found


# All layers save what the model's policy selects, in one kind of memory.
ON_DEVICE, ON_HOST = ActivationPlacement(saved=1.0), ActivationPlacement(
  saved_on_host=1.0
)


def group_into_periods(tree: Any, length: int) -> Any:
  """Reshapes arrays of L layers to periods of ``length`` consecutive layers.

  The shapes ``[L, ...]`` become ``[L / length, length, ...]``; with a length of
  1 they are unchanged.
  """
  if length == 1:
    return tree
  return jax.tree.map(lambda x: x.reshape(-1, length, *x.shape[1:]), tree)


def split_period(tree: Any, length: int) -> list[Any]:
  """Splits the arrays of ``length`` layers into one tree for each layer."""
  if length == 1:
    return [tree]
  leaves, structure = jax.tree.flatten(tree)
  # In the backward, a split becomes one concatenation, but indexing many sums.
  parts = [lax.split(x, [1] * length) for x in leaves]
  return [
    structure.unflatten(part[i].squeeze(0) for part in parts)
    for i in range(length)
  ]


def stack_trees(trees: list[Any]) -> Any:
  """Stacks the trees of layers to one tree of arrays ``[layers, ...]``.

  A single tree is returned unchanged.
  """
  if len(trees) == 1:
    return trees[0]
  return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def offload_policy(policy: Policy) -> Policy:
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
    ...   policy=offload_policy(jax.checkpoint_policies.nothing_saveable),
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
