"""SparseLoCo: DiLoCo with a few large elements, and error feedback as momentum.

    e_m <- decay * e_m + (phi - theta_m)                 what m has not sent yet
    c_m  = the k largest of each chunk of e_m, two bits each;  e_m <- e_m - c_m
    phi <- phi - rate * mean over m of c_m;  theta_m <- phi

What is not sent stays in e_m and is sent once it has grown large, so e_m does
what the momentum of DiLoCo's outer optimizer does; there is no other.

The kept elements go to all workers by all-gathers: positions as uint16 (12 bits
would do at the usual chunk of 4096), values of two bits, and two float32
magnitudes per chunk. Each device adds them up in the order of the workers.

A worker whose phi - theta_m has diverged (`parallel.outer.health`) is not in
the mean, and keeps the e_m of the round before.

Source: Sarfi et al., "Communication efficient LLM pre-training with
SparseLoCo", arXiv 2508.15706; the three equations agree with an independent
write-up of it. The public code of its first author (amiiir-sarfi/templar) does
four things that the equations do not have, and neither has this file: it
averages an element over only those workers that sent it, so that where workers
choose different elements its step is larger, up to as many times as there are
workers; it clips the norm of what a worker sends to the median over workers; it
puts rate * (phi - theta_m) into e_m; and its two bits stand for four values per
tensor, the means of what falls into each of four bins. Ours stand for a sign
and one of two magnitudes per chunk (`parallel.kernels.codec.top_k`).
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from parallel import quantize
from parallel.kernels.codec import top_k
from parallel.outer import health
from parallel.outer.base import (
  CommonRounds,
  Params,
  Plan,
  State,
  at_path,
  stacked_zeros,
  to_workers,
)


@dataclasses.dataclass(frozen=True)
class SparseLoCo(CommonRounds):
  """Exchanges a few elements of each chunk at the end of every H-th step.

  Attributes:
    every: H, the number of inner steps in a round.
    rate: The outer learning rate.
    block_dims: Tree in the structure of the parameters: how many leading dims
      of each parameter no chunk crosses.
    decay: The share of e_m that a round leaves of it.
    chunk: Elements per chunk.
    top_k: Elements that are kept of each chunk.
    weights: One weight per worker, such as its number of tokens; empty for
      equal ones.
    rule: By what workers are judged.
  """

  plain_alone: ClassVar[bool] = False  # two bits round a single worker, too

  rate: float
  block_dims: Any
  decay: float
  chunk: int
  top_k: int
  weights: tuple[float, ...] = ()
  rule: health.Rule = health.ANY_FINITE

  def __post_init__(self) -> None:
    if not 4 <= self.top_k <= self.chunk <= 65536 or self.top_k % 4:
      raise ValueError(
        f"top_k={self.top_k} must be a multiple of 4 in "
        f"[4, chunk={self.chunk}], and the chunk at most 65536"
      )

  def init(self, params: Params) -> State:
    return {
      "params": params,
      "workers": health.init(self.worker) | {
        "residual": stacked_zeros(params, self.worker)
      },
    }

  def plan(self, step: int) -> Plan:
    return Plan((step + 1) % self.every == 0)

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    params = optax.apply_updates(params, updates)
    if not plan.variant:
      return params, state
    outer = state["params"]
    deltas = jax.tree.map(jnp.subtract, outer, params)
    verdict = self.rule.judge(deltas, self.worker)
    weights = health.weights_of(self.weights, verdict.heard, self.worker)
    deltas = self.rule.then(deltas, weights)
    old = state["workers"]["residual"]
    total = jax.tree.map(lambda e, d: self.decay * e + d, old, deltas)
    leaves, treedef = jax.tree.flatten_with_path(total)
    means, left = [], []
    for path, leaf in leaves:
      mean, own = self._mean(leaf, at_path(self.block_dims, path), weights)
      means.append(mean)
      # Less what the others have decoded, so that the error of two bits is kept
      # as well as what was not chosen.
      left.append(leaf - own)
    outer = jax.tree.map(
      lambda phi, mean: phi - self.rate * mean, outer, treedef.unflatten(means)
    )
    residual = health.choose(verdict.mine, treedef.unflatten(left), old)
    workers = health.noted(state["workers"], verdict.norms, verdict.mine)
    workers = workers | {"residual": residual}
    state = state | {"params": outer, "workers": workers}
    return to_workers(outer, self.worker), state

  def _mean(
    self, x: jax.Array, block_dims: int, weights: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Averages what workers send, and tells what each of them has sent.

    Args:
      x: e_m of one parameter, ``[W, ...]``.
      block_dims: How many leading dims after W no chunk crosses.
      weights: The workers' weights ``[workers]``.

    Returns:
      The mean of all c_m, ``[...]``, and this device's c_m, ``[W, ...]``.
    """
    n = math.prod(x.shape[1 + block_dims :])
    rows = x.reshape(*x.shape[: 1 + block_dims], n)
    encoded = top_k.encode_top_k(rows, self.chunk, self.top_k)

    def decode(encoded):
      return top_k.decode_top_k(encoded, n, self.chunk)

    # [*B, n] and [W, *B, n], as all devices decode them.
    total = quantize.mean_of_encoded(encoded, self.worker, decode, weights)
    own = decode(encoded)
    return total.reshape(x.shape[1:]), own.reshape(x.shape)

  def sent_bytes(self, shapes: Params) -> dict[str, int]:
    if self.worker.devices == 1:
      return {}
    chunks = 0
    for path, leaf in jax.tree.leaves_with_path(shapes):
      dims = at_path(self.block_dims, path)
      row = math.prod(leaf.shape[dims:])
      chunks += math.prod(leaf.shape[:dims]) * -(-row // self.chunk)
    chunks *= self.worker.lanes
    # For each chunk top_k positions, as many codes of two bits, two magnitudes.
    return {
      "uint16": chunks * self.top_k * 2,
      "uint8": chunks * self.top_k // 4,
      "float32": chunks * 2 * 4 + health.sent_bytes(self.worker)["float32"],
    }
