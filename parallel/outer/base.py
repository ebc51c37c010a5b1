"""What an outer loop is: how workers that train apart agree now and then.

Parameters and optimizer state of the workers have a leading dim: inside
``jax.shard_map`` a tree ``[W, ...]`` holds the W lanes of the worker axis that
are on this device. What all workers share, such as the outer parameters, has no
such dim and is the same on every device of that axis.

The trainer calls an outer loop three times in each step:

    state         = loop.begin(params, state, plan)
    grads         = gradients at params, per worker
    grads         = loop.gradients(grads, state)
    updates       = inner optimizer's, per worker
    params, state = loop.finish(params, updates, state, plan)

A worker that the others did not hear (`parallel.outer.health`) gets a new inner
optimizer from the trainer after such a step.

An exchange can run under a step's compute only if it starts before that compute
and nothing in the compute reads its result. So what is to be hidden is sent in
``begin``, before the gradients, and read in ``finish`` of this step or of a
later one. A collective cannot outlive the program that holds it, and a step is
one program: an exchange that is to take longer than one step is cut into
pieces, one per step (`parallel.outer.streaming`).
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


class Plan(NamedTuple):
  """What an outer loop does in one step.

  What is sent must be known when a program is compiled, so that no program
  holds a collective that does not run. All that may differ from step to step
  within one program is passed to it as numbers.

  Attributes:
    variant: Which compiled program runs; steps with equal variants share one.
    numbers: Tree of int32 that the program takes as an argument, such as the
      number of the round.
  """

  variant: Hashable = ()
  numbers: Any = ()


@dataclasses.dataclass(frozen=True)
class OuterLoop:
  """An outer loop that never communicates; algorithms override what they need.

  Attributes:
    worker: The worker axis.
  """

  worker: Axis
  # Whether what is exchanged are means, of however many workers there are.
  averages: ClassVar[bool] = True
  # Keys of the state, between `begin` and `finish`, too: of what has a leading
  # worker dim, and of what all know, with one element for each worker.
  own: ClassVar[tuple[str, ...]] = ("workers",)
  of_each: ClassVar[tuple[str, ...]] = ()
  # Whether all workers have equal parameters and inner optimizers after a step.
  equal: ClassVar[bool] = False
  # Whether a single worker trains as it would without the loop, if the outer
  # optimizer is SGD(1) and nothing is encoded or delayed. False for loops that
  # change parameters without peers: by rounding that cannot be turned off, or
  # by a pull towards a center variable as in elastic averaging SGD.
  plain_alone: ClassVar[bool] = True

  def coming_and_going(self) -> "OuterLoop":
    """Returns the same loop for workers of a swarm, who come and go.

    Its state has what one that comes starts from, be it that workers who all
    stay need it not.
    """
    return self

  def over(
    self, worker: Axis, weights: tuple[float, ...] = ()
  ) -> "OuterLoop":
    """Returns the same loop of other workers.

    Args:
      worker: The axis of these workers.
      weights: What each weighs in a mean; empty for equal weights. A loop
        whose means have no weights leaves them alone.
    """
    changes: dict[str, Any] = {"worker": worker, "weights": weights}
    if hasattr(self, "exchange"):
      changes["exchange"] = dataclasses.replace(
        self.exchange, worker=worker, weights=weights
      )
    names = {field.name for field in dataclasses.fields(self)}
    return dataclasses.replace(
      self, **{k: v for k, v in changes.items() if k in names}
    )

  def awaits(self, plan: Plan) -> bool:
    """Returns whether a step reads the state after `begin`, or changes it.

    If not, what `begin` has sent in an earlier step may be under way still
    when `gradients` and `finish` run.
    """
    return True

  @property
  def period(self) -> int:
    """Steps after which the plans' variants repeat, in the steady state."""
    return 1

  @property
  def steady_round(self) -> range:
    """The steps of one period in the steady state."""
    # A period is at least a round. First sends come after one round, and each
    # arrives less than a round later: by the third period both happen.
    return range(2 * self.period, 3 * self.period)

  def init(self, params: Params) -> State:
    """Returns the first state that is carried beside the workers' parameters.

    The trainer places the state by its paths. A leaf whose path ends like a
    parameter's is sharded like that parameter. Leaves under the key
    ``"workers"`` have a leading worker dim of logical size, and each worker's
    part lives with the worker.

    Args:
      params: The parameters from which all workers start, without worker dim.

    Returns:
      A dict of arrays of logical shape.
    """
    return {}

  def plan(self, step: int) -> Plan:
    """Returns what happens in a step; the first step has the number 0."""
    return Plan()

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    """Sends, before the gradients, what may travel while they are computed.

    Args:
      params: The workers' parameters ``[W, ...]``.
      state: What `init` described, as it lies on this device.
      plan: What happens in this step.

    Returns:
      The state, with what has been sent in it.
    """
    return state

  def gradients(self, grads: Params, state: State) -> Params:
    """Changes the gradients that the inner optimizers get.

    Args:
      grads: Each worker's gradients ``[W, ...]``.
      state: What `begin` returned.
    """
    return grads

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    """Applies the inner optimizers' updates and what has arrived.

    Args:
      params: The workers' parameters ``[W, ...]`` before the step.
      updates: What each inner optimizer adds to them, ``[W, ...]``.
      state: What `begin` returned.
      plan: What happens in this step.

    Returns:
      The workers' parameters and the state after the step.
    """
    return optax.apply_updates(params, updates), state

  def evaluated(self, params: Params, state: State) -> Params:
    """Returns the parameters that stand for the run, without worker dim."""
    return mean_over_workers(params, self.worker)

  def metrics(self, state: State) -> dict[str, Any]:
    """Returns what is told of each worker, arrays ``[workers]`` by name.

    Returns:
      "delta_norm" and "left_out", as `parallel.outer.health` has them; empty
      for loops that leave no worker out.
    """
    workers = state.get("workers", {})
    return {
      key: workers[key] for key in ("delta_norm", "left_out") if key in workers
    }

  def is_border(self, step: int) -> bool:
    """Returns whether the number of workers may change before a step."""
    return True

  def joined(
    self, params: Params, state: State, first: int
  ) -> tuple[Params, State]:
    """Fills in what workers start with that join a run.

    It works on arrays of logical shape, outside ``jax.shard_map``.

    Args:
      params: The workers' parameters ``[workers, ...]``.
      state: The state, of logical shape.
      first: The first worker that joins. From there on, all of ``params`` and
        what is under "workers" in the state is zero.

    Returns:
      Both, with what a worker that joins starts with.
    """
    return of_joined(params, mean_of_first(params, first), first), state

  def started(self, state: State) -> State:
    """Returns the state of a worker that comes to a swarm.

    Args:
      state: What all share, as it is now, and a worker's first own part.
    """
    return state

  def late(
    self, params: Params, state: State, shared: State, hooks: tuple[str, str],
    steps: tuple[int, int],
  ) -> tuple[Params, State]:
    """Moves what a worker of a swarm has to say on to a later exchange.

    It works on arrays of logical shape, outside ``jax.shard_map``.

    Args:
      params: The worker's parameters ``[1, ...]``, updates included.
      state: The state when it had something to say.
      shared: The same with what all share, as it is at the later exchange.
      hooks: In which of "begin" and "finish" it had something to say, and in
        which the later exchange is.
      steps: The numbers of the steps in which these hooks are.

    Returns:
      The parameters, moved by as much as the common ones have moved since; and
      the state that the worker has in the later exchange.
    """
    moved = jax.tree.map(
      lambda x, new, old: x + (new - old), params, shared["params"],
      state["params"],
    )
    return moved, shared

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    """Returns what a device sends over the worker axis in one period.

    Args:
      shapes: Shapes of one worker's parameters as they lie on one device.

    Returns:
      Operand bytes of collectives by dtype on the wire; empty where one device
      has all workers.
    """
    return {}


