"""NoLoCo: random pairs of workers average, without any global reduction.

After H inner steps worker i, with its separate outer parameters phi_i, computes

    d_i   = phi_i - theta_i                                 the outer gradient
    s_i   <- momentum s_i - rate (d_i + d_j) / 2 - pull (phi_i - phi_j) / 2
    phi_i <- phi_i + s_i;  theta_i <- phi_i

with a partner j sampled anew in each round. The outer parameters never become
equal; the last term of s_i moves the two of a pair towards each other. A pair
exchanges d and phi in float32.

First, the two exchange the norms of d, 4 bytes each, and judge each other
(`parallel.outer.health`): the d of a diverged worker is replaced by its
partner's, or by zero if both have diverged. The phi of a diverged worker dates
from before the divergence and is used unchanged.

The pairs of a round are one random round of a round-robin tournament, in which
every worker meets every other one once. With an odd number of workers one sits
out and is its own partner: it takes a step with its own outer gradient d_i and
without the pull. The tournament deviates from the paper, which samples from all
pairings: a permute needs its pairs at compile time, and a tournament of an even
number N of workers has only N - 1 rounds, each of which is one program.

Source: Kolehmainen et al., "NoLoCo: no-all-reduce low communication training
method for large models", arXiv 2506.10911, Eqs. 1 to 3 for groups of two;
checked against that text and its authors' code (jkolehm/noloco). In the paper
Delta = -d, and the sign of Delta in Eq. 2 is an error: Eq. 32 and the code add
rate times Delta. momentum, rate and pull are its alpha, beta and gamma; it uses
alpha = 0.5 and beta = 0.7 every 50 steps (section 4), and gamma = 0.7 (code).
Odd numbers of workers are an extension: the authors' code takes even numbers
only.
"""

import dataclasses
import math
import random
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from parallel.collectives import permute, permute_routes
from parallel.outer import health
from parallel.outer.base import (
  Params,
  Plan,
  RoundLoop,
  State,
  stack_copies,
  stacked_zeros,
)


@dataclasses.dataclass(frozen=True)
class NoLoCo(RoundLoop):
  """Outer loop that averages pairs of workers at the end of every H-th step.

  The spread of the outer parameters depends on momentum and pull. Without
  gradients their mean square distance shrinks for N workers, N even, while 0 <
  pull < 2 (1 - momentum^2) / (1 - momentum / (N - 1)), which was derived for
  this project and compared with simulations. A momentum of 0.9, as in DiLoCo,
  bounds the pull by 0.46 for six workers and by 0.38 for many.

  Attributes:
    sync_every: H, the number of inner steps per round.
    rate: Outer learning rate.
    momentum: Decay of the outer momentum s_i.
    pull: Strength of the attraction between the outer parameters of a pair.
    seed: Seed of the pairs.
    rule: Criterion by which the two workers of a pair judge each other.
  """

  averages: ClassVar[bool] = False

  rate: float
  momentum: float
  pull: float
  seed: int = 0
  rule: health.ExclusionRule = health.ANY_FINITE

  def init(self, params: Params) -> State:
    momentum = stacked_zeros(params, self.worker)
    copies = stack_copies(params, self.worker)
    workers = {"params": copies, "momentum": momentum}
    return {"workers": health.init(self.worker) | workers}

  def plan(self, step: int) -> Plan:
    if (step + 1) % self.sync_every:
      return Plan(None)
    number = (step + 1) // self.sync_every
    rounds = num_pairing_rounds(self.worker.size)
    # A text seed gives equal draws in all processes and Python versions: every
    # process must compile the same pairs.
    return Plan(random.Random(f"{self.seed} {number}").randrange(rounds))

  @property
  def steady_round(self) -> range:
    # The random pairs of the rounds do not repeat, so no period represents all
    # later rounds exactly.
    return range(2 * self.period, 3 * self.period)

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    params = optax.apply_updates(params, updates)
    if plan.variant is None:
      return params, state
    own = state["workers"]
    pairs = self._pairs(plan.variant)
    deltas = jax.tree.map(jnp.subtract, own["params"], params)
    norms = self.rule.norm(deltas)
    # [2, W]: own norms and those of the partners.
    both = jnp.stack([norms, permute(norms, self.worker, pairs)])
    mine, other = health.healthy(both, self.rule.outlier_factor)  # [W] each
    deltas, phis = self.rule.order_after((deltas, own["params"]), both)

    @jax.vmap
    def mean_of_healthy(delta, other_delta, mine, other):
      # A diverged delta is replaced by the partner's, or by zero.
      first = jnp.where(mine, delta, jnp.where(other, other_delta, 0.0))
      return (first + jnp.where(other, other_delta, first)) / 2

    def step(momentum, phi, delta):
      other_delta = permute(delta, self.worker, pairs)
      other_phi = permute(phi, self.worker, pairs)
      return (
        self.momentum * momentum
        - self.rate * mean_of_healthy(delta, other_delta, mine, other)
        - self.pull * (phi - other_phi) / 2
      )

    momentum = jax.tree.map(step, own["momentum"], phis, deltas)
    outer = jax.tree.map(jnp.add, own["params"], momentum)
    own = health.record_statistics(own, norms, mine)
    return outer, {"workers": own | {"params": outer, "momentum": momentum}}

  def _pairs(self, number: int) -> list[tuple[int, int]]:
    """Returns the pairs (source rank, destination rank) of round ``number``.

    A worker that sits out sends to itself: its partner's outer gradient and
    parameters are its own, so that the pull is zero.
    """
    partners = partners_of_round(self.worker.size, number)
    return [(partner, i) for i, partner in enumerate(partners)]

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    """Returns the bytes that a device sends in the round of `steady_round`.

    Each permute sends outer gradient and parameters, and a norm. Their number
    depends on the pairs of the round: a pair may be on one device, and a device
    may send for several workers.
    """
    plan = self.plan(self.steady_round[-1])
    routes = permute_routes(self.worker, self._pairs(plan.variant)).values()
    elements = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    # Number of permutes that send between different devices.
    sent = sum(
      any(source != there for source, there in moves or ()) for moves in routes
    )
    return {"float32": sent * (2 * elements + 1) * 4} if sent else {}


def num_pairing_rounds(workers: int) -> int:
  """Returns the number of rounds of a round-robin tournament of workers."""
  return max(1, workers - 1 + workers % 2)


def partners_of_round(workers: int, number: int) -> list[int]:
  """Returns each worker's partner in one round; itself if it sits out.

  This is the circle method for tournaments. Workers sit around a table, and
  each is paired with the one opposite. From one round to the next, the worker
  on the last seat stays and all others move by one seat, so that after seats -
  1 rounds every worker has met every other one. With an odd number of workers
  the last seat is empty, and the worker opposite to it sits out.

  Args:
    workers: Number of workers.
    number: Index of the round, from 0.

  Example:
    >>> for number in range(num_pairing_rounds(4)):
    ...   print(partners_of_round(4, number))
    [1, 0, 3, 2]
    [3, 2, 1, 0]
    [2, 3, 0, 1]
  """
  seats = workers + workers % 2
  if seats < 2:
    return [0]
  turning = [(number + i) % (seats - 1) for i in range(seats - 1)]
  order = [seats - 1, *turning]
  partners = list(range(workers))
  # Pairs the first half of the order with the reversed second half.
  for a, b in zip(order[: seats // 2], order[: seats // 2 - 1 : -1],
                  strict=True):
    if a < workers and b < workers:
      partners[a], partners[b] = b, a
  return partners
