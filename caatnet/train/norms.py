"""L2 norms, over all ranks, of trees with the layout of the parameters."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from caatnet.program import Program, is_spec
from parallel.collectives import order_after
from parallel.outer.base import at_path


def parameter_names(params: Any) -> list[str]:
  """Returns the sorted names of parameters in metrics and errors."""
  return sorted(
    {_parameter_name(path) for path, _ in jax.tree.leaves_with_path(params)}
  )


def gradient_norms(grads: Any, program: Program) -> dict[str, jax.Array]:
  """Computes the L2 norm of each parameter's gradient over all ranks.

  Every logical element counts once. Squares of a sliced parameter are summed
  over the axes that cut it. A replicated parameter is not summed over ranks,
  since that would multiply its squares by the number of ranks. Parameters that
  are cut over the same axes share one all-reduce.

  Args:
    grads: One worker's gradients of trained parameters, with the layout of the
      stored parameters.
    program: The model on a mesh.

  Returns:
    float32 scalars by parameter name, equal on all ranks.
  """
  squares: dict[tuple[str, ...], dict[str, jax.Array]] = {}
  for (path, grad), spec in zip(
    jax.tree.leaves_with_path(grads),
    jax.tree.leaves(program.split(program.specs).trained, is_leaf=is_spec),
    strict=True,
  ):
    names = tuple(name for name in spec if name)
    square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
    squares.setdefault(names, {})[_parameter_name(path)] = square
  total = {}
  for names, of_groups in squares.items():
    stacked = jnp.stack(list(of_groups.values()))  # [parameters]
    # A data dependency orders the all-reduces equally on all processes.
    stacked = order_after(stacked, total, program.layout.ordered)
    summed = lax.psum(stacked, names) if names else stacked
    total |= dict(zip(of_groups, summed, strict=True))
  return {group: jnp.sqrt(square) for group, square in total.items()}


def worker_norms(tree: Any, program: Program) -> jax.Array:
  """Computes the L2 norm of each worker's part of a tree.

  Every logical element of all ranks counts once.

  Args:
    tree: Arrays ``[W, ...]`` of W workers, at the paths of all or some
      parameters and sharded like them. Other dims may differ in size.
    program: The model on a mesh.

  Returns:
    float32 ``[W]``, equal on all ranks.
  """
  squares: dict[tuple[str, ...], jax.Array] = {}
  for path, x in jax.tree.leaves_with_path(tree):
    names = tuple(name for name in at_path(program.specs, path) if name)
    square = jnp.sum(
      jnp.square(x.astype(jnp.float32)), axis=tuple(range(1, x.ndim))
    )
    squares[names] = squares.get(names, 0.0) + square
  # One all-reduce per set of axes, in the same order on all processes.
  total = jnp.zeros(())
  for names, square in squares.items():
    square = order_after(square, total, program.layout.ordered)
    total = total + (lax.psum(square, names) if names else square)
  return jnp.sqrt(total)


def _parameter_name(path: tuple[Any, ...]) -> str:
  """Returns a parameter's name, for example "blocks/w_qkv"."""
  return "/".join(str(key.key) for key in path)
