"""DC-S3GD: stale-synchronous SGD, one step late, with delay compensation.

The mean of the workers' updates travels while the next gradients are computed.
A step of worker i, with u_i the inner optimizer's update of the step before:

    w_i = w + u_i                         worker i does not wait for the mean
    send u_i;  g_i at w_i;  receive       D_i = mean(u) - u_i
    l_i = l_0 |g_i| / |g_i * g_i * D_i|   elementwise products, Euclidean norms
    w  <- w + mean(u)
    u_i <- U(g_i + l_i g_i * g_i * D_i)   U: the inner optimizer

The gradient was taken at w + u_i, but the update that comes of it is added to
w + mean(u), which is D_i away. To first order the gradient there is g_i + H D_i
with the Hessian H; the correction takes the elementwise square of the gradient
in place of H, as DC-ASGD does. l_i gives the whole correction the norm
l_0 |g_i|. With l_0 = 0 this is stale SGD without compensation.

A worker whose update has diverged (`parallel.outer.health`) has none: u_i = 0,
which the mean leaves out, so that the worker goes on from w.

Source: Rigazzi, "DC-S3GD: delay-compensated stale-synchronous SGD", arXiv
1911.02516. Its abstract confirms the delay of one step and a first-order
correction. The normalisation l_i and the default l_0 = 0.2 are recalled, since
neither its text nor its code was at hand. The correction is that of DC-ASGD,
Zheng et al., arXiv 1609.08326, and was compared with that paper's own code:
g + lambda g * g * (where the step is taken - where g was taken), before the
optimizer, with a constant lambda or one divided by an elementwise running root
mean square of g.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from parallel.collectives import after
from parallel.outer import health
from parallel.outer.base import (
  OuterLoop,
  Params,
  Plan,
  State,
  of_joined,
  stacked_zeros,
  to_workers,
)
from parallel.outer.exchange import Exchange


@dataclasses.dataclass(frozen=True)
class DCS3GD(OuterLoop):
  """Exchanges updates at the head of each step and applies them at its end.

  Attributes:
    exchange: How the mean over workers is taken. Its norm is that of the
      compensation, too.
    compensation: l_0, the norm of the correction over that of the gradient; 0
      for no correction.
  """

  exchange: Exchange
  compensation: float
  of_each: ClassVar[tuple[str, ...]] = ("heard",)

  def init(self, params: Params) -> State:
    shared = self.exchange.init(params)
    workers = shared.pop("workers", {}) | {
      "update": stacked_zeros(params, self.worker)
    }
    heard = jnp.ones(self.worker.size)  # whose updates are sent next
    return {"params": params, "heard": heard, "workers": workers}

  def plan(self, step: int) -> Plan:
    return Plan((), (step,))

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    arriving, new = self.exchange.mean(
      state["workers"]["update"], state, plan.numbers[0], state["heard"]
    )
    # `finish` takes it out again: the state between steps has no mean.
    return state | new | {"mean": arriving}

  def gradients(self, grads: Params, state: State) -> Params:
    if not self.compensation:
      return grads
    correction = jax.tree.map(
      lambda g, m, u: g * g * (m - u),  # g_i * g_i * D_i
      grads, state["mean"], state["workers"]["update"],
    )
    size = self.exchange.rule.norm(correction)
    # The second norm waits for the first: each may be several collectives, and
    # devices must run all of them in one order (`collectives.after`).
    norm = self.exchange.rule.norm(after(grads, size))
    # l_i; 0 where D_i is zero, as in the first step, when no update has been
    # made. The inner `where` keeps the division finite there.
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
    # w is kept itself and all workers add the same mean to it. If each kept
    # only its own w_i and added D_i, as the paper writes it, the workers'
    # roundings would add up and their w would drift apart.
    common = optax.apply_updates(state["params"], state.pop("mean"))
    state["params"] = common
    verdict = self.exchange.judge(updates)
    updates = health.choose(
      verdict.mine, updates, jax.tree.map(jnp.zeros_like, updates)
    )
    workers = health.noted(state["workers"], verdict.norms, verdict.mine)
    state["workers"] = workers | {"update": updates}
    state["heard"] = verdict.heard
    params = optax.apply_updates(to_workers(common, self.worker), updates)
    return params, state

  def joined(
    self, params: Params, state: State, first: int
  ) -> tuple[Params, State]:
    return of_joined(params, state["params"], first), state

  def late(
    self, params: Params, state: State, shared: State, hooks: tuple[str, str],
    steps: tuple[int, int],
  ) -> tuple[Params, State]:
    moved, shared = super().late(params, state, shared, hooks, steps)
    said, later = hooks
    if said == "begin":
      return moved, shared
    # Its u_i has been sent, and is sent no second time but the one that came of
    # it. In `begin` that is not judged: it must be finite, as by `ANY_FINITE`.
    update = jax.tree.map(
      lambda x, w, u: x - w - u, params, state["params"],
      state["workers"]["update"],
    )
    if later == "finish":
      return jax.tree.map(jnp.add, shared["params"], update), shared
    finite = jnp.isfinite(health.norms_here(update))
    update = health.choose(
      finite, update, jax.tree.map(jnp.zeros_like, update)
    )
    return moved, shared | {"workers": shared["workers"] | {"update": update}}

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    return self.exchange.sent_bytes(shapes)
