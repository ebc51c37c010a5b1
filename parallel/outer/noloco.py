"""NoLoCo: no all-reduce; random pairs of workers meet.

    d_i   = phi_i - theta_i
    s_i   <- momentum s_i - rate (d_i + d_j) / 2 - pull (phi_i - phi_j) / 2
    phi_i <- phi_i + s_i;  theta_i <- phi_i

with a partner j drawn anew for each round from the rounds of a round-robin
tournament, in which everyone meets everyone once; with an odd number of workers
one sits out and is its own partner. A pair exchanges d and phi in float32.

Source: Kolehmainen et al., "NoLoCo: no-all-reduce low communication training
method for large models", arXiv 2506.10911; the update is recalled, not checked
against it, and drawing from tournament rounds is ours: a permute needs its
pairs when the program is compiled.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import optax

from parallel.collectives import permute
from parallel.outer.base import (
  OuterLoop,
  Params,
  Plan,
  State,
  float32_bytes,
  mean_over_workers,
  stacked,
  stacked_zeros,
)


@dataclasses.dataclass(frozen=True)
class NoLoCo(OuterLoop):
  """Pairwise exchange every ``every`` steps.

  Attributes:
    every: H, inner steps per round.
    rate: Outer learning rate.
    momentum: Of the outer update.
    pull: How strongly partners' parameters attract each other.
    seed: Decides the pairs.
  """

  every: int
  rate: float
  momentum: float
  pull: float
  seed: int = 0

  @property
  def period(self) -> int:
    return self.every

  def init(self, params: Params) -> State:
    momentum = stacked_zeros(params, self.worker)
    copies = stacked(params, self.worker)
    return {"workers": {"params": copies, "momentum": momentum}}

  def plan(self, step: int) -> Plan:
    if (step + 1) % self.every:
      return Plan(None)
    number = (step + 1) // self.every
    rounds = num_rounds(self.worker.size)
    return Plan(random.Random(f"{self.seed} {number}").randrange(rounds))

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    params = optax.apply_updates(params, updates)
    if plan.variant is None:
      return params, state
    own = state["workers"]
    partners = partners_of_round(self.worker.size, plan.variant)
    pairs = [(partner, i) for i, partner in enumerate(partners)]

    def step(momentum, phi, theta):
      delta = phi - theta
      other_delta = permute(delta, self.worker, pairs)
      other_phi = permute(phi, self.worker, pairs)
      return (
        self.momentum * momentum
        - self.rate * (delta + other_delta) / 2
        - self.pull * (phi - other_phi) / 2
      )

    momentum = jax.tree.map(step, own["momentum"], own["params"], params)
    outer = jax.tree.map(jnp.add, own["params"], momentum)
    return outer, {"workers": {"params": outer, "momentum": momentum}}

  def evaluated(self, params: Params, state: State) -> Params:
    return mean_over_workers(state["workers"]["params"], self.worker)

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    """Where each device has one worker; lanes meet within a device, too."""
    sizes = float32_bytes(shapes, self.worker)
    return {dtype: 2 * size for dtype, size in sizes.items()}


def num_rounds(workers: int) -> int:
  """Rounds of a tournament of all pairs."""
  return max(1, workers - 1 + workers % 2)


def partners_of_round(workers: int, number: int) -> list[int]:
  """Each worker's partner in one round; itself where it sits out.

  The circle method: the last seat stays, the others turn; with an odd number
  of workers the last seat is empty.
  """
  seats = workers + workers % 2
  if seats < 2:
    return [0]
  turning = [(number + i) % (seats - 1) for i in range(seats - 1)]
  order = [seats - 1, *turning]
  partners = list(range(workers))
  for a, b in zip(order[: seats // 2], order[: seats // 2 - 1 : -1],
                  strict=True):
    if a < workers and b < workers:
      partners[a], partners[b] = b, a
  return partners
