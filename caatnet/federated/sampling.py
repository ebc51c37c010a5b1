"""Sampled clients of a round, and the coefficients of their updates.

Clients k have weights w_k (examples, or 1) with the shares p_k = w_k / sum w.
The step of full participation is sum_k p_k D_k, with D_k the update of client
k. Both samplings of K clients estimate it without bias:

  uniform    K different clients; the step is the mean of N p_k D_k, with N the
             number of clients. With K = N it is full participation.
  weighted   K draws with probability p_k, with replacement; the step is the
             mean of D_k over draws.

The ratio sum w_k D_k / sum w_k over a sample, which Flower and McMahan et al.
(arXiv 1602.05629) use, favours clients with small weights. If only some of the
sampled clients return an update in time, the means are over those, which is
unbiased only if returning does not depend on the update.

The draw of a round depends on the seed and the round only: not on the clients
that are connected, nor on earlier rounds.
"""

from collections.abc import Mapping, Sequence
import random


def sample(
  weights: Mapping[int, float], num: int, sampling: str, seed: int, round: int
) -> tuple[int, ...]:
  """Returns the clients of a round, in order.

  Args:
    weights: Positive weights of all clients.
    num: K, the number of clients; with "uniform" at most all clients.
    sampling: "uniform", or "weighted", which may repeat a client.
    seed: Seed of the run.
    round: Number of the round.

  Example:
    >>> sample({0: 1, 1: 1, 2: 1}, 2, "uniform", seed=0, round=0)
    (1, 2)
  """
  # Python's generator gives the same numbers in all versions.
  draw = random.Random(f"{seed}/{round}")
  clients = sorted(weights)
  if sampling == "uniform":
    return tuple(draw.sample(clients, min(num, len(clients))))
  return tuple(draw.choices(clients, [weights[k] for k in clients], k=num))


def coefficients(
  weights: Mapping[int, float], sampling: str,
  merged: Sequence[tuple[int, int, int]],
) -> list[float]:
  """Returns the factors of updates in the step of a round.

  Args:
    weights: Positive weights of all clients.
    sampling: "uniform" or "weighted".
    merged: For each update: its client, the number of draws of this client in
      the update's round, and its age, the number of revisions since the one
      that it was computed from. The factor of age a is (1 + a)^-1/2, as in
      FedBuff (Nguyen et al., arXiv 2106.06639), and is not renormalised, so
      that a round of old updates makes a smaller step.

  Example:
    Full participation of clients with 1 and 3 examples:

    >>> coefficients({0: 1, 1: 3}, "uniform", [(0, 1, 0), (1, 1, 0)])
    [0.25, 0.75]
  """
  total = sum(weights.values())
  draws = sum(number for _, number, _ in merged)
  factors = []
  for client, number, age in merged:
    share = (
      len(weights) * weights[client] / total if sampling == "uniform" else 1.0
    )
    factors.append(share * number * (1 + age) ** -0.5 / draws)
  return factors