@dataclasses.dataclass(frozen=True)
class Rounds(OuterLoop):
  """An outer loop with an exchange at the end of each round.

  Attributes:
    every: H, the inner steps of a round.
  """

  every: int

  @property
  def period(self) -> int:
    return self.every

  def is_border(self, step: int) -> bool:
    # Between rounds no exchange is in pieces. Means that have not arrived yet
    # are complete, and arrive whoever the workers are by then.
    return step % self.every == 0


@dataclasses.dataclass(frozen=True)
class CommonRounds(Rounds):
  """Rounds whose outer parameters, "params" in the state, all workers share."""

  def joined(
    self, params: Params, state: State, first: int
  ) -> tuple[Params, State]:
    return of_joined(params, state["params"], first), state

  def evaluated(self, params: Params, state: State) -> Params:
    return state["params"]


@dataclasses.dataclass(frozen=True)
class OwnRounds(Rounds):
  """Rounds of workers with outer parameters of their own.

  These are "params" under "workers" in the state. They and the other parts in
  ``averaged`` start, for a worker that joins, from the mean of the workers.
  """

  averaged: ClassVar[tuple[str, ...]] = ("params",)

  def joined(
    self, params: Params, state: State, first: int
  ) -> tuple[Params, State]:
    own = state["workers"]
    means = {key: mean_of_first(own[key], first) for key in self.averaged}
    filled = {key: of_joined(own[key], means[key], first) for key in means}
    params = of_joined(params, means["params"], first)
    return params, state | {"workers": own | filled}

  def evaluated(self, params: Params, state: State) -> Params:
    return mean_over_workers(state["workers"]["params"], self.worker)


