"""Adapters of outer loops to workers that join, leave or miss an exchange.

An outer loop synchronises a fixed set of workers. Between two rounds, a run can
resume with another number of workers. In an elastic run each peer is one
worker: it starts from the state that all workers share, and if it misses an
exchange, it contributes to a later one. `elastic_adapter` returns the adapter
of a loop; `ElasticAdapter` suffices unless a late contribution depends on the
algorithm.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from parallel.axes import Axis
from parallel.outer import health
from parallel.outer.base import (
  OuterLoop,
  Params,
  Plan,
  RoundLoop,
  State,
  stack_copies,
)
from parallel.outer.dc_s3gd import DCS3GD
from parallel.outer.eager import Eager
from parallel.outer.streaming import Streaming

# Entries of a state's "workers" that are not shared, so that they are zero for
# a worker that joins.
_PRIVATE = ("delta_norm", "left_out", "residual")


@dataclasses.dataclass(frozen=True)
class ElasticAdapter:
  """Adapter of an outer loop to a changing set of workers.

  Attributes:
    loop: The outer loop.
  """

  loop: Any

  def elastic(self) -> OuterLoop:
    """Returns the same loop for elastic membership.

    The state of the returned loop contains the values from which a joining
    worker starts, even if a fixed set of workers does not need them.
    """
    return self.loop

  def is_round_boundary(self, step: int) -> bool:
    """Returns whether the number of workers may change before a step."""
    # Between rounds no exchange is partially sent. Means that are not applied
    # yet are complete, and a change of the set of workers does not affect them.
    loop = self.loop
    return not isinstance(loop, RoundLoop) or step % loop.sync_every == 0

  def awaits(self, plan: Plan) -> bool:
    """Returns whether a step with ``plan`` uses the state after `begin`.

    It uses the loop's state if `gradients` or `finish` read or change it.

    If not, an exchange that `begin` started in an earlier step may still be in
    flight while `gradients` and `finish` run.
    """
    return True

  def joined(
    self, params: Params, state: State, first: int
  ) -> tuple[Params, State]:
    """Initializes the workers that join a training run.

    They start from the shared outer parameters. If each worker has its own
    outer parameters, they start from the mean of these over the workers, and
    so do other entries under "workers", except residuals and health statistics.
    (All outer optimizers except Adam are linear, so the mean of their states is
    the state that the mean gradients would give.) The method operates on arrays
    of logical shape, outside ``jax.shard_map``.

    Args:
      params: Parameters of the workers, ``[workers, ...]``.
      state: The state, of logical shape.
      first: Index of the first joining worker. From there on, ``params`` and
        all entries under "workers" in the state are zero.

    Returns:
      The parameters and the state with the joining workers' initial values.
    """

    def mean(tree):
      return jax.tree.map(lambda x: jnp.mean(x[:first], axis=0), tree)

    own = state.get("workers", {})
    if self.loop.equal:
      new = jax.tree.map(lambda x: x[0], params)
    elif "params" in own:
      means = {key: mean(own[key]) for key in own if key not in _PRIVATE}
      new = means["params"]
      filled = {
        key: set_joining_values(own[key], means[key], first) for key in means
      }
      state = state | {"workers": own | filled}
    else:
      new = state["params"] if "params" in state else mean(params)
    return set_joining_values(params, new, first), state

  def started(self, state: State) -> State:
    """Returns the state of a worker that joins an elastic training run.

    Args:
      state: State that the workers share, with the initial values of "workers".
    """
    own = state.get("workers", {})
    if "params" not in own:
      return state
    # Entries without a shared value, such as an unsent delta, are zero.
    return state | {"workers": own | {
      key: stack_copies(state[key], self.loop.worker) if key in state
      else jax.tree.map(jnp.zeros_like, own[key])
      for key in own if key not in _PRIVATE
    }}

  def late(
    self, params: Params, state: State, shared: State, hooks: tuple[str, str],
    steps: tuple[int, int],
  ) -> tuple[Params, State]:
    """Moves a worker's contribution from a missed exchange to a later one.

    The worker belongs to an elastic run. The method operates on arrays of
    logical shape, outside ``jax.shard_map``.

    Args:
      params: Parameters of the worker, updates included, ``[1, ...]``.
      state: The state at the missed exchange.
      shared: ``state`` with the shared values at the later exchange.
      hooks: Methods of the loop that run the missed and the later exchange,
        each "begin" or "finish".
      steps: Numbers of the steps of the missed and of the later exchange.

    Returns:
      The parameters, shifted by the change of the common parameters between the
      two exchanges, and the worker's state in the later exchange.
    """
    moved = jax.tree.map(
      lambda x, new, old: x + (new - old)[None], params, shared["params"],
      state["params"],
    )
    return moved, shared


class _EagerAdapter(ElasticAdapter):

  def elastic(self) -> Eager:
    return dataclasses.replace(self.loop, common=True)

  def awaits(self, plan: Plan) -> bool:
    return plan.variant[1]

  def late(
    self, params: Params, state: State, shared: State, hooks: tuple[str, str],
    steps: tuple[int, int],
  ) -> tuple[Params, State]:
    said, later = hooks
    own = state["workers"]
    delta = own["delta"]
    if said == "finish":  # the delta in the state has been sent
      delta = jax.tree.map(jnp.subtract, own["params"], params)
    shared = self.started(shared)
    own = shared["workers"]
    if (said, later) == ("begin", "begin"):  # `finish` has judged this delta
      return own["params"], shared | {"workers": own | {"delta": delta}}
    # Parameters as if the worker had started this round from the current common
    # parameters and moved by its delta.
    return jax.tree.map(jnp.subtract, own["params"], delta), shared


class _StreamingAdapter(ElasticAdapter):

  def awaits(self, plan: Plan) -> bool:
    return bool(plan.variant.receives)

  def late(
    self, params: Params, state: State, shared: State, hooks: tuple[str, str],
    steps: tuple[int, int],
  ) -> tuple[Params, State]:
    loop = self.loop
    moved, shared = super().late(params, state, shared, hooks, steps)
    # Fragments that this worker sent before it was late, and whose means have
    # arrived since, so that the outer parameters include their deltas. They are
    # merged as in a worker on time; else this one would send the deltas again.
    (first, last), tau = steps, min(loop.overlap)
    for sent_at in range(first + 1 - tau, min(first, last + 1 - tau)):
      if (number := loop.times.sent(sent_at)) is not None:
        place = loop.fragments.place(number)
        mixed = jax.tree.map(
          loop.mix, *loop.outer_and_own_params(params, shared, *place)
        )
        moved = loop.fragments.put(moved, mixed, *place, 1)
    if loop.pieces > 1:
      workers = shared["workers"]
      old, new = (loop.plan(step).numbers.send for step in steps)
      # The worker has sent no piece of the exchange that is running now.
      if old.exchange != new.exchange or not old.piece:
        zeros = jax.tree.map(jnp.zeros_like, workers["sending"])
        shared = shared | {"workers": workers | {"sending": zeros}}
    return moved, shared


class _DCS3GDAdapter(ElasticAdapter):

  def late(
    self, params: Params, state: State, shared: State, hooks: tuple[str, str],
    steps: tuple[int, int],
  ) -> tuple[Params, State]:
    moved, shared = super().late(params, state, shared, hooks, steps)
    said, later = hooks
    if said == "begin":
      return moved, shared
    # The last update was already sent, so the later exchange gets only the one
    # computed since. `begin` does not judge updates, so a non-finite one is
    # replaced by zero here, as `ANY_FINITE` does.
    update = jax.tree.map(
      lambda x, w, u: x - w[None] - u, params, state["params"],
      state["workers"]["update"],
    )
    if later == "finish":
      moved = jax.tree.map(lambda w, u: w[None] + u, shared["params"], update)
      return moved, shared
    finite = jnp.isfinite(health.worker_norms(update))
    update = health.select_per_worker(
      finite, update, jax.tree.map(jnp.zeros_like, update)
    )
    return moved, shared | {"workers": shared["workers"] | {"update": update}}


_ADAPTERS: dict[type, Callable[[Any], ElasticAdapter]] = {
  Eager: _EagerAdapter, Streaming: _StreamingAdapter, DCS3GD: _DCS3GDAdapter,
}


def elastic_adapter(loop: OuterLoop) -> ElasticAdapter:
  """Returns the adapter of an outer loop.

  Example:
    >>> loop = RoundLoop(Axis("worker", size=2), sync_every=3)
    >>> borders = elastic_adapter(loop)
    >>> [step for step in range(7) if borders.is_round_boundary(step)]
    [0, 3, 6]
  """
  return _ADAPTERS.get(type(loop), ElasticAdapter)(loop)


def with_worker_axis(
  loop: OuterLoop, worker: Axis, weights: tuple[float, ...] = ()
) -> Any:
  """Returns an outer loop with the same options for another worker axis.

  Args:
    loop: The outer loop.
    worker: The new worker axis.
    weights: Weight of each worker in a mean; empty for equal weights. A loop
      whose means have no weights ignores them.
  """
  changes: dict[str, Any] = {"worker": worker, "weights": weights}
  if hasattr(loop, "exchange"):
    changes["exchange"] = dataclasses.replace(
      loop.exchange, worker=worker, weights=weights
    )
  names = {field.name for field in dataclasses.fields(loop)}
  return dataclasses.replace(
    loop, **{k: v for k, v in changes.items() if k in names}
  )


def set_joining_values(tree: Params, new: Params, first: int) -> Params:
  """Returns a tree in which the values of the joining workers are replaced.

  Args:
    tree: Arrays ``[workers, ...]`` of logical shape.
    new: Value for each joining worker, ``[...]``.
    first: Index of the first joining worker.
  """
  return jax.tree.map(lambda x, y: x.at[first:].set(y), tree, new)
