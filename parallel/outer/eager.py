"""Eager updates: DiLoCo with means of the round before and own news at once.

At the end of round k a worker knows its own outer gradient d_m(k), but the mean
over the M workers that it has is that of round k - 1. It takes its own part of
that mean out and puts its newest one in:

    d~_m(k) = d_m(k) / M + (mean(k - 1) - d_m(k - 1) / M)
    phi_m  <- OuterOpt(phi_m, d~_m);  theta_m <- phi_m

Before round 1 all outer gradients are zero. Then the sum over rounds
telescopes: what has been applied after k rounds is

    mean(1) + ... + mean(k - 1) + d_m(k) / M

so each mean counts once. The outer parameters phi_m of two workers differ by
their own newest parts, and the mean of all phi_m stands for the run.

With weights, 1 / M is the worker's share in the mean of that round. A worker
that has diverged (`parallel.outer.health`) has no share and tells nothing: its
d_m is zero, and it goes on from its own phi_m and the others' news.

Workers who come and go share one trajectory more, that of a worker who never
has a d_m of its own: OuterOpt by the means alone. One that comes starts from it
with d_m = 0. What a worker takes out of a mean is what it has put in before,
whatever its share in that mean became since: so the sum telescopes in any
world.

Source: Kale et al., "Eager updates for overlapped communication and computation
in DiLoCo", arXiv 2502.12996, Algorithm 3. The formula agrees with an
independent write-up of the paper; the paper itself was not at hand. There, too,
each worker applies the outer optimizer to its own outer parameters. That all is
zero before round 1 is ours: what the paper does in its first round is not known
to us.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from parallel.collectives import ranks_here
from parallel.outer import health
from parallel.outer.base import (
  OwnRounds,
  Params,
  Plan,
  State,
  stacked,
  stacked_zeros,
)
from parallel.outer.exchange import Exchange
from parallel.outer.optimizers import OuterOptimizer

# What a worker that comes has as all have it, and what it has not.
_COMMON, _UNSAID = ("params", "optimizer"), ("delta", "share")


@dataclasses.dataclass(frozen=True)
class Eager(OwnRounds):
  """Sends a round's outer gradients in the next one; applies them at its end.

  Attributes:
    every: H, the number of inner steps in a round.
    optimizer: The outer optimizer; each worker has a state of its own.
    exchange: How the mean over workers is taken.
    common: Whether the state has the common trajectory, "params" and
      "optimizer", which takes as much memory as a worker's own. It stands for
      the run then, since all know it.
  """

  optimizer: OuterOptimizer
  exchange: Exchange
  common: bool = False
  # All outer steps but Adam's are linear, so the mean of the workers is what
  # one would be that had gone the mean way. Its d_m is not sent, as it is that
  # of the others.
  averaged: ClassVar[tuple[str, ...]] = (
    "params", "optimizer", "delta", "share"
  )

  of_each: ClassVar[tuple[str, ...]] = ("heard",)

  def coming_and_going(self) -> "Eager":
    return dataclasses.replace(self, common=True)

  def init(self, params: Params) -> State:
    shared = self.exchange.init(params)
    workers = shared.pop("workers", {}) | {
      "params": stacked(params, self.worker),
      "optimizer": stacked(self.optimizer.init(params), self.worker),
      # Of the last round: d_m, and its share in the mean.
      "delta": stacked_zeros(params, self.worker),
      "share": jnp.zeros(self.worker.size),
    }
    state = {
      "mean": jax.tree.map(jnp.zeros_like, params),
      "heard": jnp.ones(self.worker.size),  # whose d_m is sent next
      "workers": workers,
    }
    if self.common:
      state |= {"params": params, "optimizer": self.optimizer.init(params)}
    return state

  def plan(self, step: int) -> Plan:
    # The head of a round is where the outer gradients of the last one are sent,
    # to travel under this step's compute; in round 0 there are none.
    begins = step > 0 and step % self.every == 0
    ends = (step + 1) % self.every == 0
    return Plan((begins, ends), (step // self.every,))

  def awaits(self, plan: Plan) -> bool:
    return plan.variant[1]

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    begins, _ = plan.variant
    if not begins:
      return state
    arriving, new = self.exchange.mean(
      state["workers"]["delta"], state, plan.numbers[0], state["heard"]
    )
    return state | new | {"mean": arriving}

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    params = optax.apply_updates(params, updates)
    _, ends = plan.variant
    if not ends:
      return params, state
    own = state["workers"]
    delta = jax.tree.map(jnp.subtract, own["params"], params)
    verdict = self.exchange.judge(delta)
    own = health.noted(own, verdict.norms, verdict.mine)
    delta = health.choose(
      verdict.mine, delta, jax.tree.map(jnp.zeros_like, delta)
    )
    weights = health.weights_of(
      self.exchange.weights, verdict.heard, self.worker
    )
    share = (weights / jnp.sum(weights))[ranks_here(self.worker)]

    @functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, None))
    def eager_mean(now, share, last, last_share, all_last):
      # In brackets: what the other workers had in the mean of the round before.
      return now * share + (all_last - last * last_share)

    eager = jax.tree.map(
      lambda now, last, all_last: eager_mean(
        now, share, last, own["share"], all_last
      ),
      delta, own["delta"], state["mean"],
    )
    # By `update`, as the mean has arrived already and each worker adds its own
    # part: no pass that decodes could take this step.
    updates, optimizer = jax.vmap(self.optimizer.update)(
      eager, own["optimizer"], own["params"]
    )
    outer = optax.apply_updates(own["params"], updates)
    own = own | {"params": outer, "optimizer": optimizer, "delta": delta}
    state = state | {"heard": verdict.heard}
    if self.common:
      step, optimizer = self.optimizer.update(
        state["mean"], state["optimizer"], state["params"]
      )
      common = optax.apply_updates(state["params"], step)
      state |= {"params": common, "optimizer": optimizer}
    return outer, state | {"workers": own | {"share": share}}

  def evaluated(self, params: Params, state: State) -> Params:
    return state["params"] if self.common else super().evaluated(params, state)

  def started(self, state: State) -> State:
    own = state["workers"]
    common = {key: stacked(state[key], self.worker) for key in _COMMON}
    unsaid = {key: jax.tree.map(jnp.zeros_like, own[key]) for key in _UNSAID}
    return state | {"workers": own | common | unsaid}

  def late(
    self, params: Params, state: State, shared: State, hooks: tuple[str, str],
    steps: tuple[int, int],
  ) -> tuple[Params, State]:
    said, later = hooks
    own = state["workers"]
    delta = own["delta"]
    if said == "finish":  # that one has been sent, and a newer one has not
      delta = jax.tree.map(jnp.subtract, own["params"], params)
    shared = self.started(shared)
    own = shared["workers"]
    if (said, later) == ("begin", "begin"):  # it has been judged
      return own["params"], shared | {"workers": own | {"delta": delta}}
    # It is as if the worker had come this way from the common parameters.
    return jax.tree.map(jnp.subtract, own["params"], delta), shared

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    return self.exchange.sent_bytes(shapes)
