"""Stale-synchronous SGD, one step late, with a first-order correction.

The mean of the workers' updates travels while the next gradients are computed:

    w_i = w + u_i                         u_i: the inner optimizer's update
    send u_i;  g_i at w_i;  receive       D_i = mean(u) - u_i
    l_i = l_0 |g_i| / |g_i * g_i * D_i|   elementwise products, Euclidean norms
    u_i <- U(g_i + l_i g_i * g_i * D_i);  w <- w + mean(u)

``w`` is kept itself, the same bits on all workers; a textbook's w_i + D_i is
that up to rounding. With l_0 = 0 it is stale SGD without compensation.

Source: Rigazzi, "DC-S3GD: delay-compensated stale-synchronous SGD", arXiv
1911.02516; equations recalled, not checked against it.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import optax

from parallel.collectives import after
from parallel.outer.base import (
  OuterLoop,
  Params,
  Plan,
  State,
  stacked_zeros,
  to_workers,
)
from parallel.outer.exchange import Exchange


@dataclasses.dataclass(frozen=True)
class DCS3GD(OuterLoop):
  """One exchange per step, sent at its head, applied at its end.

  Attributes:
    exchange: How the mean over workers is taken.
    compensation: l_0; 0 for none.
    norm: Trees ``[W, ...]`` -> ``[W]``, the norm of each worker's tree, each
      logical element counted once.
  """

  exchange: Exchange
  compensation: float
  norm: Callable[[Params], jax.Array]

  def init(self, params: Params) -> State:
    shared = self.exchange.init(params)
    workers = shared.pop("workers", {}) | {
      "update": stacked_zeros(params, self.worker)
    }
    return {"params": params, "workers": workers}

  def plan(self, step: int) -> Plan:
    return Plan((), (step,))

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    arriving, new = self.exchange.mean(
      state["workers"]["update"], state, plan.numbers[0]
    )
    return state | new | {"mean": arriving}  # until the end of this step

  def gradients(self, grads: Params, state: State) -> Params:
    if not self.compensation:
      return grads
    correction = jax.tree.map(
      lambda g, m, u: g * g * (m - u),
      grads, state["mean"], state["workers"]["update"],
    )
    size = self.norm(correction)
    # In order: a norm may be several reductions.
    norm = self.norm(after(grads, size))
    strength = jnp.where(
      size > 0,
      self.compensation * norm / jnp.where(size > 0, size, 1.0),
      0.0,
    )
    correct = jax.vmap(lambda g, c, by: g + by * c)
    return jax.tree.map(
      lambda g, c: correct(g, c, strength), grads, correction
    )

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    state = dict(state)
    common = optax.apply_updates(state["params"], state.pop("mean"))
    state["params"] = common
    state["workers"] = state["workers"] | {"update": updates}
    params = optax.apply_updates(to_workers(common, self.worker), updates)
    return params, state

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    return self.exchange.sent_bytes(shapes)
