"""DiLoCo: H inner steps apart, then one outer step on the mean difference.

    repeat H times:  theta_m <- InnerOpt(theta_m)        state stays with m
    delta   = mean over m of (phi - theta_m)             an outer gradient
    phi     <- OuterOpt(phi, delta);  theta_m <- phi

Source: Douillard et al., "DiLoCo", arXiv 2311.08105; outer SGD with Nesterov
momentum by default. With outer SGD(1) it is local SGD, and with weights and a
sample of workers in each round FedAvg (McMahan et al., arXiv 1602.05629).
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
  to_workers,
)
from parallel.outer.exchange import Exchange
from parallel.outer.optimizers import OuterOptimizer


@dataclasses.dataclass(frozen=True)
class DiLoCo(OuterLoop):
  """Dense exchange every ``every`` steps.

  Attributes:
    every: H, inner steps per round.
    optimizer: The outer one.
    exchange: How the mean over workers is taken.
    clients: Workers that are heard in each round, drawn anew; None: all.
  """

  every: int
  optimizer: OuterOptimizer
  exchange: Exchange
  clients: int | None = None

  @property
  def period(self) -> int:
    return self.every

  def init(self, params: Params) -> State:
    state = {"params": params, "optimizer": self.optimizer.init(params)}
    return state | self.exchange.init(params)

  def plan(self, step: int) -> Plan:
    ends = (step + 1) % self.every == 0
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
    def exchange(uses):
      return self.exchange.mean(
        params, state, number, self._heard(number), outer, uses
      )

    new, optimizer, residual = self.optimizer.step(outer, optimizer, exchange)
    state = state | residual | {"params": new, "optimizer": optimizer}
    return to_workers(new, self.worker), state

  def _heard(self, number: jax.Array) -> jax.Array | None:
    """float32 ``[workers]`` of ones and zeros; None if all are heard."""
    if self.clients is None:
      return None
    key = jax.random.fold_in(jax.random.key(self.exchange.seed), number)
    order = jax.random.permutation(key, self.worker.size)
    return (order < self.clients).astype(jnp.float32)

  def evaluated(self, params: Params, state: State) -> Params:
    return state["params"]

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    return self.exchange.sent_bytes(shapes)
