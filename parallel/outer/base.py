"""What an outer loop is: how workers that train apart agree now and then.

A worker's training state has a leading dim: trees ``[W, ...]`` hold W = lanes
of the worker axis. What all workers share (outer parameters and the like) has
no such dim and is the same on every device of that axis.

A step of the trainer, in the order in which it calls an outer loop:

    state         = loop.begin(params, state, plan)
    grads         = gradients at params, per worker
    grads         = loop.gradients(grads, state)
    updates       = inner optimizer's, per worker
    params, state = loop.finish(params, updates, state, plan)

What ``begin`` sends can run on the links under the gradients' compute, since
only ``finish`` reads it, then or some steps later.
"""

from collections.abc import Hashable
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from parallel.axes import Axis
from parallel.collectives import all_reduce, ranks_here, varying

Params = Any
State = Any


class Plan(NamedTuple):
  """What an outer loop does in one step.

  Attributes:
    variant: Which compiled program runs: steps with equal values share one.
    numbers: What differs between them: int32s that the program is given.
  """

  variant: Hashable = ()
  numbers: Any = ()


@dataclasses.dataclass(frozen=True)
class OuterLoop:
  """Workers that never talk; each algorithm overrides what it needs.

  Attributes:
    worker: The worker axis.
  """

  worker: Axis

  @property
  def period(self) -> int:
    """Steps after which plans repeat, numbers aside, once all has begun."""
    return 1

  @property
  def steady_round(self) -> range:
    """The steps of one period, when all has begun."""
    return range(2 * self.period, 3 * self.period)

  def init(self, params: Params) -> State:
    """The state beside the workers' parameters.

    Args:
      params: The common start, without worker dim. A leaf of the state whose
        path ends like a parameter's lives where that parameter lives; under
        the key ``"workers"`` leaves have a leading worker dim of logical size.

    Returns:
      A dict of arrays.
    """
    return {}

  def plan(self, step: int) -> Plan:
    """What happens in the step that makes update number ``step + 1``."""
    return Plan()

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    """Before the gradients."""
    return state

  def gradients(self, grads: Params, state: State) -> Params:
    """Between gradients and inner optimizer; all trees ``[W, ...]``."""
    return grads

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    """Applies the inner optimizer's updates and what has arrived."""
    return optax.apply_updates(params, updates), state

  def evaluated(self, params: Params, state: State) -> Params:
    """The parameters that stand for the run, without worker dim."""
    return mean_over_workers(params, self.worker)

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    """What a device sends over the worker axis in one period.

    Args:
      shapes: One worker's parameters as they lie on one device.

    Returns:
      Operand bytes of collectives by dtype on the wire; none where one device
      has all workers.
    """
    return {}


def mean_over_workers(tree: Params, worker: Axis) -> Params:
  """``[W, ...] -> [...]``, the mean over all workers, by one all-reduce."""
  return jax.tree.map(lambda x: all_reduce(x, worker) / worker.size, tree)


def of_first(tree: Params, worker: Axis) -> Params:
  """``[W, ...] -> [...]``, worker 0's bits on every device."""
  only_first = jax.vmap(lambda rank, x: jnp.where(rank == 0, x, 0))
  ranks = ranks_here(worker)
  return jax.tree.map(
    lambda x: all_reduce(only_first(ranks, x), worker), tree
  )


def to_workers(tree: Params, worker: Axis) -> Params:
  """``[...] -> [W, ...]``: one copy for each worker of this device."""

  def copies(x):
    stacked = jnp.broadcast_to(x, (worker.lanes, *x.shape))
    return varying(stacked, worker.name)

  return jax.tree.map(copies, tree)


def stacked(tree: Params, worker: Axis) -> Params:
  """``[...] -> [workers, ...]``, logical shapes, for a first state."""
  return jax.tree.map(
    lambda x: jnp.broadcast_to(x, (worker.size, *jnp.shape(x))), tree
  )


def stacked_zeros(params: Params, worker: Axis) -> Params:
  """Zeros ``[workers, ...]`` for every parameter ``[...]``."""
  return jax.tree.map(jnp.zeros_like, stacked(params, worker))


def at_path(tree: Any, path: tuple[Any, ...]) -> Any:
  """The leaf of a nested dict at a path, as ``jax.tree`` functions give it."""
  return functools.reduce(lambda part, key: part[key.key], path, tree)


def float32_bytes(shapes: Params, worker: Axis) -> dict[str, int]:
  """Of one all-reduce of all parameters, lanes summed before."""
  if worker.devices == 1:
    return {}
  elements = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
  return {"float32": 4 * elements}
