"""Interface of outer loops: synchronisation of separately training workers.

Parameters and optimizer state of the workers have a leading dim: inside
``jax.shard_map`` a tree ``[W, ...]`` holds the W workers (lanes of the worker
axis) of this device. State that all workers share, such as outer parameters,
has no such dim and is equal on every device of that axis.

An outer loop has five methods that train (`init`, `plan`, `begin`, `gradients`,
`finish`) and four that describe it (`period`, `export_params`, `metrics`,
`sent_bytes`), all with defaults. `parallel.outer.joining` adapts it to workers
that join and leave. The trainer calls a loop three times in each step:

    state         = loop.begin(params, state, plan)
    grads         = gradients of the loss at params, per worker
    grads         = loop.gradients(grads, state)
    updates       = updates of the inner optimizer, per worker
    params, state = loop.finish(params, updates, state, plan)

After an exchange that excluded a worker (`parallel.outer.health`), the trainer
reinitializes that worker's inner optimizer.

An exchange can overlap with a step's compute only if it starts before that
compute and nothing in the compute reads its result. Overlapped exchanges are
therefore sent in ``begin``, before the gradients, and read in ``finish`` of the
same or a later step. A collective cannot outlive the program that contains it,
and a step is one program: an exchange that takes longer than one step is split
into pieces, one per step (`parallel.outer.streaming`).
"""

from collections.abc import Hashable
import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from parallel.axes import Axis
from parallel.collectives import all_reduce, ranks_here, varying

Params = Any
State = Any

# Keys of a state whose arrays have a leading worker dim. "mask_here", bool [W],
# marks the workers in this step's exchange; it is removed at the step's end.
WORKER_DIM_KEYS = ("workers", "mask_here")
# Keys of shared arrays with one element per worker. "mask", float32, marks the
# workers that the next exchange includes.
PER_WORKER_KEYS = ("mask",)

# Minimum number of steps for which `steady_round` compares plans: enough to
# detect rounds that get longer, and a `period` that is shorter than a round.
_CHECKED_STEPS = 10_000


class Plan(NamedTuple):
  """Communication of an outer loop in one step.

  Which collectives a step runs is known at compile time, so that no program
  contains a collective that it does not run. Values that differ between steps
  of one program are arguments of the program.

  Attributes:
    variant: Key of the compiled program, shared by all steps with equal keys.
    numbers: Tree of int32 that the program takes as an argument, such as the
      number of the round.
  """

  variant: Hashable = ()
  numbers: Any = ()


@dataclasses.dataclass(frozen=True)
class OuterLoop:
  """Outer loop without communication; algorithms override its methods.

  Attributes:
    worker: The worker axis.

  Example:
    Subclasses change the hooks; the base class only applies the updates.

    >>> loop = OuterLoop(Axis("worker", size=2))
    >>> params = {"w": jnp.array([[1.0], [2.0]])}
    >>> updates = {"w": jnp.array([[0.5], [0.25]])}
    >>> params, state = loop.finish(params, updates, {}, loop.plan(0))
    >>> params["w"].tolist()
    [[1.5], [2.25]]
  """

  worker: Axis
  # Whether the loop exchanges means, over any number of workers.
  averages: ClassVar[bool] = True
  # Whether all workers have equal parameters and inner optimizers after a step.
  equal: ClassVar[bool] = False
  # Whether a single worker trains as without the loop if the outer optimizer is
  # SGD(1) and nothing is encoded or delayed. False for loops that change
  # parameters even without other workers: by rounding that cannot be disabled,
  # or by attraction to a center variable as in elastic averaging SGD.
  plain_alone: ClassVar[bool] = True

  @property
  def period(self) -> int:
    """Number of steps after which programs repeat, in the steady state.

    `steady_round` checks that the programs (`Plan.variant`) repeat.
    """
    return 1

  @property
  def steady_round(self) -> range:
    """Steps of one steady-state period that represents all later periods.

    A loop whose plans never repeat can override it with the steps of any round
    if that round represents all others (`parallel.outer.noloco`).

    Raises:
      ValueError: A later period needs other programs (`Plan.variant`).
    """
    # A period is at least one round. The first exchange is sent after one round
    # and arrives less than one round later. The third period thus has both.
    found = range(2 * self.period, 3 * self.period)
    for step in range(found.start, max(4 * self.period, _CHECKED_STEPS)):
      later = step + self.period
      if self.plan(later).variant != self.plan(step).variant:
        raise ValueError(
          f"{type(self).__name__}: period={self.period}, but steps {step} and "
          f"{later} need different programs (plan(step).variant differs); "
          "override `period` of the outer loop"
        )
    return found

  def init(self, params: Params) -> State:
    """Returns the initial state of the loop.

    The trainer places the state by its paths. A leaf whose path ends like a
    parameter's is sharded like that parameter. Leaves under the key
    ``"workers"`` have a leading worker dim of logical size, and each worker's
    part is on the worker's devices.

    Args:
      params: Initial parameters of all workers, without worker dim.

    Returns:
      A dict of arrays of logical shape.
    """
    return {}

  def plan(self, step: int) -> Plan:
    """Returns the communication of a step; steps are counted from 0."""
    return Plan()

  def averages_state(self, variant: Hashable) -> bool:
    """Returns whether steps of a variant average explicit training state.

    Such state, for example a router's bias, is no parameter of the loop. By
    default, steps that communicate average it: those whose `Plan.variant` is
    True or a tuple with a true entry.
    """
    return any(variant) if isinstance(variant, tuple) else variant is True

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    """Starts, before the gradients, the exchanges that overlap with them.

    Args:
      params: Parameters of the W workers on this device, ``[W, ...]``.
      state: State in the structure of `init`, this device's part.
      plan: Plan of this step.

    Returns:
      The state, with the results of the exchanges.
    """
    return state

  def gradients(self, grads: Params, state: State) -> Params:
    """Transforms the gradients that the inner optimizers receive.

    Args:
      grads: Gradients of the W workers on this device, ``[W, ...]``.
      state: State that `begin` returned.

    Returns:
      The gradients ``[W, ...]`` for the inner optimizers.
    """
    return grads

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    """Applies the inner optimizers' updates and the means that have arrived.

    Args:
      params: Parameters of the W workers on this device before the step,
        ``[W, ...]``.
      updates: Update of each inner optimizer, ``[W, ...]``.
      state: State that `begin` returned.
      plan: Plan of this step.

    Returns:
      The workers' parameters and the state after the step.
    """
    return optax.apply_updates(params, updates), state

  def export_params(self, params: Params, state: State) -> Params:
    """Returns the parameters to evaluate and export, without worker dim.

    By default these are the outer parameters, "params" of the state. If workers
    have separate ones, "params" under "workers", it is their mean; without
    outer parameters it is the mean of ``params``.
    """
    if "params" in state:
      return state["params"]
    params = state.get("workers", {}).get("params", params)
    return mean_over_workers(params, self.worker)

  def metrics(self, state: State) -> dict[str, Any]:
    """Returns the metrics of each worker.

    Returns:
      Name -> ``[workers]``: "delta_norm" and "left_out", as described in
      `parallel.outer.health.init`; empty for loops that exclude no worker.
    """
    workers = state.get("workers", {})
    return {
      key: workers[key] for key in ("delta_norm", "left_out") if key in workers
    }

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    """Returns the bytes that a device sends over the worker axis in one period.

    Args:
      shapes: Shapes of one worker's parameters on one device.

    Returns:
      Operand bytes of collectives by dtype on the wire; empty if one device has
      all workers. The default is the bytes of one exchange by the attribute
      ``exchange`` (`parallel.outer.exchange.Exchange`), if there is one.
    """
    exchange = getattr(self, "exchange", None)
    return {} if exchange is None else exchange.sent_bytes(shapes)


