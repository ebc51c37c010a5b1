"""Eager updates: DiLoCo with delayed means and immediate own deltas.

At the end of round k, worker m has its own outer gradient d_m(k), but the mean
over the M workers only for round k - 1. It replaces its own part of that mean,
d_m(k - 1) / M, by its newest part:

    d~_m(k) = d_m(k) / M + (mean(k - 1) - d_m(k - 1) / M)
    phi_m  <- OuterOpt(phi_m, d~_m);  theta_m <- phi_m

Before round 1 all outer gradients are zero. Then the sum over rounds
telescopes: the sum of the applied gradients after k rounds is

    mean(1) + ... + mean(k - 1) + d_m(k) / M

so each mean counts once. The outer parameters phi_m of two workers differ by
their own newest parts, and the mean of all phi_m is evaluated.

With weights, 1 / M is the worker's share in the mean of that round. A worker
that has diverged (`parallel.outer.health`) has share 0 and d_m = 0; it
continues from its own phi_m and the others' means.

With elastic membership, the workers also share one common trajectory: outer
parameters to which OuterOpt applies the means alone, as for a worker whose own
d_m is always zero. A joining worker starts from them with d_m = 0. A worker
subtracts from a mean exactly the part that it applied one round earlier, even
if its share in that mean has changed since, so the sum telescopes for any set
of workers.

Source: Kale et al., "Eager updates for overlapped communication and computation
in DiLoCo", arXiv 2502.12996, Algorithm 3. The formula agrees with an
independent write-up of the paper; the paper itself was not available. In it,
too, each worker applies the outer optimizer to its own outer parameters. The
zero gradients before round 1 are an assumption: the paper's first round is not
known to us.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from parallel.collectives import ranks_here
from parallel.outer import health
from parallel.outer.base import (
  Params,
  Plan,
  RoundLoop,
  State,
  stack_copies,
  stacked_zeros,
)
from parallel.outer.exchange import Exchange
from parallel.outer.optimizers import OuterOptimizer


@dataclasses.dataclass(frozen=True)
class Eager(RoundLoop):
  """Outer loop that overlaps the exchange of a round with the next round.

  Attributes:
    sync_every: H, the number of inner steps per round.
    optimizer: Outer optimizer; each worker has a separate state.
    exchange: Mean over the workers.
    common: Whether the state also has outer parameters that only means update,
      as "params" and "optimizer". They are equal on all workers, are evaluated
      instead of the mean of the workers' outer parameters, and take as much
      memory as the outer parameters of one worker.
  """

  optimizer: OuterOptimizer
  exchange: Exchange
  common: bool = False
  def init(self, params: Params) -> State:
    shared = self.exchange.init(params)
    workers = shared.pop("workers", {}) | {
      "params": stack_copies(params, self.worker),
      "optimizer": stack_copies(self.optimizer.init(params), self.worker),
      # Outer gradient d_m of the previous round, and its share in that mean.
      "delta": stacked_zeros(params, self.worker),
      "share": jnp.zeros(self.worker.size),
    }
    state = {
      "mean": jax.tree.map(jnp.zeros_like, params),
      # float32 [workers]: workers in the mean of the next exchange.
      "mask": jnp.ones(self.worker.size),
      "workers": workers,
    }
    if self.common:
      state |= {"params": params, "optimizer": self.optimizer.init(params)}
    return state

  def plan(self, step: int) -> Plan:
    # The outer gradients of the last round are sent at the start of a round,
    # concurrently with the compute of this step; round 0 has none to send.
    begins = step > 0 and step % self.sync_every == 0
    ends = (step + 1) % self.sync_every == 0
    return Plan((begins, ends), (step // self.sync_every,))

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    begins, _ = plan.variant
    if not begins:
      return state
    arriving, new = self.exchange.mean(
      state["workers"]["delta"], state, plan.numbers[0], state["mask"]
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
    own = health.record_statistics(own, verdict.norms, verdict.mine)
    delta = health.select_per_worker(
      verdict.mine, delta, jax.tree.map(jnp.zeros_like, delta)
    )
    weights = health.weights_of(
      self.exchange.weights, verdict.mask, self.worker
    )
    share = (weights / jnp.sum(weights))[ranks_here(self.worker)]  # [W]

    @functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, None))
    def eager_mean(now, share, last, last_share, all_last):
      # The parentheses hold the other workers' part of the previous mean.
      return now * share + (all_last - last * last_share)

    eager = jax.tree.map(
      lambda now, last, all_last: eager_mean(
        now, share, last, own["share"], all_last
      ),
      delta, own["delta"], state["mean"],
    )
    # `update` instead of `step`, which fuses the outer step into the decoder:
    # the mean was decoded earlier, and each worker adds its own part to it.
    updates, optimizer = jax.vmap(self.optimizer.update)(
      eager, own["optimizer"], own["params"]
    )
    outer = optax.apply_updates(own["params"], updates)
    own = own | {"params": outer, "optimizer": optimizer, "delta": delta}
    state = state | {"mask": verdict.mask}
    if self.common:
      step, optimizer = self.optimizer.update(
        state["mean"], state["optimizer"], state["params"]
      )
      common = optax.apply_updates(state["params"], step)
      state |= {"params": common, "optimizer": optimizer}
    return outer, state | {"workers": own | {"share": share}}
