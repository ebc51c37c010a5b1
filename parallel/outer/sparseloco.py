"""SparseLoCo: DiLoCo with top-k deltas and error feedback as momentum.

    e_m <- decay * e_m + (phi - theta_m)                 unsent part of worker m
    c_m  = top k elements of each chunk of e_m, two bits each;  e_m <- e_m - c_m
    phi <- phi - rate * mean over m of c_m;  theta_m <- phi

Elements that are not sent stay in e_m and are sent once they have grown large,
so e_m replaces the momentum of DiLoCo's outer optimizer.

All-gathers send the kept elements to all workers: positions as uint16 (12 bits
suffice for the usual chunk of 4096), values of two bits, and two float32
magnitudes per chunk. Each device sums them in the order of the workers.

A worker whose phi - theta_m has diverged (`parallel.outer.health`) is excluded
from the mean and keeps the e_m of the previous round.

Source: Sarfi et al., "Communication efficient LLM pre-training with
SparseLoCo", arXiv 2508.15706; the three equations agree with an independent
write-up of it. The public code of its first author (amiiir-sarfi/templar)
differs from the equations, and from this file, in four ways. It averages an
element over only those workers that sent it, so that where workers choose
different elements its step is larger, by a factor of up to the number of
workers. It clips the norm of each worker's message to the median over workers.
It adds rate * (phi - theta_m) to e_m. Its two bits encode four values per
tensor, the means of four bins; here they encode a sign and one of two
magnitudes per chunk (`parallel.kernels.codec.top_k`).
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import optax

from parallel import quantize
from parallel.kernels.codec import top_k
from parallel.outer import health
from parallel.outer.base import (
  Params,
  Plan,
  RoundLoop,
  State,
  at_path,
  stacked_zeros,
  to_workers,
)


@dataclasses.dataclass(frozen=True)
class SparseLoCo(RoundLoop):
  """Outer loop that exchanges k elements of each chunk after every H-th step.

  Attributes:
    sync_every: H, the number of inner steps per round.
    rate: Outer learning rate.
    block_dims: Tree in the structure of the parameters: the number of leading
      dims of each parameter that no chunk crosses.
    decay: Factor by which the unsent part e_m decays per round.
    chunk: Elements per chunk.
    top_k: Elements that are kept of each chunk.
    weights: One weight per worker, such as its number of tokens; empty for
      equal weights.
    rule: Criterion that excludes diverged workers.

  Raises:
    ValueError: ``top_k`` is not a multiple of 4 in [4, chunk], or the chunk is
      larger than 65536.
  """

  plain_alone: ClassVar[bool] = False  # a single worker is rounded, too

  rate: float
  block_dims: Any
  decay: float
  chunk: int
  top_k: int
  weights: tuple[float, ...] = ()
  rule: health.ExclusionRule = health.ANY_FINITE

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
    return Plan((step + 1) % self.sync_every == 0)

  def finish(
    self, params: Params, updates: Params, state: State, plan: Plan
  ) -> tuple[Params, State]:
    params = optax.apply_updates(params, updates)
    if not plan.variant:
      return params, state
    outer = state["params"]
    deltas = jax.tree.map(lambda x, y: x[None] - y, outer, params)
    verdict = self.rule.judge(deltas, self.worker)
    weights = health.weights_of(self.weights, verdict.mask, self.worker)
    deltas = self.rule.order_after(deltas, weights)
    old = state["workers"]["residual"]
    # Decayed unsent parts of earlier rounds plus this round's delta, [W, ...].
    total = jax.tree.map(lambda e, d: self.decay * e + d, old, deltas)
    leaves, treedef = jax.tree.flatten_with_path(total)
    means, left = [], []
    for path, leaf in leaves:
      mean, own = self._mean(leaf, at_path(self.block_dims, path), weights)
      means.append(mean)
      # Subtracts the decoded message, so that the residual includes the
      # rounding error of the two bits as well as the elements that were not
      # sent.
      left.append(leaf - own)
    # Plain SGD: error feedback replaces the momentum.
    outer = jax.tree.map(
      lambda phi, mean: phi - self.rate * mean, outer, treedef.unflatten(means)
    )
    residual = health.select_per_worker(
      verdict.mine, treedef.unflatten(left), old
    )
    workers = health.record_statistics(
      state["workers"], verdict.norms, verdict.mine
    )
    workers = workers | {"residual": residual}
    state = state | {"params": outer, "workers": workers}
    return to_workers(outer, self.worker), state

  def _mean(
    self, x: jax.Array, block_dims: int, weights: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Averages the top-k elements of the workers' accumulated deltas.

    Args:
      x: Accumulated deltas of one parameter of this device's W workers,
        ``[W, ...]``.
      block_dims: Number of leading dims after W that no chunk crosses.
      weights: Weights of the workers, ``[workers]``.

    Returns:
      The mean of the decoded top-k elements of all workers, ``[...]``, and
      those elements of this device's workers, ``[W, ...]``.
    """
    n = math.prod(x.shape[1 + block_dims :])
    rows = x.reshape(*x.shape[: 1 + block_dims], n)
    encoded = top_k.encode_top_k(rows, self.chunk, self.top_k)

    def decode(encoded):
      return top_k.decode_top_k(encoded, n, self.chunk)

    # [*B, n] and [W, *B, n]: the decoded values, the same bits on every device.
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
    chunks *= self.worker.lanes  # each lane sends its own deltas
    # Per chunk: top_k positions, top_k codes of two bits, two magnitudes.
    return {
      "uint16": chunks * self.top_k * 2,
      "uint8": chunks * self.top_k // 4,
      "float32": chunks * 2 * 4 + health.sent_bytes(self.worker)["float32"],
    }