@dataclasses.dataclass(frozen=True)
class RoundLoop(OuterLoop):
  """Outer loop with an exchange at the end of each round.

  Attributes:
    sync_every: H, the number of inner steps per round.
  """

  sync_every: int

  @property
  def period(self) -> int:
    return self.sync_every


def mean_over_workers(tree: Params, worker: Axis) -> Params:
  """Averages leaves of W workers per device, ``[W, ...]``, over all workers."""
  return jax.tree.map(lambda x: all_reduce(x, worker) / worker.size, tree)


def broadcast_first(tree: Params, worker: Axis) -> Params:
  """Broadcasts worker 0's values to every device as ``[...]``.

  The leaves of ``tree`` are ``[W, ...]`` for W workers per device.

  The sum over workers, with zeros for all except worker 0, is exact and
  invarying by type; a slice of one device's array would be device-varying. The
  bits are summed as integers, since a sum of floats turns -0 into 0.
  """
  only_first = jax.vmap(lambda rank, x: jnp.where(rank == 0, x, 0))
  ranks = ranks_here(worker)

  def of_leaf(x):
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    found = all_reduce(only_first(ranks, bits), worker)
    return lax.bitcast_convert_type(found.astype(bits.dtype), x.dtype)

  return jax.tree.map(of_leaf, tree)


def to_workers(tree: Params, worker: Axis) -> Params:
  """Copies leaves ``[...]`` to ``[W, ...]``, for this device's W workers."""

  def copies(x):
    stacked = jnp.broadcast_to(x, (worker.lanes, *x.shape))
    # Parameters of workers are device-varying, and a step must return arrays of
    # the same types as its arguments.
    return varying(stacked, worker.name)

  return jax.tree.map(copies, tree)


def stack_copies(tree: Params, worker: Axis) -> Params:
  """Copies leaves ``[...]`` to ``[workers, ...]``, for all workers."""
  return jax.tree.map(
    lambda x: jnp.broadcast_to(x, (worker.size, *jnp.shape(x))), tree
  )


def stacked_zeros(params: Params, worker: Axis) -> Params:
  """Returns zeros ``[workers, ...]`` for every parameter ``[...]``."""
  return jax.tree.map(jnp.zeros_like, stack_copies(params, worker))


def at_path(tree: Any, path: tuple[Any, ...]) -> Any:
  """Returns the leaf of a nested dict at a path of `jax.tree.map_with_path`."""
  return functools.reduce(lambda part, key: part[key.key], path, tree)


def float32_sum_bytes(shapes: Params, worker: Axis) -> dict[str, int]:
  """Returns the operand bytes of one all-reduce of all parameters in float32.

  The workers of a device are summed locally, so their number does not matter.
  ``shapes`` are those of one worker's parameters on one device.
  """
  if worker.devices == 1:
    return {}
  elements = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
  return {"float32": 4 * elements}
