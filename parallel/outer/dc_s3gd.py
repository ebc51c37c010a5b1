"""DC-S3GD: stale-synchronous SGD, one step delayed, with delay compensation.

The workers' updates are averaged while the next gradients are computed. Let w
be the parameters that all workers share, g_i the gradient of worker i, and u_i
the update of its inner optimizer in the previous step. A step of worker i is

    w_i = w + u_i                         worker i does not wait for the mean
    send u_i; compute g_i at w_i; receive mean(u);  D_i = mean(u) - u_i
    l_i = l_0 |g_i| / |g_i * g_i * D_i|   elementwise products, Euclidean norms
    w  <- w + mean(u)
    u_i <- U(g_i + l_i g_i * g_i * D_i)   U: the inner optimizer

The gradient is taken at w + u_i, but its update is added to w + mean(u), at a
distance of D_i. To first order the gradient at that point is g_i + H D_i with
the Hessian H; the correction replaces H by the elementwise square of the
gradient, as DC-ASGD does. l_i scales the whole correction to the norm l_0
|g_i|. With l_0 = 0 this is stale SGD without compensation.

The update of a worker that has diverged (`parallel.outer.health`) is replaced
by u_i = 0 and excluded from the mean, so that the worker continues from w.

Source: Rigazzi, "DC-S3GD: delay-compensated stale-synchronous SGD", arXiv
1911.02516. Its abstract confirms the delay of one step and a first-order
correction. The normalisation l_i and the default l_0 = 0.2 are from memory,
since neither its text nor its code was available. The correction is that of
DC-ASGD, Zheng et al., arXiv 1609.08326, and was compared with that paper's own
code: g + lambda * g * g * (parameters of the step - parameters of the
gradient), before the optimizer, with a constant lambda or one divided by an
elementwise running root mean square of g.
"""

from collections.abc import Hashable
import dataclasses

import jax
import jax.numpy as jnp
import optax

from parallel.collectives import order_after
from parallel.outer import health
from parallel.outer.base import (
  OuterLoop,
  Params,
  Plan,
  State,
  mean_over_workers,
  stacked_zeros,
  to_workers,
)
from parallel.outer.exchange import Exchange


@dataclasses.dataclass(frozen=True)
class DCS3GD(OuterLoop):
  """Outer loop that averages the updates of the previous step in each step.

  Attributes:
    exchange: Mean over the workers. ``exchange.rule.norm`` also computes the
      norms of gradient and correction.
    compensation: l_0, the norm of the correction divided by that of the
      gradient; 0 for no correction.
  """

  exchange: Exchange
  compensation: float

  def init(self, params: Params) -> State:
    shared = self.exchange.init(params)
    workers = shared.pop("workers", {}) | {
      "update": stacked_zeros(params, self.worker)
    }
    # float32 [workers]: workers in the mean of the next exchange.
    mask = jnp.ones(self.worker.size)
    return {"params": params, "mask": mask, "workers": workers}

  def plan(self, step: int) -> Plan:
    return Plan((), (step,))

  def averages_state(self, variant: Hashable) -> bool:
    return True

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    arriving, new = self.exchange.mean(
      state["workers"]["update"], state, plan.numbers[0], state["mask"]
    )
    # `finish` removes the mean: it is not part of the state between steps.
    return state | new | {"mean": arriving}

  def gradients(self, grads: Params, state: State) -> Params:
    if not self.compensation:
      return grads
    correction = jax.tree.map(
      lambda g, m, u: g * g * (m[None] - u),  # m - u is D_i
      grads, state["mean"], state["workers"]["update"],
    )
    size = self.exchange.rule.norm(correction)
    # The second norm is ordered after the first: each can contain several
    # collectives, and all devices must run them in one order
    # (`collectives.order_after`).
    norm = self.exchange.rule.norm(order_after(grads, size))
    # Factor of the correction (l_i), [W]; 0 where the correction is zero, as in
    # the first step. There the inner `where` keeps the division finite.
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
    # The state holds the common parameters, to which all workers add the same
    # mean. If each worker only added mean - update to its own parameters, as in
    # the paper, rounding errors would make the workers drift apart.
    common = optax.apply_updates(state["params"], state.pop("mean"))
    state["params"] = common
    verdict = self.exchange.judge(updates)
    updates = health.select_per_worker(
      verdict.mine, updates, jax.tree.map(jnp.zeros_like, updates)
    )
    workers = health.record_statistics(
      state["workers"], verdict.norms, verdict.mine
    )
    state["workers"] = workers | {"update": updates}
    state["mask"] = verdict.mask
    params = optax.apply_updates(to_workers(common, self.worker), updates)
    return params, state

  def export_params(self, params: Params, state: State) -> Params:
    return mean_over_workers(params, self.worker)
