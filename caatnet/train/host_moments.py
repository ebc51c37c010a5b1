"""Updates of moments in host memory, one layer after another.

XLA copies arguments from host memory as early as it can: a program that copies
all moments to the device before it updates them has all of them in device
memory at one time. Here a loop copies the moments of one layer, updates them,
and copies them back into the same memory. Parameters outside of stacks of
layers are updated one at a time.

CPUs have one memory, so all parts are updated at once there. The operations are
the same, but compilers may round them differently in a loop: XLA:CPU fuses
other products with sums.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.tree_util import keystr

from caatnet.program import Program, by_end_of_path, is_spec
from parallel.collectives import after

# Returns the part of the array at a path in a tree; None for step counts.
Find = Callable[[tuple[Any, ...]], str | None]


def apply(
  program: Program, f: Callable[[Any, Any], Any], changed: Any, fixed: Any,
  results: Any,
) -> Any:
  """Computes ``f(changed, fixed)``, inside ``jax.shard_map``.

  Args:
    program: The model on a mesh.
    f: Function of arrays in device memory, elementwise in those of parameters.
      For a part of the state, it receives None instead of other parameters.
    changed: Tree of ``[W, ...]``. The path of an array of a parameter ends with
      the path of the parameter; such arrays may be in host memory. All others
      are step counts, which all parts have.
    fixed: Tree of ``[W, ...]`` in device memory, with the structure of the
      parameters.
    results: Arrays that must be computed before arrays are copied.

  Returns:
    The result of ``f``, with the structure and memory of ``changed``.
  """
  if program.layout.moments != "device" and not program.layout.on_cpu:
    return in_parts(program, f, changed, fixed, results)
  return jax.tree.map(
    _like, changed, f(jax.tree.map(_to_device, changed), fixed)
  )


def in_parts(
  program: Program, f: Callable[[Any, Any], Any], changed: Any, fixed: Any,
  results: Any,
) -> Any:
  """Computes ``f(changed, fixed)`` as `apply` does, a part at a time."""
  stacks = program.model.stacks
  owners = jax.tree.map_with_path(
    lambda path, _: path[0].key if path[0].key in stacks else keystr(path),
    program.specs, is_leaf=is_spec,
  )
  find = by_end_of_path(owners)
  # Arrays are [W, layers, ...] or [W, stages, layers, ...].
  dim = 1 if program.layout.stages is None else 2
  done = changed
  for owner in dict.fromkeys(jax.tree.leaves(owners)):
    old, others = (
      jax.tree.map_with_path(
        lambda path, x, owner=owner: x if find(path) in (None, owner) else None,
        tree,
      ) for tree in (changed, fixed)
    )
    if owner in stacks:
      new = _by_layer(f, old, others, find, dim)
    else:
      new = jax.tree.map(_like, old, f(_loaded(old, results), others))
    results = [x for x in jax.tree.leaves(new) if not _on_host(x)]
    done = jax.tree.map(lambda x, y: x if y is None else y, done, new)
  return done


def _by_layer(
  f: Callable[[Any, Any], Any], old: Any, others: Any, find: Find, dim: int
) -> Any:
  """Computes ``f(old, others)`` for a stack, one layer at a time."""

  def step(number: jax.Array, now: Any) -> Any:
    def layer(x: jax.Array) -> jax.Array:
      return _to_device(lax.dynamic_slice_in_dim(x, number, 1, dim))

    # All layers have the step counts from before the loop.
    mine = jax.tree.map_with_path(
      lambda path, first, x: first if find(path) is None else layer(x),
      old, now,
    )
    return jax.tree.map_with_path(
      lambda path, x, new: new if find(path) is None
      else lax.dynamic_update_slice_in_dim(x, _like(x, new), number, dim),
      now, f(mine, jax.tree.map(layer, others)),
    )

  sizes = {x.shape[dim] for x in jax.tree.leaves(others)}
  assert len(sizes) == 1, f"layers of a stack: {sizes}"
  return lax.fori_loop(0, sizes.pop(), step, old)


def _on_host(x: jax.Array) -> bool:
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def _to_device(x: jax.Array) -> jax.Array:
  return jax.device_put(x, jax.memory.Space.Device) if _on_host(x) else x


def _like(x: jax.Array, new: jax.Array) -> jax.Array:
  """Copies a new array to the memory of the one that it replaces."""
  return jax.device_put(new, jax.memory.Space.Host) if _on_host(x) else new


def _loaded(tree: Any, results: Any) -> Any:
  """Copies arrays to the device after other arrays have been computed."""
  # The barrier's results vary over the mesh axes of all operands. The scalar
  # varies over none, so that arrays keep their types.
  late = after(jnp.zeros((), jnp.int32), results)
  return jax.tree.map(
    lambda x: _to_device(lax.optimization_barrier((x, late))[0])
    if _on_host(x) else x,
    tree,
  )
