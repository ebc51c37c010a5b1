"""DiLoCo: H inner steps apart, then one outer step with the mean difference.

    repeat H times:  theta_m <- InnerOpt(theta_m)        each worker m by itself
    delta   = mean over m of (phi - theta_m)             the outer gradient
    phi     <- OuterOpt(phi, delta);  theta_m <- phi

theta_m are a worker's parameters, phi the outer ones, which all workers share.
The outer gradient points from where the workers went back to where they began,
since an optimizer goes against the gradient that it is given. The state of an
inner optimizer stays with its worker and is not averaged.

The mean may have weights, and leaves out a worker that has diverged
(`parallel.outer.health`), which goes on from phi as all others do.

With outer SGD at rate 1 this is local SGD. With weights and a sample of workers
in each round it is FedAvg (McMahan et al., arXiv 1602.05629).

Source: Douillard et al., "DiLoCo", arXiv 2311.08105, whose outer optimizer is
SGD with Nesterov momentum.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from parallel.outer import health
from parallel.outer.base import (
  CommonRounds,
  Params,
  Plan,
  State,
  to_workers,
)
from parallel.outer.exchange import Exchange
from parallel.outer.optimizers import OuterOptimizer

_CLIENTS = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class DiLoCo(CommonRounds):
  """Exchanges all parameters at the end of every H-th step.

  Attributes:
    every: H, the number of inner steps in a round.
    optimizer: The outer optimizer.
    exchange: How the mean over workers is taken.
    clients: How many workers take part in the mean of a round, drawn anew for
      each among the healthy ones; None for all.
  """

  optimizer: OuterOptimizer
  exchange: Exchange
  clients: int | None = None

  def init(self, params: Params) -> State:
    state = {"params": params, "optimizer": self.optimizer.init(params)}
    return state | self.exchange.init(params)

  def plan(self, step: int) -> Plan:
    ends = (step + 1) % self.every == 0
    # The number of the round decides its random draws.
    return Plan(ends, ((step + 1) // self.every,))

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    params = optax.apply_updates(params, updates)
    if not plan.variant:
      return params, state
    outer = state["params"]
    optimizer = state["optimizer"]
    number = plan.numbers[0]
    verdict = self.exchange.judge(params, outer)
    heard = self._drawn(number, verdict.heard)
    state = state | {
      "workers": health.noted(state["workers"], verdict.norms, verdict.mine)
    }

    # phi - theta_m is taken where it is encoded, and the outer step where the
    # mean is decoded: with kernels, neither difference nor mean is in memory.
    def exchange(uses):
      return self.exchange.mean(params, state, number, heard, outer, uses)

    new, optimizer, rest = self.optimizer.step(outer, optimizer, exchange)
    state = state | rest | {"params": new, "optimizer": optimizer}
    # Workers that took no part in the mean start from it, too.
    return to_workers(new, self.worker), state

  def _drawn(self, number: jax.Array, healthy: jax.Array) -> jax.Array:
    """Draws the clients of a round among the healthy workers.

    Args:
      number: int32, the number of the round.
      healthy: float32 ``[workers]``, 1 for the healthy ones and else 0.

    Returns:
      float32 ``[workers]``, 1 for who takes part and else 0, the same on every
      device.
    """
    if self.clients is None:
      return healthy
    # All devices draw from one key, so they agree without telling each other.
    # The exchange folds parameters' numbers into the round's key; no parameter
    # has this one.
    key = jax.random.fold_in(jax.random.key(self.exchange.seed), number)
    key = jax.random.fold_in(key, _CLIENTS)
    order = jax.random.permutation(key, self.worker.size)
    order = jnp.where(healthy > 0, order, order + self.worker.size)
    place = jnp.sum(order[:, None] > order, axis=1)  # among all workers
    return healthy * (place < self.clients)

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    return self.exchange.sent_bytes(shapes)
