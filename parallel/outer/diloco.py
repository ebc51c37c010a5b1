"""DiLoCo: H local steps per worker, then one outer step with the mean delta.

    repeat H times:  theta_m <- InnerOpt(theta_m)        each worker m alone
    delta   = mean over m of (phi - theta_m)             outer gradient
    phi     <- OuterOpt(phi, delta);  theta_m <- phi

theta_m are the parameters of worker m, phi the outer parameters, which all
workers share. The outer gradient is the negative of the workers' mean progress,
since an optimizer moves against its gradient. The state of an inner optimizer
stays with its worker and is not averaged.

The mean can be weighted. It excludes a worker that has diverged
(`parallel.outer.health`); such a worker continues from phi, as all others do.

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
  Params,
  Plan,
  RoundLoop,
  State,
  to_workers,
)
from parallel.outer.exchange import Exchange
from parallel.outer.optimizers import OuterOptimizer

# Number that is folded into a round's key to sample its clients.
# `Exchange.mean` folds in the index of each parameter, which is smaller.
_CLIENTS_FOLD = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class DiLoCo(RoundLoop):
  """Outer loop that averages all parameters at the end of every H-th step.

  Attributes:
    sync_every: H, the number of inner steps per round.
    optimizer: Outer optimizer.
    exchange: Mean over the workers.
    clients: Number of workers in the mean of a round, sampled anew in each
      round from the healthy ones; None for all.

  Example:
    One round of two workers on one device. They have moved by -0.5 and -0.1, so
    outer SGD at rate 1 sets both to 1 - 0.3.

    >>> from jax.sharding import PartitionSpec as P
    >>> from parallel.axes import Axis, make_mesh
    >>> from parallel.outer.optimizers import Optax
    >>> from parallel.wire import Wire
    >>> worker = Axis("worker", size=2)  # two lanes of one device
    >>> exchange = Exchange(worker, Wire(), block_dims={"w": 0})
    >>> loop = DiLoCo(worker, 1, Optax(optax.sgd(1.0)), exchange)
    >>> state = loop.init({"w": jnp.array([1.0])})
    >>> def finish(theta, updates, state):
    ...   return loop.finish(theta, updates, state, loop.plan(0))
    >>> of_state = {"params": P(), "optimizer": P(), "workers": P("worker")}
    >>> theta, state = jax.shard_map(
    ...   finish,
    ...   mesh=make_mesh({"worker": worker}),
    ...   in_specs=(P("worker"), P("worker"), of_state),
    ...   out_specs=(P("worker"), of_state),
    ... )({"w": jnp.ones((2, 1))}, {"w": jnp.array([[-0.5], [-0.1]])}, state)
    >>> theta["w"].tolist(), state["params"]["w"].tolist()
    ([[0.699...], [0.699...]], [0.699...])
  """

  optimizer: OuterOptimizer
  exchange: Exchange
  clients: int | None = None

  def init(self, params: Params) -> State:
    state = {"params": params, "optimizer": self.optimizer.init(params)}
    return state | self.exchange.init(params)

  def plan(self, step: int) -> Plan:
    ends = (step + 1) % self.sync_every == 0
    # The number of the round seeds its random numbers.
    return Plan(ends, ((step + 1) // self.sync_every,))

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
    mask = self._drawn(number, verdict.mask)
    state = state | {
      "workers": health.record_statistics(
        state["workers"], verdict.norms, verdict.mine
      )
    }

    # Subtracting workers' parameters is fused into the encoder, the outer step
    # into the decoder: with kernels, neither the deltas nor the mean are
    # materialised.
    def exchange(epilogues):
      return self.exchange.mean(params, state, number, mask, outer, epilogues)

    new, optimizer, rest = self.optimizer.step(outer, optimizer, exchange)
    state = state | rest | {"params": new, "optimizer": optimizer}
    # All workers restart from the outer parameters, also excluded ones.
    return to_workers(new, self.worker), state

  def _drawn(self, number: jax.Array, healthy: jax.Array) -> jax.Array:
    """Samples the clients of a round from the healthy workers.

    Args:
      number: int32, the number of the round.
      healthy: float32 ``[workers]``, 1 for healthy workers and else 0.

    Returns:
      float32 ``[workers]``, 1 for the sampled workers and else 0; equal on
      every device.
    """
    if self.clients is None:
      return healthy
    # All devices draw from the same key, so they agree without communication.
    key = jax.random.fold_in(jax.random.key(self.exchange.seed), number)
    key = jax.random.fold_in(key, _CLIENTS_FOLD)
    order = jax.random.permutation(key, self.worker.size)
    # Unhealthy workers are ranked after all healthy ones.
    order = jnp.where(healthy > 0, order, order + self.worker.size)
    place = jnp.sum(order[:, None] > order[None], axis=1)  # rank, from 0
    return healthy * (place < self.clients).astype(healthy.dtype)
