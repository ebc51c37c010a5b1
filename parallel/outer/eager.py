"""DiLoCo whose exchange takes a whole round, with one's own part up to date.

At the end of round k a worker knows its own outer gradient d_m(k), while the
mean over workers that has arrived is that of round k - 1:

    d~_m(k) = d_m(k) / M + (mean(k - 1) - d_m(k - 1) / M)
    phi_m  <- OuterOpt(phi_m, d~_m);  theta_m <- phi_m

Before round 1 all differences are zero, so that what is applied in k rounds is
the sum of k - 1 means and d_m(k) / M: each mean counts once. Workers' outer
parameters differ by their own newest parts; their mean stands for the run.

Source: Kale et al., "Eager updates for overlapped communication and computation
in DiLoCo", arXiv 2502.12996; the formula is recalled, not checked against it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from parallel.outer.base import (
  OuterLoop,
  Params,
  Plan,
  State,
  mean_over_workers,
  stacked,
  stacked_zeros,
)
from parallel.outer.exchange import Exchange
from parallel.outer.optimizers import OuterOptimizer


@dataclasses.dataclass(frozen=True)
class Eager(OuterLoop):
  """Sent at the head of a round, applied at its end.

  Attributes:
    every: H, inner steps per round.
    optimizer: The outer one, of each worker.
    exchange: How the mean over workers is taken.
  """

  every: int
  optimizer: OuterOptimizer
  exchange: Exchange

  @property
  def period(self) -> int:
    return self.every

  def init(self, params: Params) -> State:
    shared = self.exchange.init(params)
    workers = shared.pop("workers", {}) | {
      "params": stacked(params, self.worker),
      "optimizer": stacked(self.optimizer.init(params), self.worker),
      "delta": stacked_zeros(params, self.worker),
    }
    return {"mean": jax.tree.map(jnp.zeros_like, params), "workers": workers}

  def plan(self, step: int) -> Plan:
    begins = step > 0 and step % self.every == 0
    ends = (step + 1) % self.every == 0
    return Plan((begins, ends), (step // self.every,))

  def begin(self, params: Params, state: State, plan: Plan) -> State:
    begins, _ = plan.variant
    if not begins:
      return state
    arriving, new = self.exchange.mean(
      state["workers"]["delta"], state, plan.numbers[0]
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
    share = 1.0 / self.worker.size
    eager = jax.tree.map(
      lambda now, all_last, last: now * share + (all_last - last * share),
      delta, state["mean"], own["delta"],
    )
    updates, optimizer = jax.vmap(self.optimizer.update)(
      eager, own["optimizer"], own["params"]
    )
    outer = optax.apply_updates(own["params"], updates)
    own = own | {"params": outer, "optimizer": optimizer, "delta": delta}
    return outer, state | {"workers": own}

  def evaluated(self, params: Params, state: State) -> Params:
    return mean_over_workers(state["workers"]["params"], self.worker)

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    return self.exchange.sent_bytes(shapes)
