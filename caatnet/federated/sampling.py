"""Sampled clients of a round, and the coefficients of their updates.

Clients k have weights w_k (examples, or 1) with the shares p_k = w_k / sum w.
The step of full participation is D = sum_k p_k D_k, with D_k the update of
client k and N the number of clients. Samples of K clients estimate it:

  weighted   K draws with probability p_k, with replacement; the step is the
             mean of D_k over draws. Unbiased; variance V / K, with
             V = sum_k p_k |D_k - D|^2.
  uniform    K different clients; the step is the mean of N p_k D_k. Unbiased;
             variance (1 - K/N) / K * sum_k |N p_k D_k - D|^2 / (N - 1), which
             is not 0 for equal updates: the coefficients sum to the mean of
             N p_k, which is 1 only on average. A sum far above 1 is a step
             that is too long, and training may diverge.
  ratio      K different clients; the step is sum w_k D_k / sum w_k over them
             (Flower; McMahan et al., arXiv 1602.05629). Biased by about
             -(1 - K/N) / K * sum_k (N p_k)^2 (D_k - D) / (N - 1), towards
             clients with small weights; to first order, the variance is
             (1 - K/N) / K * sum_k |N p_k (D_k - D)|^2 / (N - 1).

With K = N all clients are sampled once, and the step is D in all three cases.
If only some of the sampled clients return an update in time, means are over
those ("weighted" with K = N: with their weights), which is unbiased only if
returning does not depend on the update.

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
    num: K, the number of clients; N or more sample all clients once.
    sampling: "uniform", "ratio", or "weighted", which may repeat a client.
    seed: Seed of the run.
    round: Number of the round.

  Example:
    >>> sample({0: 1, 1: 1, 2: 1}, 2, "uniform", seed=0, round=0)
    (1, 2)
  """
  # Python's generator gives the same numbers in all versions.
  draw = random.Random(f"{seed}/{round}")
  clients = sorted(weights)
  if sampling == "weighted" and num < len(clients):
    return tuple(draw.choices(clients, [weights[k] for k in clients], k=num))
  return tuple(draw.sample(clients, min(num, len(clients))))


def coefficients(
  weights: Mapping[int, float], num: int, sampling: str,
  merged: Sequence[tuple[int, int, int]],
) -> list[float]:
  """Returns the factor of each update of ``merged`` in the step of a round.

  Args:
    weights: Positive weights of all clients.
    num: K, the number of clients that are sampled.
    sampling: "weighted", "uniform" or "ratio".
    merged: For each update: its client, the number of draws of this client in
      the update's round, and its age, the number of revisions since the one
      that it was computed from. The factor of age a is (1 + a)^-1/2, as in
      FedBuff (Nguyen et al., arXiv 2106.06639), and is not renormalised, so
      that a round of old updates makes a smaller step.

  Example:
    Full participation of clients with 1 and 3 examples:

    >>> coefficients({0: 1, 1: 3}, 2, "weighted", [(0, 1, 0), (1, 1, 0)])
    [0.25, 0.75]
  """
  total = sum(weights.values())
  by_draws = sampling == "weighted" and num < len(weights)
  shares = [
    number * (1.0 if by_draws else len(weights) * weights[client] / total)
    for client, number, _ in merged
  ]
  divisor = (
    sum(number for _, number, _ in merged) if sampling == "uniform"
    else sum(shares)
  )
  return [
    share * (1 + age) ** -0.5 / divisor
    for share, (*_, age) in zip(shares, merged, strict=True)
  ]
