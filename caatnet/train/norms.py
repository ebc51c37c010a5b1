"""Norms over all ranks of what lies like a worker's parameters."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from caatnet.program import Program, is_spec
from parallel.collectives import after
from parallel.outer.base import at_path


def parameter_groups(params: Any) -> list[str]:
  """Returns the names that metrics and errors give to parameters, sorted."""
  return sorted(
    {_group(path) for path, _ in jax.tree.leaves_with_path(params)}
  )


def group_norms(grads: Any, program: Program) -> dict[str, jax.Array]:
  """Computes each parameter's norm, every logical element counted once.

  A sliced parameter has other elements on each rank, so its squares are summed
  over the axes that it is cut along. Of a replicated parameter every rank has
  all elements: a sum over ranks would count each of them as often as there are
  ranks. Parameters that are cut along the same axes share one all-reduce.

  Args:
    grads: One worker's gradients, lying like the stored parameters.
    program: The model on a mesh.
  """
  squares: dict[tuple[str, ...], dict[str, jax.Array]] = {}
  for (path, grad), spec in zip(
    jax.tree.leaves_with_path(grads),
    jax.tree.leaves(program.specs, is_leaf=is_spec),
    strict=True,
  ):
    names = tuple(name for name in spec if name)
    square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
    squares.setdefault(names, {})[_group(path)] = square
  total = {}
  for names, of_groups in squares.items():
    stacked = jnp.stack(list(of_groups.values()))  # [parameters]
    stacked = after(stacked, total, program.layout.on_cpu)
    summed = lax.psum(stacked, names) if names else stacked
    total |= dict(zip(of_groups, summed, strict=True))
  return {group: jnp.sqrt(square) for group, square in total.items()}


def worker_norms(tree: Any, program: Program) -> jax.Array:
  """Computes each worker's norm of what lies like parameters, or of a part.

  It counts the logical elements of all ranks, and is the same on each.

  Args:
    tree: Arrays ``[W, ...]`` at the paths of parameters; there need not be one
      for each. Dims that are cut along no mesh axis may have other sizes.
    program: The model on a mesh.

  Returns:
    float32 ``[W]``.
  """
  squares: dict[tuple[str, ...], jax.Array] = {}
  for path, x in jax.tree.leaves_with_path(tree):
    names = tuple(name for name in at_path(program.specs, path) if name)
    square = jnp.sum(
      jnp.square(x.astype(jnp.float32)), axis=tuple(range(1, x.ndim))
    )
    squares[names] = squares.get(names, 0.0) + square
  # One all-reduce for all that is cut along the same axes, in one order.
  total = jnp.zeros(())
  for names, square in squares.items():
    square = after(square, total, program.layout.on_cpu)
    total = total + (lax.psum(square, names) if names else square)
  return jnp.sqrt(total)


def _group(path: tuple[Any, ...]) -> str:
  return "/".join(str(key.key) for key in path)
