"""Update of explicit training state (`Parameter.update`) in a step."""

from typing import Any

import jax
import jax.numpy as jnp

from caatnet.models.checks import is_parameter
from caatnet.models.protocol import Parameter
from caatnet.program import Program
from parallel.axes import Axis
from parallel.collectives import all_reduce, each_lane
from parallel.outer.base import to_workers
from parallel.zero.shards import TensorSpec


def updated(
  program: Program, state: Any, statistics: Any, averaged: bool
) -> Any:
  """Returns the workers' explicit state after a step, inside ``shard_map``.

  Args:
    program: The model on a mesh.
    state: Nested dict of ``[W, ...]`` for the W workers on this device.
    statistics: Sums of the model's reports, in the same structure.
    averaged: Whether the new state is averaged over all workers.
  """
  if not state:
    return state
  layout = program.layout
  rules = program.split(program.model.parameters).explicit
  tensors = program.split(program.tensors).explicit

  def rule(
    p: Parameter, tensor: TensorSpec, x: jax.Array, statistic: jax.Array
  ) -> jax.Array:
    shape = x.shape
    if layout.shards is not None:  # which stores flattened tensors
      shape = (*x.shape[:-1], *tensor.shape)
    assert p.update is not None
    new = p.update(x.reshape(shape), statistic.reshape(shape))
    return new.reshape(x.shape)

  def of_worker(state: Any, statistics: Any) -> Any:
    return jax.tree.map(
      rule, rules, tensors, state, statistics, is_leaf=is_parameter
    )

  state = each_lane(of_worker, layout.worker, state, statistics)
  if not averaged or layout.worker.size == 1:
    return state
  return to_workers(mean_of_finite(state, layout.worker), layout.worker)


def mean_of_finite(state: Any, worker: Axis) -> Any:
  """Averages finite elements of ``[W, ...]`` over all workers.

  A diverged worker does not change the others. Elements that are finite on no
  worker become NaN.
  """

  def mean(x: jax.Array) -> jax.Array:
    finite = jnp.isfinite(x)
    total = all_reduce(jnp.where(finite, x, 0.0), worker)
    return total / all_reduce(finite.astype(x.dtype), worker)

  return jax.tree.map(mean, state)