def mean_over_workers(tree: Params, worker: Axis) -> Params:
  """Averages ``[W, ...]`` to ``[...]`` over all workers, by an all-reduce."""
  return jax.tree.map(lambda x: all_reduce(x, worker) / worker.size, tree)


def of_first(tree: Params, worker: Axis) -> Params:
  """Brings worker 0's values of ``[W, ...]`` to every device as ``[...]``.

  A sum of which all other summands are zero is exact, and by its type the same
  on all devices; a slice of one device's array would not be. Bits are summed as
  integers, since a sum of floats makes 0 of -0.
  """
  only_first = jax.vmap(lambda rank, x: jnp.where(rank == 0, x, 0))
  ranks = ranks_here(worker)

  def of_leaf(x):
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    found = all_reduce(only_first(ranks, bits), worker)
    return lax.bitcast_convert_type(found.astype(bits.dtype), x.dtype)

  return jax.tree.map(of_leaf, tree)


def to_workers(tree: Params, worker: Axis) -> Params:
  """Copies ``[...]`` to ``[W, ...]``, once for each worker of this device."""

  def copies(x):
    stacked = jnp.broadcast_to(x, (worker.lanes, *x.shape))
    # The workers' parameters vary over the axis by type, and steps return the
    # types that they take.
    return varying(stacked, worker.name)

  return jax.tree.map(copies, tree)


def stacked(tree: Params, worker: Axis) -> Params:
  """Copies ``[...]`` to ``[workers, ...]``, of logical size, for `init`."""
  return jax.tree.map(
    lambda x: jnp.broadcast_to(x, (worker.size, *jnp.shape(x))), tree
  )


def mean_of_first(tree: Params, count: int) -> Params:
  """Averages the first workers of ``[workers, ...]`` of logical shape."""
  return jax.tree.map(lambda x: jnp.mean(x[:count], axis=0), tree)


def of_joined(tree: Params, new: Params, first: int) -> Params:
  """Gives the workers from ``first`` on their part, for `OuterLoop.joined`.

  Args:
    tree: Arrays ``[workers, ...]`` of logical shape.
    new: What each of these workers gets, ``[...]``.
    first: The first worker that gets it.
  """
  return jax.tree.map(lambda x, y: x.at[first:].set(y), tree, new)


def stacked_zeros(params: Params, worker: Axis) -> Params:
  """Returns zeros ``[workers, ...]`` for every parameter ``[...]``."""
  return jax.tree.map(jnp.zeros_like, stacked(params, worker))


def at_path(tree: Any, path: tuple[Any, ...]) -> Any:
  """Returns the leaf of a nested dict at a path of `jax.tree` functions."""
  return functools.reduce(lambda part, key: part[key.key], path, tree)


def float32_bytes(shapes: Params, worker: Axis) -> dict[str, int]:
  """Returns the operand bytes of one all-reduce of all parameters in float32.

  The lanes of a device are summed before, so their number does not matter.
  """
  if worker.devices == 1:
    return {}
  elements = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
  return {"float32": 4 * elements}
